"""Durations as Slurm prints them."""

from __future__ import annotations

import re
from functools import lru_cache

from polluxd.errors import SlurmGarbled


@lru_cache(maxsize=4096)
def duration(text: str) -> float | None:
    """Seconds of `D-HH:MM:SS`, `HH:MM:SS` or `MM:SS`; None: no limit."""
    if text in ("UNLIMITED", "NOT_SET", "Partition_Limit", "PARTITION_LIMIT", "N/A", "INVALID"):
        return None
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not re.fullmatch(r"\d{1,9}(:\d{1,9}){0,2}", clock) or (dash and not re.fullmatch(r"\d{1,9}", days)):
        raise SlurmGarbled(f"expected a duration D-HH:MM:SS, got {text[:40]!r}")
    seconds = 0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return float(seconds + 86400 * int(days or 0))
