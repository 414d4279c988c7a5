"""The nodes of each job's last attempt, while Slurm must not start the job there again (`slurm.site_defaults`)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from polluxd.apply.startable import Eligibility
from polluxd.model import JobState
from polluxd.slurm.protocol import ClusterState, SlurmJob


@dataclass(frozen=True, slots=True)
class _Left:
    nodes: frozenset[str] | None
    """None: not known, since this process has not seen the attempt. Every node may be one of them."""
    at: float | None
    """When the job was first seen to have left them, by a clock that does not step; None: it is there."""


class FormerNodes:
    """Where each job ran last, and since when it has been gone from there."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._left: dict[int, _Left] = {}
        self.kept_off_s = 0.0
        """For how long a job stays off the nodes of its last attempt; 0: Slurm asks for no such time."""

    def observe(self, state: ClusterState) -> None:
        """Note where the jobs are now."""
        now, known = self._monotonic(), self._left
        self.kept_off_s, self._left = state.kept_off_s, {}
        if not state.kept_off_s:
            return
        for job in state.jobs:
            own = job.base or job.nodes
            if job.spec is None:
                continue
            if own:
                self._left[job.job_id] = _Left(frozenset(own), None)
            elif job.job_id in known:
                left = known[job.job_id]
                self._left[job.job_id] = _Left(left.nodes, now if left.at is None else left.at)
            elif job.restart_count:
                self._left[job.job_id] = _Left(None, now - max(0.0, state.taken_at - job.queued_at))

    def wait_s(self, job: SlurmJob | None, nodes: Collection[str]) -> float:
        """Return the seconds until the waiting job may start on these nodes."""
        left = self._left.get(job.job_id) if job is not None and job.state is JobState.PENDING else None
        if left is None or left.at is None or (left.nodes is not None and left.nodes.isdisjoint(nodes)):
            return 0.0
        return max(0.0, left.at + self.kept_off_s - self._monotonic())

    def eligibility(self, state: ClusterState) -> dict[int, Eligibility]:
        """Return where waiting jobs may start whose last nodes are barred to them."""
        names, found = frozenset(node.name for node in state.nodes), {}
        for job in state.jobs if self._left else ():
            wait = self.wait_s(job, names)
            if wait > 0.0:
                nodes = self._left[job.job_id].nodes
                found[job.job_id] = Eligibility(
                    names - nodes if nodes is not None else frozenset(),
                    f"the nodes of its last attempt run no Prolog for it for another {wait:.0f} s (this Slurm "
                    "release)",
                )
        return found
