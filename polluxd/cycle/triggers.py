"""Notice what is worth a decision before the interval has passed.

- A job or a node came or went.
- A job is measured at the GPUs that it holds, for the first time since it holds them, while GPUs are idle, or polluxd
  has now seen its progress there. Both bound its growth (`policy/feasible.py`), and now allow more.
- A job waits, and another one that moved or rested at the last decision may be moved again. That decision had to leave
  it as it was.
- A job waits to which the last decision gave GPUs: its move came to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from polluxd.apply.reconciler import Reconciler
from polluxd.model import JobState, Move, Report
from polluxd.slurm.protocol import ClusterState, SlurmJob


class Triggers:
    """What has changed since the last decision.

    `seen` tells whether polluxd has seen a job's progress at its present size.
    """

    def __init__(self, moves: Reconciler, seen: Callable[[int], bool]) -> None:
        self._moves = moves
        self._seen = seen
        self._present: frozenset[object] = frozenset()
        self._left_alone: frozenset[int] = frozenset()
        """Jobs that moved or rested at the last decision."""
        self._given: frozenset[int] = frozenset()
        """Jobs to which the last decision gave GPUs."""
        self.measured: frozenset[tuple[int, int, str]] = frozenset()
        """Measurements that some decision knew. A job adds at most three for each number of GPUs that it ever held,
        whatever it reports."""
        self._resized: frozenset[tuple[int, int]] = frozenset()
        """Jobs that were ever resized in place, and to how many GPUs."""
        self._awaited: frozenset[tuple[int, int]] = frozenset()
        """Of these, the ones of the last decision for which the next one waits."""

    def since_decision(self, state: ClusterState, reports: Mapping[int, Report]) -> bool:
        """Whether a decision now may differ from the last one for such a reason."""
        if _present(state) != self._present:
            return True
        waiting = {job.job_id for job in self._waiting(state)}
        if waiting and not all(map(self._moves.occupied, self._left_alone)):
            return True
        if not waiting.isdisjoint(self._given):
            return True
        return self._idle(state) > 0 and not self._measurements(state, reports) <= self.measured

    def resizing(self) -> bool:
        """Whether a resize in place of the last decision is under way still.

        A job counts once for each number of GPUs, so that one which never becomes ready does not delay all decisions.
        """
        return any(self._moves.coming(job_id) == gpus for job_id, gpus in self._awaited)

    def can_start_one(self, state: ClusterState) -> bool:
        """Whether idle GPUs suffice for a job that came since the last decision."""
        idle = self._idle(state)
        return any(
            job.spec is not None and job.spec.min_gpus <= idle
            for job in self._waiting(state)
            if _presence(job) not in self._present
        )

    def decided(self, state: ClusterState, reports: Mapping[int, Report], begun: Collection[Move]) -> None:
        """Note what the decision of this moment knew, and the moves that it began."""
        self._present = _present(state)
        alive = {job.job_id for job in state.jobs if job.spec is not None and not job.state.finished}
        self._left_alone = frozenset(filter(self._moves.occupied, alive))
        self._given = frozenset(move.job_id for move in begun if move.target)
        kept = {measured for measured in self.measured if measured[0] in alive}
        self.measured = frozenset(kept | self._measurements(state, reports))
        resized = {(move.job_id, move.target.gpus) for move in begun if move.path == "resize"}
        self._awaited = frozenset(resized - self._resized)
        self._resized = frozenset(resized | {known for known in self._resized if known[0] in alive})

    def _waiting(self, state: ClusterState) -> list[SlurmJob]:
        """Jobs that wait for GPUs, without those that move or rest."""
        return [
            job
            for job in state.jobs
            if job.spec is not None
            and job.state is JobState.PENDING
            and not job.kept_back(state.taken_at)
            and not self._moves.occupied(job.job_id)
        ]

    def _idle(self, state: ClusterState) -> int:
        """GPUs of open nodes that no Pollux job holds or is to have."""
        room = {node.name: node.capacity for node in state.nodes}
        taken = sum(
            max(
                sum(gpus for node, gpus in job.gpus_per_node_held.items() if room.get(node)),
                self._moves.coming(job.job_id),
            )
            for job in state.jobs
            if job.spec is not None and not job.state.finished
        )
        return max(sum(room.values()) - taken, 0)

    def _measurements(self, state: ClusterState, reports: Mapping[int, Report]) -> set[tuple[int, int, str]]:
        """Jobs measured at their GPUs that could take more.

        Each with its GPUs and what is known there: the fit; the noise scale, without which larger batches promise
        nothing; and progress, without which no job grows beyond an equal share.
        """
        found: set[tuple[int, int, str]] = set()
        for job in state.jobs:
            report, held = reports.get(job.job_id), sum(job.gpus_per_node_held.values())
            if job.spec is None or job.state.finished or not held or report is None:
                continue
            most = job.spec.max_gpus
            if (
                report.attempt == job.restart_count
                and job.spec.preemptible
                and report.params is not None
                and report.first_step_at is not None
                and report.explored_gpus >= held
                and (most is None or most > held)
                and not self._moves.occupied(job.job_id)
            ):
                noise, progress = report.noise is not None, self._seen(job.job_id)
                known = {"fit": True, "noise": noise, "progress": progress}
                found.update((job.job_id, held, fact) for fact, holds in known.items() if holds)
        return found


def _present(state: ClusterState) -> frozenset[object]:
    """Jobs and nodes whose coming or going is worth a decision at once."""
    jobs = {_presence(job) for job in state.jobs if not job.state.finished}
    nodes = {(node.name, node.capacity) for node in state.nodes}
    return frozenset(jobs | nodes)


def _presence(job: SlurmJob) -> tuple[int, bool, bool]:
    return job.job_id, job.held_by_user, job.dependent
