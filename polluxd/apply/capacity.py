"""Count free GPUs while polluxd carries a plan out.

The counts ensure that no intermediate state uses more GPUs than a node has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from polluxd.model import JobState, Move, Node, Placement, Step
from polluxd.slurm.protocol import SlurmJob

_LEAVING = (Step.CHECKPOINTED, Step.REQUEUED)


@dataclass(slots=True)
class Capacity:
    """GPUs per node that are free now or will soon be free.

    GPUs will soon be free (`leaving`) where a job is irrevocably on its way out.
    """

    free: Counter[str] = field(default_factory=Counter)
    leaving: Counter[str] = field(default_factory=Counter)
    closed: set[str] = field(default_factory=set)
    """Nodes on which Slurm starts no job (drained, down), even where GPUs are free."""

    def fits_now(self, target: Placement) -> bool:
        """True when every node of `target` has its GPUs free at this moment."""
        return self._open(target) and all(self.free[n] >= target.gpus_per_node for n in target.nodes)

    def fits_soon(self, target: Placement, own: Placement) -> bool:
        """Tell whether `target` fits once the GPUs that are leaving are free.

        The job's own GPUs (`own`) count as free as well.
        """
        return self._open(target) and all(
            self.free[n] + self.leaving[n] + (own.gpus_per_node if n in own.nodes else 0)
            >= target.gpus_per_node
            for n in target.nodes
        )

    def kept(self, target: Placement) -> bool:
        """True when what was set aside for `target` is still there."""
        return self._open(target) and all(self.free[n] >= 0 for n in target.nodes)

    def _open(self, target: Placement) -> bool:
        return self.closed.isdisjoint(target.nodes)

    def take(self, target: Placement) -> None:
        """Set `target` aside.

        A later move of the same tick then does not count on these GPUs.
        """
        for n in target.nodes:
            self.free[n] -= target.gpus_per_node

    def promise(self, target: Placement, own: Placement) -> None:
        """Set aside the GPUs that a move which begins to drain now will take.

        The job's own GPUs (`own`) count first.
        """
        for n in target.nodes:
            self.leaving[n] -= target.gpus_per_node - (own.gpus_per_node if n in own.nodes else 0)


def capacity(
    nodes: Iterable[Node],
    jobs: Mapping[int, SlurmJob],
    moves: Iterable[Move],
    *,
    pending_companions: Mapping[int, SlurmJob] | None = None,
    orphans: Iterable[SlurmJob] = (),
) -> Capacity:
    """Count free GPUs from Slurm's present state and the moves under way.

    GPUs that any job holds (running, suspended or completing) are taken. GPUs of a move that was configured but has
    not started are taken as well. GPUs that a requeued job waits for are promised to that job.

    Args:
        pending_companions: by move; companions that no job counts as its own.
        orphans: further companions that no job counts as its own.
    """
    pending_companions = pending_companions or {}
    result = Capacity()
    for node in nodes:
        result.free[node.name] = (node.gpus - node.foreign_gpus) if node.schedulable else 0
        if not node.schedulable:
            result.closed.add(node.name)
    for job in (*jobs.values(), *pending_companions.values(), *orphans):
        for name, gpus in job.gpus_per_node_held.items():
            result.free[name] -= gpus
    for move in moves:
        job_now = jobs.get(move.job_id)
        if job_now is None:
            continue
        if move.in_allocation:
            _within(result, move, job_now, pending_companions.get(move.id))
        elif move.step is Step.CONFIGURED and job_now.state is JobState.PENDING:
            result.take(move.target)
        elif move.step in _LEAVING:
            for name, gpus in job_now.gpus_per_node_held.items():
                result.leaving[name] += gpus
            for name in move.target.nodes:
                result.leaving[name] -= move.target.gpus_per_node
        elif move.step is Step.DRAINING:
            # The job may still fail to drain: count the GPUs that the move will take, not those that it will free.
            result.promise(move.target, move.source)
    return result


def _within(result: Capacity, move: Move, job: SlurmJob, companion: SlurmJob | None) -> None:
    """Count the GPUs that a move within the allocation adds or gives back."""
    if move.grows:
        arrived = companion is not None and companion.gpus_per_node_held
        if move.step in (Step.RECRUITING, Step.CONFIGURED, Step.STARTED) and not arrived:
            result.take(move.added)
    elif move.step is Step.CHECKPOINTED:
        for name, gpus in job.gpus_per_node_held.items():
            if name not in move.target.nodes:
                result.leaving[name] += gpus
