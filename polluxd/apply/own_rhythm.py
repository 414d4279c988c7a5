"""Move trainers that save by themselves in their own rhythm: at their next checkpoint, and seldom.

Such a trainer (`pollux wrap`) saves when it chooses, each 30 minutes say, and makes the steps since then again after a
move. Its report says when its next checkpoint is due. A plan leaves the job where it is until then, and a drain waits
for it. A user may claim any time, so a plan waits for an hour at most, a drain for another one, and neither protects
more than the user's equal share of the GPUs (`protected`) for longer than ten minutes. Within it, no such trainer gets
fewer GPUs than its user asked for before it has trained for as long as after a move: it may fail on fewer, and then
stands for nothing.
"""

from __future__ import annotations

from polluxd.config.settings import MoveSettings
from polluxd.model import JobState, Report
from polluxd.slurm.protocol import ClusterState
from polluxd.store import CycleRecords

LONGEST_S = 3600.0
"""The longest wait for a checkpoint, of a plan and of a drain each."""
CONTESTED_S = 600.0
"""The longest wait of a drain while others lack what protection leaves its job, or what is set aside for it."""
LATE_S = 60.0
"""How much later than it was due a checkpoint may come: its distance from the last one is no promise."""


def due_at(report: Report | None, attempt: int) -> float | None:
    """Return when the next checkpoint of a job's attempt is due [POSIX s]; None: the job saves when it is asked."""
    if report is None or report.attempt != attempt or report.next_save_s is None:
        return None
    return report.at + report.next_save_s


class OwnRhythm:
    """Which running jobs stay where they are for the sake of their own rhythm, and why."""

    def __init__(self, limits: MoveSettings) -> None:
        self._limits = limits
        # As long as from one decision to the next, so that one falls into it.
        self._soon_s = max(limits.drain_timeout_s, LATE_S)
        self._since: dict[tuple[int, int], float] = {}
        """By job and attempt: when its plans began to wait for a checkpoint that has not come since."""
        self.stays: dict[int, str] = {}
        self.least: dict[int, int] = {}
        """Fewest GPUs of trainers that may work on no fewer, until they have trained long enough for a try."""

    def observe(self, state: ClusterState, records: CycleRecords) -> None:
        """Take in what a decision is made on."""
        now, since = state.taken_at, self._since
        self._since, self.stays, self.least = {}, {}, {}
        in_service = {node.name for node in state.nodes if node.schedulable}
        for job in state.jobs:
            report, total = records.reports.get(job.job_id), records.totals.get(job.job_id)
            if job.state is not JobState.RUNNING or report is None or job.spec is None:
                continue
            cost, due = total.mean_cost.get("requeue") if total else None, due_at(report, job.restart_count)
            rests = self._rest_s(report, cost or self._limits.default_cost_s, now) > 0
            if (own := job.spec.own_size) and rests and in_service.issuperset(job.gpus_per_node_held):
                holds = sum(job.gpus_per_node_held.values())
                self.least[job.job_id] = min(own, holds, job.spec.max_gpus or own)
            if due is None:
                continue
            key = job.job_id, job.restart_count
            if due - now > self._soon_s:
                self._since[key] = since.get(key, now)
                if now - self._since[key] <= LONGEST_S:
                    self.stays[job.job_id] = f"moves at its next checkpoint, in about {_in_words(due - now)}"
            if cost is not None and (left := self._rest_s(report, cost, now)) > 0:
                more = f"trains for {_in_words(left)} more before its next move"
                self.stays[job.job_id] = f"{more}: one has cost it {cost:.0f} s"

    def _rest_s(self, report: Report, cost: float, now: float) -> float:
        """Seconds until it has trained long enough for a move at this cost."""
        return min(self._limits.own_loop_rest * cost, LONGEST_S) - (now - (report.first_step_at or now))


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.0f} min"
