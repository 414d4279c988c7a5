"""Carries moves out: the intent is in the database before Slurm is touched, and each effect is read back from Slurm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polluxd.apply.capacity import Capacity, capacity
from polluxd.apply.intents import Intent
from polluxd.apply.knots import knot
from polluxd.apply.machine import (
    Action,
    Configure,
    Drain,
    Fail,
    Limits,
    Reach,
    Remind,
    Requeue,
    Wait,
    next_action,
    same_place,
)
from polluxd.errors import SlurmRefused
from polluxd.model import JobState, Placement, Reallocation, Report, Step
from polluxd.slurm.protocol import ClusterState, Geometry, SlurmClient, SlurmJob
from polluxd.store import Store

log = logging.getLogger(__name__)

_RENEWED_AT_ONCE = 250
"""scontrol asks slurmctld for one job after the other: more of them might not be done within its time limit."""


@dataclass(slots=True)
class _History:
    """What this process remembers of a job's moves; lost at a restart, at no more cost than one early retry."""

    ended_at: float = float("-inf")
    failures: int = 0


class Reconciler:
    """Brings Slurm to the plan, one safe action at a time.

    `tick` may be called at any moment, by a process that knows nothing but the database and Slurm: it finds the
    moves under way and takes the next action of each. `authorize` is called before each action on Slurm and raises
    `LeaderLost` once this process may no longer act.
    """

    def __init__(
        self,
        slurm: SlurmClient,
        store: Store,
        *,
        limits: Limits,
        cooldown: float,
        lease: float,
        max_concurrent: int,
        authorize: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._slurm = slurm
        self._store = store
        self._limits = limits
        self._cooldown = cooldown
        self._lease = lease
        self._max_concurrent = max_concurrent
        self._authorize = authorize
        self._clock = clock
        self._last_try: dict[tuple[int, Step], float] = {}
        self._history: dict[int, _History] = {}
        self._renewed: dict[int, float] = {}

    def begin(self, wished: Sequence[Intent], under_way: Sequence[Reallocation]) -> list[Reallocation]:
        """Write the intents of a plan as moves, up to the cluster's limit of moves at one time."""
        epoch = self._authorize()
        busy = {move.job_id for move in under_way}
        room = self._max_concurrent - len(under_way) if self._max_concurrent else len(wished)
        begun: list[Reallocation] = []
        for intent in wished:
            if intent.job_id in busy:
                continue
            if len(begun) >= room:
                break
            begun.append(
                self._store.plan_reallocation(
                    intent.job_id,
                    intent.attempt,
                    intent.path,
                    intent.source,
                    intent.target,
                    intent.reason,
                    epoch,
                )
            )
            log.info("job %d: %s -> %s (%s)", intent.job_id, intent.source, intent.target, intent.reason)
        return begun

    def resting(self, job_id: int) -> float:
        """Seconds for which the job is still to be left alone: the cooldown, doubled with each failed move."""
        past = self._history.get(job_id)
        if past is None:
            return 0.0
        rest = self._cooldown * (2.0 ** min(past.failures, 6))
        return max(0.0, past.ended_at + rest - self._clock())

    def tick(self, state: ClusterState, reports: Mapping[int, Report], *, paused: bool = False) -> int:
        """Take the next action of each move under way; returns how many moves are still open."""
        moves = self._store.open_reallocations()
        jobs = {job.job_id: job for job in state.jobs if job.spec is not None}
        if not paused:
            # Before anything is started: a renewal after it would keep back what was just let go.
            self._renew_leases(jobs, moves)
        room = capacity(state.nodes, jobs, moves)
        # Smallest growth first: what gives GPUs back comes before what takes them.
        ordered = sorted(moves, key=lambda m: (m.target.gpus - m.source.gpus, m.id))
        still_open = 0
        stuck = all(move.step in (Step.PLANNED, Step.REQUEUED, Step.STARTED) for move in ordered)
        for move in ordered:
            job = jobs.get(move.job_id)
            action = next_action(
                move,
                job,
                reports.get(move.job_id),
                room,
                self._clock(),
                limits=self._limits,
                last_try=self._last_try.get((move.id, move.step), float("-inf")),
                paused=paused,
            )
            stuck = stuck and isinstance(action, Wait)
            still_open += self._carry_out(move, job, action, room)
        if stuck and not paused:
            self._untie(ordered, room)
        return still_open

    def _carry_out(self, move: Reallocation, job: SlurmJob | None, action: Action, room: Capacity) -> bool:
        """Do `action`; True while the move stays open."""
        match action:
            case Wait():
                return True
            case Drain():
                self._drain(move, room)
            case Remind():
                self._tell(move)
            case Requeue():
                return self._requeue(move)
            case Configure():
                if job is not None:
                    self._configure(move, job, room)
            case Reach(step=step, detail=detail):
                self._reach(move, step, detail)
                return not step.terminal
            case Fail(reason=reason, keep_back=keep_back):
                self._fail(move, reason, keep_back=keep_back)
                return False
        return True

    def _untie(self, ordered: Sequence[Reallocation], room: Capacity) -> None:
        """Where all moves wait for each other's GPUs: the least of them gives its own up first."""
        for move in knot(ordered, room)[:1]:
            log.info("job %d: its move goes first, others wait for its GPUs and it for theirs", move.job_id)
            self._drain(move, room)

    def _drain(self, move: Reallocation, room: Capacity) -> None:
        room.promise(move.target, move.source)
        self._reach(move, Step.DRAINING)
        self._tell(move)

    def _tell(self, move: Reallocation) -> None:
        self._authorize()
        self._last_try[move.id, Step.DRAINING] = self._clock()
        try:
            self._slurm.signal(move.job_id)
        except SlurmRefused as error:
            # No step is running (yet): the agent reads its instructions from the database as well.
            log.info("job %d: signal refused (%s); the agent polls for it", move.job_id, error)

    def _requeue(self, move: Reallocation) -> bool:
        """Send the job back to the queue; True while the move stays open. A refusal concerns this job alone."""
        self._authorize()
        self._last_try[move.id, move.step] = self._clock()
        try:
            self._slurm.requeue(move.job_id)
        except SlurmRefused as error:
            now = self._slurm.jobs([move.job_id]).get(move.job_id)
            if now is not None and now.state is JobState.RUNNING:
                self._fail(move, f"Slurm refused the requeue: {error}", keep_back=False)
                return False
            log.info("job %d: requeue refused (%s); it has left its nodes by itself", move.job_id, error)
        return True

    def _configure(self, move: Reallocation, job: SlurmJob, room: Capacity) -> None:
        self._authorize()
        room.take(move.target)
        try:
            self._slurm.configure(move.job_id, geometry(job, move.target), start=True)
        except SlurmRefused as error:
            # An earlier update that timed out may have been carried out since: then the job is where it should be.
            now = self._slurm.jobs([move.job_id]).get(move.job_id)
            if now is None or not same_place(now, move.target):
                self._fail(move, f"Slurm refused the new size: {error}", keep_back=True)
                return
        self._reach(move, Step.CONFIGURED)

    def _reach(self, move: Reallocation, step: Step, detail: str = "") -> None:
        epoch = self._authorize()
        self._store.advance(move.id, step, self._clock(), epoch=epoch, detail=detail)
        log.info("job %d: move %d reached %s %s", move.job_id, move.id, step, detail)
        if step.terminal:
            self._forget(move, failed=False)

    def _fail(self, move: Reallocation, reason: str, *, keep_back: bool) -> None:
        epoch = self._authorize()
        if keep_back:
            try:
                self._slurm.renew([move.job_id], self._clock() + self._lease)
            except SlurmRefused as error:
                log.warning("job %d: its lease could not be renewed: %s", move.job_id, error)
        self._store.advance(move.id, Step.FAILED, self._clock(), epoch=epoch, detail=reason)
        log.warning("job %d: move %d to %s failed: %s", move.job_id, move.id, move.target, reason)
        self._forget(move, failed=True)

    def _forget(self, move: Reallocation, *, failed: bool) -> None:
        for step in Step:
            self._last_try.pop((move.id, step), None)
        past = self._history.setdefault(move.job_id, _History())
        past.ended_at = self._clock()
        past.failures = past.failures + 1 if failed else 0

    def _renew_leases(self, jobs: Mapping[int, SlurmJob], moves: Sequence[Reallocation]) -> None:
        """Keep waiting jobs back, many in one call; a third of the lease may pass between renewals."""
        now = self._clock()
        starting = {m.job_id for m in moves if m.step in (Step.CONFIGURED, Step.STARTED)}
        waiting = [
            job
            for job in jobs.values()
            if job.state is JobState.PENDING and job.job_id not in starting and not job.held_by_user
        ]
        due = [job.job_id for job in waiting if now - self._renewed.get(job.job_id, 0.0) > self._lease / 3]
        self._renewed = {j.job_id: self._renewed[j.job_id] for j in waiting if j.job_id in self._renewed}
        # A job's own --begin, when later than the lease, stays.
        due = [j for j in due if (jobs[j].begin_time or 0.0) <= now]
        for first in range(0, len(due), _RENEWED_AT_ONCE):
            some = due[first : first + _RENEWED_AT_ONCE]
            self._authorize()
            try:
                self._slurm.renew(some, now + self._lease)
            except SlurmRefused as error:
                # Tried again in a third of the lease. What stays refused starts as a plain job; the others' moves
                # must not wait for it.
                log.warning("leases could not be renewed: %s", error)
            self._renewed.update(dict.fromkeys(some, now))


def geometry(job: SlurmJob, target: Placement) -> Geometry:
    """What the job asks of Slurm at `target`; CPUs and memory follow the GPUs, which Slurm itself does not do."""
    assert job.spec is not None
    gpus = target.gpus_per_node
    memory = job.spec.mem_per_gpu_mb
    return Geometry(
        nodes=target.nodes,
        gpus_per_node=gpus,
        cpus_per_task=job.spec.cpus_per_gpu * gpus,
        mem_per_node_mb=memory * gpus if memory else None,
    )
