"""Choose the path by which a job moves to its new placement.

The paths are, fastest first: resize in place, relaunch within the allocation, requeue. polluxd takes the fastest path
that the job's agent, Slurm and the administrator allow. Where a path failed for a job's growth or shrink, polluxd does
not use that path again in the same direction during the same attempt, and takes the next slower path.

All functions here are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from polluxd.apply.actions import PAUSED
from polluxd.model import JobState, Move, Placement, Report, Step
from polluxd.slurm.protocol import SlurmJob

_ABLE = {"in-place": ("resize", "relaunch"), "relaunch": ("relaunch",)}


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
    pause ended, says nothing against its path.
    """
    failed: dict[int, frozenset[tuple[str, bool]]] = {}
    for move in moves:
        if move.step is Step.FAILED and not move.cancelled_by and PAUSED not in move.detail:
            failed[move.job_id] = failed.get(move.job_id, frozenset()) | {(move.path, move.grows)}
    return failed


def choose(
    source: Placement, target: Placement, job: SlurmJob, report: Report | None, means: PathOptions
) -> tuple[str, Placement]:
    """Return the path to `target`, and `target` in that path's node order.

    Args:
        job: the job as Slurm shows it, its companions counted in.
    """
    if not source:
        return "start", target
    if not target:
        return "park", target
    able = _open(job, report, means, grows=len(target.nodes) > len(source.nodes))
    path = _within(source, target, job, able, means)
    return (path, _ordered(source, target, job.batch_host)) if path else ("requeue", target)


def likely(job: SlurmJob, report: Report | None, means: PathOptions, *, whole_nodes: bool) -> str:
    """Return the job's most likely next path, `resize` or `requeue`.

    The path, and so the cost of a move, is known for certain only once its target is known.

    A job that can be resized in place and holds whole nodes usually gains and gives back whole nodes. Any other job
    moves through the queue. A shrink may also be a relaunch.
    """
    both = all("resize" in _open(job, report, means, grows=grows) for grows in (True, False))
    return "resize" if whole_nodes and both else "requeue"


def keeps(job: SlurmJob, report: Report | None, means: PathOptions) -> tuple[str, ...]:
    """Return the job's nodes in the order in which a shrink must keep them.

    The order is the batch host, the job's other own nodes, then the companions' nodes, oldest companion first. So a
    shrink gives up the newest companion first. The result is empty where the job cannot shrink within its allocation.
    """
    if len(job.gpus_per_node_held) < 2 or not _open(job, report, means, grows=False):
        return ()
    own = sorted(job.base, key=lambda name: (name != job.batch_host, name))
    lent = [
        name for c in sorted(job.companions, key=lambda c: c.job_id) for name in sorted(c.gpus_per_node_held)
    ]
    return (*own, *lent)


def _open(job: SlurmJob, report: Report | None, means: PathOptions, *, grows: bool) -> tuple[str, ...]:
    if report is None or report.attempt != job.restart_count or job.state is not JobState.RUNNING:
        return ()
    if grows and (job.demands.reservation or job.demands.exclusive):
        return ()  # a companion is a job without these options
    failed = means.failed.get(job.job_id, frozenset())
    return tuple(p for p in _ABLE.get(report.resize, ()) if p in means.paths and (p, grows) not in failed)


def _within(
    source: Placement, target: Placement, job: SlurmJob, able: tuple[str, ...], means: PathOptions
) -> str | None:
    """Return the path within the allocation; None where there is none."""
    old, new = set(source.nodes), set(target.nodes)
    if not able or source.gpus_per_node != target.gpus_per_node or set(job.gpus_per_node_held) != old:
        return None
    if not job.batch_host or job.batch_host not in new:
        return None
    if old < new:
        return "resize" if "resize" in able else None
    own, lent = set(job.base), [set(c.gpus_per_node_held) for c in job.companions]
    whole = all(nodes <= new or nodes.isdisjoint(new) for nodes in lent)
    if not new < old or not whole or (not own <= new and not means.can_shrink):
        return None
    if "resize" in able:
        return "resize"
    return None if lent else "relaunch"


def _ordered(source: Placement, target: Placement, first: str) -> Placement:
    """Order the nodes of `target` for a move within the allocation.

    The batch host comes first, then the other nodes that stay, then the added nodes; each group is sorted by name.
    """
    nodes = sorted(target.nodes, key=lambda n: (n != first, n not in source.nodes, n))
    return Placement(tuple(nodes), target.gpus_per_node)
