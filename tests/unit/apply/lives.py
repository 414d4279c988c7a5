"""Lives of a small cluster with polluxd, each drawn from one seed, in virtual time.

The controller, the reconciler and the store's rules are the real ones; Slurm, the database's rows and the jobs' agents
are in memory. In half of the lives the real policy decides, in the others an adversary, who moves jobs for no reason.
In half of the lives nothing breaks but what refuses; in the others everything that `troubled_cluster` knows.

    python -m tests.unit.apply.lives --lives 1000 --seed 1

A life that breaks an invariant is printed with its seed, and the same seed plays the same life again.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any, NamedTuple

from polluxd.apply.actions import REFUSED_SIZE, REFUSED_START
from polluxd.apply.refused.refusals import TRIED_AGAIN_S
from polluxd.errors import StoreUnavailable
from polluxd.model import JobSpec, JobState, Move, Placement, Step
from polluxd.policy import decide
from polluxd.slurm.fake.fake_job import FakeJob
from polluxd.slurm.protocol import Geometry
from tests import build

from .costs import Costs
from .troubled_cluster import ABLE, CALLS, MOST_JOBS, STEPS, Cluster
from .world import LEADER_LEASE_S, Killed, Process

EVENTS = (5, 10, 20, 40)
"""How many things happen in a life: short lives reach as much in a second as long ones, and shrink to less."""
USERS = ("alice", "bea", "cem")
BACK_S = 10.0
"""Longest time that a refused training stands, while nothing else is wrong."""
QUIET_S = 200.0
"""A job that waits beside idle GPUs has been tried again by then, and others have given way."""


class Violation(AssertionError):
    """An invariant that did not hold."""


class Start(NamedTuple):
    """What Slurm is to start."""

    user: str
    gpus: int
    """Of each node."""
    nodes: Sequence[str]
    minutes: float
    """Its time limit."""
    beside: Sequence[tuple[str, int, float]] = ()
    """Of each job that runs: its user, its GPUs, and its minutes left."""
    completing: int = 0
    """Jobs that are COMPLETING: they have left all limits, and keep their licences."""

    @property
    def total(self) -> int:
        return self.gpus * len(self.nodes)

    def of(self, user: str) -> list[tuple[str, int, float]]:
        """Of those beside it, the jobs of a user."""
        return [one for one in self.beside if one[0] == user]


@dataclass
class Cause:
    """A rule by which Slurm or the site refuses starts, which no record shows."""

    kind: str
    most: int
    node: str = ""
    user: str = ""
    version: int = 0
    """Counts its changes."""

    @property
    def reason(self) -> str:
        """What squeue says."""
        return _SAYS.get(self.kind, self.kind)

    def bars(self, one: Start) -> bool:
        """Whether it refuses a start."""
        return _BARS[self.kind](self, one)


_BARS: dict[str, Callable[[Cause, Start], bool]] = {
    "QOSMaxGRESPerJob": lambda rule, one: one.total > rule.most,
    "update": lambda rule, one: one.total > rule.most,
    "QOSMaxGRESPerUser": lambda rule, one: (
        one.user == rule.user and sum(gpus for _, gpus, _ in one.of(rule.user)) + one.total > rule.most
    ),
    "QOSMaxGRESMinutesPerJob": lambda rule, one: one.total * one.minutes > rule.most * 60.0,
    "PartitionNodeLimit": lambda rule, one: len(one.nodes) > 1,
    "Resources": lambda rule, one: rule.node in one.nodes and one.gpus > rule.most,
    "QOSMaxJobsPerUserLimit": lambda rule, one: (
        one.user == rule.user and len(one.of(rule.user)) + 1 > rule.most
    ),
    "QOSGrpGRES": lambda rule, one: sum(gpus for _, gpus, _ in one.beside) + one.total > 2 * rule.most,
    "QOSGrpGRESRunMinutes": lambda rule, one: (
        sum(gpus * minutes for _, gpus, minutes in one.beside) + one.total * one.minutes > rule.most * 120.0
    ),
    "Licenses": lambda rule, one: len(one.beside) + one.completing + 1 > rule.most,
    "QOSMaxWallDurationPerJobLimit": lambda rule, one: one.minutes > rule.most * 30.0,
    "InvalidQOS": lambda rule, one: one.user == rule.user,
    "reservation": lambda rule, one: rule.node in one.nodes and one.minutes > rule.most * 15.0,
    "switches": lambda rule, one: rule.node in one.nodes and len(one.nodes) > 1,
    "features": lambda rule, one: rule.node in one.nodes,
}
REASONS = (
    "QOSMaxGRESPerJob",
    "QOSMaxGRESPerUser",
    "QOSMaxGRESMinutesPerJob",
    "PartitionNodeLimit",
    "Resources",
    "update",
)
MORE_FROM = 1_000_000
"""Seeds from here on play lives with more reasons, and with trainers of one size: others stay what they were."""
MORE_REASONS = tuple(_BARS)
FOR_ALL_FROM = 3_006_000
"""Seeds from here on play lives in which limits on several jobs refuse plain jobs, too."""
_OF_SEVERAL = {
    "QOSMaxGRESPerUser",
    "QOSMaxJobsPerUserLimit",
    "QOSGrpGRES",
    "QOSGrpGRESRunMinutes",
    "Licenses",
}
_SAYS = {
    "reservation": "ReqNodeNotAvail, May be reserved for other job",
    "switches": "Resources",
    "features": "BadConstraints",
}


@dataclass
class Stop:
    """A training that a refused move has stopped."""

    job_id: int
    cause: Cause
    version: int
    move: int
    at: float
    back_at: float | None = None
    taken: bool = False
    """Others have its former GPUs."""


class Door:
    """What a polluxd calls; one of the calls of a life may not come back."""

    def __init__(self, life: Life, name: str, inner: Any) -> None:
        self._life, self._name, self._inner = life, name, inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **words: Any) -> Any:
            self._life.calls(self._name, after=False)
            answer = found(*args, **words)
            self._life.calls(self._name, after=True)
            return answer

        return call


@dataclass
class Broken:
    """The call that will not come back."""

    door: str
    """`slurm` or `store`; empty: either."""
    left: int
    """Calls until then."""
    after: bool
    """It is carried out, and only its answer is lost."""
    error: BaseException


class Life(Cluster):
    """One life.

    Args:
        seed: all that happens follows from it.
    """

    def __init__(self, seed: int) -> None:
        random = Random(seed)
        nodes, exit_s = random.choice((1, 2, 3, 3)), random.choice((0.1, 0.1, 0.1, 3.0, 12.0))
        super().__init__(nodes, exit_s, poll_s=2.0, interval_s=15.0)
        self.random, self.exit_s = random, exit_s
        self.broken: Broken | None = None
        self.more, self.for_all = seed >= MORE_FROM, seed >= FOR_ALL_FROM
        self.world.door = lambda name, inner: inner if name == "authorize" else Door(self, name, inner)
        self.process = Process(self.world)
        self.events = self.random.choice(EVENTS)
        self.calm = self.random.random() < 0.5
        self.sane = self.random.random() < 0.5
        self.history: list[str] = []
        self.causes: list[Cause] = []
        self.stops: list[Stop] = []
        self._refused: dict[tuple[int, int], tuple[Cause, int]] = {}
        """By job and attempt: what refused its start."""
        self._by_chance: set[tuple[int, int]] = set()
        """Starts, by job and attempt, that a rule refused for plain jobs which began since the training left."""
        self._known: set[tuple[int, int]] = set()
        """Rules, with their versions, that have stopped a training."""
        self._free_since: dict[int, float] = {}
        """Since when trainings have stood that could go back."""
        self._judged = 0
        self.costs = Costs(self.world, self._unknown, self._barred, self._by_chance)
        self.world.slurm.refusal = self._refuses
        self.world.slurm.refuses_update = self._refuses_update
        if self.sane:
            self.world.policy = decide
        self.guaranteed = self.random.choice(("", "", *USERS))
        if self.guaranteed:
            self.world.rows.settings["user_guarantees"] = {self.guaranteed: self.random.choice((1, 2, 4))}
        self.world.words = _measured

    # --- Slurm's answers ----------------------------------------------------------------------------

    def _cause_of(
        self, job: FakeJob, nodes: Sequence[str], gpus: int, since: float | None = None
    ) -> Cause | None:
        """What refuses a start; with `since`, without the plain jobs that have started since then."""
        running = [one for one in map(self.world.slurm.raw, self.world.everybody) if one.held]
        beside = [
            (one.user, sum(one.held.values()), self._minutes(one))
            for one in running
            if one.job_id != job.job_id
            and one.state is not JobState.COMPLETING
            and not (one.job_id in self.world.foreign and (one.started or 0.0) >= (since or inf))
        ]
        completing = sum(one.state is JobState.COMPLETING for one in running)
        start = Start(job.user, gpus, nodes, (job.time_limit_s or 86400.0) / 60.0, beside, completing)
        kinds = _BARS.keys() - {"update"} if job.spec is not None else _OF_SEVERAL
        return next((cause for cause in self.causes if cause.kind in kinds and cause.bars(start)), None)

    def _minutes(self, job: FakeJob) -> float:
        """Until the time limit of a job that runs."""
        began = self.world.slurm.clock() if job.started is None else job.started
        return max(began + (job.time_limit_s or 86400.0) - self.world.slurm.clock(), 0.0) / 60.0

    def _updates(self, gpus: int, nodes: Sequence[str]) -> Cause | None:
        """What refuses an update to so many GPUs."""
        one = Start("", gpus, nodes, 0.0)
        return next((cause for cause in self.causes if cause.kind == "update" and cause.bars(one)), None)

    def _refuses(self, job: FakeJob, nodes: Sequence[str]) -> str:
        if job.spec is None and not self.for_all:
            return ""
        wanted = nodes or tuple(f"?{n}" for n in range(job.nodes_wanted))
        cause = self._cause_of(job, wanted, job.gpus_per_node)
        if job.spec is None:
            return "" if cause is None else cause.reason
        # A limit that a plain job has taken since the training left its place is chance, like GPUs that one took.
        began = None if job.left_at is None else job.leaves_at - self.exit_s
        shown = self._cause_of(job, wanted, job.gpus_per_node, began)
        if cause is not None and shown is None:
            self._by_chance.add((job.job_id, job.restarts))
        if shown is not None and job.required:
            self._refused[job.job_id, job.restarts] = shown, shown.version
        return "" if cause is None else cause.reason

    def _refuses_update(self, job_id: int, geometry: Geometry) -> str:
        if geometry.anywhere:
            return ""
        cause = self._updates(geometry.gpus_per_node, geometry.nodes)
        if cause is None:
            return ""
        self._refused[job_id, self.world.truth(job_id).restart_count] = cause, cause.version
        return f"the site allows {cause.most} GPUs"

    def _unknown(self, move: Move) -> bool:
        """Whether a rule refused the move's start that had stopped no training since it changed."""
        found = self._refused.get((move.job_id, move.attempt + 1))
        if found is None:
            return False
        first = (id(found[0]), found[1]) not in self._known
        self._known.add((id(found[0]), found[1]))
        return first

    def _barred(self, move: Move) -> bool:
        """Whether a rule refuses the job of a move where the move took it from."""
        job, source = self.world.slurm.raw(move.job_id), move.source
        return self._cause_of(job, source.nodes, source.gpus_per_node) is not None

    # --- life ---------------------------------------------------------------------------------------

    def live(self) -> None:
        """Live through all events, then through a quiet time, and to the end of all jobs."""
        try:
            for _ in range(2):
                self._submit()
            if self.random.random() < 0.8:
                self._new_cause()
            for _ in range(self.events):
                name, happens = self._draw()
                self.history.append(name)
                happens()
                self._pass(self.random.choice((0.0, 1.0, 5.0, 15.0)))
            self.settle()
            self._quiet()
            self.causes.clear()
            self.world.policy = decide  # an adversary may never ask for what a job may have
            self.converge()
        finally:
            self.world.close()

    def _draw(self) -> tuple[str, Callable[[], object]]:
        pick, seconds = self.random.randrange(10), self.random.choice((1.0, 4.0, 15.0))
        yes = self.random.random() < 0.5
        name = self.random.choice(sorted(self.world.gpus))
        calm: dict[str, Callable[[], object]] = {
            "submit": self._submit,
            "foreign": lambda: self.foreign(
                gpus=self.random.randint(1, 4), runtime=self.random.choice((2.0, 20.0))
            ),
            "cancel": lambda: self.cancel(pick=pick, how=JobState.CANCELLED),
            "cause": self._new_cause,
            "cause changes": self._change_cause,
            "agent": lambda: self._agent(pick),
            "drained": lambda: self.node_goes(
                name=name, seconds=self.random.choice((15.0, 60.0)), breaks=False
            ),
            "rest": lambda: self._pass(11.5),
            "hold while it runs": lambda: self._hold_running(pick),
        }
        storm: dict[str, Callable[[], object]] = {
            "hold": lambda: self.hold(pick=pick, seconds=seconds),
            "dependency": lambda: self._depend(pick, seconds),
            "time limit": lambda: self._shorten(pick),
            "requeue": lambda: self.requeue_by_hand(pick=pick),
            "node": lambda: self._node(name, seconds, breaks=yes),
            "pause": lambda: self.pause(seconds=seconds),
            "pin": lambda: self.pin(pick=pick, seconds=seconds),
            "cancel move": lambda: self.cancel_move(pick=pick),
            "slurm fails": lambda: self.slurm_fails(
                call=self.random.choice(CALLS), applied=yes, refused=self.random.random() < 0.3
            ),
            "slurmctld": lambda: self.slurmctld_restarts(seconds=self.random.choice((1.0, 5.0)), forgets=yes),
            "database": lambda: self.database(seconds=seconds),
            "kill": self.kill,
            "killed at a call": lambda: self._break("", Killed()),
            "statement fails": lambda: self._break("store", StoreUnavailable()),
            "in mid-move": lambda: self._in_mid_move(pick, seconds),
            "kill at": lambda: self.kill_at(
                step=self.random.choice(STEPS[:4]), seconds=self.random.choice((4.0, 40.0))
            ),
            "freeze": self._freeze,
            "clock": lambda: self.clock_steps(seconds=self.random.choice((-7200.0, -30.0, 30.0, 7200.0))),
            "companion": lambda: self.companion_goes(
                pick=pick, how=self.random.choice(("cancelled", "failed", "held"))
            ),
        }
        known = calm if self.calm else calm | storm
        chosen = self.random.choice(sorted(known))
        return chosen, known[chosen]

    def _break(self, door: str, error: BaseException) -> None:
        self.broken = Broken(door, self.random.randint(1, 60), self.random.random() < 0.5, error)

    def calls(self, door: str, *, after: bool) -> None:
        """One of polluxd's calls begins, or has been carried out."""
        broken = self.broken
        if broken is None or broken.after is not after or broken.door not in ("", door):
            return
        broken.left -= 1
        if not broken.left:
            self.broken = None
            raise broken.error

    def _hold_running(self, pick: int) -> None:
        """A user puts a job on hold while it runs, which protects it from moves, and leaves it so."""
        job_id = self.job(pick, JobState.RUNNING)
        if job_id is not None:
            self.world.slurm.hold(job_id, True)
            self.begin(f"hold {job_id}", 1e6)

    def _in_mid_move(self, pick: int, seconds: float) -> None:
        """Somebody does something to a job while a move is at some step."""
        step = self.random.choice(STEPS)
        what = self.random.choice(("requeue", "hold", "cancel", "node", "foreign", "dies", "killed"))
        for _ in range(20):
            found = [m for m in map(self._move, self.world.rows.open) if m.step is step]
            if found:
                break
            self.turn()
        else:
            return
        move, slurm = found[pick % len(found)], self.world.slurm
        self.history[-1] += f": {what} at {step}"
        match what:
            case "requeue":
                slurm.requeue_by_hand(move.job_id)
            case "hold":
                slurm.hold(move.job_id, True)
                self.begin(f"hold {move.job_id}", seconds)
            case "cancel" | "dies":
                slurm.finish(move.job_id, JobState.CANCELLED if what == "cancel" else JobState.FAILED)
            case "node":
                nodes = (move.target or move.source).nodes
                self._node(nodes[pick % len(nodes)], seconds, breaks=self.random.random() < 0.5)
            case "foreign":
                self.world.submit_foreign(self.random.randint(1, 4), runtime=seconds)
            case "killed":
                self.process = Process(self.world)

    def _move(self, number: int) -> Move:
        return self.world.rows.moves[number - 1]

    def _freeze(self) -> None:
        if self.frozen is not None:
            self.thaw()
        elif len(self.thawed) < 2:
            self.freeze(waited=self.random.choice((0.0, LEADER_LEASE_S + 0.5)))

    def _node(self, name: str, seconds: float, *, breaks: bool) -> None:
        self.node_goes(name=name, seconds=seconds, breaks=breaks)
        self._changed(name)

    def end(self, trouble: str) -> None:
        super().end(trouble)
        kind, _, name = trouble.partition(" ")
        if kind == "node":
            self._changed(name)

    def _changed(self, node: str) -> None:
        """A node went or came: what it refuses may have changed."""
        for cause in self.causes:
            # What refuses two nodes together may be either's: it is tried again once one of them has changed.
            cause.version += cause.kind == "switches" or (cause.kind == "Resources" and cause.node == node)

    def _depend(self, pick: int, seconds: float) -> None:
        job_id = self.job(pick, JobState.PENDING)
        others = [number for number in self.world.trainings if number != job_id]
        if job_id is not None and others:
            self.world.slurm.depend(job_id, self.random.choice(others))
            self.begin(f"dependency {job_id}", seconds)

    def _shorten(self, pick: int) -> None:
        job_id = self.job(pick, JobState.PENDING, JobState.RUNNING)
        if job_id is not None:
            self.world.slurm.shorten(job_id, self.random.choice((60.0, 120.0, 600.0)))

    def _submit(self) -> None:
        if sum(not job.state.finished for job in self.world.ours()) >= MOST_JOBS:
            return
        number, size = self.random.randrange(len(USERS)), 1
        if self.more and self.random.random() < 0.3:
            size = self.random.randint(2, 4)
        job_id = self.world.submit(
            spec=JobSpec(own_size=size) if size > 1 else None,
            work_s=self.random.choice((3.0, 60.0, 600.0)),
            time_limit_s=self.random.choice((None, 3600.0)),
            able=self.random.choice(ABLE),
            user=USERS[number],
            uid=1000 + number,
            **({"nodes": 1, "gpus_per_node": size} if size > 1 else {}),
        )
        if size > 1:
            self.world.trainings[job_id].least = self.random.choice((1, size))

    def _new_cause(self) -> None:
        if len(self.causes) < 2:
            self.causes.append(
                Cause(
                    self.random.choice(MORE_REASONS if self.more else REASONS),
                    self.random.randint(1, 3),
                    self.random.choice(sorted(self.world.gpus)),
                    self.random.choice(USERS),
                )
            )

    def _change_cause(self) -> None:
        if self.causes:
            cause = self.random.choice(self.causes)
            cause.version += 1
            cause.most = self.random.randint(1, 4)

    def _agent(self, pick: int) -> None:
        """An agent becomes a bad one, or a good one again."""
        job_id = self.job(pick, JobState.PENDING, JobState.RUNNING)
        if job_id is not None:
            training = self.world.trainings[job_id]
            kind = self.random.choice(("good", "refuses", "keeps", "silent", "lies", "dies"))
            training.refuses, training.keeps_gpus = kind == "refuses", kind == "keeps"
            training.silent, training.dies = kind == "silent", kind == "dies"
            training.saves = kind != "lies"

    # --- invariants ---------------------------------------------------------------------------------

    def turn(self, seconds: float = 0.5) -> None:
        try:
            super().turn(seconds)
        except Killed:
            self.process = Process(self.world)
            super().turn(seconds)
        self._measure(seconds)

    def step(self) -> None:
        self._pass(1.5)

    def _pass(self, seconds: float, step: float = 2.0) -> None:
        """Let time pass: in larger steps while nothing moves."""
        until = self.world.slurm.clock() + seconds
        while (left := until - self.world.slurm.clock()) > 1e-6:
            self.turn(min(left, 0.5 if self.world.rows.open or self.costs.standing else step))

    def _measure(self, seconds: float) -> None:
        """Count what trainings did, and see what became of refused ones."""
        world = self.world
        moves = world.rows.moves
        self.costs.measure(seconds)
        while self._judged < len(moves) and moves[self._judged].step.terminal:
            self._judge(moves[self._judged])
            self._judged += 1
        if self.calm and self.sane:
            for job_id, one in self.costs.standing.items():
                if not world.truth(job_id).held_by_user and self._stands(job_id, moves[one.move - 1]):
                    raise Violation(f"job {job_id} stands without a next place: {moves[one.move - 1]}")
        for stop in self.stops:
            self._back(stop)

    def _stands(self, job_id: int, move: Move) -> bool:
        """Whether a training has stood for long while its former place is free."""
        now = self.world.slurm.clock()
        waits = (
            Step.REQUEUED in move.times
            and self._free(move.source)
            and not self._barred(move)
            and not any(
                one.job_id == job_id and not one.step.terminal for one in self.world.rows.moves[move.id - 1 :]
            )
        )
        since = self._free_since.setdefault(job_id, now) if waits else self._free_since.pop(job_id, now)
        # What was refused, to it or to another job under the same rule, is tried again after a minute.
        again = TRIED_AGAIN_S if self._refused or self._by_chance else 0.0
        return waits and now - since > 2 * BACK_S + again

    def _free(self, place: Placement, at: float = inf) -> bool:
        """Whether Slurm could start a job there, also at a moment of this turn."""
        used: Counter[str] = Counter()
        for one in map(self.world.slurm.raw, self.world.everybody):
            left = dict.fromkeys(one.left_nodes, one.gpus_per_node) if one.leaves_at > at else {}
            used.update(one.held or left)
        return all(
            self.world.slurm.opens(n) and used[n] + place.gpus_per_node <= self.world.gpus[n]
            for n in place.nodes
        )

    def _judge(self, move: Move) -> None:
        """Take in the end of a move."""
        stopped = move.step is Step.FAILED and Step.REQUEUED in move.times and move.path == "requeue"
        refused = any(one in move.detail for one in (REFUSED_START, REFUSED_SIZE))
        found = self._refused.get((move.job_id, move.attempt + 1))
        if not stopped or not refused or found is None:
            return
        cause, version = found
        if self.calm and self._can_go_back(move):
            raise Violation(f"it does not go back where it was: {move}")
        self.stops.append(Stop(move.job_id, cause, version, move.id, move.times[Step.REQUEUED]))

    def _can_go_back(self, move: Move) -> bool:
        """Whether the training of a refused move has no way back although its former place is there."""
        job = self.world.slurm.raw(move.job_id)
        later = [one for one in self.world.rows.moves[move.id :] if one.job_id == move.job_id]
        wanted = {
            name
            for one in self.world.rows.moves
            if not one.step.terminal and one.job_id != move.job_id
            for name in (*one.target.nodes, *one.source.nodes)
        }
        return (
            job.state is JobState.PENDING
            and not later
            and not job.on_hold
            and wanted.isdisjoint(move.source.nodes)
            and self._free(move.source, move.times[Step.FAILED])
            and self._cause_of(job, move.source.nodes, move.source.gpus_per_node) is None
        )

    def _back(self, stop: Stop) -> None:
        if stop.back_at is not None or stop.taken:
            return
        job, source = self.world.truth(stop.job_id), self.world.rows.moves[stop.move - 1].source
        now = self.world.slurm.clock()
        if job.state is not JobState.PENDING and not job.state.finished:
            stop.back_at = now
            return
        barred = self._cause_of(self.world.slurm.raw(stop.job_id), source.nodes, source.gpus_per_node)
        stop.taken = job.state.finished or job.held_by_user or not self._free(source) or barred is not None
        stop.taken |= stop.version != stop.cause.version
        if not stop.taken and self.calm and self.sane and now - stop.at > BACK_S + 5.0:
            raise Violation(f"job {stop.job_id} stands since {now - stop.at:.1f} s, refused by {stop.cause}")

    def stopped_once(self) -> None:
        """No training is stopped twice for one cause that has not changed."""
        many = Counter((stop.job_id, id(stop.cause), stop.version) for stop in self.stops)
        if many and max(many.values()) > 1:
            raise Violation(f"stopped again for one cause: {self.stops}")

    def _quiet(self) -> None:
        """Wait; then every idle GPU beside a waiting job has a true reason, and nobody keeps more than a share."""
        for training in self.world.trainings.values():
            training.work_s = 1e9
        self._pass(QUIET_S, step=5.0)
        for job_id in self.world.trainings:
            self._explained(job_id)
        self._guarantee_holds()

    def _explained(self, job_id: int) -> None:
        """A waiting job has a cause: no GPUs, or a rule that refuses it everywhere."""
        world, job = self.world, self.world.slurm.raw(job_id)
        shown = world.truth(job_id)
        moving = any(m.job_id == job_id and not m.step.terminal for m in world.rows.moves)
        if shown.state is not JobState.PENDING or not self.sane or moving or shown.held_by_user:
            return
        used: Counter[str] = Counter()
        for one in world.holders():
            used.update(one.gpus_per_node_held)
        for number in world.foreign:
            used.update(world.truth(number).gpus_per_node_held)
        least = world.trainings[job_id].least
        if job_id not in world.rows.reports:  # it waits for the size that its user asked for
            least = max(least, shown.spec.own_size or 1)
        for name, gpus in world.gpus.items():
            refused = self._cause_of(job, (name,), least)
            refused = refused or self._updates(least, (name,))
            open_ = f"node {name}" not in self.over
            if open_ and used[name] + least <= gpus and refused is None:
                raise Violation(f"job {job_id} waits beside {gpus - used[name]} idle GPUs of {name}: {shown}")
        owners, kept = Counter[str](), Counter[str]()
        for one in world.holders():
            gpus, training = sum(one.gpus_per_node_held.values()), world.trainings.get(one.job_id)
            owners[one.user] += gpus
            # A trainer that works at no smaller size has its price in the plan, like `min-gpus`.
            dishonest = training is not None and not training.honest and training.least == 1
            kept[one.user] += gpus * (one.held_by_user or dishonest)
        users = {one.user for one in world.ours() if not one.state.finished}
        share = sum(world.gpus.values()) / len(users)
        barred = any(self._cause_of(job, (name,), 1) for name in world.gpus)
        most = max(kept.values(), default=0)
        if len(users) > 1 and not barred and owners[shown.user] + 1 <= share and most > share + 1:
            raise Violation(f"job {job_id} waits, while {owners} hold more than {share:.1f}, and keep {kept}")

    def _guarantee_holds(self) -> None:
        """A user with a guarantee and a job that waits has it, where all others' agents are honest."""
        world, waits = self.world, False
        honest = all(training.honest for training in world.trainings.values())
        if not self.guaranteed or not self.sane or not honest or self.over:
            return
        least, owned = world.rows.settings["user_guarantees"][self.guaranteed], Counter[str]()
        for one in world.holders():
            owned[one.user] += sum(one.gpus_per_node_held.values())
            barred = any(
                self._cause_of(world.slurm.raw(one.job_id), (name,), 1) is not None
                or self._updates(1, (name,)) is not None
                for name in world.gpus
            )
            starts = one.job_id in world.trainings and world.trainings[one.job_id].least <= least
            waits |= one.user == self.guaranteed and one.state is JobState.PENDING and starts and not barred
        held_back = any(one.held_by_user for one in world.ours())
        others = owned.total() - owned[self.guaranteed]
        if waits and not held_back and owned[self.guaranteed] < least <= owned[self.guaranteed] + others:
            raise Violation(f"{self.guaranteed} waits with less than its guarantee of {least}: {owned}")


