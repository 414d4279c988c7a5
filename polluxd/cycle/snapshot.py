"""One consistent picture of the cluster for the policy. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from polluxd.apply.companions import ClusterView
from polluxd.apply.paths import MoveRules, keeps, likely, resizable
from polluxd.apply.placed import held
from polluxd.apply.plain_jobs import left_to_plain_jobs
from polluxd.apply.protected import Stay, stay
from polluxd.apply.startable import LONGEST_RULE, Eligibility
from polluxd.config.config_file import Config
from polluxd.cycle.gpu_types import GpuTypes
from polluxd.cycle.trusted_reports import Judged
from polluxd.model import (
    NO_PLACEMENT,
    GpuLimit,
    JobSpec,
    JobState,
    Move,
    Node,
    Placement,
    Report,
    Snapshot,
    SnapshotJob,
)
from polluxd.slurm.priority import priority_weights
from polluxd.slurm.protocol import ClusterState, SlurmJob
from polluxd.slurm.topology import racks_of
from polluxd.store import CycleRecords, JobTimes, MoveTotals

RESIZE_COST_S = 2.0
"""Expected cost of a resize in place, until a job's own was measured [s]."""


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What the configuration adds to the picture."""

    cluster: str
    racks: Mapping[str, str] = field(default_factory=dict)
    """Racks of nodes that Slurm's own topology does not place."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Relative speeds of GPU types."""
    requeue_cost: float = 30.0
    """Expected cost of a move through the queue, until a job's own was measured [s]."""

    @classmethod
    def of(cls, config: Config) -> ClusterFacts:
        slurm, moves = config.slurm, config.moves
        return cls(
            slurm.cluster,
            racks_of(slurm.racks),
            slurm.gpu_speeds,
            moves.default_cost_s,
        )


def build_snapshot(
    facts: ClusterFacts,
    seen: ClusterView,
    records: CycleRecords,
    rules: MoveRules,
    judged: Judged,
) -> Snapshot:
    """The snapshot of this cycle.

    Left out are jobs that cannot be given GPUs now: held, waiting for a dependency or for their own --begin, ending,
    or running on uneven GPUs per node (which no placement of ours describes). What such jobs hold counts as used.
    A job's moves are expected to cost what its own have cost on average by its likely path, and until one was measured
    what `facts` says; and where a job has to stay off its nodes before it starts there again, as long on top.
    A job that Slurm would not start where it is now (`rules.eligibility`) keeps what it holds; any other such job is
    offered the allowed nodes alone.

    Args:
        records: with the reports that polluxd believes, and waiting times without those of a hold.
        judged: what polluxd thinks of the claims of reports.
    """
    state, settings = seen.state, records.settings
    views = _Views(facts, state, records, rules, judged)
    jobs = [view for job in state.jobs if (view := views.of(job)) is not None]
    ours = {job.job_id for job in jobs}
    others = Counter[str]()
    for job in (*state.jobs, *seen.orphans):
        if job.spec is not None and job.job_id not in ours:
            others.update(job.gpus_per_node_held)
    others.update(
        left_to_plain_jobs(
            *(state, jobs, others),
            shrink=settings.gpu_counts == "any",
            idle_for=rules.idle_for,
            admitted=rules.allowed.admitted,
        )
    )
    nodes = tuple(
        replace(
            node,
            foreign_gpus=node.foreign_gpus + others[node.name],
            rack=node.rack or facts.racks.get(node.name, ""),
            partitions=views.offers.on(node),
            # By its features a node may have a price; one that is off may get one.
            features=node.features
            if node.power != "on" or not settings.cloud_prices.keys().isdisjoint(node.features)
            else frozenset(),
            tmp_mb=None,
            position=position,
        )
        for position, node in enumerate(state.nodes)
    )
    return Snapshot(
        facts.cluster,
        state.taken_at,
        nodes,
        tuple(sorted(jobs, key=lambda j: j.job_id)),
        settings,
        _limits(state, rules, ours),
        records.rent,
    )


