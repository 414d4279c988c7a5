"""Nodes on which Slurm did not start a job, or refused to let polluxd update it, and what that bars. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from polluxd.apply.actions import WAITED, WENT_BACK
from polluxd.apply.refused.bars import Bar
from polluxd.apply.refused.causes import condition, demands_of, equipment, rules_of, use
from polluxd.apply.startable import Eligibility
from polluxd.model import Placement
from polluxd.slurm.protocol import ClusterState, SlurmJob

UNTOLD_S = 3600.0
MOST_OF_USER = 50
"""Refusals of one user's jobs that are remembered. Each decision compares each job with each of them."""
_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(slots=True)
class RefusedNodes:
    """Nodes on which Slurm did not start a job."""

    reason: str
    since: float
    tried_at: float
    job_id: int
    user: str
    target: Placement
    demands: tuple[object, ...]
    record: tuple[object, ...]
    use: tuple[Mapping[str, int], ...]
    """What others used of them: GPUs, CPUs, memory."""
    updated: bool
    """The update was refused, whoever uses the nodes."""
    had: int = 0
    """GPUs of the training that was stopped for it; 0: none was."""
    eased: bool = False
    """Others use less of the nodes since: it bars the training that it has stopped, and nobody else."""

    def works(self, at: Placement, job: SlurmJob) -> bool:
        """Whether the start of a job there shows that Slurm refuses this no more."""
        return (
            set(self.target.nodes) <= set(at.nodes)
            and self.target.gpus_per_node <= at.gpus_per_node
            and self.demands == demands_of(job)
        )


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


def still_refused(one: RefusedNodes, state: ClusterState, job: SlurmJob, now: float) -> bool:
    """Whether nothing that Slurm shows of the job and the nodes has changed, or come free there, since.

    Where nobody told a reason, such as while Slurm was slow, an hour is enough.

    What has come free is reason enough for a job that waits to try it, and not to stop one training twice: the training
    may stand for a while, such as on its way back.
    """
    if one.reason.startswith((WAITED, WENT_BACK)) and now - one.tried_at > UNTOLD_S:
        return False
    if one.demands != demands_of(job) or one.record != record_of(state, job, one.target, updated=one.updated):
        return False
    one.eased = one.eased or any(
        now_used[what] < count
        for now_used, then in zip(use(state, one.target, one.job_id), one.use, strict=False)
        for what, count in then.items()
    )
    return not one.eased or one.had > 0


def by_nodes(job: SlurmJob, holds: int, one: RefusedNodes, state: ClusterState) -> Bar:
    """What nodes that refused a job mean for a job with the same demands."""
    assert job.spec is not None
    where, own = frozenset(one.target.nodes), job.job_id == one.job_id
    if one.eased and not (own and holds):
        return None, None
    rule, bound = f"Slurm did not start it on {one.target} ({one.reason})", f"Slurm's refusal ({one.reason})"
    if holds and (found := _of_running(job, holds, one, state.reach(job.partition), rule, bound)) is not None:
        return found
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


def _of_running(
    job: SlurmJob, holds: int, one: RefusedNodes, reach: frozenset[str], rule: str, bound: str
) -> Bar | None:
    """What they mean for a job that holds GPUs; None: that it is kept from these nodes."""
    own = job.job_id == one.job_id
    if own and one.updated and holds >= one.target.gpus:
        # Slurm started it as it was submitted: it has no way back.
        return None, Eligibility(frozenset(), rule)
    if one.target.gpus > holds and (own or one.updated):
        # Any of the nodes where it does not train may be the one that refused it.
        there = reach.difference(one.target.nodes).union(job.gpus_per_node_held)
        return (holds if own else max(holds, one.had), bound), Eligibility(there, rule) if own else None
    if not own and not set(one.target.nodes).isdisjoint(job.gpus_per_node_held):
        return None, None  # it holds GPUs there: what it may have is for its own tries to show
    return None
