"""How much memory the job may use on this node, and how much is left: by the machine and Slurm's cgroups, v1 and v2."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

RESERVE = 256_000_000
"""Bytes that the agent leaves to the training, whose use may still grow after its first steps."""

_V2 = ("memory.max", "memory.current", "")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
"""Files of the limit and of the use, and the prefix of the entries in memory.stat that count cgroups below, too."""


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes of memory that the job may use on this node: the machine's, or the least limit of its cgroups."""
    return min(limit for limit, _ in _levels(root))


def memory_left(root: Path = Path("/")) -> int:
    """Bytes that the job may still take: the least of all levels. What the kernel can free counts as free."""
    return max(min(limit - used for limit, used in _levels(root)), 0)


def _levels(root: Path) -> Iterator[tuple[int, int]]:
    """The limit and the use of the machine, and of each cgroup around this process that has a limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _entry(root / "proc/meminfo", "MemAvailable")
    yield machine, machine - 1024 * available if available is not None else 0
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        folder = top / path.lstrip("/")
        for at in (folder, *folder.parents):
            if not at.is_relative_to(top):
                break
            for limit_file, use_file, prefix in (_V2, _V1):
                limit = _number(at / limit_file)
                if limit is not None:
                    cache = [
                        _entry(at / "memory.stat", f"{prefix}{kind}_file") for kind in ("inactive", "active")
                    ]
                    yield limit, max((_number(at / use_file) or 0) - sum(each or 0 for each in cache), 0)


def _number(path: Path) -> int | None:
    """The number in a file; None for "max", and where there is no such file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _entry(path: Path, name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:?\s+(\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
