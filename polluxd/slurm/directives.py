"""The AdminComment that the submission hook writes on Pollux jobs.

It marks a job as Pollux' and passes on the requests of its `#POLLUX` lines. The hook is `slurm_hooks/job_submit.lua`.
The comment of a job, all on one line:

    pollux:v1 min-gpus=1 max-gpus=8 gpu-counts=1,2,4,8 adaptive=yes preemptible=yes cpus-per-gpu=2 mem-per-gpu=4000
    submitted=T begin=T asked=1x2

A job with `#POLLUX continue=yes` has `continue=yes` after `preemptible=`; then one whose script calls `pollux wrap`, or
no `pollux` at all, has `loop=own`, and a job of a search `search=NAME`.
After `mem-per-gpu=` stand the demands on nodes. The comment of a companion job:

    pollux:v1 companion-of=J attempt=R move=ID nonce=N cpus-per-gpu=2 mem-per-gpu=4000 submitted=T

Text of the site may follow after a word `--`. Users can read the comment but cannot set it. An administrator can set
it, so it is checked like any other input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from polluxd.config.value_types import GPU_RULE, GPU_RULES
from polluxd.errors import DirectiveError, SlurmGarbled
from polluxd.model import JobSpec
from polluxd.slurm.demands import Demands, matches, shortened
from polluxd.slurm.notation import node_names
from polluxd.slurm.protocol import Companion

MARK = "pollux:"
_VERSION = "pollux:v1"
_LONGEST = 2048
"""Characters of a comment, as the hook has it."""
_MOST_TYPES = 16
_LONGEST_TYPE = 64
_LONGEST_TYPES = 512
"""Characters, as the hook has it."""
_SITE_TEXT = "--"
"""The word before the site's own text."""


@dataclass(frozen=True, slots=True)
class Directives:
    """A parsed AdminComment."""

    spec: JobSpec
    submitted: float | None = None
    """First submission [POSIX s]; None where the hook did not note it."""
    begin: float | None = None
    """The user's own --begin [POSIX s]."""
    companion: Companion | None = None
    demands: Demands = field(default_factory=Demands)


def parse_admin_comment(text: str) -> Directives | None:
    """Parse an AdminComment; None when the job is not Pollux'.

    Raises:
        DirectiveError: the comment has Pollux' mark but cannot be understood. The message names the word and what was
            expected.
    """
    words = text.split()
    if not words or not words[0].startswith(MARK):
        return None
    if len(text) > _LONGEST:
        raise DirectiveError(f"AdminComment has {len(text)} characters; at most {_LONGEST} are read")
    if words[0] != _VERSION:
        raise DirectiveError(f"AdminComment starts with {words[0]!r}; this polluxd understands {_VERSION!r}")
    values: dict[str, str] = {}
    for word in takewhile(_SITE_TEXT.__ne__, words[1:]):
        key, equals, value = word.partition("=")
        if not equals or key not in _WORDS:
            raise DirectiveError(f"AdminComment: {word!r} is none of {', '.join(k + '=' for k in _WORDS)}")
        if key in values:
            raise DirectiveError(f"AdminComment: {key} is given twice")
        values[key] = value
    spec = JobSpec(**_read(values, _SPEC))
    if spec.max_gpus is not None and spec.min_gpus > spec.max_gpus:
        raise DirectiveError(f"AdminComment: min-gpus={spec.min_gpus} is above max-gpus={spec.max_gpus}")
    companion = _read(values, _COMPANION)
    if companion.keys() - {"nonce"} and len(companion.keys() | {"nonce"}) < len(_COMPANION):
        given = [word for word in _COMPANION if word in values]
        raise DirectiveError(f"AdminComment: a companion has companion-of, attempt, move, this one {given}")
    demands = Demands(**_read(values, _DEMANDS))
    if _read(values, _OWN_LOOP) and demands.asked is not None:
        spec = replace(spec, own_size=demands.asked[0] * demands.asked[1])
    return Directives(
        spec,
        **_read(values, _TIMES),
        companion=Companion(**companion) if companion.keys() - {"nonce"} else None,
        demands=demands,
    )


def _read(values: Mapping[str, str], words: Mapping[str, _Word]) -> dict[str, Any]:
    """Read the words that are given, by the field that each fills."""
    found = {}
    for word, (name, expected, read) in words.items():
        if word in values:
            try:
                found[name] = read(values[word])
            except (ValueError, SlurmGarbled):
                raise DirectiveError(
                    f"AdminComment: {word} is {expected}, not {shortened(values[word])!r}"
                ) from None
    return found


