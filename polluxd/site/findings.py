"""What a check found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """Pollux works, and something is not as it could be."""
    FAULT = "fault"
    """Something does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    """Name of the check, for programs."""
    level: Level
    result: str
    """What is, in plain words."""
    remedy: str = ""
    """What to do; empty where nothing is to do."""


def ok(check: str, result: str) -> Finding:
    return Finding(check, Level.OK, result)


def warning(check: str, result: str, remedy: str) -> Finding:
    return Finding(check, Level.WARNING, result, remedy)


def fault(check: str, result: str, remedy: str) -> Finding:
    return Finding(check, Level.FAULT, result, remedy)


SKEW_S = 5.0
"""Clocks that differ by more make munge and leases unreliable (munge(7) allows 300 s)."""


def clock(skew_s: float, one: str, other: str) -> Finding:
    if abs(skew_s) > SKEW_S:
        return fault("clock", f"{one} is {skew_s:+.0f} s from {other}", "run an NTP client on both machines")
    return ok("clock", f"{one} is {other}")
