"""Types of settings: each says what a value must be, for pydantic and for pages and messages.

All that pages and messages say of a setting is in the JSON schema that pydantic makes of its class.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le, Predicate
from pydantic import AllowInfNan, BeforeValidator, Field, StrictFloat, StrictInt, StringConstraints

# Nine digits are more than any cluster has, and as many as the submission hook lets pass.
_MULTIPLE = "multiples-of-([1-9]|[1-5][0-9]|6[0-4])"
GPU_RULE = rf"^(any|powers-of-two|whole-nodes|{_MULTIPLE}|[1-9][0-9]{{0,8}}(,[1-9][0-9]{{0,8}})*)$"
"""A rule on the numbers of GPUs that a job may be given, as `JobSpec.gpu_counts` and `PolicySettings.gpu_counts`."""
GPU_RULES = (
    "any, powers-of-two, whole-nodes, multiples-of-8 (from 1 to 64), or a list of counts such as 1,2,4,8"
)
"""For messages that say what was expected."""


def replica(rule: str) -> int | None:
    """Return the GPUs of one replica, where a job has a whole number of them; None: the rule names none."""
    name, _, gpus = rule.rpartition("-")
    return int(gpus) if name == "multiples-of" else None


def unit(name: str) -> Any:
    """Return the annotation of a number that names its unit."""
    return Field(json_schema_extra={"unit": name})


def expected(text: str, metavar: str) -> Any:
    """Return the annotation that says what a value must be; `metavar` stands for it in help."""
    return Field(json_schema_extra={"expected": text, "metavar": metavar})


def example(value: Any) -> Any:
    """Return the annotation with what the example file shows, where the default shows too little."""
    return Field(examples=[value])


def run_time_only(command: str, **names: str) -> Any:
    """Return the annotation of a setting that `command` changes, never polluxd.toml.

    `names`: of a table, what its names are (`expected_name`), and what stands for one in help (`name_metavar`).
    """
    return Field(json_schema_extra={"run_time_only": command, **names})


def _is_postgres_url(value: str) -> bool:
    parts = urlsplit(value)
    return parts.scheme.partition("+")[0] == "postgresql" and parts.port != 0 and parts.path.strip("/") != ""


def _is_listen_address(value: str) -> bool:
    host, _, port = value.rpartition(":")
    return not value or (host != "" and port.isdecimal() and 0 < int(port) < 65536)


def _is_gateway_url(value: str) -> bool:
    parts = urlsplit(value)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.path and "," not in value


Seconds = Annotated[StrictFloat, Gt(0), AllowInfNan(False), unit("seconds")]
Duration = Annotated[StrictFloat, Ge(0), AllowInfNan(False), unit("seconds")]
Days = Annotated[StrictFloat, Gt(0), AllowInfNan(False), unit("days")]
Count = Annotated[StrictInt, Ge(0)]
Gpus = Annotated[StrictInt, Ge(0), unit("GPUs")]
StartGpus = Annotated[StrictInt, Ge(1), unit("GPUs")]
Share = Annotated[StrictFloat, Ge(0), Le(1), expected("a share from 0 to 1", "SHARE")]
# Beyond, a job's most efficient size would be worth next to nothing, too.
LeastGain = Annotated[StrictFloat, Ge(0), Le(0.9), expected("a share from 0 to 0.9", "SHARE")]
Speed = Annotated[StrictFloat, Gt(0), AllowInfNan(False)]
# A weight above 1000 would leave the other jobs nothing but rounding.
Weight = Annotated[StrictFloat, Gt(0), Le(1000), expected("a weight above 0, up to 1000", "WEIGHT")]
JobId = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,9}$")]
# Infinity has a name: JSON has none.
Power = Annotated[
    StrictFloat,
    Le(1),
    BeforeValidator(lambda value: -math.inf if value in ("-inf", "max-min") else value),
    expected("a number up to 1, or -inf for max-min fairness", "P"),
]
Kappa = Annotated[StrictFloat, Ge(0), Le(1000), expected("a number from 0 to 1000", "K")]
Exponent = Annotated[StrictFloat, Ge(-4), Le(4), expected("a number from -4 to 4", "Q")]
Objective = Literal["fair-share", "completion-time"]
Owner = Literal["job", "user", "account"]
GpuRule = Annotated[str, StringConstraints(pattern=GPU_RULE), expected(GPU_RULES, "RULE")]
PostgresUrl = Annotated[
    str,
    Predicate(_is_postgres_url),
    expected("a URL such as postgresql://pollux_daemon@db.example.org/pollux", "URL"),
]
ClusterName = Annotated[
    str,
    StringConstraints(pattern=r"^[^:\s]{1,40}$"),
    expected("a name of up to 40 characters without spaces and colons", "NAME"),
]
Names = Annotated[
    tuple[Annotated[str, StringConstraints(pattern=r"^[^,\s]{1,250}$")], ...],
    Field(strict=False),
    expected("a list of names, each without spaces and commas", "NAMES"),
]
SbatchOptions = Annotated[
    tuple[Annotated[str, StringConstraints(pattern=r"^-[^\n\x00]{1,250}$")], ...],
    Field(strict=False),
    expected('a list of options of sbatch, such as ["--account=staff", "--time=10"]', "OPTIONS"),
]
NodeList = Annotated[str, expected("a node list such as n[1-8]", "NODES")]
FilePath = Annotated[Path, Field(strict=False), expected("the path of a file", "FILE")]
ListenAddress = Annotated[
    str,
    Predicate(_is_listen_address),
    expected("HOST:PORT such as 127.0.0.1:9850, or an empty text", "ADDRESS"),
]
PrometheusUrl = Annotated[
    str,
    Predicate(
        lambda url: not url or (urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).netloc))
    ),
    expected("a URL such as http://127.0.0.1:9090, or an empty text", "URL"),
]
GatewayUrls = Annotated[
    tuple[str, ...],
    Field(strict=False),
    Predicate(lambda urls: all(map(_is_gateway_url, urls))),
    expected("a list of URLs such as https://head.example.org:9851", "URLS"),
]
MovePaths = Annotated[
    tuple[Literal["resize", "requeue"], ...],
    Field(strict=False),
    Predicate(lambda paths: "requeue" in paths and len(set(paths)) == len(paths)),
    expected(
        'each of "resize", "requeue" at most once, and "requeue" among them: every job can be requeued',
        "PATHS",
    ),
]
Money = Annotated[StrictFloat, Ge(0), AllowInfNan(False), expected("an amount of money from 0", "MONEY")]
NodePrice = Annotated[StrictFloat, Gt(0), Le(1e6), expected("a price above 0", "PRICE")]
