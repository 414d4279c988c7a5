"""What an attempt of a Pollux job knows of polluxd's gateway.

The submission hook puts the gateway's addresses into the job's environment. `pollux run` in the batch script adds a
token of the attempt; a rank without one asks for it (`pollux.scheduler.credentials`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

log = logging.getLogger(__name__)

ADDRESSES = "POLLUX_GATEWAY"
"""URLs of the gateways, separated by commas; set by the submission hook, empty in other batch jobs."""
SUBMITTED = "POLLUX_SUBMITTED"
"""When the submission hook made the job a Pollux job. A site may set ADDRESSES for all users of `polluxctl`."""
CA = "POLLUX_GATEWAY_CA"
"""File of the certificates that vouch for the gateways; empty: the system's."""
TOKEN = "POLLUX_TOKEN"
"""The attempt's `Grant` as JSON, from `pollux run` in the batch script."""

_LONGEST_INTERVAL_S = 86400
_TOKEN = re.compile(r"J\.([0-9]{1,18})\.([0-9]{1,9})\.[A-Za-z0-9_-]{16,128}")


@dataclass(frozen=True, slots=True)
class Grant:
    """What the gateway gave to an attempt; its repr shows no secret."""

    token: str = field(repr=False)
    publish_interval_s: float = 30.0
    gpu_type: str = ""
    """Slurm's name for the type of the job's GPUs; empty if unknown."""

    @classmethod
    def from_document(cls, document: Any, job_id: int, attempt: int) -> Grant:
        """Read a grant of this attempt. Raises ValueError; no message holds the token."""
        if not isinstance(document, dict):
            raise ValueError("expected a JSON object")
        token, interval = document.get("token"), document.get("publish_interval_s", 30.0)
        kind = document.get("gpu_type") or ""
        found = _TOKEN.fullmatch(token) if isinstance(token, str) else None
        if not isinstance(token, str) or found is None:
            raise ValueError("expected a token J.JOB.ATTEMPT.SECRET")
        if (int(found[1]), int(found[2])) != (job_id, attempt):
            raise ValueError(
                f"the token is of job {found[1]}, attempt {found[2]}; this is job {job_id}, attempt {attempt}"
            )
        number = isinstance(interval, int | float) and not isinstance(interval, bool)
        if not number or not 0 < interval <= _LONGEST_INTERVAL_S:
            raise ValueError(f"publish_interval_s must be above 0 and at most {_LONGEST_INTERVAL_S}")
        if not isinstance(kind, str) or len(kind) > 64 or not kind.isprintable():
            raise ValueError("gpu_type must be text of at most 64 printable characters")
        return cls(token, float(interval), kind)

    def to_environment(self) -> dict[str, str]:
        """Return the variable by which ranks inherit this grant."""
        return {TOKEN: json.dumps(asdict(self))}


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """Where the gateways are, and who asks."""

    addresses: tuple[str, ...]
    ca: str
    job_id: int
    attempt: int
    """Slurm's restart count."""
    grant: Grant | None = None
    """From the launcher; None: this process has to ask for one."""


def in_pollux_job(environ: Mapping[str, str]) -> bool:
    """Tell whether the submission hook made this job a Pollux job."""
    return all(environ.get(name) for name in (ADDRESSES, SUBMITTED, "SLURM_JOB_ID"))


def read_access(environ: Mapping[str, str]) -> GatewayAccess | None:
    """Read the access in the environment; None outside a Pollux job.

    A token of another job or attempt counts as none: a job that was submitted from within another may inherit it.
    """
    if not in_pollux_job(environ):
        return None
    addresses = tuple(filter(None, (part.strip() for part in environ[ADDRESSES].split(","))))
    try:
        # Slurm leaves the count unset in a first attempt.
        job_id, attempt = int(environ["SLURM_JOB_ID"]), int(environ.get("SLURM_RESTART_COUNT") or 0)
    except ValueError as error:
        log.warning(
            "this job's number or attempt makes no sense (%s); training goes on without Pollux", error
        )
        return None
    return GatewayAccess(
        addresses, environ.get(CA, ""), job_id, attempt, _inherited(environ, job_id, attempt)
    )


def _inherited(environ: Mapping[str, str], job_id: int, attempt: int) -> Grant | None:
    text = environ.get(TOKEN, "")
    if not text:
        return None
    try:
        return Grant.from_document(json.loads(text), job_id, attempt)
    except (ValueError, RecursionError) as error:
        # json's message has line and column, and no part of the text.
        log.info("%s is not used: %s", TOKEN, error)
        return None
