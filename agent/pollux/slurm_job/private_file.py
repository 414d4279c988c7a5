"""Read a file that holds a secret of this user."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_LARGEST = 65536  # bytes


class Unusable(Exception):
    """A private file is not usable."""


def read_private(path: Path) -> str:
    """Read a file that only this user can write; others' could mislead. Raises OSError and Unusable."""
    # O_NOFOLLOW and O_NONBLOCK: another user may have put a link or a pipe there.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise Unusable("expected a regular file")
        if facts.st_uid not in (os.geteuid(), 0):
            raise Unusable(f"it belongs to uid {facts.st_uid}, expected {os.geteuid()}")
        if facts.st_mode & 0o077:
            raise Unusable(f"expected mode 0600, its mode is {stat.S_IMODE(facts.st_mode):04o}")
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise Unusable(f"expected at most {_LARGEST} bytes")
    return content.decode()
