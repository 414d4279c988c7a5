"""What a user's sbatch options demand of a job's nodes.

The submission hook (`slurm_hooks/placement_options.lua`) writes them into AdminComment (`directives`). sbatch(1).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from polluxd.errors import DirectiveError
from polluxd.model import Node
from polluxd.slurm.notation import parse_gpus

MIXED = " (polluxd places no job on one of several GPU types of a node)"
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
            return f"gpu-types={shortened(','.join(sorted(self.gpu_types)))}" + (MIXED if mixed else "")
        if self.nodelist and node.name not in self.nodelist:
            return "--nodelist"
        if node.name in self.exclude:
            return "--exclude"
        if self.constraint and not matches(self.constraint, node.features):
            return f"--constraint={shortened(self.constraint)}"
        if self.min_cpus > max(node.cpus, 1):
            return f"--mincpus={self.min_cpus}"
        if self.tmp_mb and node.tmp_mb is not None and node.tmp_mb < self.tmp_mb:
            return f"--tmp={self.tmp_mb}"
        return ""


def of_plain_job(gres: str) -> Demands:
    """Return the GPU type that a plain job asks for, where it names one. Raises SlurmGarbled."""
    kind = parse_gpus(gres).type
    return Demands(gpu_types=frozenset({kind})) if kind and "+" not in kind else Demands()


@lru_cache(maxsize=65536)
def matches(constraint: str, features: frozenset[str]) -> bool:
    """Tell whether a node with these features fulfils the constraint. Raises DirectiveError."""
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


def shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
