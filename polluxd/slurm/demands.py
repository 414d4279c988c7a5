"""What a user's sbatch options demand of a job's nodes.

The submission hook (`slurm_hooks/placement_options.lua`) writes these words into AdminComment. sbatch(1).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from polluxd.errors import DirectiveError, SlurmGarbled
from polluxd.model import Node
from polluxd.slurm.gres import parse_gpus
from polluxd.slurm.node_lists import node_names

MIXED = " (polluxd places no job on one of several GPU types of a node)"
_MOST_TYPES = 16
_LONGEST_TYPE = 64
_LONGEST_TYPES = 512
"""Characters, as the hook has it."""
_SHOWN = 80
"""Characters of a user's text that a reason repeats."""
_NAME = r"[\w.:+-]+"
_TOKEN = re.compile(rf"{_NAME}|[&|()]")


@dataclass(frozen=True, slots=True)
class Demands:
    """Nodes that a job may use; the defaults demand nothing."""

    gpu_types: frozenset[str] = frozenset()
    """Empty: any."""
    constraint: str = ""
    """Features with & and |, and one level of parentheses; empty: any node."""
    nodelist: frozenset[str] = frozenset()
    """Empty: all."""
    exclude: frozenset[str] = frozenset()
    reservation: str = ""
    exclusive: bool = False
    min_cpus: int = 1
    tmp_mb: int = 0
    switches: int = 0
    """Most leaf switches; 0: any number."""
    array_limit: int | None = None
    """Most tasks of the job's array that run at one time."""
    contiguous: bool = False
    """Its nodes follow each other in Slurm's order."""
    cpus_asked: bool = False
    """It asks for CPUs itself, so that the site's DefCpuPerGPU says nothing."""
    memory_asked: bool = False
    """It asks for memory itself (--mem=0: for all), so that the site's DefMemPerGPU says nothing."""
    asked: tuple[int, int] | None = None
    """The size that its user wrote: nodes, and GPUs on each; None: not known, or uneven."""

    @property
    def of_nodes(self) -> bool:
        """Whether any demand depends on the node alone."""
        return bool(
            self.gpu_types
            or self.constraint
            or self.nodelist
            or self.exclude
            or self.exclusive
            or self.min_cpus > 1
            or self.tmp_mb
        )

    def refuses(self, node: Node) -> str:
        """Return the option that leaves the node out; empty where none does."""
        if self.gpu_types and node.gpu_type not in self.gpu_types:
            mixed = not self.gpu_types.isdisjoint(node.gpu_type.split("+"))
            return f"gpu-types={_shown(','.join(sorted(self.gpu_types)))}" + (MIXED if mixed else "")
        if self.nodelist and node.name not in self.nodelist:
            return "--nodelist"
        if node.name in self.exclude:
            return "--exclude"
        if self.constraint and not matches(self.constraint, node.features):
            return f"--constraint={_shown(self.constraint)}"
        if self.min_cpus > max(node.cpus, 1):
            return f"--mincpus={self.min_cpus}"
        if self.tmp_mb and node.tmp_mb is not None and node.tmp_mb < self.tmp_mb:
            return f"--tmp={self.tmp_mb}"
        return ""


def of_plain_job(gres: str) -> Demands:
    """Return the GPU type that a plain job asks for, where it names one.

    Raises:
        SlurmGarbled: the request is of an unknown form.
    """
    kind = parse_gpus(gres).type
    return Demands(gpu_types=frozenset({kind})) if kind and "+" not in kind else Demands()


@lru_cache(maxsize=65536)
def matches(constraint: str, features: frozenset[str]) -> bool:
    """Tell whether a node with these features fulfils the constraint.

    Raises:
        DirectiveError: the constraint is of another form than the hook accepts.
    """
    tokens = _TOKEN.findall(constraint)
    if "".join(tokens) != constraint:
        raise _senseless(constraint)
    value, left = _alternatives(tokens, features, constraint)
    if left:
        raise _senseless(constraint)
    return value


def _alternatives(tokens: list[str], features: frozenset[str], text: str) -> tuple[bool, list[str]]:
    """Evaluate terms joined by & or |, as far as they go."""
    value, tokens = _term(tokens, features, text)
    while tokens and tokens[0] in "&|":
        operator = tokens[0]
        other, tokens = _term(tokens[1:], features, text)
        value = (value and other) if operator == "&" else (value or other)
    return value, tokens


def _term(tokens: list[str], features: frozenset[str], text: str) -> tuple[bool, list[str]]:
    if not tokens or tokens[0] in "&|)":
        raise _senseless(text)
    if tokens[0] != "(":
        return tokens[0] in features, tokens[1:]
    value, left = _alternatives(tokens[1:], features, text)
    if not left or left[0] != ")":
        raise _senseless(text)
    return value, left[1:]


def _senseless(text: str) -> DirectiveError:
    return DirectiveError(f"AdminComment: constraint is features with & and |, not {text[:_SHOWN]!r}")


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def read_demands(values: dict[str, str]) -> Demands:
    """Read the demands among the words of an AdminComment.

    Raises:
        DirectiveError: a word makes no sense.
    """
    constraint = values.get("constraint", "")
    if constraint:
        matches(constraint, frozenset())
    for switch in ("exclusive", "contiguous", "cpus-asked", "mem-asked"):
        if values.get(switch, "yes") != "yes":
            raise DirectiveError(f"AdminComment: {switch} is yes, not {values[switch]!r}")
    return Demands(
        gpu_types=_types(values.get("gpu-types", "")),
        constraint=constraint,
        nodelist=_nodes(values, "nodelist"),
        exclude=_nodes(values, "exclude"),
        reservation=values.get("reservation", ""),
        exclusive="exclusive" in values,
        min_cpus=_count(values, "min-cpus", 1),
        tmp_mb=_count(values, "tmp", 0),
        switches=_count(values, "switches", 0),
        contiguous="contiguous" in values,
        cpus_asked="cpus-asked" in values,
        memory_asked="mem-asked" in values,
        array_limit=_count(values, "array-limit", 0) or None,
        asked=_size(values.get("asked", "")),
    )


WORDS = (
    *("gpu-types", "constraint", "nodelist", "exclude", "reservation", "exclusive"),
    *("min-cpus", "tmp", "switches", "contiguous", "array-limit", "cpus-asked", "mem-asked"),
    "asked",
)


def _types(text: str) -> frozenset[str]:
    types = frozenset(filter(None, text[: _LONGEST_TYPES + 1].split(",")))
    if (
        len(text) > _LONGEST_TYPES
        or len(types) > _MOST_TYPES
        or max(map(len, types), default=0) > _LONGEST_TYPE
    ):
        raise DirectiveError(
            f"AdminComment: gpu-types is at most {_MOST_TYPES} types of at most {_LONGEST_TYPE} characters, "
            f"{_LONGEST_TYPES} in all, not {_shown(text)!r}"
        )
    return types


def _nodes(values: dict[str, str], key: str) -> frozenset[str]:
    try:
        return frozenset(node_names(values.get(key, "")))
    except SlurmGarbled as error:
        raise DirectiveError(f"AdminComment: {key}: {error}") from error


def _count(values: dict[str, str], key: str, default: int) -> int:
    text = values.get(key)
    if text is None:
        return default
    if not re.fullmatch(r"\d{1,9}", text):
        raise DirectiveError(f"AdminComment: {key} is a whole number, not {text!r}")
    return int(text)


def _size(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    found = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text)
    if found is None:
        raise DirectiveError(f"AdminComment: asked is NODESxGPUS, not {text[:_SHOWN]!r}")
    return int(found[1]), int(found[2])
