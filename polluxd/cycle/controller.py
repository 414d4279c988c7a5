"""The control cycle on one screen: observe -> decide -> act.

`Controller.step` is called every poll. It observes, lets the moves under way take their next action, and when a
decision is due (the interval has passed, or `triggers` has one) decides and writes the moves that the plan asks
for. Anything that cannot be understood or reached raises before anything is changed: running jobs are left alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polluxd import logs
from polluxd.apply.boots import Boots
from polluxd.apply.companions import ClusterView
from polluxd.apply.idle_watch import INTERVALS, IdleGpus, IdleWatch, remarked
from polluxd.apply.idle_watch import note as idle_note
from polluxd.apply.open_moves import stuck_moves
from polluxd.apply.past_moves import PastMoves, equal_share
from polluxd.apply.paths import MoveRules, intents
from polluxd.apply.plain_jobs import contending, impossible, unplaced, with_contenders
from polluxd.apply.reconciler import Reconciler
from polluxd.apply.scope import LostMarks, Scope
from polluxd.config.config_file import Config
from polluxd.cycle.snapshot import ClusterFacts, WaitingTimes, build_snapshot
from polluxd.cycle.spending import Spending
from polluxd.cycle.triggers import Triggers
from polluxd.cycle.trusted_reports import Held, TrustedReports
from polluxd.errors import LeaderLost
from polluxd.metrics import Metrics
from polluxd.metrics.cluster_view import of_cluster, of_idle, of_moves, of_plan, of_reports
from polluxd.model import DaemonMode, Move, Plan, Report, Snapshot
from polluxd.model.snapshot_json import to_json
from polluxd.policy import Cache, decide
from polluxd.slurm.protocol import ClusterState, SlurmClient
from polluxd.store import CycleRecords, CycleStore, JobTimes

log = logging.getLogger(__name__)

_NAMED = 5
"""Unreadable records that the note of a cycle names; the log names all."""

_PATIENCE = 3
"""Floors between two decisions while a resize in place is under way."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step came to."""

    open_moves: int
    decided: bool
    paused: bool
    gpus: int = 0
    """Of the whole cluster, in service or not."""
    idle: Sequence[IdleGpus] = ()
    """Of a decision: GPUs that stay idle beside a waiting job."""


