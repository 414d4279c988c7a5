"""What polluxd asks before it orders a training to drain, the point of no return.

The site's hooks and rights: an update that changes nothing, once in an attempt. The job's own moves: what Slurm has
refused to a polluxd that ran before this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from polluxd.apply.actions import Fail, Withdraw
from polluxd.apply.refused.refusals import Refusals
from polluxd.errors import SlurmRefused
from polluxd.model import JobState, Move
from polluxd.slurm.protocol import SlurmClient, SlurmJob
from polluxd.store import CycleStore


class AskedFirst:
    """Who has said yes to a move of each running job."""

    def __init__(
        self, slurm: SlurmClient, store: CycleStore, refusals: Refusals, *, authorize: Callable[[], int]
    ) -> None:
        self._slurm = slurm
        self._store = store
        self._refusals = refusals
        self._authorize = authorize
        self._probed: frozenset[int] = frozenset()
        """Running jobs that polluxd was let update."""

    def keep(self, jobs: Mapping[int, SlurmJob]) -> None:
        """Forget the attempts that have ended."""
        self._probed = frozenset(n for n in self._probed if n in jobs and jobs[n].state is JobState.RUNNING)

    def refusal(self, move: Move, job: SlurmJob) -> Fail | Withdraw | None:
        """Return how the move ends instead of an order; None: nobody has said no."""
        if job.job_id in self._probed:
            return None
        if why := self._refusals.recall(move, job, self._store.moves(job.job_id)):
            return Withdraw(f"{why}; the job could not start there")
        self._authorize()
        try:
            self._slurm.probe(job.job_id)
        except SlurmRefused as error:
            self._refusals.cannot_be_changed(job, str(error))
            return Fail(f"Slurm, or a hook of the site, lets polluxd not update the job: {error}", rest=False)
        self._probed |= {job.job_id}
        return None
