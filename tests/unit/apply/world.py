"""A cluster in memory: jobs, agents, one polluxd or two, invariants."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from pollux.goodput import BatchLimits
from polluxd.apply.placed import held
from polluxd.apply.reconciler import Reconciler
from polluxd.config.config_file import Config
from polluxd.config.settings import MoveSettings
from polluxd.cycle.controller import Controller
from polluxd.daemon import Daemon
from polluxd.model import JobSpec, JobState, Node, Placement, Plan, Report, Snapshot, Step
from polluxd.slurm.protocol import Companion, Geometry
from polluxd.store.fake import FakeRows
from tests import build
from tests.troubled_slurm import TroubledSlurm
from tests.troubled_store import TroubledStore

from .agents import Training, resize

TIMEOUT_S, LEADER_LEASE_S, LEASE_S = 1.0, 3.0, 60.0
LIMITS = MoveSettings(
    cooldown_s=2.0,
    planned_timeout_s=30.0,
    drain_timeout_s=6.0,
    requeued_timeout_s=20.0,
    start_timeout_s=10.0,
    training_timeout_s=10.0,
)
DRAIN_WAIT_S = 120.0
"""pollux.checkpoint.checkpointer: so long a drained agent waits to be killed before it trains on."""

Policy = Callable[[Snapshot], Plan]


class Killed(BaseException):
    """kill -9 of polluxd."""


def config(mode: str = "enforce", *, interval_s: float = 5.0, poll_s: float = 0.5) -> Config:
    cycle = {"interval_s": interval_s, "floor_s": 1.0, "poll_s": poll_s, "busy_poll_s": 0.5}
    return build.config(
        mode=mode,
        slurm={"timeout_s": TIMEOUT_S, "lease_s": LEASE_S},
        cycle={**cycle, "leader_lease_s": LEADER_LEASE_S},
    )


class Process(Daemon):
    """polluxd's own loop, turn by turn, over the fakes.

    `door` wraps its client of Slurm and its store.
    """

    def __init__(self, world: World, door: Callable[[str, Any], Any] | None = None) -> None:
        self._world, self._door = world, door or world.door
        self._due = -inf
        world.lives += 1
        super().__init__(lambda: config(**world.cycle))

    def turn_if_due(self) -> None:
        """Take a turn, unless the pause after the last one has not passed."""
        now = self._world.slurm.clock()
        if now >= self._due - 1e-6:
            self._due = now + self.turn()

    def _assemble(self, config: Config) -> None:
        world = self._world
        self._config = config
        self._schema_known = True
        self._pruned = float("inf")
        store = TroubledStore(world.rows, lease_s=config.cycle.leader_lease_s)
        self.store = store
        slurm = self._door("slurm", Watched(world, store))
        door: Any = self._door("store", store)
        reconciler = Reconciler(
            slurm,
            door,
            limits=LIMITS,
            lease=LEASE_S,
            authorize=self._door("authorize", self.authorize),
            clock=world.wall,
            monotonic=world.slurm.clock,
        )
        self.controller = Controller(
            config,
            slurm,
            door,
            reconciler,
            monotonic=world.slurm.clock,
            policy=lambda snapshot, _cache: world.policy(snapshot),
            metrics=self.metrics,
        )


class Watched:
    """Slurm as one polluxd reaches it; each writing call is checked."""

    def __init__(self, world: World, store: TroubledStore) -> None:
        self._world, self._store, self._slurm = world, store, world.slurm

    def __getattr__(self, name: str) -> Any:
        assert name in ("observe", "jobs", "can_shrink", "ask_limits"), f"{name}: unchecked"
        return getattr(self._slurm, name)

    def requeue(self, job_id: int) -> None:
        self._about_to("requeue", job_id)
        world, job = self._world, self._world.truth(job_id)
        if job.state is JobState.RUNNING:
            moves = [m for m in world.rows.moves if m.job_id == job_id and m.step is Step.CHECKPOINTED]
            assert [m.attempt for m in moves] == [job.restart_count], f"requeued outside of a move: {moves}"
            training = world.trainings[job_id]
            # What an acknowledgement promised: no step is trained twice.
            kept = moves[0].id not in world.acknowledged or training.done_s == training.saved_s
            assert kept, "requeued after it had trained on"
        before = world.truth(job_id).restart_count
        try:
            self._slurm.requeue(job_id)
        finally:
            world.requeued[job_id] += world.truth(job_id).restart_count - before

    def configure(self, job_id: int, geometry: Geometry, **words: Any) -> None:
        self._about_to("configure", job_id)
        world = self._world
        claim = world.truth(job_id).companion
        if claim is not None:
            assert world.truth(claim.parent).uid == world.truth(job_id).uid, "placed another user's companion"
        promised = Counter[str]()
        for job in world.holders():
            promised.update(job.gpus_per_node_held)
        for move in world.rows.moves:
            starts = move.step is Step.CONFIGURED and world.truth(move.job_id).state is JobState.PENDING
            if starts and move.job_id != job_id:
                promised.update(dict.fromkeys(move.target.nodes, move.target.gpus_per_node))
            comes = [c for c in world.holders() if c.companion and c.companion.move == move.id]
            if move.grows and move.step is Step.CONFIGURED and not any(c.gpus_per_node_held for c in comes):
                promised.update(dict.fromkeys(move.added.nodes, move.added.gpus_per_node))
        if geometry.anywhere:  # Slurm starts it where GPUs are free: no node is promised
            self._slurm.configure(job_id, geometry, **words)
            return
        promised.update(dict.fromkeys(geometry.nodes, geometry.gpus_per_node))
        # Elsewhere a job whose lease lapsed may have taken what was promised: that is for Slurm to sort out.
        over = {n: promised[n] for n in geometry.nodes if promised[n] > world.gpus[n]}
        assert not over, f"more promised than there is: {over}"
        self._slurm.configure(job_id, geometry, **words)

    def run_again(self, job_id: int) -> None:
        self._about_to("run_again", job_id)
        self._slurm.run_again(job_id)

    def shrink(self, job_id: int, nodes: Sequence[str]) -> None:
        self._about_to("shrink", job_id)
        training, held = self._world.trainings[job_id], self._world.truth(job_id).gpus_per_node_held
        if training.attempt == self._world.truth(job_id).restart_count:
            taken = set(training.nodes) & (set(held) - set(nodes))
            assert not taken, f"nodes taken from under ranks of job {job_id}: {taken}"
        self._slurm.shrink(job_id, nodes)

    def cancel(self, job_ids: Sequence[int]) -> None:
        world = self._world
        for job_id in job_ids:
            self._about_to("cancel", job_id)
            assert job_id in world.companions, f"cancelled job {job_id}, which is no companion"
            assert not self._needed(job_id), f"companion {job_id} ended under its parent"
        self._slurm.cancel(job_ids)

    def _needed(self, job_id: int) -> bool:
        """Ranks train on it, and nobody has told the parent to give it up."""
        world, claim = self._world, self._world.truth(job_id).companion
        training, parent = world.trainings.get(claim.parent), world.truth(claim.parent)
        if training is None or parent.state is not JobState.RUNNING or job_id not in training.lent:
            return False
        moves = [m for m in world.rows.moves if m.job_id == claim.parent]
        leaving = any(not m.in_allocation and m.step is Step.CHECKPOINTED for m in moves)
        own = world.rows.moves[claim.move - 1]
        return training.attempt == parent.restart_count and not leaving and own.step is not Step.FAILED

    def limit_time(self, job_id: int, seconds: float) -> None:
        self._about_to("limit_time", job_id)
        self._slurm.limit_time(job_id, seconds)

    def release(self, job_id: int) -> None:
        self._about_to("release", job_id)
        self._slurm.release(job_id)

    def probe(self, job_id: int) -> None:
        self._about_to("probe", job_id)
        self._slurm.probe(job_id)

    def renew(self, job_ids: Sequence[int], until: float) -> None:
        for job_id in job_ids:
            self._about_to("renew", job_id)
        self._slurm.renew(job_ids, until)

    def _about_to(self, call: str, job_id: int) -> None:
        world = self._world
        assert job_id not in world.foreign, f"{call} of foreign job {job_id}"
        assert self._store.epoch == world.rows.epoch, f"{call} by a former leader"


class World:
    """Nodes, jobs, agents, and the time that passes for all of them."""

    def __init__(
        self, nodes: int = 2, gpus: int = 4, *, policy: Policy | None = None, exit_s: float = 0.1
    ) -> None:
        self.gpus = {f"n{i + 1}": gpus for i in range(nodes)}
        self.slurm = TroubledSlurm(
            [Node(name, gpus, cpus=64, partitions=frozenset({"main"})) for name in self.gpus], exit_s=exit_s
        )
        self.rows = FakeRows(self.slurm.clock)
        self.door: Callable[[str, Any], Any] = lambda _name, inner: inner
        """Of each polluxd that has none of its own."""
        self.cycle: dict[str, float] = {}
        """Its seconds between looks and decisions, where they differ from `config`'s."""
        self.skew = 0.0
        """By how much polluxd's clock is wrong."""
        self.policy: Policy = policy or (lambda snapshot: Plan((), 1.0, 1.0, "none"))
        self.trainings: dict[int, Training] = {}
        self.foreign: set[int] = set()
        self.companions: set[int] = set()
        self.requeued = Counter[int]()
        """Restarts that polluxd's own calls made."""
        self.acknowledged: set[int] = set()
        """Moves whose agent has said that its checkpoint is there."""
        self.lives = 0
        """How many polluxd there were: each has learnt for itself."""
        self.words: Callable[[int], dict[str, Any]] = lambda _job_id: {}
        """What a job's agent reports besides."""
        self.faults: list[str] = []
        self._handler = _Errors(self.faults)
        logging.getLogger("polluxd").addHandler(self._handler)

    def close(self) -> None:
        logging.getLogger("polluxd").removeHandler(self._handler)

    def wall(self) -> float:
        return self.slurm.clock() + self.skew

    def submit(
        self,
        *,
        work_s: float = 1e9,
        at: Placement | None = None,
        spec: JobSpec | None = None,
        able: str = "requeue",
        **words: Any,
    ) -> int:
        job_id = self.slurm.submit(spec or JobSpec(), lease=LEASE_S, **words)
        self.trainings[job_id] = Training(work_s, able=able)
        if at is not None:
            self.slurm.configure(job_id, Geometry(at.nodes, at.gpus_per_node, 1), start=True)
        return job_id

    def submit_companion(self, claim: Companion, nodes: int, gpus: int, **words: Any) -> int:
        job_id = self.slurm.submit(
            JobSpec(), lease=LEASE_S, nodes=nodes, gpus_per_node=gpus, companion=claim, **words
        )
        self.companions.add(job_id)
        return job_id

    def submit_foreign(self, gpus: int, **words: Any) -> int:
        job_id = self.slurm.submit(None, gpus_per_node=gpus, **words)
        self.foreign.add(job_id)
        return job_id

    def truth(self, job_id: int) -> Any:
        """The job as it is, whether slurmctld answers or not."""
        return self.slurm.truth(job_id)

    def ours(self) -> list[Any]:
        return [self.truth(job_id) for job_id in self.trainings]

    def holders(self) -> list[Any]:
        return [self.truth(job_id) for job_id in (*self.trainings, *self.companions)]

    @property
    def everybody(self) -> tuple[int, ...]:
        """All jobs that may hold GPUs."""
        return (*self.trainings, *self.companions, *self.foreign)

    def place(self, job_id: int) -> Placement | None:
        """What the job holds, with what was lent to it."""
        held_now = dict(self.truth(job_id).gpus_per_node_held)
        for companion in self.trainings[job_id].lent:
            held_now |= self.truth(companion).gpus_per_node_held
        return held(replace(self.truth(job_id), gpus_per_node_held=held_now))

    def pass_time(self, seconds: float) -> None:
        """Slurm and the agents live on, 0.5 s at a time."""
        left = seconds
        while left > 1e-9:
            part = min(left, 0.5)
            self.slurm.advance(part)
            self._live(part)
            left -= part

    def _live(self, seconds: float) -> None:
        now = self.slurm.clock()
        for job_id, training in self.trainings.items():
            job = self.truth(job_id)
            if job.state is not JobState.RUNNING:
                training.stopped_at = None
                continue
            if training.attempt != job.restart_count:
                training.attempt, training.stopped_at = job.restart_count, None
                training.done_s = training.saved_s
                training.nodes, training.lent = tuple(job.gpus_per_node_held), {}
                training.resized = training.refused = 0
            if training.silent or now < job.start_time + 1.0:
                continue
            if sum(job.gpus_per_node_held.values()) < training.least:
                self._fails(job_id, training, now)
                continue
            self._train(job_id, training, seconds, now)
            resize(self, job_id, training, now)
            if training.done_s >= training.work_s:
                self.slurm.finish(job_id)
                continue
            if not self.rows.down:
                self.rows.reports[job_id] = Report(
                    attempt=job.restart_count,
                    at=now,
                    limits=BatchLimits(32, 256, 8, 64),
                    first_step_at=job.start_time + 1.0,
                    checkpointed=training.saved_s > 0.0,
                    resize=training.able,
                    resized=training.resized,
                    refused=training.refused,
                    least_gpus=training.known_least,
                    **self.words(job_id),
                )

    def _fails(self, job_id: int, training: Training, now: float) -> None:
        """The wrapper says on how many GPUs its trainer works, and requeues the job."""
        known = self.rows.reports.get(job_id)
        training.known_least = training.least if training.tells else 1
        if not self.rows.down and known is not None:
            words = {"at": now, "first_step_at": None, "least_gpus": training.known_least}
            attempt = self.truth(job_id).restart_count
            self.rows.reports[job_id] = replace(known, attempt=attempt, **words)
        self.slurm.requeue_by_hand(job_id)

    def _train(self, job_id: int, training: Training, seconds: float, now: float) -> None:
        stopped = training.stopped_at
        ended = stopped is not None and self.rows.moves[training.stopped_for - 1].step.terminal
        if stopped is None or now > stopped + DRAIN_WAIT_S or (ended and not self.rows.down):
            training.stopped_at = None
            training.done_s += seconds
        for move in self.rows.moves:
            asked = move.job_id == job_id and move.step is Step.DRAINING and move.attempt == training.attempt
            if asked and not move.in_allocation and training.keeps_gpus:
                training.refused = move.id
            elif asked and not move.in_allocation and training.dies:
                self.slurm.finish(job_id, JobState.FAILED)
            elif asked and not move.in_allocation:
                training.saved_s = training.done_s if training.saves else training.saved_s
                if self.rows.acknowledge(move.id, self.wall()):
                    training.stopped_at, training.stopped_for = now, move.id
                    if training.saves:
                        self.acknowledged.add(move.id)

    def assert_sound(self) -> None:
        """What holds at every moment."""
        assert not self.faults, self.faults
        used = Counter[str]()
        for job in self.holders():
            used.update(job.gpus_per_node_held)
        assert all(used[name] <= gpus for name, gpus in self.gpus.items()), used
        open_moves = Counter(m.job_id for m in self.rows.moves if not m.step.terminal)
        assert not open_moves or max(open_moves.values()) == 1


class _Errors(logging.Handler):
    """Faults of polluxd's own, which its loop survives and logs."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        shown = logging.Formatter().format(record)
        self._found.append(shown)
