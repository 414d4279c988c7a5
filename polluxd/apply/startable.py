"""Decide whether and where Slurm would start a job.

polluxd takes no GPUs from a job that could not start again. All functions here are pure; `FormerNodes` remembers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from polluxd.apply.placed import ends_at
from polluxd.model import JobState, Move, Node, Placement
from polluxd.slurm.protocol import ClusterState, SlurmJob
from polluxd.slurm.rules import Partition, Reservation

LONGEST_RULE = 200


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Where a job may start now."""

    nodes: frozenset[str]
    rule: str
    """What forbids the other nodes. Decisions repeat it for each job, so it is cut to 200 characters."""

    def __post_init__(self) -> None:
        if len(self.rule) > LONGEST_RULE:
            object.__setattr__(self, "rule", self.rule[: LONGEST_RULE - 3] + "...")

    def allows(self, placement: Placement) -> bool:
        return self.nodes.issuperset(placement.nodes)


def combined(*found: Mapping[int, Eligibility]) -> dict[int, Eligibility]:
    """Combine eligibility of jobs: a node must be allowed by all of a job's."""
    merged: dict[int, Eligibility] = {}
    for each in found:
        for job_id, eligible in each.items():
            known = merged.get(job_id)
            both = known and Eligibility(known.nodes & eligible.nodes, f"{known.rule}; {eligible.rule}")
            merged[job_id] = both or eligible
    return merged


def eligibility(state: ClusterState) -> dict[int, Eligibility]:
    """Return where jobs may start, for managed jobs that a rule limits.

    The rules are Slurm's, and the job's own sbatch options. All other jobs may start on every node of their partitions.
    """
    names = frozenset(node.name for node in state.nodes)
    known: dict[tuple[object, ...], Eligibility | None] = {}
    found: dict[int, Eligibility] = {}
    for job in state.jobs:
        if job.spec is None or job.state.finished:
            continue
        left = time_left(job, state.taken_at)
        own = job.demands.reservation
        blocked = state.rules.forbidden(state.taken_at + left, state.taken_at, own)
        partitions = state.rules.named(job.partition)
        kept_out = tuple(p.refuses(job.account, job.qos, left) for p in partitions)
        # What an exclusive job may use depends on the nodes that it holds.
        whose = job.job_id if job.demands.exclusive or job.demands.switches else 0
        key = job.partition, frozenset(blocked), kept_out, job.demands, whose, own and job.user
        if key not in known:
            reach = frozenset[str]().union(*(p.nodes for p in partitions)) if partitions else names
            known[key] = _demanded(job, _eligible(partitions, kept_out, blocked, names), state, reach)
        eligible = known[key]
        if eligible is not None:
            found[job.job_id] = eligible
    return found


def _demanded(
    job: SlurmJob, ruled: Eligibility | None, state: ClusterState, reach: frozenset[str]
) -> Eligibility | None:
    """Leave out the nodes of the job's partitions (`reach`) that the job's own options leave out."""
    demands, nodes = job.demands, reach if ruled is None else ruled.nodes
    why = [ruled.rule] if ruled is not None else []
    if demands.of_nodes:
        options = {node.name: demands.refuses(node) or _shared(job, node) for node in state.nodes}
        if left_out := sorted({option for name, option in options.items() if option and name in nodes}):
            nodes = frozenset(name for name in nodes if not options.get(name))
            why.append(
                f"{' and '.join(left_out)} of the job {'leave' if len(left_out) > 1 else 'leaves'} nodes out"
            )
    if demands.reservation:
        reserved = state.rules.reserved(demands.reservation, job.user, state.taken_at)
        if reserved is not None and not nodes <= reserved:
            nodes &= reserved
            why.append(
                f"--reservation={demands.reservation} leaves out all nodes but its own"
                if reserved
                else f"reservation {demands.reservation}, which the job asks for, is not active for its user"
            )
    if demands.switches and len(racks := _fullest_racks(job, nodes, state)) < len(
        {n.rack for n in state.nodes}
    ):
        nodes = frozenset(node.name for node in state.nodes if node.name in nodes and node.rack in racks)
        why.append(
            f"--switches={demands.switches} of the job keeps it to {', '.join(sorted(racks)) or 'no rack'}"
        )
    return Eligibility(nodes, "; ".join(why)) if why else None


