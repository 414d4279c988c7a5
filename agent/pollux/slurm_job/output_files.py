"""The files that this process prints to, and those of its command. The next attempt has to open them again."""

from __future__ import annotations

import os
import sys
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


COMMAND = tuple(os.path.abspath(word) for word in sys.orig_argv[:20] if os.path.isfile(word))
"""The files that the command's first words name, such as the script: a user may remove it once the job runs. Further
ones may be thousands of files of data."""


def unopenable(paths: Iterable[str] = OUTPUTS, command: Iterable[str] = COMMAND) -> str | None:
    """Return why no next attempt could print there or read its command's files; None: it could."""
    for path in command:
        if not os.access(path, os.R_OK):
            return f"{path}, which its command names, cannot be read any more: a restart would fail"
    for path in paths:
        there = (
            os.access(path, os.W_OK) if os.path.exists(path) else os.access(os.path.dirname(path), os.W_OK)
        )
        if not there:
            return f"its output {path} cannot be opened again (was its folder renamed?): a restart would fail"
    return None