def _measured(job_id: int) -> dict[str, Any]:
    """What an honest job reports besides: it scales, and its noise grows."""
    kind = ("scalable", "middling", "stubborn")[job_id % 3]
    return {"params": build.THETAS[kind], "noise": build.NOISE, "explored_gpus": 12, "explored_nodes": 3}


KINDS = ("lost", "chance", "learnt", "shut_out", "own")


@dataclass
class Played:
    """What lives came to."""

    lives: int = 0
    stops: int = 0
    moves: int = 0
    gpu_s: float = 0.0
    """Of the calm lives under the real policy; so are the costs, by kind."""
    costs: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[int, str]] = field(default_factory=list)

    def take_in(self, life: Life) -> None:
        self.stops += len(life.stops)
        self.moves += len(life.world.rows.moves)
        if life.calm and life.sane:
            costs = life.costs
            self.gpu_s += costs.gpu_s
            for kind in KINDS:
                self.costs[kind] += getattr(costs, kind).total()

    @property
    def lost(self) -> float:
        """The part of GPU seconds that is lost to moves that came to nothing, for reasons that polluxd could know."""
        return self.costs["lost"] / max(self.gpu_s, 1.0)


def play(seed: int) -> Life:
    """Play the life of a seed."""
    life = Life(seed)
    life.live()
    return life


