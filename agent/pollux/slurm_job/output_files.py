"""The files that this process prints to. Slurm, or the batch script, has to open them again for the next attempt."""

from __future__ import annotations

import os
from collections.abc import Iterable
from stat import S_ISREG


def _printed_to(number: int) -> str:
    """The path of an open file; empty: it is none, such as a pipe."""
    try:
        return os.readlink(f"/proc/self/fd/{number}") if S_ISREG(os.fstat(number).st_mode) else ""
    except OSError:
        return ""


OUTPUTS = tuple(filter(None, map(_printed_to, (1, 2))))
"""As they were at the start: a folder may be renamed while the job runs, and the open file goes with it."""


def unopenable(paths: Iterable[str] = OUTPUTS) -> str | None:
    """Return why no next attempt could print there, such as after its folder was renamed; None: it could."""
    for path in paths:
        there = (
            os.access(path, os.W_OK) if os.path.exists(path) else os.access(os.path.dirname(path), os.W_OK)
        )
        if not there:
            return f"its output {path} cannot be opened again (was its folder renamed?): a restart would fail"
    return None
