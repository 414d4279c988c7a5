"""What polluxd asks before it orders a training to drain, the point of no return.

The site's hooks and rights: an update that changes nothing. slurmdbd: whether the user still has the job's QOS. The
job's own moves: what Slurm has refused to a polluxd that ran before this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from polluxd.apply.actions import Fail, Withdraw
from polluxd.apply.refused.refusals import Refusals
from polluxd.errors import SlurmRefused
from polluxd.model import JobState, Move, Step
from polluxd.slurm.protocol import SlurmClient, SlurmJob
from polluxd.store import CycleStore

_BEFORE = (Step.PLANNED, Step.RECRUITING)
"""Steps of moves before which no training is stopped."""


class AskedFirst:
    """Who has said yes to a move of each running job."""

    def __init__(
        self, slurm: SlurmClient, store: CycleStore, refusals: Refusals, *, authorize: Callable[[], int]
    ) -> None:
        self._slurm = slurm
        self._store = store
        self._refusals = refusals
        self._authorize = authorize
        self._recalled: frozenset[int] = frozenset()
        """Running jobs of whose moves this process knows what they were refused."""
        self._known: frozenset[int] = frozenset()
        """Open moves, of whose jobs this process knows what they were refused."""

    def keep(self, jobs: Mapping[int, SlurmJob], moves: Iterable[Move]) -> None:
        """Forget the attempts that have ended; read what the jobs were refused that a former polluxd has stopped."""
        stopped = {move.id: move for move in moves if move.source and move.step not in _BEFORE}
        for number in stopped.keys() - self._known:
            if (job := jobs.get(stopped[number].job_id)) is not None and job.job_id not in self._recalled:
                self._refusals.recall(stopped[number], job, self._store.moves(job.job_id))
        self._known = frozenset(stopped)
        self._recalled = frozenset(
            n for n in self._recalled if n in jobs and jobs[n].state is JobState.RUNNING
        )

    def refusal(self, move: Move, job: SlurmJob) -> Fail | Withdraw | None:
        """Return how the move ends instead of an order; None: nobody has said no."""
        if job.job_id not in self._recalled:
            if why := self._refusals.recall(move, job, self._store.moves(job.job_id)):
                return Withdraw(f"{why}; the job could not start there")
            self._recalled |= {job.job_id}
        self._authorize()
        try:
            self._slurm.probe(job.job_id)
        except SlurmRefused as error:
            self._refusals.cannot_be_changed(job, str(error))
            return Fail(
                f"Slurm, or a hook of the site, would not let the job start again: {error}", rest=False
            )
        return None
