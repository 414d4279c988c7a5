"""Carry moves out.

polluxd writes each intent to the database before it calls Slurm, and reads each effect back from Slurm.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from polluxd.apply.actions import (
    REPEAT_S,
    Action,
    Configure,
    Drain,
    Fail,
    GiveBack,
    Place,
    Reach,
    Recruit,
    Requeue,
    RunAgain,
    Wait,
    Withdraw,
)
from polluxd.apply.capacity import Capacity, capacity
from polluxd.apply.companions import ClusterView, gather, named_moves
from polluxd.apply.contention import Contenders
from polluxd.apply.cooldowns import Cooldowns
from polluxd.apply.headroom import Headroom, headroom, targets
from polluxd.apply.in_place import InPlaceMoves
from polluxd.apply.intents import Intent
from polluxd.apply.leases import Leases, kept_back
from polluxd.apply.machine import next_action
from polluxd.apply.move_ids import MoveIds
from polluxd.apply.move_rules import MoveRules, RestartBudget
from polluxd.apply.paths import PathOptions, failed_paths
from polluxd.apply.placed import ends_at, geometry, limit_reached_at, same_place, time_left
from polluxd.apply.refusals import Refusals
from polluxd.apply.startable import Eligibility, combined, eligibility, forbids
from polluxd.apply.stopwatch import Stopwatch
from polluxd.apply.submitted_sizes import SubmittedSizes
from polluxd.apply.undrained import Undrained
from polluxd.config.settings import MoveSettings
from polluxd.errors import SlurmRefused
from polluxd.logs import about
from polluxd.model import JobState, Move, Step
from polluxd.slurm.protocol import ClusterState, SlurmClient, SlurmJob
from polluxd.slurm.queue import BAD_CONSTRAINTS
from polluxd.store import CycleRecords, Store

log = logging.getLogger(__name__)


class Reconciler:
    """Carries out the moves of a plan, one safe action at a time.

    A process may call `tick` at any moment. It needs only the database and Slurm: `tick` finds the moves under way and
    takes the next action of each.

    Args:
        limits: section [moves] of polluxd.toml.
        lease: how long a waiting job is kept back at a time [s].
        authorize: called before each action on Slurm and each write; the epoch, or LeaderLost once this process may
            no longer act.
        ended: called with each move that ends, its result (`completed`, `failed`, `withdrawn`) and the seconds since
            it was planned.
        clock: POSIX time [s].
        monotonic: seconds that only go forward, whatever is done to the clock.
    """

    def __init__(
        self,
        slurm: SlurmClient,
        store: Store,
        *,
        limits: MoveSettings,
        lease: float,
        authorize: Callable[[], int],
        ended: Callable[[Move, str, float], None] = lambda move, result, seconds: None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slurm = slurm
        self._store = store
        self._ended = ended
        self._limits = limits
        self.authorize = authorize
        self._clock = clock
        self._monotonic = monotonic
        self._stopwatch = Stopwatch(clock, monotonic)
        self.refusals = Refusals(clock, monotonic)
        self.cooldowns = Cooldowns(limits.cooldown_s, monotonic)
        self.undrained = Undrained()
        self._gpu_types: dict[str, str] = {}
        self._acted_on: Mapping[int, Move] = {}
        """Moves open at the last tick, by job. What was observed before that tick no longer holds for these jobs."""
        self.ids = MoveIds()
        self._leases = Leases(slurm, lease=lease, authorize=authorize, clock=clock, monotonic=monotonic)
        self._sizes = SubmittedSizes(slurm, authorize)
        self.contenders = Contenders(slurm, authorize)
        self._resizer = InPlaceMoves(
            slurm, store, repeat=REPEAT_S, authorize=authorize, clock=clock, monotonic=monotonic
        )

    def gather(self, state: ClusterState) -> ClusterView:
        """Return the cluster with each companion assigned to its parent.

        All later steps of the cycle must use this view.
        """
        return gather(state, self._store.resizes(named_moves(state)))

    def begin(self, intents: Sequence[Intent], records: CycleRecords) -> list[Move]:
        """Write the intents of a plan as moves, up to the cluster's limits.

        The limits are the number of moves at one time and the numbers of restarts per hour. A job whose move ended in
        the last tick waits for the next plan: this plan was made from its placement before that end.
        """
        epoch = self.authorize()
        budget = RestartBudget(self._limits, records.restarts)
        busy = self._acted_on.keys() | {move.job_id for move in records.moves}
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
        return begun

    def occupied(self, job_id: int) -> bool:
        """Tell whether a plan has to leave the job as it is.

        The job moves, or is in the cooldown after a move.
        """
        return job_id in self._acted_on or self.cooldowns.left(job_id) > 0

    def coming(self, job_id: int) -> int:
        """Return the GPUs to which a move brings the job; 0 without a move."""
        move = self._acted_on.get(job_id)
        return move.target.gpus if move else 0

    @property
    def moving(self) -> Collection[int]:
        """Jobs with a move under way."""
        return self._acted_on.keys()

    def eligibility(self, state: ClusterState, allowed: Headroom) -> dict[int, Eligibility]:
        """Return where jobs may start, for jobs that Slurm restricts.

        The restrictions come from Slurm's rules and limits, and from its recent refusals.
        """
        return combined(eligibility(state), allowed.eligibility, self.refusals.eligibility(state.jobs))

    def rules(self, seen: ClusterView, records: CycleRecords) -> MoveRules:
        """Return what may be done with each job now."""
        allowed = self.refusals.lowered(headroom(seen.state, targets(records.moves)))
        failed = failed_paths(seen.moves.values())
        return MoveRules(
            PathOptions(frozenset(self._limits.paths), self._slurm.can_shrink(), failed),
            allowed,
            self.eligibility(seen.state, allowed),
            self.cooldowns.left,
            RestartBudget(self._limits, records.restarts).spent,
        )

    def tick(self, seen: ClusterView, records: CycleRecords) -> int:
        """Take the next action of each move under way.

        Returns how many moves and orphaned companions polluxd still has to wait for.
        """
        moves, reports, paused = records.moves, records.reports, records.settings.paused
        self._acted_on = {move.job_id: move for move in moves}
        jobs = {job.job_id: job for job in seen.state.jobs if job.spec is not None}
        self._stopwatch.keep(moves, seen.state.nodes)
        self.ids.keep(moves)
        self._gpu_types = {node.name: node.gpu_type for node in seen.state.nodes}
        holding = {job_id for job_id, job in jobs.items() if job.gpus_per_node_held}
        self.cooldowns.keep(holding, jobs.keys() - holding)
        self.undrained.keep(jobs)
        self.refusals.keep({job_id for job_id, job in jobs.items() if not job.state.finished})
        if not paused:
            # Renew before any job is started: a later renewal would keep back a job that was just released.
            self._leases.renew(kept_back(jobs, seen.pending_companions, moves, self.contenders.jobs))
            self._sizes.restore(jobs, jobs.keys() - self._acted_on.keys() - self.contenders.jobs)
        if not (moves or paused):
            self._resizer.tidy(seen, reports, set())
            return self._resizer.sweep(seen.orphans)
        allowed = headroom(seen.state, targets(moves))
        room = capacity(
            seen.state.nodes,
            jobs,
            moves,
            pending_companions=seen.pending_companions,
            orphans=seen.orphans,
            limits=allowed.groups,
        )
        # Smallest growth first: moves that give GPUs back come before moves that take GPUs.
        ordered = sorted(moves, key=lambda m: (m.target.gpus - m.source.gpus, m.id))
        may_start = self.eligibility(seen.state, allowed)
        insisted_on = self.undrained.insisted_on(seen.state)
        still_open = 0
        waiting: list[Move] = []
        stuck = all(move.step in (Step.PLANNED, Step.REQUEUED, Step.STARTED) for move in ordered)
        for move in ordered:
            job, companion = jobs.get(move.job_id), seen.pending_companions.get(move.id)
            action = next_action(
                move,
                job,
                reports.get(move.job_id),
                room,
                now=self._clock(),
                waited=self._stopwatch.waited(move),
                since_try=self._stopwatch.since_try(move),
                limits=self._limits,
                paused=paused,
                companion=companion,
                forbidden=forbids(may_start.get(move.job_id), move),
                insist=move.job_id in insisted_on,
            )
            self.refusals.look(move, job, action)
            stuck = stuck and isinstance(action, Wait)
            if isinstance(action, Wait) and move.step is Step.PLANNED and not move.in_allocation:
                waiting.append(move)
            with self.ids.about(move):
                still_open += self._carry_out(move, job, companion, action, room)
        if not paused:
            # On a busy cluster other moves are always under way, but they do not help moves that wait in a ring.
            long = {
                m.id
                for m in waiting
                if stuck or self._stopwatch.waited(m) > self._limits.planned_timeout_s / 4
            }
            self._untie([m for m in waiting if m.id in long], jobs, room)
            self._resizer.tidy(seen, reports, {m.job_id for m in moves})
        return still_open + self._resizer.sweep(seen.orphans)

    def _carry_out(
        self,
        move: Move,
        job: SlurmJob | None,
        companion: SlurmJob | None,
        action: Action,
        room: Capacity,
    ) -> bool:
        """Do `action`; True while the move stays open."""
        match action:
            case Wait():
                return True
            case Drain():
                self._drain(move, job, room)
            case Requeue():
                return self._requeue(move, job)
            case Recruit() | Place() | GiveBack():
                return self._resize(move, job, companion, action, room)
            case Configure():
                if job is not None:
                    self._configure(move, job, room)
            case Reach(step=step, detail=detail):
                if step is Step.PARKED and job is not None:
                    self._limit_time(move, job)
                self._reach(move, step, detail)
                return not step.terminal
            case RunAgain():
                self._run_again(move, job)
                return False
            case Withdraw() | Fail():
                self._give_up(move, job, action)
                self._resizer.dismiss([companion] if companion else [])
                return False
        return True

    def _untie(self, waiting: Sequence[Move], jobs: Mapping[int, SlurmJob], room: Capacity) -> None:
        """Drain one move of a ring of moves that wait for each other's GPUs.

        The job of the move with the smallest growth gives up its GPUs first.
        """
        for move in room.ring(waiting)[:1]:
            with self.ids.about(move):
                log.info("job %d moves first: others wait for its GPUs, it for theirs", move.job_id)
                self._drain(move, jobs.get(move.job_id), room)

    def _drain(self, move: Move, job: SlurmJob | None, room: Capacity) -> None:
        room.promise(move.target, move.source, move.job_id)
        # At the requeue, Slurm discards the start time of the attempt.
        end = ends_at(job)
        if job is not None and end is not None and job.restart_count:
            end = limit_reached_at(job, self._store.moves(job.job_id))
        self._reach(move, Step.DRAINING, ends_at=end)

    def _give_up(self, move: Move, job: SlurmJob | None, action: Withdraw | Fail) -> None:
        if isinstance(action, Fail):
            if action.undrained:
                self.undrained.add(move)
            why = self._stopwatch.with_cause(move, action.reason)
            self._fail(move, job, why, keep_back=action.keep_back, rest=action.rest)
        else:
            self._withdraw(move, action.reason, rest=action.rest)

    def _resize(
        self,
        move: Move,
        job: SlurmJob | None,
        companion: SlurmJob | None,
        action: Recruit | Place | GiveBack,
        room: Capacity,
    ) -> bool:
        """Carry out an action of a move within an allocation.

        Returns True while the move stays open.
        """
        why = ""
        match action:
            case Recruit():
                room.take(move.added, move.job_id)
                self._reach(move, Step.RECRUITING)
            case Place() if job is not None and companion is not None:
                why = self._resizer.place(move, job, companion)
                if not why:
                    self._reach(move, Step.CONFIGURED)
            case GiveBack() if job is not None:
                self._stopwatch.try_now(move)
                why = self._resizer.give_back(job, move.target)
        if why:
            self._fail(move, job, why, keep_back=False)
            self._resizer.dismiss([companion] if companion else [])
        return not why

    def _requeue(self, move: Move, job: SlurmJob | None) -> bool:
        """End the job's companions, then send the job back to the queue.

        Returns True while the move stays open. A refusal by Slurm concerns this job alone.
        """
        self._resizer.dismiss(job.companions if job else ())
        self.authorize()
        self._stopwatch.try_now(move)
        try:
            self._slurm.requeue(move.job_id)
        except SlurmRefused as error:
            now = self._slurm.jobs([move.job_id]).get(move.job_id)
            if now is not None and now.state is JobState.RUNNING:
                self._fail(move, now, f"Slurm refused the requeue: {error}", keep_back=False)
                return False
            log.info("job %d: requeue refused (%s); it has left its nodes by itself", move.job_id, error)
        return True

    def _run_again(self, move: Move, job: SlurmJob | None) -> None:
        """Put the job back into the queue; the next plan starts it."""
        self.authorize()
        reason = "Slurm ended the job at its start (a revoked credential?): queued again"
        try:
            self._slurm.run_again(move.job_id)
        except SlurmRefused as error:
            reason = f"Slurm ended the job at its start, and refused to queue it again: {error}"
        self._fail(move, job, reason, keep_back=True)

    def _configure(self, move: Move, job: SlurmJob, room: Capacity) -> None:
        self.authorize()
        room.take(move.target, move.job_id)
        self._sizes.changed(move.job_id)
        try:
            size = geometry(job, move.target, self._gpu_types.get(move.target.nodes[0], ""))
            self._slurm.configure(move.job_id, size, start=True, time_limit_s=time_left(move, job))
        except SlurmRefused as error:
            # Slurm may have carried out an earlier update that timed out: the job then has the right placement.
            now = self._slurm.jobs([move.job_id]).get(move.job_id)
            if now is None or not same_place(now, move.target):
                self._fail(move, now, f"Slurm refused the new size: {error}", keep_back=True)
                self.refusals.of_job(job, str(error))
                return
        self._reach(move, Step.CONFIGURED)

    def _limit_time(self, move: Move, job: SlurmJob) -> None:
        """Give a parked job the rest of its time limit.

        A requeue gives the job its whole time limit again.
        """
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
        log.info("job %d: move %d reached %s %s", move.job_id, move.id, step, detail)
        if step.terminal:
            self.cooldowns.completed(move, self._since_planned(move))
            self._ended(move, "completed", self._since_planned(move))

    def _fail(
        self, move: Move, job: SlurmJob | None, reason: str, *, keep_back: bool, rest: bool = True
    ) -> None:
        epoch = self.authorize()
        if keep_back:
            if job is not None:
                self._limit_time(move, job)
            self._leases.extend(move.job_id)
            if job is not None and job.reason == BAD_CONSTRAINTS:
                self._leases.release(move.job_id)
        self._store.advance(move.id, Step.FAILED, self._clock(), epoch=epoch, detail=reason)
        log.warning("job %d: move %d to %s failed: %s", move.job_id, move.id, move.target, reason)
        if rest:
            self.cooldowns.failed(move)
        self._ended(move, "failed", self._since_planned(move))

    def _withdraw(self, move: Move, reason: str, *, rest: bool) -> None:
        epoch = self.authorize()
        self._store.advance(move.id, Step.FAILED, self._clock(), epoch=epoch, detail=reason)
        log.info("job %d: move %d to %s withdrawn: %s", move.job_id, move.id, move.target, reason)
        if rest:
            self.cooldowns.begin(move.job_id)
        self._ended(move, "withdrawn", self._since_planned(move))

    def _since_planned(self, move: Move) -> float:
        """Seconds since the plan; the wall clock may have been set back."""
        return max(0.0, self._clock() - move.times.get(Step.PLANNED, self._clock()))
