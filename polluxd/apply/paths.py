"""Which way a job takes to its new placement: in place, by a relaunch in its allocation, or through the queue. Pure.

The fastest that the job's agent, Slurm and the administrator allow; one that failed in this attempt, growing or
shrinking, is not tried again that way in it, and the next one below takes its place.
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
    """What the choice of a path depends on, beside the job."""

    paths: frozenset[str] = frozenset({"requeue"})
    """Those that the configuration allows."""
    can_shrink: bool = False
    """Slurm lets a running job give nodes back."""
    failed: Mapping[int, frozenset[tuple[str, bool]]] = field(default_factory=dict)
    """Paths that went wrong in a job's present attempt, each with whether it was to grow."""


def failed_paths(moves: Iterable[Move]) -> dict[int, frozenset[tuple[str, bool]]]:
    """Paths that went wrong, by job, of the moves of present attempts that failed once begun; each with whether the job
    was to grow, for a site where jobs may submit no jobs can still take nodes back.

    A move that somebody took back, or that a pause ended, says nothing against its path.
    """
    failed: dict[int, frozenset[tuple[str, bool]]] = {}
    for move in moves:
        if move.step is Step.FAILED and not move.cancelled_by and PAUSED not in move.detail:
            failed[move.job_id] = failed.get(move.job_id, frozenset()) | {(move.path, move.grows)}
    return failed


def choose(
    source: Placement, target: Placement, job: SlurmJob, report: Report | None, means: PathOptions
) -> tuple[str, Placement]:
    """The path from `source` to `target`, and the target with its nodes in the order that the path wants.

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
    """The path that the job's next move would most likely take, `resize` or `requeue`: what it costs is not known
    before it is known where to.

    A job that can be resized in place and holds whole nodes is given and left whole nodes as a rule; any other moves
    through the queue; a shrink may also be a relaunch.
    """
    both = all("resize" in _open(job, report, means, grows=grows) for grows in (True, False))
    return "resize" if whole_nodes and both else "requeue"


def keeps(job: SlurmJob, report: Report | None, means: PathOptions) -> tuple[str, ...]:
    """The job's nodes in the order in which a shrink within its allocation has to leave them; none where none can be.

    The batch host, its other own nodes, then companions' nodes, the longest-lent first: the newest is given up first.
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
    failed = means.failed.get(job.job_id, frozenset())
    return tuple(p for p in _ABLE.get(report.resize, ()) if p in means.paths and (p, grows) not in failed)


def _within(
    source: Placement, target: Placement, job: SlurmJob, able: tuple[str, ...], means: PathOptions
) -> str | None:
    """The path within the allocation; None: there is none."""
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
    """The batch host, the other nodes that stay, those that come in; each group by name."""
    nodes = sorted(target.nodes, key=lambda n: (n != first, n not in source.nodes, n))
    return Placement(tuple(nodes), target.gpus_per_node)