def _shared(job: SlurmJob, node: Node) -> str:
    """Name --exclusive where others use the node."""
    busy = node.foreign_cpus > 0 or node.foreign_gpus > 0
    return "--exclusive" if job.demands.exclusive and busy and node.name not in job.nodes else ""


def _fullest_racks(job: SlurmJob, nodes: frozenset[str], state: ClusterState) -> frozenset[str]:
    """The racks of the job, then the largest, as many as --switches allows."""
    gpus: dict[str, tuple[bool, int]] = {}
    for node in state.nodes:
        if node.name in nodes:
            held, total = gpus.get(node.rack, (False, 0))
            gpus[node.rack] = held or node.name in job.nodes, total + node.capacity
    return frozenset(sorted(gpus, key=lambda rack: (*gpus[rack], rack), reverse=True)[: job.demands.switches])


def forbids(eligible: Eligibility | None, move: Move) -> str:
    """Return the rule that forbids `move`; empty where no rule does.

    A job that gives GPUs back within its allocation does not start again, so no rule applies. A parked job must be able
    to start somewhere.
    """
    if eligible is None:
        return ""
    if move.in_allocation and not move.grows:
        return ""
    starts = move.added if move.grows else move.target
    return "" if eligible.nodes and eligible.allows(starts) else eligible.rule


def time_left(job: SlurmJob, now: float) -> float:
    """Return the time limit of the job if it started again now [s].

    A requeued job keeps the rest of its time limit.
    """
    if job.state is JobState.RUNNING and (end := ends_at(job)) is not None:
        return max(end - now, 0.0)
    return inf if job.time_limit_s is None else job.time_limit_s


def _eligible(
    wanted: Sequence[Partition],
    kept_out: Sequence[str],
    blocked: Mapping[str, Reservation],
    names: frozenset[str],
) -> Eligibility | None:
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
    return Eligibility(nodes.difference(blocked), "; ".join(why))


def _clock(at: float) -> str:
    return time.strftime("on %Y-%m-%d at %H:%M UTC", time.gmtime(at)) if at else "at an unknown time"


_NOT_LOOKED_AT = re.compile(r"|None|Priority|BeginTime|Cleaning|Prolog|Dependency\w*|JobHeld\w+|Unknown")
_OF_NODES = re.compile(r"Resources|ReqNodeNotAvail(?!.*Reserved)|NodeDown")
_LIMIT = re.compile(
    r"(Invalid)?QOS|Assoc|(Invalid)?Account|Max\w+Per|MaxJobs|Partition|Licenses|JobArrayTaskLimit"
)
_LEAST = re.compile(r"(QOS|Assoc)Min")


def of_limit(reason: str) -> bool:
    """Tell from squeue(1)'s reason whether a limit keeps a job out, one that smaller jobs may not meet."""
    return _LIMIT.match(reason) is not None and not _LEAST.match(reason)


def refused(reason: str, *, free: bool) -> bool:
    """Tell from squeue(1)'s reason whether Slurm has looked at a job and does not start it.

    Args:
        free: nobody else has taken the job's GPUs. A reason that is about nodes is a refusal only then.
    """
    if _NOT_LOOKED_AT.fullmatch(reason):
        return False
    return free or not _OF_NODES.match(reason)


@dataclass(frozen=True, slots=True)
class _Left:
    nodes: frozenset[str] | None
    """None: not known, since this process has not seen the attempt. Every node may be one of them."""
    at: float | None
    """When the job was first seen to have left them, by a clock that does not step; None: it is there."""


class FormerNodes:
    """Where each job ran last, and since when it has been gone from there.

    Some releases of Slurm must not start a job there again for a while (`slurm.site_defaults`).
    """

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
