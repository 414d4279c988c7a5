"""Choose the path by which a job moves to its new placement.

There are two: resize in place, which is fast, and requeue. polluxd resizes a job in place where the job's agent, Slurm
and the administrator allow it. Where that failed for a job's growth or shrink, polluxd requeues the job for every
further move in the same direction during the same attempt.

All functions here are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from polluxd.apply.actions import NOT_BOOTED, PAUSED
from polluxd.model import JobState, Move, Placement, Report, Step
from polluxd.slurm.protocol import SlurmJob


@dataclass(frozen=True, slots=True)
class PathOptions:
    """What the choice of a path depends on, apart from the job."""

    paths: frozenset[str] = frozenset({"requeue"})
    """Paths that the configuration allows."""
    can_shrink: bool = False
    """Slurm lets a running job give nodes back."""
    failed: Mapping[int, frozenset[tuple[str, bool]]] = field(default_factory=dict)
    """Paths that failed in a job's present attempt, each with whether the job was to grow."""


def failed_paths(moves: Iterable[Move]) -> dict[int, frozenset[tuple[str, bool]]]:
    """Return the failed paths by job, each with whether the job was to grow.

    The direction matters: a site where jobs may not submit jobs can still take nodes back.

    Only moves of present attempts that failed after they had begun count. A move that somebody cancelled, or that a
    pause or a node that did not boot ended, says nothing against its path.
    """
    failed: dict[int, frozenset[tuple[str, bool]]] = {}
    for move in moves:
        excused = move.cancelled_by or any(why in move.detail for why in (PAUSED, NOT_BOOTED))
        if move.step is Step.FAILED and not excused:
            failed[move.job_id] = failed.get(move.job_id, frozenset()) | {(move.path, move.grows)}
    return failed


def choose(
    source: Placement, target: Placement, job: SlurmJob, report: Report | None, options: PathOptions
) -> tuple[str, Placement]:
    """Return the path to `target`, and `target` in that path's node order.

    Args:
        job: the job as Slurm shows it, its companions counted in.
    """
    if not source:
        return "start", target
    if not target:
        return "park", target
    able = _resizable(job, report, options, grows=len(target.nodes) > len(source.nodes))
    if able and _within(source, target, job, options):
        return "resize", _ordered(source, target, job.batch_host)
    return "requeue", target


def likely(job: SlurmJob, report: Report | None, options: PathOptions, *, whole_nodes: bool) -> str:
    """Return the job's most likely next path, `resize` or `requeue`.

    The path, and so the cost of a move, is known for certain only once its target is known.

    A job that can be resized in place and holds whole nodes usually gains and gives back whole nodes. Any other job
    moves through the queue.
    """
    both = all(_resizable(job, report, options, grows=grows) for grows in (True, False))
    return "resize" if whole_nodes and both else "requeue"


def keeps(job: SlurmJob, report: Report | None, options: PathOptions) -> tuple[str, ...]:
    """Return the job's nodes in the order in which a shrink must keep them.

    The order is the batch host, the job's other own nodes, then the companions' nodes, oldest companion first. So a
    shrink gives up the newest companion first. The result is empty where the job cannot shrink within its allocation.
    """
    if len(job.gpus_per_node_held) < 2 or not _resizable(job, report, options, grows=False):
        return ()
    own = sorted(job.base, key=lambda name: (name != job.batch_host, name))
    lent = [
        name for c in sorted(job.companions, key=lambda c: c.job_id) for name in sorted(c.gpus_per_node_held)
    ]
    return (*own, *lent)


def _resizable(job: SlurmJob, report: Report | None, options: PathOptions, *, grows: bool) -> bool:
    """Whether the job, the administrator and the attempt so far allow a resize in place."""
    if report is None or report.attempt != job.restart_count or job.state is not JobState.RUNNING:
        return False
    if grows and (job.demands.reservation or job.demands.exclusive):
        return False  # a companion is a job without these options
    failed = options.failed.get(job.job_id, frozenset())
    return report.resize == "in-place" and "resize" in options.paths and ("resize", grows) not in failed


def _within(source: Placement, target: Placement, job: SlurmJob, options: PathOptions) -> bool:
    """Whether the allocation can become `target`."""
    old, new = set(source.nodes), set(target.nodes)
    if source.gpus_per_node != target.gpus_per_node or set(job.gpus_per_node_held) != old:
        return False
    if not job.batch_host or job.batch_host not in new:
        return False
    if old < new:
        return True
    own, lent = set(job.base), [set(c.gpus_per_node_held) for c in job.companions]
    whole = all(nodes <= new or nodes.isdisjoint(new) for nodes in lent)
    return new < old and whole and (own <= new or options.can_shrink)


def _ordered(source: Placement, target: Placement, first: str) -> Placement:
    """Order the nodes of `target` for a move within the allocation.

    The batch host comes first, then the other nodes that stay, then the added nodes; each group is sorted by name.
    """
    nodes = sorted(target.nodes, key=lambda n: (n != first, n not in source.nodes, n))
    return Placement(tuple(nodes), target.gpus_per_node)
