"""A small cluster with polluxd, and faults as rules in any order."""

from __future__ import annotations

import random
import re
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from polluxd.apply.capacity import goes_back
from polluxd.errors import SlurmRefused, SlurmUnavailable
from polluxd.model import NO_PLACEMENT, JobState, Placement, Plan, Snapshot, Step
from polluxd.slurm.protocol import Companion
from tests import build
from tests.troubled_store import TroubledStore

from .world import LEADER_LEASE_S, LEASE_S, Process, World

MOST_JOBS = 6
TROUBLE = st.sampled_from([1.0, 4.0, 15.0])

ABLE = ("in-place", "requeue")
CALLS = ("observe", "jobs", "requeue", "configure", "renew", "limit_time", "shrink", "cancel", "probe")
STEPS = (Step.DRAINING, Step.CHECKPOINTED, Step.REQUEUED, Step.CONFIGURED, Step.RECRUITING, Step.STARTED)

counted = Counter[str]()


class Cluster(RuleBasedStateMachine):
    """Three nodes of four GPUs."""

    def __init__(self, nodes: int = 3, exit_s: float = 0.1, **cycle: float) -> None:
        super().__init__()
        counted["runs"] += 1
        self.world = World(nodes, exit_s=exit_s)
        self.world.cycle = cycle
        self.world.policy = self.scatter
        self.process = Process(self.world)
        self.frozen: Process | None = None
        self.thawed: list[Process] = []
        self.paused_with: int | None = None
        self.over: dict[str, float] = {}
        """When each trouble ends by itself."""

    @initialize(seed=st.integers(0, 2**32 - 1), most_gpus=st.sampled_from([None, 2, 3]))
    def seed(self, seed: int, most_gpus: int | None) -> None:
        self.random = random.Random(seed)
        if most_gpus is not None:
            self.world.slurm.refusal = lambda job, _nodes: (
                "QOSMaxGRESPerJob" if job.nodes_wanted * job.gpus_per_node > most_gpus else ""
            )
        for able in ABLE:
            self.world.submit(work_s=200.0, time_limit_s=3600.0, able=able)

    def scatter(self, snapshot: Snapshot) -> Plan:
        """Some legal plan: an adversary's, who moves jobs for no good reason."""
        free = {n.name: n.capacity for n in snapshot.nodes}
        wanted: dict[int, Placement] = {}
        for job in snapshot.jobs:
            if job.pinned:
                wanted[job.job_id] = job.placement
                for name in job.placement.nodes:
                    free[name] -= job.placement.gpus_per_node
        others = [job for job in snapshot.jobs if not job.pinned]
        self.random.shuffle(others)
        for job in others:
            choice = self.resized(job.placement, free) if job.placement else job.placement
            if not choice or self.random.random() < 0.1:
                gpus = self.random.choice((1, 1, 2, 2, 3, 4))
                names = [n for n in free if free[n] >= gpus]
                count = self.random.choice((0, 1, 2, 2)) if job.placement else self.random.choice((1, 2, 2))
                choice = NO_PLACEMENT
                if count and len(names) >= count:
                    choice = Placement(tuple(sorted(self.random.sample(names, count))), gpus)
            if any(free[n] < choice.gpus_per_node for n in choice.nodes):
                choice = NO_PLACEMENT
            for name in choice.nodes:
                free[name] -= choice.gpus_per_node
            wanted[job.job_id] = choice
        return build.plan(snapshot.jobs, wanted)

    def resized(self, source: Placement, free: dict[str, int]) -> Placement:
        """The job as it is, or with some nodes more, or with some less."""
        gpus, chance = source.gpus_per_node, self.random.random()
        names = set(source.nodes)
        if chance < 0.4:
            names |= {n for n in free if free[n] >= gpus and self.random.random() < 0.5}
        elif chance < 0.8 and len(names) > 1:
            names = set(self.random.sample(sorted(names), self.random.randint(1, len(names) - 1)))
        return Placement(tuple(sorted(names)), gpus)

    # --- life -------------------------------------------------------------------------------------

    def turn(self, seconds: float = 0.5) -> None:
        for trouble in [name for name, at in self.over.items() if self.world.slurm.clock() >= at]:
            del self.over[trouble]
            self.end(trouble)
        for process in (self.process, *self.thawed):
            process.turn_if_due()
        self.world.pass_time(seconds)
        self.check()

    def step(self) -> None:
        """What every rule begins with: life goes on."""
        counted["steps"] += 1
        for _ in range(3):
            self.turn()

    def end(self, trouble: str) -> None:
        kind, _, name = trouble.partition(" ")
        match kind:
            case "database":
                self.world.rows.down = False
            case "pause":
                self.world.rows.settings["paused"] = False
                self.paused_with = None
            case "node":
                self.world.slurm.set_schedulable(name, True)
            case "hold":
                self.world.slurm.hold(int(name), False)
            case "pin":
                self.world.rows.pins.pop(int(name), None)
            case "dependency":
                self.world.slurm.depend(int(name), None)

    def begin(self, trouble: str, seconds: float) -> None:
        self.over[trouble] = self.world.slurm.clock() + seconds

    def check(self) -> None:
        world = self.world
        world.assert_sound()
        for job_id in world.foreign:
            assert world.truth(job_id).restart_count == 0
        if self.paused_with is not None and not world.rows.down:
            assert self.planned() == self.paused_with, "a move was planned while paused"

    def planned(self) -> int:
        """Moves so far; a pause lets those under way end, and so brings a refused job back where it was."""
        return sum(not goes_back(move) for move in self.world.rows.moves)

    @rule(turns=st.integers(1, 20))
    def run(self, turns: int) -> None:
        self.step()
        for _ in range(turns):
            self.turn()

    @rule(seconds=st.sampled_from([4.0, 12.0, 40.0, 150.0]))
    def rest(self, seconds: float) -> None:
        """Nobody looks for a while."""
        self.step()
        self.world.pass_time(seconds)
        self.check()

    def job(self, pick: int, *states: JobState) -> int | None:
        jobs = [j for j in self.world.trainings if self.world.truth(j).state in states]
        return jobs[pick % len(jobs)] if jobs else None

    @rule(
        work=st.sampled_from([3.0, 60.0]),
        silent=st.booleans(),
        limit=st.booleans(),
        able=st.sampled_from(ABLE),
    )
    def submit(self, work: float, silent: bool, limit: bool, able: str) -> None:
        self.step()
        alive = [j for j in self.world.ours() if not j.state.finished]
        if len(alive) < MOST_JOBS:
            job_id = self.world.submit(work_s=work, time_limit_s=3600.0 if limit else None, able=able)
            self.world.trainings[job_id].silent = silent and work < 10.0

    @rule(gpus=st.integers(1, 4), runtime=st.sampled_from([2.0, 20.0]))
    def foreign(self, gpus: int, runtime: float) -> None:
        self.step()
        self.world.submit_foreign(gpus, runtime=runtime)
        self.world.pass_time(0.1)
        self.check()

    # --- other people -------------------------------------------------------------------------------

    @rule(pick=st.integers(0, 9), how=st.sampled_from([JobState.CANCELLED, JobState.FAILED]))
    def cancel(self, pick: int, how: JobState) -> None:
        self.step()
        job_id = self.job(pick, JobState.PENDING, JobState.RUNNING)
        if job_id is not None:
            self.world.slurm.finish(job_id, how)

    @rule(pick=st.integers(0, 9), how=st.sampled_from(["cancelled", "failed", "held"]))
    def companion_goes(self, pick: int, how: str) -> None:
        """Its user does something about a companion, or its node fails."""
        self.step()
        alive = [c for c in sorted(self.world.companions) if not self.world.truth(c).state.finished]
        if alive and how == "held":
            self.world.slurm.hold(alive[pick % len(alive)], True)
        elif alive:
            state = JobState.CANCELLED if how == "cancelled" else JobState.FAILED
            self.world.slurm.finish(alive[pick % len(alive)], state)

    @rule(
        pick=st.integers(0, 9), move=st.integers(0, 9), uid=st.sampled_from([1000, 1001]), knows=st.booleans()
    )
    def forge(self, pick: int, move: int, uid: int, knows: bool) -> None:
        """A user claims that a job is a companion of another user's job.

        Or a second companion of one move. `knows`: the claim has the move's nonce.
        """
        self.step()
        job_id = self.job(pick, JobState.RUNNING, JobState.PENDING)
        grown = [m for m in self.world.rows.moves if m.grows]
        if job_id is not None and len(self.world.companions) < 100:
            claimed = grown[-1 - move % len(grown)] if grown else None
            parent = claimed.job_id if claimed else job_id
            nonce = claimed.nonce if claimed and knows else "f" * 32
            claim = Companion(parent, claimed.attempt if claimed else 0, claimed.id if claimed else 1, nonce)
            self.world.submit_companion(claim, 1, 4, uid=uid)

    @rule(pick=st.integers(0, 9), refuses=st.booleans())
    def agent_refuses(self, pick: int, refuses: bool) -> None:
        self.step()
        job_id = self.job(pick, JobState.PENDING, JobState.RUNNING)
        if job_id is not None:
            self.world.trainings[job_id].refuses = refuses

    @rule(pick=st.integers(0, 9), seconds=TROUBLE)
    def hold(self, pick: int, seconds: float) -> None:
        self.step()
        job_id = self.job(pick, JobState.PENDING, JobState.RUNNING, JobState.COMPLETING)
        if job_id is not None:
            self.world.slurm.hold(job_id, True)
            self.begin(f"hold {job_id}", seconds)

    @rule(pick=st.integers(0, 9))
    def requeue_by_hand(self, pick: int) -> None:
        self.step()
        job_id = self.job(pick, JobState.RUNNING)
        if job_id is not None:
            self.world.slurm.requeue_by_hand(job_id)

    @rule(name=st.sampled_from(["n1", "n2", "n3"]), seconds=TROUBLE, breaks=st.booleans())
    def node_goes(self, name: str, seconds: float, breaks: bool) -> None:
        self.step()
        if breaks:
            self.world.slurm.break_node(name)
        else:
            self.world.slurm.set_schedulable(name, False)
        self.begin(f"node {name}", seconds)

    # --- administrators -----------------------------------------------------------------------------

    @rule(seconds=TROUBLE)
    def pause(self, seconds: float) -> None:
        self.step()
        self.world.rows.settings["paused"] = True
        self.paused_with = self.planned()
        self.begin("pause", seconds)

    @rule(pick=st.integers(0, 9), seconds=TROUBLE)
    def pin(self, pick: int, seconds: float) -> None:
        self.step()
        job_id = self.job(pick, JobState.PENDING, JobState.RUNNING)
        if job_id is not None:
            self.world.rows.pins[job_id] = "root"
            self.begin(f"pin {job_id}", seconds)

    @rule(pick=st.integers(0, 9))
    def cancel_move(self, pick: int) -> None:
        self.step()
        under_way = [m for m in self.world.rows.moves if not m.step.terminal]
        if under_way and not self.world.rows.down:
            TroubledStore(self.world.rows).cancel_move(under_way[pick % len(under_way)].job_id, "root")

    # --- faults -------------------------------------------------------------------------------------

    @rule(call=st.sampled_from(CALLS), applied=st.booleans(), refused=st.booleans())
    def slurm_fails(self, call: str, applied: bool, refused: bool) -> None:
        self.step()
        if refused and not applied and call not in ("observe", "jobs"):
            self.world.slurm.fail(call, SlurmRefused("no"))
        else:
            self.world.slurm.fail(call, SlurmUnavailable("timed out"), applied=applied)

    @rule(seconds=st.sampled_from([1.0, 5.0]), forgets=st.booleans())
    def slurmctld_restarts(self, seconds: float, forgets: bool) -> None:
        self.step()
        self.world.slurm.break_controller(seconds, forgets_s=1.0 if forgets else 0.0)

    @rule(seconds=TROUBLE)
    def database(self, seconds: float) -> None:
        self.step()
        self.world.rows.down = True
        self.begin("database", seconds)

    @rule()
    def kill(self) -> None:
        self.step()
        self.process = Process(self.world)

    @rule(step=st.sampled_from(STEPS), seconds=st.sampled_from([4.0, 40.0, 150.0]))
    def kill_at(self, step: Step, seconds: float) -> None:
        """polluxd dies while a move is at this step, and stays dead a while."""
        self.step()
        for _ in range(20):
            if any(move.step is step for move in self.world.rows.moves):
                break
            self.turn()
        self.process = Process(self.world)
        self.world.pass_time(seconds)
        self.check()

    @precondition(lambda self: self.frozen is None and len(self.thawed) < 2)
    @rule(waited=st.sampled_from([0.0, LEADER_LEASE_S + 0.5]))
    def freeze(self, waited: float) -> None:
        """The leader stands still, and another is started."""
        self.step()
        self.frozen, self.process = self.process, Process(self.world)
        self.world.pass_time(waited)

    @precondition(lambda self: self.frozen is not None)
    @rule()
    def thaw(self) -> None:
        self.step()
        self.thawed.append(self.frozen)
        self.frozen = None

    @rule(seconds=st.sampled_from([-7200.0, -30.0, 30.0, 7200.0]))
    def clock_steps(self, seconds: float) -> None:
        self.step()
        self.world.skew += seconds

    # --- the end ------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """All is well again: every job ends."""
        try:
            self.converge()
        finally:
            self.world.close()

    def settle(self) -> None:
        """End all troubles."""
        for trouble in self.over:
            self.end(trouble)
        self.over.clear()
        self.world.slurm.mend()
        self.world.skew = 0.0

    def converge(self) -> None:
        world = self.world
        self.settle()
        for training in world.trainings.values():
            training.work_s = min(training.work_s, training.done_s + 3.0)
            training.silent, training.dies, training.saves = False, False, True
        until = world.slurm.clock() + 2 * LEASE_S + 400.0
        while not all(job.state.finished for job in world.ours()) and world.slurm.clock() < until:
            self.turn(1.0)
        left = {job.job_id: (job.raw_state, job.reason) for job in world.ours() if not job.state.finished}
        assert not left, f"never ended: {left}; {[m for m in world.rows.moves if not m.step.terminal]}"
        for _ in range(10):  # moves of jobs that have ended are closed, by a new leader if need be
            self.turn()
        assert not [m for m in world.rows.moves if not m.step.terminal]
        alone = {c: world.truth(c).raw_state for c in world.companions if not world.truth(c).state.finished}
        assert not alone, f"companions of jobs that have ended: {alone}"
        self.stopped_once()
        by_move = Counter(
            m.job_id for m in world.rows.moves if Step.CHECKPOINTED in m.times and not m.in_allocation
        )
        assert all(n <= by_move[j] for j, n in world.requeued.items()), "requeued more often than moved"
        for move in world.rows.moves:
            if move.step is Step.FAILED:
                counted[re.sub(r"\d|\(.*|[:;].*|instead.*|on n.*", "", move.detail)] += 1
        counted["moves"] += len(world.rows.moves)
        for move in world.rows.moves:
            if move.step is Step.TRAINING:
                kind = " (grow)" if move.grows else " (shrink)" if move.in_allocation else ""
                counted[f"completed {move.path}{kind}"] += 1
        counted["requeues"] += sum(world.requeued.values())

    def stopped_once(self) -> None:
        """No training is stopped twice for one cause, whoever was polluxd in between."""
        stops = Counter(m.job_id for m in self.world.rows.moves if m.source and "Slurm refuses" in m.detail)
        counted["stops for a limit"] += stops.total()
        assert all(n <= 1 for n in stops.values()), f"stopped again for one cause: {stops}"
