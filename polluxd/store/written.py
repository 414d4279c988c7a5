"""What this leader has written: only what differs is written again."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from polluxd.model import Allocation
from polluxd.slurm.protocol import SlurmJob

from .rows import allocations_to_json

_NUMBERS = re.compile(r"[0-9][0-9.,:]*")
DRIFT = 0.1
"""Predictions that differ by less are the same decision."""


@dataclass
class Written:
    """The rows of jobs and decisions in the database.

    Attributes:
        epoch: under which they were written; None: not as a leader. Another epoch may have written since.
        jobs: by job id, as Slurm showed them; None: not known.
        decisions: by job id, as stored, which may be some cycles ago; None: not known.
    """

    epoch: int | None = None
    jobs: dict[int, SlurmJob] | None = None
    decisions: dict[int, Allocation] | None = None

    def under(self, epoch: int | None) -> Written:
        """Return these rows, or none where they were written under another epoch."""
        return self if epoch is not None and epoch == self.epoch else Written(epoch)

    def decide(self, allocations: Sequence[Allocation]) -> tuple[list[Allocation], list[int]]:
        """Return changed decisions, and the jobs whose stored decision ends.

        The decisions that did not change stay as they were stored, so that small changes add up.
        """
        before = self.decisions or {}
        after = {
            a.job_id: before[a.job_id] if a.job_id in before and same_decision(before[a.job_id], a) else a
            for a in allocations
        }
        changed = [a for job_id, a in after.items() if before.get(job_id) is not a]
        self.decisions = after
        return changed, [a.job_id for a in changed] + sorted(before.keys() - after.keys())


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
    return None if facts is None else (facts.limit, facts.next_gpus, facts.doubts)
