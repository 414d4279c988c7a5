"""What this leader has written: only what differs is written again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polluxd.model import Allocation

from .decision_changes import same_decision
from .views import ObservedJob


@dataclass
class Written:
    """The rows of jobs and decisions in the database.

    Attributes:
        epoch: under which they were written; None: not as a leader. Another epoch may have written since.
        jobs: by job id, as Slurm showed them; None: not known.
        decisions: by job id, as stored, which may be some cycles ago; None: not known.
    """

    epoch: int | None = None
    jobs: dict[int, ObservedJob] | None = None
    decisions: dict[int, Allocation] | None = field(default=None)

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