def _limits(state: ClusterState, rules: MoveRules, ours: Collection[int]) -> tuple[GpuLimit, ...]:
    """The limits on GPUs of several jobs, without what jobs use that are not in the picture."""
    apart = {job.job_id: sum(job.gpus_per_node_held.values()) for job in state.jobs if job.job_id not in ours}
    return tuple(
        replace(limit, gpus=limit.gpus - sum(apart.get(job_id, 0) for job_id in limit.jobs))
        for limit in rules.allowed.groups
    )


class _Terms(NamedTuple):
    """On what terms a job may be given other GPUs."""

    spec: JobSpec
    rule: str
    """Why it may have fewer GPUs than it asks for; empty: it may not."""
    eligible: Eligibility | None
    """The nodes on which alone Slurm would start it; None: no such rule."""
    pin_reason: str
    gives_back: bool


class _Views:
    """Each job as the policy sees it."""

    def __init__(
        self,
        facts: ClusterFacts,
        state: ClusterState,
        records: CycleRecords,
        rules: MoveRules,
        judged: Judged,
    ) -> None:
        self._facts, self._state, self._records, self._rules = facts, state, records, rules
        self._judged = judged
        self._moves = {move.job_id: move for move in records.moves}
        self._types = GpuTypes(state.nodes, facts.speeds)
        alive = [job for job in state.jobs if job.spec is not None and not job.state.finished]
        self._weights = priority_weights(alive, records.settings.slurm_priority)
        self._gpus = {node.name: node.gpus for node in state.nodes}
        self._shares_memory = any(node.memory_mb for node in state.nodes)
        self.offers = _Offers()

    def of(self, job: SlurmJob) -> SnapshotJob | None:
        """Return the job's view; None if it cannot be given GPUs now."""
        facts, records, rules = self._facts, self._records, self._rules
        move, placement = self._moves.get(job.job_id), held(job)
        if move is not None:  # its target may begin with the batch host
            placement = Placement(tuple(sorted(move.target.nodes)), move.target.gpus_per_node)
        if (
            job.spec is None
            or placement is None
            or not _eligible(job, moving=move is not None, now=self._state.taken_at)
        ):
            return None
        total = records.totals.get(job.job_id, MoveTotals(0, 0.0, {}))
        report = self._report(job, total.count)
        known = records.times.get(job.job_id, JobTimes(job.submit_time))
        whole_nodes = bool(placement) and {self._gpus.get(n) for n in placement.nodes} == {
            placement.gpus_per_node
        }
        path, costs = likely(job, report, rules, whole_nodes=whole_nodes), total.mean_cost
        terms = self._terms(job, placement, report, path, costs.get("requeue", facts.requeue_cost))
        return SnapshotJob(
            job_id=job.job_id,
            name=job.name,
            user=job.user,
            account=job.account,
            partition=job.partition
            if terms.pin_reason or terms.eligible is None
            else self.offers.of(job.partition, terms.eligible),
            spec=terms.spec,
            max_gpus_rule=terms.rule,
            submitted_at=known.submitted_at,
            age=max(0.0, self._state.taken_at - known.submitted_at),
            waiting=None if known.held_at is None else max(0.0, self._state.taken_at - known.held_at),
            weight=self._weights.get(job.job_id, 1.0),
            placement=placement,
            report=None if report is None else report.for_decision(self._types.names),
            pinned=bool(terms.pin_reason),
            pin_reason=terms.pin_reason,
            started=report is not None or job.state is not JobState.PENDING,
            time_limit=None if job.spec.continues else job.time_limit_s,
            attempt=job.restart_count,
            qos=job.qos,
            moves=total.count,
            lost_seconds=total.lost_seconds,
            move_cost=costs.get(
                "requeue",
                max(facts.requeue_cost, rules.start_s.get(job.job_id, 0.0)) + self._state.kept_off_s,
            ),
            resize_cost=costs.get("resize", RESIZE_COST_S) if path == "resize" else None,
            keeps=() if move is not None else keeps(job, report, rules),
            doubts=self._judged.doubts.get(job.job_id, ()),
            unconfirmed=self._judged.unconfirmed.get(job.job_id, ()),
            contiguous=job.demands.contiguous,
            max_nodes=rules.most_nodes.get(job.job_id),
            gives_back=terms.gives_back,
        )

    def _report(self, job: SlurmJob, moves: int) -> Report | None:
        """The job's newest report, as far as the policy may use it."""
        report = self._records.reports.get(job.job_id)
        if report is None:
            return None
        here = held(job) if report.attempt == job.restart_count else None
        report = self._types.known_to(report, here or NO_PLACEMENT, moves=moves)
        if report.resize == "in-place" and not resizable(job, report, self._rules, grows=True):
            return replace(report, resize="requeue")
        return report

    def _terms(
        self, job: SlurmJob, placement: Placement, report: Report | None, path: str, cost: float
    ) -> _Terms:
        """On what terms the job may be given other GPUs; `cost`: seconds that a move through the queue takes."""
        assert job.spec is not None
        rules, move = self._rules, self._moves.get(job.job_id)
        pin, rest = self._records.pins.get(job.job_id, ""), rules.resting(job.job_id)
        pin_reason = _pin_reason(job, move, rest, pin)
        eligible = None if move is not None else rules.eligibility.get(job.job_id)
        spent = "" if path == "resize" else rules.spent(job.user)
        staying = Stay(pin_reason, of_user=False) if pin_reason else self._stays(job, report, eligible, spent)
        # Where memory bounds nobody, jobs of other memory are alike to the policy.
        spec, memory = job.spec, job.mem_per_gpu_mb if self._shares_memory else 0
        if (spec.mem_per_gpu_mb or 0) != memory:
            spec = replace(spec, mem_per_gpu_mb=memory or None)
        if report is not None and (least := min(report.least_gpus, report.explored_gpus)) > spec.min_gpus:
            spec = replace(spec, min_gpus=least)
        allowed = rules.allowed.most.get(job.job_id, (None, ""))
        most, rule = _within(allowed, placement, _time_left(report), cost)
        if path != "resize" and placement and (taker := rules.at_risk.get(job.job_id)) is not None:
            most, rule = (placement.gpus if most is None else min(most, placement.gpus)), taker
            nodes = frozenset(placement.nodes)
            eligible = Eligibility(nodes if eligible is None else nodes & eligible.nodes, taker)
        if spec.min_gpus < (kept := rules.least.get(job.job_id, 0)) <= (most or kept):
            spec = replace(spec, min_gpus=kept)
        pin_reason, owes = staying.reason if staying else "", job.job_id in rules.allowed.gives_back
        if staying is not None and staying.of_user and job.job_id in rules.beyond_share:
            # It gives the rest back where it is: a place elsewhere would cost it more.
            most, rule = _in_share(rules.beyond_share[job.job_id], spec, staying)
            pin_reason, spec, owes = "", replace(spec, preemptible=True), True
            eligible = Eligibility(frozenset(placement.nodes), rule)
        if most is None or (spec.max_gpus is not None and most >= spec.max_gpus):
            return _Terms(spec, "", eligible, pin_reason, owes)
        return _Terms(replace(spec, max_gpus=most), rule, eligible, pin_reason, owes)

    def _stays(
        self, job: SlurmJob, report: Report | None, eligible: Eligibility | None, spent: str
    ) -> Stay | None:
        """Why the job stays where it is, as far as that protects it; None when it may move."""
        rules, now = self._rules, self._state.taken_at
        if job.state is JobState.RUNNING:
            undrained = rules.undrained(job.job_id)
            staying = stay(job, report, spent, now, rules.stepped, rules.rhythm, undrained)
            if staying is not None:
                return staying
        placement = held(job) or NO_PLACEMENT
        if eligible is None or (eligible.nodes and eligible.allows(placement)):
            return None
        kept = "; it could not start again, and keeps what it has" if placement else ""
        return Stay(f"{eligible.rule}{kept}", of_user=True)


