"""The text of `sacct --parsable2`, row by row, and what its fields mean.

sacct quotes nothing. A separator in a job's name makes more fields than there are columns: they belong to JobName, the
one free text that stands beside the others. A line break in a name makes a row that is too short, and spoils no other.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path

from pollux.private_folder import open_named

Rows = Iterator[tuple[int, list[str] | None]]
"""The line's number and its fields; None: more or fewer than columns."""

_LONGEST = 1 << 16
"""Letters of a row."""
_GPUS = re.compile(r"(?:^|,)gres/gpu(?::([\w.+-]{1,64}))?=(\d{1,9})(?=,|$)")
_ELAPSED = re.compile(r"(?:(\d{1,9})-)?(\d{1,9}):(\d{1,9}):(\d{1,9})")


class NoSacctText(ValueError):
    """The file is no output of `sacct --parsable2`, or a column is missing. The message says which."""


def rows(path: Path, needed: Sequence[str]) -> tuple[list[str], Rows]:
    """Return the columns of a file and its rows. Raises NoSacctText, and OSError."""
    # Python would end a line at a carriage return, too, which a job's name may have.
    file = io.TextIOWrapper(open_named(path), encoding="utf-8-sig", errors="replace", newline="\n")
    names = file.readline(100_000).strip("\r\n").split("|")
    if missing := [name for name in needed if name not in names]:
        file.close()
        raise NoSacctText(f"no column {' or '.join(missing)} among {', '.join(names)[:200]}")
    return names, _rows(file, names)


def _rows(file: io.TextIOWrapper, names: list[str]) -> Rows:
    free, count = names.index("JobName") if "JobName" in names else None, len(names)
    with file:
        # What is longer is no row, and its parts are none: a file may have a hole of a terabyte.
        for number, text in enumerate(iter(partial(file.readline, _LONGEST), ""), 2):
            fields = text.rstrip("\r\n").split("|")
            more = len(fields) - count
            if more > 0 and free is not None:
                fields[free : free + more + 1] = ["|".join(fields[free : free + more + 1])]
                more = 0
            yield number, None if more else fields


def moment(text: str) -> float | None:
    """POSIX seconds of a time; None for `Unknown` and `None`. Raises ValueError.

    With SLURM_TIME_FORMAT=%s Slurm writes POSIX seconds. Other times have no zone and count as UTC.
    """
    if text.isdecimal() and text.isascii() and len(text) <= 11:
        return float(text) or None
    if text in ("Unknown", "None", ""):
        return None
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


@lru_cache(maxsize=1 << 16)
def gpus_of(tres: str) -> tuple[int, str]:
    """Return the GPUs of an AllocTRES or ReqTRES, and their type where it is one.

    A GPU of a named type is counted under its own name and, where Slurm is told to, under the plain one.
    """
    found = [(kind, int(count)) for kind, count in _GPUS.findall(tres)]
    kinds = {kind for kind, count in found if kind and count}
    named, plain = (sum(n for kind, n in found if bool(kind) is typed) for typed in (True, False))
    return max(named, plain), kinds.pop() if len(kinds) == 1 and named >= plain else ""


def seconds_of(text: str) -> float | None:
    """Return the seconds of Elapsed, [DAYS-]HH:MM:SS; None for anything else."""
    if (found := _ELAPSED.fullmatch(text)) is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