def lives(first: int, count: int, tell: Callable[[str], None] = print) -> Played:
    """Play lives of successive seeds."""
    done, log = Played(), logging.getLogger("polluxd")
    before = log.level
    log.setLevel(logging.ERROR)  # nobody reads what is below
    try:
        for seed in range(first, first + count):
            done.lives += 1
            try:
                done.take_in(play(seed))
            except Exception as error:
                told = "".join(traceback.format_exception(error)[-3:])
                done.failed.append((seed, told))
                tell(f"seed {seed}: {told[-1500:]}")
            if seed % 100 == 0:
                gc.collect()
    finally:
        log.setLevel(before)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lives", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    gc.disable()
    began = time.process_time()
    done = lives(arguments.seed, arguments.lives)
    took = time.process_time() - began
    part = {kind: f"{100 * done.costs[kind] / max(done.gpu_s, 1.0):.3f} %" for kind in KINDS}
    print(
        f"{done.lives} lives of seeds from {arguments.seed}, {done.lives / took:.1f} a second of CPU: "
        f"{len(done.failed)} violations; {done.moves} moves, {done.stops} refused after a stop. Of the GPU seconds of "
        f"calm lives under the real policy moves that came to nothing cost {part['lost']}; besides, by chance "
        f"{part['chance']}, to learn of rules that nothing showed {part['learnt']} and {part['shut_out']} "
        f"where these refused the former size, too, by their own users {part['own']}"
    )
    for seed, _ in done.failed:
        print(f"failing seed: {seed}")
    return int(bool(done.failed))


if __name__ == "__main__":
    sys.exit(main())
