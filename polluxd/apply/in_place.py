"""Calls to Slurm for moves within an allocation.

They place and end companions, and give nodes back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from polluxd.apply.companions import ClusterView
from polluxd.apply.machine import REPEAT_S
from polluxd.apply.placed import ends_at, geometry, held, same_place
from polluxd.errors import SlurmRefused
from polluxd.model import JobState, Move, Placement, Report, Step
from polluxd.slurm.protocol import SlurmClient, SlurmJob
from polluxd.store import CycleStore

log = logging.getLogger(__name__)

_NEVER = float("-inf")
_ENDED_AT_ONCE = 250
"""Users may submit any number of jobs that claim to be companions: one call must end them within its time limit."""


class InPlaceMoves:
    """Carries out moves within an allocation for the reconciler.

    The reconciler itself writes the moves' steps to the database.
    """

    def __init__(
        self,
        slurm: SlurmClient,
        store: CycleStore,
        *,
        authorize: Callable[[], int],
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._slurm = slurm
        self._store = store
        self._authorize = authorize
        self._clock = clock
        self._monotonic = monotonic
        self._tried: dict[int, float] = {}
        """When polluxd last tried to end each orphan."""
        self._tidied: dict[int, float] = {}
        """When polluxd last tried to reclaim the nodes of each failed shrink."""
        self._prolonged: dict[int, float] = {}
        """When polluxd last gave each companion more time."""

    def place(self, move: Move, job: SlurmJob, companion: SlurmJob) -> str:
        """Let the companion start on the nodes that the move adds; return why Slurm refuses, or an empty text."""
        self._authorize()
        try:
            size = geometry(job, move.added)
            left = self._time_left(job, companion)
            self._slurm.configure(companion.job_id, size, start=True, time_limit_s=left)
        except SlurmRefused as error:
            now = self._slurm.jobs([companion.job_id]).get(companion.job_id)
            if now is None or not same_place(now, move.added):
                return f"Slurm refused to place its companion, job {companion.job_id}: {error}"
        return ""

    def give_back(self, job: SlurmJob, target: Placement) -> str:
        """Take the nodes beyond `target` from the job; return why Slurm refuses, or an empty text."""
        dropped = [c for c in job.companions if not set(c.gpus_per_node_held) <= set(target.nodes)]
        kept = [name for name in target.nodes if name in job.base]
        try:
            if len(kept) < len(job.base):
                self._authorize()
                self._slurm.shrink(job.job_id, kept)
            self._cancel(dropped)
        except SlurmRefused as error:
            return f"Slurm refused to take back what lies beyond {target}: {error}"
        return ""

    def dismiss(self, companions: Sequence[SlurmJob]) -> None:
        """End companions that no move waits for. Where Slurm refuses, `sweep` tries again."""
        try:
            self._cancel(companions)
        except SlurmRefused as error:
            log.warning("companions could not be ended: %s", error)

    def sweep(self, orphans: Iterable[SlurmJob]) -> int:
        """End the companions that belong to no job; return how many of them Slurm still shows."""
        left = [job for job in orphans if job.state is not JobState.COMPLETING]
        now = self._monotonic()
        due = [job for job in left if now - self._tried.get(job.job_id, _NEVER) > REPEAT_S]
        due = due[:_ENDED_AT_ONCE]
        self._tried = {job.job_id: self._tried.get(job.job_id, _NEVER) for job in left}
        self._tried |= dict.fromkeys((job.job_id for job in due), now)
        for job in due:
            assert job.companion is not None
            log.info("companion %d of job %d is ended: it lends to nobody", job.job_id, job.companion.parent)
        self.dismiss(due)
        return len(left)

    def tidy(self, seen: ClusterView, reports: Mapping[int, Report], busy: Collection[int]) -> None:
        """Reclaim nodes released by shrinks that later failed, and let companions last as long as their jobs.

        Jobs with a move under way (`busy`) wait. Where Slurm refuses, polluxd requeues the job to the nodes that the
        job uses.
        """
        now = self._monotonic()
        self._tidied = {number: at for number, at in self._tidied.items() if number in seen.moves}
        lent = {companion.job_id for job in seen.state.jobs for companion in job.companions}
        self._prolonged = {number: at for number, at in self._prolonged.items() if number in lent}
        for job in seen.state.jobs:
            self._last_as_long(job)
            move = left_over(job, reports.get(job.job_id), seen.moves)
            if move is None or job.job_id in busy:
                continue
            if now - self._tidied.get(move.id, _NEVER) <= REPEAT_S:
                continue
            self._tidied[move.id] = now
            why = self.give_back(job, move.target)
            source = held(job)
            if why and source is not None:
                log.warning("job %d: %s", job.job_id, why)
                self._store.plan_move(
                    job.job_id,
                    job.restart_count,
                    "requeue",
                    source,
                    move.target,
                    f"it has left nodes that Slurm does not take back: {why}",
                    self._authorize(),
                    at=self._clock(),
                )

    def _cancel(self, companions: Sequence[SlurmJob]) -> None:
        if companions:
            self._authorize()
            self._slurm.cancel([companion.job_id for companion in companions])

    def _time_left(self, job: SlurmJob, companion: SlurmJob) -> float | None:
        """Return the companion's time limit [s]: what its parent has left. None: keep the present limit."""
        end = ends_at(job)
        return None if end is None else max(60.0, end - self._clock())

    def _last_as_long(self, job: SlurmJob) -> None:
        """Give a job's companions the time that an administrator has given the job since they started.

        Slurm would end such a companion, and with it all ranks of the training would start again.
        """
        end, now = ends_at(job), self._monotonic()
        for companion in job.companions:
            own_end = ends_at(companion)
            # Slurm's limits are whole minutes.
            if end is None or own_end is None or companion.start_time is None or own_end + 60.0 >= end:
                continue
            if now - self._prolonged.get(companion.job_id, _NEVER) <= REPEAT_S:
                continue
            self._prolonged[companion.job_id] = now
            self._authorize()
            try:
                self._slurm.limit_time(companion.job_id, end - companion.start_time)
            except SlurmRefused as error:
                log.warning("companion %d ends before job %d: %s", companion.job_id, job.job_id, error)


def left_over(job: SlurmJob, report: Report | None, moves: Mapping[int, Move]) -> Move | None:
    """Return the shrink that the job carried out although its move failed: Slurm still shows nodes that it left."""
    if job.state is not JobState.RUNNING or report is None or report.attempt != job.restart_count:
        return None
    move = moves.get(report.resized)
    if move is None or (move.job_id, move.attempt) != (job.job_id, job.restart_count) or move.grows:
        return None
    unused = set(job.gpus_per_node_held) - set(move.target.nodes)
    return move if move.step is Step.FAILED and unused else None
