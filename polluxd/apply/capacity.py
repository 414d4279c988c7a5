"""Count free GPUs while polluxd carries a plan out.

The counts ensure that no intermediate state uses more GPUs than a node has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from polluxd.model import GpuLimit, JobState, Move, Node, Placement, Step
from polluxd.slurm.protocol import SlurmJob

BACK = "goes back to its former size"
"""What the reason of a move begins with that brings a job back where a refused move took it from."""
_LEAVING = (Step.CHECKPOINTED, Step.REQUEUED)


def goes_back(move: Move) -> bool:
    """Whether the move brings a stopped training back."""
    return move.reason.startswith(BACK)


@dataclass(slots=True)
class Capacity:
    """GPUs per node that are free now or will soon be free.

    GPUs will soon be free (`leaving`) if their job has irrevocably begun to leave them. A limit of Slurm on several
    jobs is counted like a node: each GPU of such a job, on any node, takes one GPU from the limit.
    """

    free: Counter[str] = field(default_factory=Counter)
    leaving: Counter[str] = field(default_factory=Counter)
    closed: set[str] = field(default_factory=set)
    """Nodes on which Slurm starts no job (drained, down), even where GPUs are free."""
    reach: dict[str, int] = field(default_factory=dict)
    """GPUs that no job outside Pollux holds."""
    limits: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """By job id: the limits that count its GPUs, as names in `free` and `leaving`."""
    ways_back: dict[int, Counter[str]] = field(default_factory=dict)
    """By job id: what is set aside of its former place: until it trains elsewhere, or until it starts there again."""

    def fits_now(self, target: Placement, job_id: int) -> bool:
        """True when every node of `target` has its GPUs free at this moment."""
        own = self.ways_back.get(job_id, Counter())
        return self._open(target) and all(
            self.free[n] + own[n] >= gpus for n, gpus in self._of(target, job_id)
        )

    def fits_soon(self, target: Placement, own: Placement, job_id: int) -> bool:
        """Tell whether `target` fits once the GPUs that are leaving, and the job's `own`, are free."""
        held = dict(self._of(own, job_id))
        return self._open(target) and all(
            self.free[n] + self.leaving[n] + held.get(n, 0) >= gpus for n, gpus in self._of(target, job_id)
        )

    def out_of_reach(self, target: Placement) -> bool:
        """True when jobs outside Pollux hold GPUs that `target` needs: nobody knows when such a job ends."""
        return any(self.reach.get(n, target.gpus_per_node) < target.gpus_per_node for n in target.nodes)

    def lost(self, target: Placement) -> bool:
        """True when Slurm will not start a job there, however long it waits."""
        return self.out_of_reach(target) or not self._open(target)

    def gone(self, move: Move, returns: Collection[str]) -> str:
        """Return why a planned start waits in vain where a training goes back (to nodes `returns`); else an empty text.

        While it stays planned, the next plan counts on it, and stops that training once more.
        """
        waits = (
            move.step is Step.PLANNED
            and move.path == "start"
            and not set(returns).isdisjoint(move.target.nodes)
        )
        fits = not waits or self.fits_soon(move.target, move.source, move.job_id)
        return "" if fits else "a training went back there"

    def kept(self, target: Placement) -> bool:
        """True when what was set aside for `target` is still there."""
        return self._open(target) and all(self.free[n] >= 0 for n in target.nodes)

    def _open(self, target: Placement) -> bool:
        return self.closed.isdisjoint(target.nodes)

    def _of(self, placement: Placement, job_id: int) -> list[tuple[str, int]]:
        """The GPUs of the placement by node, and by limit of the job."""
        return [
            *((n, placement.gpus_per_node) for n in placement.nodes),
            *((limit, placement.gpus) for limit in self.limits.get(job_id, ())),
        ]

    def take(self, target: Placement, job_id: int) -> None:
        """Set `target` aside, so that a later move of the same tick does not count on these GPUs."""
        for n, gpus in self._of(target, job_id):
            self.free[n] -= gpus

    def keep(self, target: Placement, job_id: int) -> None:
        """Set `target` aside for a start of the job that comes within seconds."""
        self.take(target, job_id)
        self.ways_back[job_id] = Counter(dict(self._of(target, job_id)))

    def forget(self, move: Move, job: SlurmJob) -> None:
        """Free what a move through the queue has set aside for its job, which waits."""
        self.free.update(self.ways_back.pop(move.job_id, ()))
        if move.step is Step.CONFIGURED:
            for n, gpus in self._of(move.target, move.job_id):
                self.free[n] += gpus
        elif move.step in _LEAVING and not job.gpus_per_node_held:
            for n, gpus in self._of(move.target, move.job_id):
                self.leaving[n] += gpus

    def free_for(self, target: Placement, job_id: int) -> bool:
        """True when `target` is free and promised to nobody."""
        return self._open(target) and all(
            self.free[n] + min(self.leaving[n], 0) >= gpus for n, gpus in self._of(target, job_id)
        )

    def promise(self, target: Placement, own: Placement, job_id: int) -> None:
        """Set aside the GPUs that a move which begins to drain now will take, beyond the job's `own`.

        Those that it will free are not there yet: its agent may refuse.
        """
        held = dict(self._of(own, job_id))
        for n, gpus in self._of(target, job_id):
            self.leaving[n] -= max(gpus - held.get(n, 0), 0)

    def ring(self, moves: Iterable[Move]) -> list[Move]:
        """Return the planned moves that wait for each other's GPUs: they fit once all their jobs free theirs.

        Only moves of running jobs count. Where no move of the ring can begin by itself, one job has to give up its GPUs
        before the GPUs of its target are free.
        """
        ring = [m for m in moves if m.step is Step.PLANNED and m.source and m.target]
        while ring:
            left = self.free.copy()
            left.update(self.leaving)  # a Counter's update adds
            for move in ring:
                left.update(dict.fromkeys(move.source.nodes, move.source.gpus_per_node))
                left.subtract(dict.fromkeys(move.target.nodes, move.target.gpus_per_node))
            short = {name for name, gpus in left.items() if gpus < 0} | self.closed
            blocked = [m for m in ring if short.intersection(m.target.nodes)]
            if not blocked:
                return ring
            ring.remove(max(blocked, key=lambda m: m.target.gpus - m.source.gpus))
        return []

    def count_limits(self, limits: Iterable[GpuLimit]) -> None:
        """Count what Slurm's limits leave, before any GPU is taken."""
        for limit in limits:
            name = f"limit {limit.rule}"
            self.free[name] = limit.gpus
            for job_id in limit.jobs:
                self.limits[job_id] = (*self.limits.get(job_id, ()), name)


