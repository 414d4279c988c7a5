"""Decide whether and where Slurm would start a job.

polluxd takes no GPUs from a job that could not start again. All functions here are pure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from polluxd.apply.placed import ends_at
from polluxd.model import JobState, Move, Placement
from polluxd.slurm.protocol import ClusterState, SlurmJob
from polluxd.slurm.rules import Reservation, Rules


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
    known: dict[tuple[str, frozenset[str]], Standing | None] = {}
    found: dict[int, Standing] = {}
    for job in state.jobs:
        if job.spec is None or job.state.finished:
            continue
        blocked = state.rules.forbidden(_end(job, state.taken_at), state.taken_at)
        key = job.partition, frozenset(blocked)
        if key not in known:
            known[key] = _standing(job.partition, blocked, names, state.rules)
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


def _end(job: SlurmJob, now: float) -> float:
    """Return when the job would end if it started again now [POSIX s].

    A requeued job keeps the rest of its time limit.
    """
    if job.state is JobState.RUNNING and (end := ends_at(job)) is not None:
        return max(end, now)
    return now + (inf if job.time_limit_s is None else job.time_limit_s)


def _standing(
    partition: str, blocked: Mapping[str, Reservation], names: frozenset[str], rules: Rules
) -> Standing | None:
    wanted = [rules.partitions[name] for name in partition.split(",") if name in rules.partitions]
    closed = [p for p in wanted if not p.starts]
    if not closed and not blocked:
        return None
    why = [f"partition {p.name} is {p.state}: Slurm starts no job there" for p in closed]
    nodes = frozenset().union(*(p.nodes for p in wanted if p.starts)) if wanted else names
    if "*" in blocked:
        blocked = dict.fromkeys(nodes, blocked["*"]) | dict(blocked)
    met = sorted({(r.start, r.name) for name, r in blocked.items() if name in nodes or name == "*"})
    why += [f"reservation {name} begins {_clock(start)}, before the job would end" for start, name in met[:3]]
    if not closed and not met:
        return None
    return Standing(nodes - blocked.keys(), "; ".join(why))


def _clock(at: float) -> str:
    return time.strftime("on %Y-%m-%d at %H:%M UTC", time.gmtime(at)) if at else "at an unknown time"
