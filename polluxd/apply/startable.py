"""Decide whether and where Slurm would start a job.

polluxd takes no GPUs from a job that could not start again. All functions here are pure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from polluxd.apply.placed import ends_at
from polluxd.model import JobState, Move, Placement
from polluxd.slurm.protocol import ClusterState, SlurmJob
from polluxd.slurm.rules import Partition, Reservation


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a job may start now."""

    nodes: frozenset[str]
    rule: str
    """What forbids the other nodes."""

    def allows(self, placement: Placement) -> bool:
        return self.nodes.issuperset(placement.nodes)


def standings(state: ClusterState) -> dict[int, Standing]:
    """Return where jobs may start, for managed jobs that a Slurm rule limits.

    All other jobs may start on every node of their partitions.
    """
    names = frozenset(node.name for node in state.nodes)
    known: dict[tuple[object, ...], Standing | None] = {}
    found: dict[int, Standing] = {}
    for job in state.jobs:
        if job.spec is None or job.state.finished:
            continue
        left = time_left(job, state.taken_at)
        blocked = state.rules.forbidden(state.taken_at + left, state.taken_at)
        partitions = [
            state.rules.partitions[p] for p in job.partition.split(",") if p in state.rules.partitions
        ]
        kept_out = tuple(p.refuses(job.account, job.qos, left) for p in partitions)
        key = job.partition, frozenset(blocked), kept_out
        if key not in known:
            known[key] = _standing(partitions, kept_out, blocked, names)
        standing = known[key]
        if standing is not None:
            found[job.job_id] = standing
    return found


def forbids(standing: Standing | None, move: Move) -> str:
    """Return the rule that forbids `move`; empty where no rule does.

    A job that gives GPUs back within its allocation does not start again, so no rule applies. A parked job must be able
    to start somewhere.
    """
    if standing is None:
        return ""
    if move.in_allocation and not move.grows:
        return ""
    starts = move.added if move.grows else move.target
    return "" if standing.nodes and standing.allows(starts) else standing.rule


def time_left(job: SlurmJob, now: float) -> float:
    """Return the time limit of the job if it started again now [s].

    A requeued job keeps the rest of its time limit.
    """
    if job.state is JobState.RUNNING and (end := ends_at(job)) is not None:
        return max(end - now, 0.0)
    return inf if job.time_limit_s is None else job.time_limit_s


def _standing(
    wanted: Sequence[Partition],
    kept_out: Sequence[str],
    blocked: Mapping[str, Reservation],
    names: frozenset[str],
) -> Standing | None:
    closed = [p for p in wanted if not p.starts]
    if not closed and not blocked and not any(kept_out):
        return None
    why = [f"partition {p.name} is {p.state}: Slurm starts no job there" for p in closed]
    why += [f"{rule} keeps the job out" for rule in kept_out if rule]
    admitting = [p.nodes for p, rule in zip(wanted, kept_out, strict=True) if p.starts and not rule]
    nodes = frozenset().union(*admitting) if wanted else names
    if "*" in blocked:
        blocked = dict.fromkeys(nodes, blocked["*"]) | dict(blocked)
    met = sorted({(r.start, r.name) for name, r in blocked.items() if name in nodes or name == "*"})
    why += [f"reservation {name} begins {_clock(start)}, before the job would end" for start, name in met[:3]]
    if not why:
        return None
    return Standing(nodes - blocked.keys(), "; ".join(why))


def _clock(at: float) -> str:
    return time.strftime("on %Y-%m-%d at %H:%M UTC", time.gmtime(at)) if at else "at an unknown time"
