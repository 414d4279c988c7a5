"""Nodes on which Slurm did not start a job, or refused to let polluxd update it, and what that bars. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from polluxd.apply.refused.causes import condition, equipment, rules_of
from polluxd.apply.startable import Eligibility
from polluxd.model import Placement
from polluxd.slurm.protocol import ClusterState, SlurmJob

MOST_OF_USER = 50
"""Refusals of one user's jobs that are remembered. Each decision compares each job with each of them."""
_K = TypeVar("_K")
_V = TypeVar("_V")
Bar = tuple[tuple[int, str] | None, Eligibility | None]
"""Most GPUs of a job and the rule, and where it may start; None: anything.

With no node left, the GPUs are those at which it is tried again.
"""


@dataclass(slots=True)
class RefusedNodes:
    """Nodes on which Slurm did not start a job."""

    reason: str
    since: float
    tried_at: float
    job_id: int
    target: Placement
    demands: tuple[object, ...]
    record: tuple[object, ...]
    use: tuple[Mapping[str, int], ...]
    """What others used of them: GPUs, CPUs, memory."""
    updated: bool
    """The update was refused, whoever uses the nodes."""


def newest_of_users(known: Mapping[_K, _V], user: Callable[[_V], str]) -> dict[_K, _V]:
    """Leave out the oldest of users with more than `MOST_OF_USER`; the newest come last."""
    of_user = Counter(map(user, known.values()))
    kept = dict(known)
    for key, one in known.items():
        if of_user[user(one)] > MOST_OF_USER:
            of_user[user(one)] -= 1
            del kept[key]
    return kept


def record_of(state: ClusterState, job: SlurmJob, target: Placement, *, updated: bool) -> tuple[object, ...]:
    """What the cause of a refusal on these nodes is read from: once it differs, the cause has changed."""
    return (equipment(state, target), rules_of(state, job)) if updated else condition(state, target)


def by_nodes(job: SlurmJob, holds: int, one: RefusedNodes, state: ClusterState) -> Bar:
    """What nodes that refused a job mean for a job with the same demands."""
    assert job.spec is not None
    where, own = frozenset(one.target.nodes), job.job_id == one.job_id
    rule, bound = f"Slurm did not start it on {one.target} ({one.reason})", f"Slurm's refusal ({one.reason})"
    if holds and own and one.target.gpus > holds:
        return (holds, bound), None
    if holds and not own and not where.isdisjoint(job.gpus_per_node_held):
        return None, None  # it holds GPUs there: what it may have is for its own tries to show
    asked = job.demands.asked[0] * job.demands.asked[1] if job.demands.asked is not None else 0
    if not holds and max(asked, job.spec.min_gpus) < one.target.gpus:
        # It starts at its user's size: the next nodes may refuse the same, and each try takes seconds.
        return (max(asked, job.spec.min_gpus), bound), None
    left = state.reach(job.partition) - where
    if left and sum(node.capacity for node in state.nodes if node.name in left) >= job.spec.min_gpus:
        return None, Eligibility(left, rule)
    least = max(job.spec.min_gpus, 1)
    if not holds and one.target.gpus > least:
        return (one.target.gpus - 1, bound), None
    return None if holds else (least, bound), Eligibility(frozenset(), rule)
