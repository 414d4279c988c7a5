"""What of a plan is stored: the decisions that changed. Pure."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from typing import Any

from polluxd.model import Allocation

from .rows import allocations_to_json

_NUMBERS = re.compile(r"[0-9][0-9.,:]*")
DRIFT = 0.1
"""Predictions that differ by less are the same decision."""


def same_decision(one: Allocation, other: Allocation) -> bool:
    """Whether two decisions on a job are the same to its user.

    They give it the same GPUs for the same kind of reason, and predict about the same. Prices, and what other jobs
    gain, change in every cycle.
    """
    return (
        one.placement == other.placement
        and one.changed == other.changed
        and _near(one.goodput, other.goodput)
        and _near(one.speedup, other.speedup)
        and _near(one.batch_size, other.batch_size)
        and (one.reason == other.reason or _kind(one.reason) == _kind(other.reason))
        and _limit(one) == _limit(other)
    )


def plan_digest(allocations: Iterable[Allocation]) -> str:
    """SHA-256 over every bit of the decisions."""
    digest, before = hashlib.sha256(b"["), b""
    # As the digest of `allocations_to_json`, whose text would be the largest of a cycle.
    for allocation in sorted(allocations, key=lambda a: a.job_id):
        digest.update(before + allocations_to_json([allocation])[1:-1].encode())
        before = b", "
    digest.update(b"]")
    return digest.hexdigest()


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=DRIFT)


def _kind(reason: str) -> str:
    return _NUMBERS.sub("#", reason)


def _limit(allocation: Allocation) -> Any:
    facts = allocation.explanation
    return None if facts is None else (facts.limit, facts.next_gpus, facts.doubts, facts.doubted_reports)
