"""Count the drains that jobs refused, or left unanswered.

A job that holds more than its user's equal share of the GPUs may leave one drain undone: its agent may have been
unable to save. From the second one on polluxd requeues the job all the same, so that it costs nobody but its own user.
Such a job gains no GPUs beyond the equal share any more.

A restart of polluxd loses the counts; the loss costs the other users one more drain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from polluxd.model import Move
from polluxd.slurm.protocol import ClusterState


def equal_share(state: ClusterState) -> float | None:
    """Return the GPUs of the cluster over the users with Pollux jobs.

    None: there is at most one such user.
    """
    # By user: further jobs of one user take nothing from the share of the others.
    users = {job.uid for job in state.jobs if job.spec is not None and not job.state.finished}
    return sum(node.gpus for node in state.nodes) / len(users) if len(users) > 1 else None


class Undrained:
    """The drains that were left undone, by job."""

    def __init__(self) -> None:
        self._by_job: Counter[int] = Counter()

    def add(self, move: Move) -> None:
        self._by_job[move.job_id] += 1

    def of(self, job_id: int) -> int:
        return self._by_job[job_id]

    def insisted_on(self, state: ClusterState) -> frozenset[int]:
        """Return the jobs that polluxd requeues even if they do not drain."""
        share = equal_share(state)
        if share is None or not self._by_job:
            return frozenset()
        held: Counter[int] = Counter()
        for job in state.jobs:
            if job.spec is not None:
                held[job.uid] += sum(job.gpus_per_node_held.values())
        return frozenset(
            job.job_id for job in state.jobs if self._by_job[job.job_id] and held[job.uid] > share
        )

    def keep(self, job_ids: Collection[int]) -> None:
        """Forget all other jobs."""
        self._by_job = Counter({job_id: n for job_id, n in self._by_job.items() if job_id in job_ids})