def _like(pattern: str, read: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """Return a reader of texts of one form."""

    def checked(text: str) -> Any:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(text)
        return read(text)

    return checked


def _types(text: str) -> frozenset[str]:
    types = frozenset(filter(None, text[: _LONGEST_TYPES + 1].split(",")))
    too_long = len(text) > _LONGEST_TYPES or max(map(len, types), default=0) > _LONGEST_TYPE
    if too_long or len(types) > _MOST_TYPES:
        raise ValueError(text)
    return types


def _rule(text: str) -> str:
    if re.fullmatch(GPU_RULE, text) is None:
        raise ValueError(text)
    return text


def _constraint(text: str) -> str:
    if text:
        matches(text, frozenset())
    return text


def _size(text: str) -> tuple[int, int] | None:
    nodes, _, gpus = text.partition("x")
    return (int(nodes), int(gpus)) if text else None


def _names(text: str) -> frozenset[str]:
    return frozenset(node_names(text))


# Of so many digits no number is meant; beyond some thousands Python itself would refuse to read it.
_COUNT = "a whole number from 1 up", _like("(?=[0-9]{1,15}$)0*[1-9][0-9]*", int)
_YES_OR_NO = "yes or no", _like("yes|no", "yes".__eq__)
_YES = "yes", _like("yes", bool)
_NUMBER = "a whole number", _like("[0-9]{1,9}", int)
_NODES = "a node list", _names

_Word = tuple[str, str, Callable[[str], Any]]
"""The field that a word fills, what is expected of it, and its reader, which raises ValueError or SlurmGarbled."""

_SPEC: dict[str, _Word] = {
    "min-gpus": ("min_gpus", *_COUNT),
    "max-gpus": ("max_gpus", *_COUNT),
    "gpu-counts": ("gpu_counts", GPU_RULES, _rule),
    "adaptive": ("adaptive", *_YES_OR_NO),
    "preemptible": ("preemptible", *_YES_OR_NO),
    "continue": ("continues", *_YES_OR_NO),
    "search": ("search", "a name of at most 64 characters", _like("([A-Za-z0-9][A-Za-z0-9._-]{0,63})?")),
    "cpus-per-gpu": ("cpus_per_gpu", *_COUNT),
    "mem-per-gpu": ("mem_per_gpu_mb", *_COUNT),
}
_OWN_LOOP: dict[str, _Word] = {"loop": ("loop", "own", _like("own"))}
_TIMES: dict[str, _Word] = {"submitted": ("submitted", *_COUNT), "begin": ("begin", *_COUNT)}
_COMPANION: dict[str, _Word] = {
    "companion-of": ("parent", *_COUNT),
    "attempt": ("attempt", "a whole number", _like("[0-9]{1,15}", int)),
    "move": ("move", *_COUNT),
    "nonce": ("nonce", "32 hexadecimal digits", _like("([0-9a-f]{32})?")),
}
_DEMANDS: dict[str, _Word] = {
    "gpu-types": (
        "gpu_types",
        f"at most {_MOST_TYPES} types of at most {_LONGEST_TYPE} characters, {_LONGEST_TYPES} in all",
        _types,
    ),
    "constraint": ("constraint", "features with & and |", _constraint),
    "nodelist": ("nodelist", *_NODES),
    "exclude": ("exclude", *_NODES),
    "reservation": ("reservation", "a name", str),
    "exclusive": ("exclusive", *_YES),
    "min-cpus": ("min_cpus", *_NUMBER),
    "tmp": ("tmp_mb", *_NUMBER),
    "switches": ("switches", *_NUMBER),
    "contiguous": ("contiguous", *_YES),
    "array-limit": ("array_limit", "a whole number", _like("[0-9]{1,9}", lambda text: int(text) or None)),
    "cpus-asked": ("cpus_asked", *_YES),
    "mem-asked": ("memory_asked", *_YES),
    "asked": ("asked", "NODESxGPUS", _like("([1-9][0-9]{0,8}x[1-9][0-9]{0,8})?", _size)),
}
_WORDS = {**_SPEC, **_OWN_LOOP, **_TIMES, **_COMPANION, **_DEMANDS}
