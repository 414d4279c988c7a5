"""Turn a plan into moves, and choose the path by which each job moves to its new placement.

There are two paths: resize in place, which is fast, and requeue. polluxd resizes a job in place where the job's agent,
Slurm and the administrator allow it. Where that failed for a job's growth or shrink, polluxd requeues the job for every
further move in the same direction during the same attempt.

All functions here are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from polluxd.apply.actions import NOT_BOOTED, PAUSED, sentences
from polluxd.apply.headroom import Headroom
from polluxd.apply.startable import Eligibility
from polluxd.config.settings import MoveSettings
from polluxd.model import RESTARTING_PATHS, JobState, Move, Placement, Plan, Report, SnapshotJob, Step
from polluxd.slurm.protocol import SlurmJob


@dataclass(frozen=True, slots=True)
class MoveRules:
    """The rules of Slurm, of the configuration, and of recent moves."""

    paths: frozenset[str] = frozenset({"requeue"})
    """Paths that the configuration allows."""
    can_shrink: bool = False
    """Slurm lets a running job give nodes back."""
    failed: Mapping[int, frozenset[tuple[str, bool]]] = field(default_factory=dict)
    """By job: paths that failed in its present attempt, each with whether the job was to grow."""
    allowed: Headroom = field(default_factory=Headroom)
    """What Slurm's limits leave to jobs."""
    eligibility: Mapping[int, Eligibility] = field(default_factory=dict)
    """Jobs that Slurm would not start everywhere."""
    most_nodes: Mapping[int, int] = field(default_factory=dict)
    """Jobs whose scripts do not run on more nodes than these."""
    resting: Callable[[int], float] = lambda _job_id: 0.0
    """Seconds for which a job is still to be left alone."""
    spent: Callable[[str], str] = lambda _user: ""
    """Why no running job of a user may be restarted now; empty where one may."""
    stepped: Mapping[int, int] = field(default_factory=dict)
    """The newest attempt of each job whose training steps polluxd has seen."""
    undrained: Callable[[int], int] = lambda _job_id: 0
    """How many orders to drain a job's agent has left undone."""
    beyond_share: Mapping[int, int] = field(default_factory=dict)
    """GPUs of jobs that hold more than protection by their own users leaves them (`protected`)."""
    at_risk: Mapping[int, str] = field(default_factory=dict)
    """Jobs whose place a plain job could take at a requeue, and which."""
    rhythm: Mapping[int, str] = field(default_factory=dict)
    """Why jobs stay for the sake of their trainers' own rhythm (`own_rhythm`)."""
    start_s: Mapping[int, float] = field(default_factory=dict)
    """How long the newest attempts of trainers with loops of their own took to their first steps [s]."""
    least: Mapping[int, int] = field(default_factory=dict)
    """Jobs that get no fewer GPUs than these (`own_rhythm`)."""
    idle_for: Callable[[int, float], bool] = lambda _uid, _now: True
    """Whether GPUs may idle at a time for plain jobs of a user that cannot start with them (`plain_jobs`)."""


@dataclass(frozen=True, slots=True)
class Intent:
    """A move that a plan asks for; it becomes a `Move` once written to the database."""

    job_id: int
    attempt: int
    path: str
    source: Placement
    target: Placement
    reason: str
    user: str = ""
    owed: bool = False
    """It gives back what its user's protection does not cover: no number of restarts keeps it."""


def intents(
    plan: Plan,
    ours: Iterable[SnapshotJob],
    shown: Iterable[SlurmJob],
    reports: Mapping[int, Report],
    rules: MoveRules,
) -> list[Intent]:
    """Return the moves of `plan`, those that give GPUs back first.

    Pinned jobs never move; an allocation equal to what the job holds is no move. Order: parks and shrinks, then
    moves at the same size, grows and first starts, each by job id, so that a replay sees the same order.

    Args:
        ours: the jobs that were decided on.
        shown: the jobs as Slurm shows them, their companions counted in.
    """
    jobs, slurm_jobs = {job.job_id: job for job in ours}, {job.job_id: job for job in shown}
    found = []
    for allocation in plan.allocations:
        job = jobs.get(allocation.job_id)
        if job is None or job.pinned or allocation.placement == job.placement:
            continue
        number, report = job.job_id, reports.get(job.job_id)
        path, target = choose(job.placement, allocation.placement, slurm_jobs[number], report, rules)
        reason, owed = allocation.reason, number in rules.beyond_share
        found.append(Intent(number, job.attempt, path, job.placement, target, reason, job.user, owed))
    return sorted(found, key=lambda i: (i.target.gpus - i.source.gpus, i.job_id))


