"""Carry moves out.

polluxd writes each intent to the database before it calls Slurm, and reads each effect back from Slurm.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from polluxd.apply.actions import REFUSED_SIZE, Action, Do, Fail, Reach, Situation, Withdraw
from polluxd.apply.capacity import BACK, Capacity, capacity, goes_back
from polluxd.apply.companions import ClusterView, gather, named_moves
from polluxd.apply.headroom import Headroom, headroom
from polluxd.apply.in_place import InPlaceMoves
from polluxd.apply.machine import next_action
from polluxd.apply.open_moves import OpenMoves, in_order
from polluxd.apply.others_pay import OthersPay
from polluxd.apply.past_moves import PastMoves
from polluxd.apply.paths import Intent, MoveRules, RestartBudget, failed_paths
from polluxd.apply.placed import ends_at, geometry, limit_reached_at, no_larger, same_place, time_left
from polluxd.apply.plain_jobs import IdleFor, at_risk, taken_by
from polluxd.apply.protected import Protection
from polluxd.apply.refused.asked import AskedFirst
from polluxd.apply.refused.refusals import Refusals
from polluxd.apply.startable import Eligibility, FormerNodes, combined, eligibility, forbids, of_limit
from polluxd.apply.waiting_jobs import WaitingJobs, kept_back
from polluxd.config.settings import MoveSettings
from polluxd.errors import SlurmRefused
from polluxd.logs import about
from polluxd.model import NO_PLACEMENT, JobState, Move, Step
from polluxd.slurm.protocol import ClusterState, SlurmClient, SlurmJob
from polluxd.slurm.queue import HELD_BY_SLURM
from polluxd.store import CycleRecords, CycleStore

log = logging.getLogger(__name__)


class Reconciler:
    """Carries out the moves of a plan, one safe action at a time.

    A process may call `tick` at any moment. It needs only the database and Slurm: `tick` finds the moves under way and
    takes the next action of each.

    Args:
        limits: section [moves] of polluxd.toml.
        lease: how long a waiting job is kept back at a time [s].
        ended: called with each move that ends, its result (`completed`, `failed`, `withdrawn`) and the seconds since
            it was planned.
    """

    def __init__(
        self,
        slurm: SlurmClient,
        store: CycleStore,
        *,
        limits: MoveSettings,
        lease: float,
        authorize: Callable[[], int],
        ended: Callable[[Move, str, float], None] = lambda move, result, seconds: None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slurm, self._store = slurm, store
        self.others = OthersPay(ended)
        self._ended = self.others.ended
        self._limits = limits
        self.authorize = authorize
        self._clock = clock
        self.open = OpenMoves(clock, monotonic)
        self.past = PastMoves(limits.cooldown_s, monotonic)
        self.refusals = Refusals(clock, monotonic)
        self.protection = Protection(limits)
        self._idle_for = IdleFor(limits.start_timeout_s)
        self.former = FormerNodes(monotonic)
        self._asked = AskedFirst(slurm, store, self.refusals, authorize=authorize)
        self._gpu_types: dict[str, str] = {}
        self.acted_on: Mapping[int, Move] = {}
        """Moves open at the last tick, by job. What was observed before that tick no longer holds for these jobs."""
        self.waiting = WaitingJobs(slurm, lease=lease, authorize=authorize, clock=clock, monotonic=monotonic)
        self._resizer = InPlaceMoves(slurm, store, authorize=authorize, clock=clock, monotonic=monotonic)

    def gather(self, state: ClusterState) -> ClusterView:
        """Return the cluster with each companion assigned to its parent, for all later steps of the cycle."""
        return gather(state, self._store.resizes(named_moves(state)))

    def rules(self, seen: ClusterView, records: CycleRecords) -> MoveRules:
        """Return what may be done with each job now."""
        self.refusals.observe(seen.state, records.moves, records.reports)
        bars = self.refusals.bars(seen.state)
        allowed = bars.lowered(self.others.lowered(headroom(seen.state, records.moves), seen.state))
        may_start = self.eligibility(seen.state, allowed)
        spent = RestartBudget(self._limits, records.restarts).spent
        self.protection.observe(seen.state, records, may_start, spent, self.past.undrained)
        return MoveRules(
            frozenset(self._limits.paths),
            self._slurm.can_shrink(),
            failed_paths(seen.moves.values()),
            allowed,
            may_start,
            bars.nodes,
            self.past.cooldown,
            spent,
            self.protection.stepped,
            self.past.undrained,
            self.protection.beyond,
            at_risk(seen.state, self.waiting.contending),
            self.protection.rhythm.stays,
            self.protection.start_s,
            self.protection.least,
            self._idle_for,
        )

    def eligibility(self, state: ClusterState, allowed: Headroom) -> dict[int, Eligibility]:
        """Return where jobs may start that Slurm restricts, by its rules, its limits and its recent refusals."""
        return combined(
            eligibility(state),
            allowed.eligibility,
            self.refusals.bars(state).eligibility,
            self.former.eligibility(state),
        )

    def begin(self, intents: Sequence[Intent], records: CycleRecords) -> list[Move]:
        """Write the intents of a plan as moves, up to the cluster's limits.

        The limits are the number of moves at one time and the numbers of restarts per hour. A job whose move ended in
        the last tick waits for the next plan: this plan was made from its placement before that end.
        """
        epoch = self.authorize()
        budget = RestartBudget(self._limits, records.restarts)
        busy = self.acted_on.keys() | {move.job_id for move in records.moves}
        room = (self._limits.max_concurrent or math.inf) - len(records.moves)
        begun: list[Move] = []
        for intent in intents:
            if intent.job_id in busy:
                continue
            if len(begun) >= room:
                break
            if spent := budget.charge(intent):
                with about(job=intent.job_id):
                    log.info("job %d stays: %s", intent.job_id, spent)
                continue
            move = self._store.plan_move(
                intent.job_id, intent.attempt, intent.path, intent.source, intent.target, intent.reason, epoch
            )
            begun.append(move)
        self.others.begun(begun, {intent.job_id: intent.user for intent in intents})
        if any(move.source for move in begun):
            self._slurm.ask_limits()
        return begun

    def occupied(self, job_id: int) -> bool:
        """Tell whether a plan has to leave the job as it is: it moves, or is in the cooldown after a move."""
        return job_id in self.acted_on or self.past.cooldown(job_id) > 0

    def coming(self, job_id: int) -> int:
        """Return the GPUs to which a move brings the job; 0 without a move."""
        move = self.acted_on.get(job_id)
        return move.target.gpus if move else 0

    def tick(self, seen: ClusterView, records: CycleRecords) -> int:
        """Take the next action of each move; return how many moves and orphaned companions are still waited for."""
        jobs = {job.job_id: job for job in seen.state.jobs if job.spec is not None}
        self.former.observe(seen.state)
        self._remember(seen, jobs, records)
        paused = records.settings.paused
        if not paused:
            # Renew before any job is started: a later renewal would keep back a job that was just released.
            self.waiting.leave(jobs[n] for n in self.refusals.unwritten if n not in self.acted_on)
            contending = self.waiting.contending
            self.waiting.renew(kept_back(jobs, seen.pending_companions, records.moves, contending))
            self.waiting.restore_sizes(jobs, jobs.keys() - self.acted_on.keys() - contending)
        still_open = self._act(seen, jobs, records) if records.moves else 0
        if not paused:
            self._resizer.tidy(seen, records.reports, self.acted_on.keys())
        return still_open + self._resizer.sweep(seen.orphans)

    def _remember(self, seen: ClusterView, jobs: Mapping[int, SlurmJob], records: CycleRecords) -> None:
        """Forget what is known of moves and jobs that are gone."""
        moves = records.moves
        self.acted_on = {move.job_id: move for move in moves}
        self._gpu_types = {node.name: node.gpu_type for node in seen.state.nodes}
        self.open.keep(moves, seen.state.nodes)
        self.refusals.observe(seen.state, moves, records.reports)
        self._asked.keep(jobs, moves)
        holding = {job_id for job_id, job in jobs.items() if job.gpus_per_node_held}
        self.past.keep(holding, jobs.keys() - holding)

    def _act(self, seen: ClusterView, jobs: Mapping[int, SlurmJob], records: CycleRecords) -> int:
        """Take the next action of each move; return how many stay open."""
        allowed = headroom(seen.state, records.moves)
        room = capacity(
            seen.state.nodes,
            jobs,
            records.moves,
            pending_companions=seen.pending_companions,
            orphans=seen.orphans,
            limits=allowed.groups,
            unproven=self.past.unproven(records.moves, jobs),
        )
        may_start = self.eligibility(seen.state, allowed)
        bars = self.refusals.bars(seen.state, self.acted_on).within(allowed)
        risks = at_risk(seen.state, self.waiting.contending)
        ordered = in_order(records.moves)
        returns = {name for m in ordered if goes_back(m) for name in m.target.nodes}
        stuck = all(move.step in (Step.PLANNED, Step.REQUEUED, Step.STARTED) for move in ordered)
        waiting: list[tuple[Move, float]] = []
        still_open = 0
        for move in ordered:
            job = jobs.get(move.job_id)
            back = goes_back(move)
            stopped = back or move.step is Step.REQUEUED
            kept_off = stopped and self.former.wait_s(job, move.target.nodes) > 0.0
            most = self.protection.beyond.get(move.job_id)
            owed = most is not None and move.gives_back
            at = Situation(
                move,
                job,
                records.reports.get(move.job_id),
                room,
                self._limits,
                now=self._clock(),
                waited=self.open.waited(move, kept_off=kept_off),
                since_try=self.open.since_try(move),
                companion=seen.pending_companions.get(move.id),
                forbidden=""
                if back
                else forbids(may_start.get(move.job_id), move)
                or bars.forbids(move)
                or taken_by(risks, move)
                or room.gone(move, returns),
                kept_off=kept_off,
                owed=owed,
                most=most,
                insist=owed and self.past.undrained(move.job_id) > 0,
                paused=records.settings.paused and not back,
            )
            action = next_action(at)
            if action is not Do.WAIT:
                stuck = False
            elif move.step is Step.PLANNED and not move.in_allocation:
                waiting.append((move, at.waited))
            with self.open.about(move):
                still_open += self._carry_out(at, action)
            if action in (Do.DRAIN, Do.CONFIGURE, Do.RECRUIT):
                # It leaves less to the next ones.
                bars = self.refusals.bars(seen.state, self.acted_on).within(allowed)
        if not records.settings.paused:
            # On a busy cluster other moves are always under way, but they do not help moves that wait in a ring.
            long = self._limits.planned_timeout_s / 4
            self._untie([move for move, waited in waiting if stuck or waited > long], jobs, room)
        return still_open

    def _untie(self, waiting: Sequence[Move], jobs: Mapping[int, SlurmJob], room: Capacity) -> None:
        """Drain one move of a ring of moves that wait for each other's GPUs.

        The job of the move with the smallest growth gives up its GPUs first.
        """
        for move in room.ring(waiting)[:1]:
            job = jobs.get(move.job_id)
            with self.open.about(move):
                log.info("job %d moves first: others wait for its GPUs, it for theirs", move.job_id)
                if job is not None and (failed := self._drain(move, job, room)) is not None:
                    self._end(move, job, failed, room)

    def _carry_out(self, at: Situation, action: Action) -> bool:
        """Do `action`; True while the move stays open, or its job waits to be brought to a place at once."""
        move, job, room = at.move, at.job, at.room
        failed: Fail | Withdraw | None = None
        match action:
            case Reach(step, detail):
                if step is Step.PARKED and job is not None:
                    self._limit_time(move, job)
                self._reach(move, step, detail)
                if step is Step.STARTED and job is not None:
                    self.refusals.works(move, job)
                return not step.terminal
            case Fail() | Withdraw():
                failed = action
            case Do.DRAIN if job is not None:
                failed = self._drain(move, job, room)
            case Do.REQUEUE:
                failed = self._requeue(move, job)
            case Do.CONFIGURE if job is not None:
                return self._configure(move, job, room)
            case Do.RUN_AGAIN:
                failed = self._run_again(move)
            case Do.RECRUIT:
                room.take(move.added, move.job_id)
                self._reach(move, Step.RECRUITING)
            case Do.PLACE | Do.GIVE_BACK if job is not None:
                failed = self._resize(move, job, at.companion)
        if failed is None:
            return True
        self._end(move, job, failed, room)
        if at.companion is not None:
            self._resizer.dismiss([at.companion])
        return isinstance(failed, Fail) and failed.keep_back

    def _drain(self, move: Move, job: SlurmJob, room: Capacity) -> Fail | Withdraw | None:
        """Order the job to drain, once nobody has said no: the point of no return."""
        if (refusal := self._asked.refusal(move, job)) is not None:
            return refusal
        room.promise(move.target, move.source, move.job_id)
        # At the requeue, Slurm discards the start time of the attempt.
        end = ends_at(job)
        if end is not None and job.restart_count:
            end = limit_reached_at(job, self._store.moves(job.job_id))
        self._reach(move, Step.DRAINING, ends_at=end)
        self._slurm.ask_limits()
        return None

    def _requeue(self, move: Move, job: SlurmJob | None) -> Fail | Withdraw | None:
        """End the job's companions, then send the job back to the queue.

        A refusal by Slurm concerns this job alone.
        """
        runs = job is not None and job.state is JobState.RUNNING and self.open.since_try(move) == math.inf
        # Asked once more: a drain may take minutes.
        if job is not None and runs and (refusal := self._asked.refusal(move, job)) is not None:
            return refusal
        self._resizer.dismiss(job.companions if job else ())
        self.authorize()
        self.open.try_now(move)
        try:
            self._slurm.requeue(move.job_id)
        except SlurmRefused as error:
            now = self._slurm.jobs([move.job_id]).get(move.job_id)
            if now is not None and now.state is JobState.RUNNING:
                self.refusals.cannot_be_changed(now, str(error))
                return Fail(f"Slurm refused the requeue: {error}")
            log.info("job %d: requeue refused (%s); it has left its nodes by itself", move.job_id, error)
        return None

    def _resize(self, move: Move, job: SlurmJob, companion: SlurmJob | None) -> Fail | None:
        """Place the companion of a move that grows, or take nodes back from a job that shrank."""
        if companion is None:
            self.open.try_now(move)
            why = self._resizer.give_back(job, move.target)
        elif not (why := self._resizer.place(move, job, companion)):
            self._reach(move, Step.CONFIGURED)
        return Fail(why, refused="" if companion is None else why) if why else None

    def _run_again(self, move: Move) -> Fail:
        """Put the job back into the queue; the next plan starts it."""
        self.authorize()
        reason = "Slurm ended the job at its start (a revoked credential?): queued again"
        try:
            self._slurm.run_again(move.job_id)
        except SlurmRefused as error:
            reason = f"Slurm ended the job at its start, and refused to queue it again: {error}"
        return Fail(reason, keep_back=True)

    def _configure(self, move: Move, job: SlurmJob, room: Capacity) -> bool:
        """Give the job its new geometry and let it start; True while the move stays open."""
        self.authorize()
        self.waiting.resized(move.job_id)
        try:
            size = geometry(job, move.target, self._gpu_types.get(move.target.nodes[0], ""))
            self._slurm.configure(move.job_id, size, start=True, time_limit_s=time_left(move, job))
        except SlurmRefused as error:
            # Slurm may have carried out an earlier update that timed out: the job then has the right placement.
            now = self._slurm.jobs([move.job_id]).get(move.job_id)
            if now is None or not same_place(now, move.target):
                why = f"{REFUSED_SIZE}: {error}"
                self._end(move, now or job, Fail(why, keep_back=True, refused=str(error)), room)
                return True
        if not goes_back(move):  # it is set aside
            room.take(move.target, move.job_id)
        self._reach(move, Step.CONFIGURED)
        return True

    def _limit_time(self, move: Move, job: SlurmJob) -> None:
        """Give a parked job the rest of its time limit: its requeue has given it the whole limit again."""
        left = time_left(move, job)
        if left is None:
            return
        self.authorize()
        try:
            self._slurm.limit_time(job.job_id, left)
        except SlurmRefused as error:
            log.warning("job %d: it has its whole time limit again: %s", job.job_id, error)

    def _reach(self, move: Move, step: Step, detail: str = "", *, ends_at: float | None = None) -> None:
        epoch = self.authorize()
        self._store.advance(move.id, step, self._clock(), epoch=epoch, detail=detail, ends_at=ends_at)
        self.refusals.begins(move)
        log.info("job %d: move %d reached %s %s", move.job_id, move.id, step, detail)
        if step.terminal:
            self.past.completed(move, self._since_planned(move))
            self._ended(move, "completed", self._since_planned(move))

    def _end(self, move: Move, job: SlurmJob | None, end: Fail | Withdraw, room: Capacity) -> None:
        """Write that the move failed or was withdrawn; learn from a refusal, and bring its job back to its place."""
        epoch = self.authorize()
        result, level, reason = "withdrawn", logging.INFO, end.reason
        if isinstance(end, Fail):
            result, level, reason = "failed", logging.WARNING, self.open.with_cause(move, reason)
            if end.keep_back:
                if job is not None:
                    self._limit_time(move, job)
                held = job is not None and job.reason in HELD_BY_SLURM
                self.waiting.keep_back(move.job_id, release=held)
        self._store.advance(move.id, Step.FAILED, self._clock(), epoch=epoch, detail=reason)
        log.log(level, "job %d: move %d to %s %s: %s", move.job_id, move.id, move.target, result, reason)
        self.past.failed(move, rest=end.rest, undrained=end.undrained, person=isinstance(end, Withdraw))
        if isinstance(end, Fail):
            if job is not None and end.refused:
                self.refusals.learn(move, job, end.refused)
            if end.alone:
                self.refusals.cannot_span(move, end.alone)
            if job is not None and end.keep_back:
                self._go_back(move, job, room, reason, end.refused)
        self._ended(move, result, self._since_planned(move))

    def _go_back(self, move: Move, job: SlurmJob, room: Capacity, why: str, refused: str) -> None:
        """Start a requeued job again where it was, if nobody else took its GPUs and no limit refuses them, too."""
        if move.path != "requeue" or job.state is not JobState.PENDING or job.kept_back(self._clock()):
            return
        if of_limit(refused) and no_larger(move.target, move.source):
            return
        room.forget(move, job)
        if not room.free_for(move.source, move.job_id):
            return
        room.take(move.source, move.job_id)
        reason = f"{BACK}: {why}"
        attempt, epoch = job.restart_count, self.authorize()
        self._store.plan_move(
            move.job_id, attempt, "start", NO_PLACEMENT, move.source, reason, epoch, at=self._clock()
        )

    def _since_planned(self, move: Move) -> float:
        """Seconds since the plan; the wall clock may have been set back."""
        return max(0.0, self._clock() - move.times.get(Step.PLANNED, self._clock()))