def _within(
    allowed: tuple[int | None, str], placement: Placement, left: float, cost: float
) -> tuple[int | None, str]:
    """Return the most GPUs and the rule.

    No process that would join a training could start in its last seconds (`left`), which are fewer than a move costs.
    """
    if not placement or left >= cost or (allowed[0] is not None and allowed[0] <= placement.gpus):
        return allowed
    return placement.gpus, f"its end in about {left:.0f} s, before a further process could start,"


def _time_left(report: Report | None) -> float:
    """The rest of the training by its own report [s]; infinite where it says nothing."""
    if report is None or report.target is None or report.goodput <= 0.0:
        return inf
    return max(0.0, report.target - report.progress) * report.limits.initial / report.goodput


class _Offers:
    """Partitions for jobs that Slurm would start on some nodes only."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, frozenset[str]], str] = {}

    def of(self, partition: str, eligible: Eligibility) -> str:
        """The job's partition, without the nodes that a rule forbids."""
        key = partition, eligible.nodes
        if key not in self._names:
            # The policy separates partitions by commas.
            name = f"{partition[:LONGEST_RULE]} ({eligible.rule})".replace(",", "+")
            taken = name in self._names.values()
            self._names[key] = f"{name} ({len(self._names) + 1})" if taken else name
        return self._names[key]

    def on(self, node: Node) -> frozenset[str]:
        """The partitions of the node; a node without any stays open to all."""
        if not node.partitions:
            return node.partitions
        return node.partitions | {name for (_, nodes), name in self._names.items() if node.name in nodes}