class Controller:
    """Runs the cycle against one Slurm and one database."""

    def __init__(
        self,
        config: Config,
        slurm: SlurmClient,
        store: CycleStore,
        reconciler: Reconciler,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        policy: Callable[[Snapshot, Cache], Plan] = lambda snapshot, cache: decide(snapshot, cache=cache),
        metrics: Metrics | None = None,
    ) -> None:
        self._config = config
        self._slurm = slurm
        self._store = store
        self._reconciler = reconciler
        self._monotonic = monotonic
        self._policy = policy
        self._metrics = metrics or Metrics()
        self._decided_at = float("-inf")
        self._cache = Cache()
        self._facts = ClusterFacts.of(config)
        self._unreadable: frozenset[str] = frozenset()
        self._trusted = TrustedReports()
        self.triggers = Triggers(reconciler, self._trusted.seen)
        self._waiting = WaitingTimes()
        self._boots: Boots | None = None
        self._boots_written: dict[str, Any] = {}
        self._marks = LostMarks()
        self._spending = Spending()
        self._scope = Scope(config.scope, slurm, reconciler.authorize)
        self._idle = IdleWatch(INTERVALS * config.cycle.interval_s)

    def step(self) -> StepResult:
        """Observe, act on the moves under way, and decide when a decision is due."""
        started = time.perf_counter()
        observed = self._slurm.observe()
        self._confirm_lead()
        self._boots = boots = self._boots or Boots(self._store.boots())
        observed = replace(observed, nodes=boots.observe(observed.nodes, observed.taken_at))
        self._name_unreadable(observed.unreadable)
        self._marks.observe(observed.jobs)
        acting = self._config.mode is DaemonMode.ENFORCE
        observed, outside = self._scope.divide(observed) if acting else (observed, ())
        self._scope.release(outside, observed.taken_at)
        seen = self._reconciler.gather(observed)
        state = seen.state
        self._store.sync_jobs([*state.jobs, *self._marks.lost, *outside])
        self._store.take_in()
        records = self._store.records(self._config.policy)
        open_moves = self._reconciler.tick(seen, records) if acting else 0
        self._trusted.observe(records.reports, _held(state, self._reconciler.acted_on))
        self._idle.observe(state)
        due, begun, idle = self._due(state, records.reports), 0, list[IdleGpus]()
        self._spending.observe(state, records.settings)
        if due:
            self._count(records)
            if (known := boots.seen()) != self._boots_written:
                self._store.record_boots(known)
                self._boots_written = known
            begun, idle = self._decide(seen, started)
        return StepResult(
            open_moves + begun,
            due,
            records.settings.paused,
            sum(node.gpus for node in state.nodes),
            idle,
        )

    def _count(self, records: CycleRecords) -> None:
        """Write what rented nodes have cost since the last decision."""
        if records.settings.cloud_prices:
            counted = self._spending.rows(records.rent.counted_at if records.rent else None)
            self._store.record_rentals(counted, self._spending.at)
            self._spending.written()

    def _decide(self, seen: ClusterView, started: float) -> tuple[int, list[IdleGpus]]:
        """Decide on one picture of the cluster; return the number of moves begun, and the GPUs that stay idle.

        Args:
            started: when the step began, by `time.perf_counter`.
        """
        state = seen.state
        self._store.remember_fits()
        # A clock set back may leave moves in the future: they count, and the restart budget is short for a while.
        records = self._store.records(self._config.policy, restarts_since=state.taken_at - 3600.0)
        snapshot, rules, doubts = self._picture(seen, records)
        observed = time.perf_counter()
        plan = self._policy(snapshot, self._cache)
        self._spending.sooner = plan.sooner
        leads = self._config.mode is DaemonMode.ENFORCE and not records.settings.paused
        contenders = contending(state, unplaced(snapshot, plan), impossible(plan)) if leads else []
        plan = with_contenders(plan, contenders)
        decided = time.perf_counter()
        self._confirm_lead()
        begun: list[Move] = []
        if leads:
            wanted = intents(plan, snapshot.jobs, state.jobs, records.reports, rules)
            begun = self._reconciler.begin(wanted, records)
            self._spending.give(begun, state.jobs)
        idle = self._idle.overdue(plan, state.taken_at) if leads else []
        senseless = _named([f"{about}: {why}" for about, why in sorted(state.unreadable.items())])
        notes = (
            self._reconciler.refusals.note(),
            "paused" if records.settings.paused else "",
            senseless and f"left alone, since their records in Slurm make no sense: {senseless}",
            self._marks.note(),
            idle_note(idle),
        )
        cycle = self._record(
            snapshot,
            remarked(plan, idle, state.taken_at),
            note="; ".join(filter(None, notes)),
            durations={
                "observe_s": observed - started,
                "decide_s": decided - observed,
                "act_s": time.perf_counter() - decided,
            },
        )
        self._reconciler.open.decided(cycle, begun)
        for move in begun:
            with self._reconciler.open.about(move):
                log.info("job %d: %s -> %s (%s)", move.job_id, move.source, move.target, move.reason)
        now = replace(records, moves=[*records.moves, *begun])
        self._measure(state, snapshot, plan, now, doubts, idle)
        self._decided_at = self._monotonic()
        self.triggers.decided(state, records.reports, begun)
        if leads:
            self._reconciler.waiting.contend(
                contenders, state.taken_at, self._reconciler.former.eligibility(state)
            )
        return len(begun), idle

    def _picture(
        self, seen: ClusterView, records: CycleRecords
    ) -> tuple[Snapshot, MoveRules, dict[int, tuple[str, ...]]]:
        """Return what the policy decides on, the rules of moves in it, and the claims that polluxd does not believe."""
        state = seen.state
        times = self._waiting.corrected(state.jobs, records.times, state.taken_at)
        held = _held(state, {move.job_id for move in records.moves}, times, self._reconciler.past)
        judged = self._trusted.trust(records.reports, held, state.taken_at)
        rules = self._reconciler.rules(seen, records)
        records = replace(records, reports=judged.reports, times=times)
        snapshot = build_snapshot(self._facts, seen, records, rules, judged)
        return snapshot, rules, judged.doubts

    def _measure(
        self,
        state: ClusterState,
        snapshot: Snapshot,
        plan: Plan,
        records: CycleRecords,
        doubts: Mapping[int, tuple[str, ...]],
        idle: Sequence[IdleGpus],
    ) -> None:
        """Show the cluster as this decision saw it."""
        paused, moves = records.settings.paused, records.moves
        stuck = [] if paused else stuck_moves(moves, self._config.moves, state.taken_at)
        refused = self._reconciler.refusals.groups
        self._metrics.cluster.show(
            of_cluster(state)
            | of_reports(state, records.reports, records.rejected, doubts)
            | of_plan(plan, snapshot)
            | of_moves(moves, stuck, refused)
            | of_idle(idle)
            | {"polluxd_barred_sizes": {"": float(self._reconciler.refusals.count)}}
        )

    def _name_unreadable(self, unreadable: Mapping[str, str]) -> None:
        """Log each record of Slurm that makes no sense, once."""
        for about in sorted(unreadable.keys() - self._unreadable):
            log.warning(
                "polluxd leaves %s alone, since its record in Slurm makes no sense: %s",
                about,
                unreadable[about],
            )
        self._unreadable = frozenset(unreadable)

    def _confirm_lead(self) -> None:
        """Renew the lead after calls that may take seconds.

        A busy slurmctld's answer or a decision over many jobs takes most of the lease; nothing would be done without.
        """
        if not self._store.still_leading():
            raise LeaderLost("the lead ended while Slurm answered or a decision was made")

    def _due(self, state: ClusterState, reports: Mapping[int, Report]) -> bool:
        """Tell whether a decision is due.

        It is due every interval, and at once on a trigger, but not more often than the floor. Jobs that are resized
        in place could only be left as they are, and others would have to give way: a trigger waits a little for them,
        unless a job has come for which there is room. A job can make it wait only once for each number of GPUs.
        """
        since, cycle = self._monotonic() - self._decided_at, self._config.cycle
        if since >= cycle.interval_s:
            return True
        waits = self.triggers.resizing() and not self.triggers.can_start_one(state)
        least = cycle.floor_s * (_PATIENCE if waits else 1)
        return since >= least and self.triggers.since_decision(state, reports)

    def _record(self, snapshot: Snapshot, plan: Plan, *, note: str, durations: dict[str, float]) -> int:
        """Write the cycle and its plan, log it, and return its id."""
        self._metrics.decided(durations, self._config.cycle.interval_s)
        cycle = self._store.record_cycle(
            plan,
            mode=self._config.mode,
            note=note,
            durations=durations,
            started_at=snapshot.taken_at,
            snapshot_json=lambda: to_json(snapshot),
        )
        moved = sum(a.changed for a in plan.allocations)
        with logs.about(cycle=cycle):
            log.info(
                "cycle: %d jobs, %d nodes, %d to move, objective %.4f, gap %.2f %%, decided in %.0f ms%s",
                len(snapshot.jobs),
                len(snapshot.nodes),
                moved,
                plan.objective,
                plan.gap * 100,
                durations["decide_s"] * 1e3,
                f" ({note})" if note else "",
            )
        return cycle


def _named(names: Sequence[str]) -> str:
    """Name the first of them, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more


def _held(
    state: ClusterState,
    moving: Collection[int],
    times: Mapping[int, JobTimes] | None = None,
    past: PastMoves | None = None,
) -> dict[int, Held]:
    """What polluxd's own records say of each job's GPUs; without `times` and `past`, where it trains alone."""
    share, kind = equal_share(state), {node.name: node.gpu_type for node in state.nodes}
    held = {}
    for job in state.jobs:
        if job.spec is None:
            continue
        here = {} if job.job_id in moving else job.gpus_per_node_held
        types = {kind.get(name, "") for name in here}
        known = times.get(job.job_id) if times else None
        held[job.job_id] = Held(
            sum(here.values()),
            len(here),
            known.most_gpus if known else 0,
            known.most_nodes if known else 0,
            share,
            gpu_type=types.pop() if len(types) == 1 else "",
            adaptive=job.spec.adaptive,
            undrained=past.undrained(job.job_id) if past else 0,
        )
    return held