def failed_paths(moves: Iterable[Move]) -> dict[int, frozenset[tuple[str, bool]]]:
    """Return the failed paths by job, each with whether the job was to grow.

    The direction matters: a site where jobs may not submit jobs can still take nodes back.

    Only moves of present attempts that failed after they had begun count. A move that somebody cancelled, or that a
    pause or a node that did not boot ended, says nothing against its path.
    """
    failed: dict[int, frozenset[tuple[str, bool]]] = {}
    for move in moves:
        excused = move.cancelled_by or any(
            said.startswith((PAUSED, NOT_BOOTED)) for said in sentences(move.detail)
        )
        if move.step is Step.FAILED and not excused:
            failed[move.job_id] = failed.get(move.job_id, frozenset()) | {(move.path, move.grows)}
    return failed


def choose(
    source: Placement, target: Placement, job: SlurmJob, report: Report | None, rules: MoveRules
) -> tuple[str, Placement]:
    """Return the path to `target`, and `target` in that path's node order.

    In place, the batch host comes first, then the other nodes that stay, then the added nodes; each group by name.
    """
    if not source:
        return "start", target
    if not target:
        return "park", target
    able = resizable(job, report, rules, grows=len(target.nodes) > len(source.nodes))
    if not (able and _within(source, target, job, rules)):
        return "requeue", target
    nodes = sorted(target.nodes, key=lambda n: (n != job.batch_host, n not in source.nodes, n))
    return "resize", Placement(tuple(nodes), target.gpus_per_node)


def likely(job: SlurmJob, report: Report | None, rules: MoveRules, *, whole_nodes: bool) -> str:
    """Return the job's most likely next path, `resize` or `requeue`.

    The path, and so the cost of a move, is known for certain only once its target is known.

    A job that can be resized in place and holds whole nodes usually gains and gives back whole nodes. Any other job
    moves through the queue.
    """
    both = all(resizable(job, report, rules, grows=grows) for grows in (True, False))
    return "resize" if whole_nodes and both else "requeue"


def keeps(job: SlurmJob, report: Report | None, rules: MoveRules) -> tuple[str, ...]:
    """Return the job's nodes in the order in which a shrink must keep them.

    The order is the batch host, the job's other own nodes, then the companions' nodes, oldest companion first. So a
    shrink gives up the newest companion first. The result is empty where the job cannot shrink within its allocation.
    """
    if len(job.gpus_per_node_held) < 2 or not resizable(job, report, rules, grows=False):
        return ()
    own = sorted(job.base, key=lambda name: (name != job.batch_host, name))
    companions = sorted(job.companions, key=lambda companion: companion.job_id)
    return (*own, *(name for companion in companions for name in sorted(companion.gpus_per_node_held)))


def resizable(job: SlurmJob, report: Report | None, rules: MoveRules, *, grows: bool) -> bool:
    """Whether the job, the administrator and the attempt so far allow a resize in place."""
    if report is None or report.attempt != job.restart_count or job.state is not JobState.RUNNING:
        return False
    if grows and job.job_id in rules.allowed.no_companion:
        return False
    failed = rules.failed.get(job.job_id, frozenset())
    return report.resize == "in-place" and "resize" in rules.paths and ("resize", grows) not in failed


def _within(source: Placement, target: Placement, job: SlurmJob, rules: MoveRules) -> bool:
    """Whether the allocation can become `target`."""
    old, new = set(source.nodes), set(target.nodes)
    if source.gpus_per_node != target.gpus_per_node or set(job.gpus_per_node_held) != old:
        return False
    if not job.batch_host or job.batch_host not in new:
        return False
    if old < new:
        return True
    lent = [set(companion.gpus_per_node_held) for companion in job.companions]
    whole = all(nodes <= new or nodes.isdisjoint(new) for nodes in lent)
    return new < old and whole and (set(job.base) <= new or rules.can_shrink)


class RestartBudget:
    """Restarts of the last hour, against the limits per hour.

    Args:
        limits: section [moves] of polluxd.toml; 0 means no limit.
        ordered: restarts of the last hour and planned restarts, by user.
    """

    def __init__(self, limits: MoveSettings, ordered: Mapping[str, int]) -> None:
        self._cluster, self._user = limits.restarts_per_hour, limits.user_restarts_per_hour
        self._ordered = Counter(ordered)

    def charge(self, intent: Intent) -> str:
        """Count a restart. Returns why it is not allowed; empty where it is, or where the move is no restart."""
        if intent.path not in RESTARTING_PATHS:
            return ""
        spent = "" if intent.owed else self.spent(intent.user)
        self._ordered[intent.user] += not spent
        return spent

    def spent(self, user: str) -> str:
        """Return why no job of `user` may be restarted now; empty where one may."""
        if self._cluster and self._ordered.total() >= self._cluster:
            return f"the cluster's {self._cluster} restarts an hour are used up"
        if self._user and self._ordered[user] >= self._user:
            return f"the {self._user} restarts an hour of user {user} are used up"
        return ""