def _eligible(job: SlurmJob, *, moving: bool, now: float) -> bool:
    if job.state.finished or job.tasks:
        return False
    if moving or job.state in (JobState.RUNNING, JobState.SUSPENDED):
        return True
    return job.state is JobState.PENDING and not job.kept_back(now)


def _pin_reason(job: SlurmJob, move: Move | None, rest: float, pin: str) -> str:
    """Why the job must stay where it is in this plan, whatever it holds; empty when nothing says so."""
    if move is not None:
        return f"move to {move.target} under way ({move.step})"
    if job.state is JobState.SUSPENDED:
        return "suspended"
    if rest > 0:
        return f"left alone for {rest:.0f} s more after its last move"
    return pin if job.state is JobState.RUNNING else ""


def _in_share(gpus: int, spec: JobSpec, staying: Stay) -> tuple[int, str]:
    """Most GPUs of a job that protection keeps, and the rule."""
    rule = f"its user's equal share, the most that a job keeps which stays ({staying.reason}),"
    return max(gpus, spec.min_gpus), rule


class WaitingTimes:
    """Count no time as waiting in which a user kept a job back.

    Without this, a user would submit jobs on hold and release them once they have waited long:
    they would go before all others. A new leader of polluxd knows only of jobs that are still kept back.
    """

    def __init__(self) -> None:
        self._kept_back_at: dict[int, float] = {}
        """By job: when it was last seen to be kept back [POSIX s]."""

    def corrected(
        self, jobs: Sequence[SlurmJob], times: Mapping[int, JobTimes], now: float
    ) -> dict[int, JobTimes]:
        """Return the times of all jobs; `held_at` no earlier than a hold ends."""
        known = self._kept_back_at
        self._kept_back_at = {
            job.job_id: now if job.kept_back(now) else known[job.job_id]
            for job in jobs
            if job.spec is not None and (job.kept_back(now) or job.job_id in known)
        }
        found = dict(times)
        for job in jobs:
            since = self._kept_back_at.get(job.job_id)
            if since is not None:
                mine = times.get(job.job_id, JobTimes(job.submit_time))
                found[job.job_id] = replace(mine, held_at=max(since, mine.held_at or 0.0))
        return found
