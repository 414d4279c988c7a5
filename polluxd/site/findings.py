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
    said: str
    """What is, in words."""
    remedy: str = ""
    """What to do; empty where nothing is to do."""


def ok(check: str, said: str) -> Finding:
    return Finding(check, Level.OK, said)


def warning(check: str, said: str, remedy: str) -> Finding:
    return Finding(check, Level.WARNING, said, remedy)


def fault(check: str, said: str, remedy: str) -> Finding:
    return Finding(check, Level.FAULT, said, remedy)