def capacity(
    nodes: Iterable[Node],
    jobs: Mapping[int, SlurmJob],
    moves: Iterable[Move],
    *,
    pending_companions: Mapping[int, SlurmJob] | None = None,
    orphans: Iterable[SlurmJob] = (),
    limits: Iterable[GpuLimit] = (),
    unproven: Collection[int] = (),
) -> Capacity:
    """Count free GPUs from Slurm's present state and the moves under way.

    GPUs that any job holds (running, suspended or completing) are taken. GPUs of a move that was configured but has
    not started are taken as well. GPUs that a requeued job waits for are promised to that job.

    Args:
        pending_companions: by move; companions that no job counts as its own.
        unproven: jobs that may not train on the part of their place to which a move brings them.
        orphans: further companions that no job counts as its own.
        limits: limits of Slurm on several jobs, without what other jobs hold of them.
    """
    pending_companions = pending_companions or {}
    result = Capacity()
    for node in nodes:
        result.free[node.name] = (node.gpus - node.foreign_gpus) if node.schedulable else 0
        result.reach[node.name] = node.gpus - node.foreign_gpus
        if not node.schedulable:
            result.closed.add(node.name)
    result.count_limits(limits)
    for job in (*jobs.values(), *pending_companions.values(), *orphans):
        for name, gpus in job.gpus_per_node_held.items():
            result.free[name] -= gpus
        for limit in result.limits.get(job.job_id, ()):
            result.free[limit] -= sum(job.gpus_per_node_held.values())
    for move in moves:
        if (job_now := jobs.get(move.job_id)) is not None:
            _under_way(result, move, job_now, pending_companions.get(move.id))
            if move.job_id in unproven:
                _keep_way_back(result, move, job_now)
    return result


def _under_way(result: Capacity, move: Move, job: SlurmJob, companion: SlurmJob | None) -> None:
    """Count the GPUs that a move takes and frees."""
    if move.in_allocation:
        _within(result, move, job, companion)
    elif move.step is Step.PLANNED and goes_back(move):
        result.keep(move.target, move.job_id)
    elif move.step is Step.CONFIGURED and job.state is JobState.PENDING:
        result.take(move.target, move.job_id)
    elif move.step in _LEAVING:
        for name, gpus in job.gpus_per_node_held.items():
            result.leaving[name] += gpus
        for name in move.target.nodes:
            result.leaving[name] -= move.target.gpus_per_node
        for limit in result.limits.get(move.job_id, ()):
            result.leaving[limit] += sum(job.gpus_per_node_held.values()) - move.target.gpus
    elif move.step is Step.DRAINING:
        result.promise(move.target, move.source, move.job_id)


def _keep_way_back(result: Capacity, move: Move, job: SlurmJob) -> None:
    """Set aside the place that a move through the queue leaves, until its job trains on a part of it."""
    kept = Counter(dict.fromkeys(move.source.nodes, move.source.gpus_per_node))
    leaves = move.step in _LEAVING
    if not leaves or job.gpus_per_node_held:
        kept.subtract(dict.fromkeys(move.target.nodes, move.target.gpus_per_node))
    if leaves and job.gpus_per_node_held:
        result.leaving.subtract(kept)
    elif leaves or move.step in (Step.CONFIGURED, Step.STARTED):
        kept.update(dict.fromkeys(result.limits.get(move.job_id, ()), kept.total()))
        result.free.subtract(kept)
        result.ways_back[move.job_id] = kept


def _within(result: Capacity, move: Move, job: SlurmJob, companion: SlurmJob | None) -> None:
    """Count the GPUs that a move within the allocation adds or gives back."""
    if move.grows:
        arrived = companion is not None and companion.gpus_per_node_held
        if move.step in (Step.RECRUITING, Step.CONFIGURED, Step.STARTED) and not arrived:
            result.take(move.added, move.job_id)
    elif move.step is Step.CHECKPOINTED:
        for name, gpus in job.gpus_per_node_held.items():
            if name not in move.target.nodes:
                result.leaving[name] += gpus
