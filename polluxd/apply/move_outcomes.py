"""Notice jobs that train more slowly after a move that was to help them.

The goodput is what the job's own agent measures, before the move and after it. Moves that take GPUs away are left out:
they help others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from polluxd.apply.placed import same_place
from polluxd.model import JobState, Move, Report
from polluxd.slurm.protocol import SlurmJob

SETTLED_S = 120.0
"""Training after the move until its goodput counts: first steps are slow, and an agent reports every 30 s."""
WORSE = 0.9
"""Part of the goodput before the move below which the job is worse off. Goodput varies by some percent."""


@dataclass(frozen=True, slots=True)
class WorseOff:
    """A job that a move did no good."""

    job_id: int
    before: float
    """Goodput before the move [examples/s]."""
    now: float
    target: str


class MoveOutcomes:
    """The goodput of jobs before their newest moves."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Move, float]] = {}
        self._arrived: dict[int, float] = {}
        """By job: time of the first report from where the move has brought it [POSIX s]."""
        self.worse_off: Sequence[WorseOff] = ()

    def begun(self, moves: Iterable[Move], reports: Mapping[int, Report]) -> None:
        """Take in the moves of a decision, and what their jobs report at that time."""
        for move in moves:
            self._before.pop(move.job_id, None)
            self._arrived.pop(move.job_id, None)
            report = reports.get(move.job_id)
            helps = move.source and move.target.gpus >= move.source.gpus
            if helps and report is not None and report.attempt == move.attempt and report.goodput > 0:
                self._before[move.job_id] = move, report.goodput

    def observe(
        self, jobs: Iterable[SlurmJob], reports: Mapping[int, Report], moving: Collection[int]
    ) -> None:
        """Compare, for each job that has arrived where its move was to bring it."""
        alive = {job.job_id: job for job in jobs if job.spec is not None and not job.state.finished}
        self._before = {job_id: known for job_id, known in self._before.items() if job_id in alive}
        self._arrived = {job_id: at for job_id, at in self._arrived.items() if job_id in alive}
        found = []
        for job_id, (move, before) in self._before.items():
            job, report = alive[job_id], reports.get(job_id)
            if job_id in moving or report is None or not _from_target(job, report, move):
                continue
            since = report.at - self._arrived.setdefault(job_id, report.at)
            if since >= SETTLED_S and report.goodput < WORSE * before:
                found.append(WorseOff(job_id, before, report.goodput, str(move.target)))
        self.worse_off = tuple(sorted(found, key=lambda one: one.job_id))

    def note(self) -> str:
        """Return the text for `polluxctl status`; empty where no job is worse off."""
        if not self.worse_off:
            return ""
        named = ", ".join(
            f"{one.job_id} ({one.before:.3g} to {one.now:.3g} examples/s on {one.target})"
            for one in self.worse_off[:5]
        )
        return f"worse off after a move: jobs {named}"


def _from_target(job: SlurmJob, report: Report, move: Move) -> bool:
    """Whether the report is of the placement that the move has brought."""
    return (
        job.state is JobState.RUNNING
        and same_place(job, move.target)
        and report.attempt == job.restart_count
        and report.gpus == move.target.gpus
        and report.goodput > 0
    )
