"""The AdminComment that the submission hook writes on Pollux jobs.

It marks a job as Pollux' and passes on the requests of its `#POLLUX` lines. The hook is `slurm_hooks/job_submit.lua`.
The comment of a job, all on one line:

    pollux:v1 min-gpus=1 max-gpus=8 gpu-counts=1,2,4,8 adaptive=yes preemptible=yes cpus-per-gpu=2 mem-per-gpu=4000
    submitted=T begin=T asked=1x2

A job with `#POLLUX continue=yes` has `continue=yes` after `preemptible=`; then a job of a search has `search=NAME`.
After `mem-per-gpu=` stand the demands on nodes (`polluxd.slurm.demands`). The comment of a companion job:

    pollux:v1 companion-of=J attempt=R move=ID nonce=N cpus-per-gpu=2 mem-per-gpu=4000 submitted=T

Text of the site may follow after a word `--`. Users can read the comment but cannot set it. An administrator can set
it, so it is checked like any other input.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

from polluxd.config.gpu_counts import RULES, is_rule
from polluxd.errors import DirectiveError
from polluxd.model import JobSpec
from polluxd.slurm.demands import WORDS, Demands, read_demands
from polluxd.slurm.protocol import Companion

MARK = "pollux:"
_VERSION = "pollux:v1"
_LONGEST = 2048
"""Characters of a comment, as the hook has it."""
_DIGITS = 15
_NONCE = re.compile("[0-9a-f]{32}")
_SEARCH = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
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
        if not equals or key not in _KEYS:
            raise DirectiveError(f"AdminComment: {word!r} is none of {', '.join(k + '=' for k in _KEYS)}")
        if key in values:
            raise DirectiveError(f"AdminComment: {key} is given twice")
        values[key] = value
    demands = read_demands({key: values.pop(key) for key in WORDS if key in values})
    gpu_counts = _gpu_counts(values.pop("gpu-counts", "any"))
    nonce = _nonce(values.pop("nonce", ""))
    search = _search(values.pop("search", ""))
    read = {key: _READERS[key](key, value) for key, value in values.items()}
    spec = JobSpec(
        min_gpus=int(read.get("min-gpus", 1)),
        max_gpus=int(read["max-gpus"]) if "max-gpus" in read else None,
        adaptive=bool(read.get("adaptive", True)),
        preemptible=bool(read.get("preemptible", True)),
        cpus_per_gpu=int(read.get("cpus-per-gpu", 1)),
        mem_per_gpu_mb=int(read["mem-per-gpu"]) if "mem-per-gpu" in read else None,
        gpu_counts=gpu_counts,
        continues=bool(read.get("continue", False)),
        search=search,
    )
    if spec.max_gpus is not None and spec.min_gpus > spec.max_gpus:
        raise DirectiveError(f"AdminComment: min-gpus={spec.min_gpus} is above max-gpus={spec.max_gpus}")
    return Directives(spec, read.get("submitted"), read.get("begin"), _companion(read, nonce), demands)


def _companion(read: dict[str, float], nonce: str) -> Companion | None:
    given = [key for key in _COMPANION if key in read]
    if not given:
        return None
    if len(given) < len(_COMPANION):
        raise DirectiveError(f"AdminComment: a companion has {', '.join(_COMPANION)}, this one {given}")
    parent, attempt, move = (int(read[key]) for key in _COMPANION)
    return Companion(parent, attempt, move, nonce)


def _nonce(text: str) -> str:
    if text and not _NONCE.fullmatch(text):
        raise DirectiveError(f"AdminComment: nonce is 32 hexadecimal digits, not {text!r}")
    return text


def _search(text: str) -> str:
    if text and not _SEARCH.fullmatch(text):
        raise DirectiveError(f"AdminComment: search is a name of at most 64 characters, not {text!r}")
    return text


def _count(key: str, text: str) -> float:
    # Of so many digits no number is meant; beyond some thousands Python itself would refuse to read it.
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS or int(text) < 1:
        raise DirectiveError(f"AdminComment: {key} is a whole number from 1 up, not {text!r}")
    return int(text)


def _attempt(key: str, text: str) -> float:
    return 0 if text == "0" else _count(key, text)


def _gpu_counts(text: str) -> str:
    """The rule as `JobSpec.gpu_counts` has it."""
    if not is_rule(text):
        raise DirectiveError(f"AdminComment: gpu-counts is {RULES}, not {text!r}")
    return text


def _yes_or_no(key: str, text: str) -> float:
    if text not in ("yes", "no"):
        raise DirectiveError(f"AdminComment: {key} is yes or no, not {text!r}")
    return text == "yes"


_READERS: dict[str, Callable[[str, str], float]] = {
    "min-gpus": _count,
    "max-gpus": _count,
    "adaptive": _yes_or_no,
    "preemptible": _yes_or_no,
    "continue": _yes_or_no,
    "cpus-per-gpu": _count,
    "mem-per-gpu": _count,
    "submitted": _count,
    "begin": _count,
    "companion-of": _count,
    "attempt": _attempt,
    "move": _count,
}
_COMPANION = ("companion-of", "attempt", "move")
_KEYS = ("gpu-counts", "nonce", "search", *_READERS, *WORDS)
