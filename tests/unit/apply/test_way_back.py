"""A trainer of its own loop that fails on fewer GPUs: what it has left is there when it comes back."""

from __future__ import annotations

import pytest

from polluxd.model import NO_PLACEMENT, JobSpec, JobState, Placement, Plan, Snapshot, Step
from tests import build

from .world import Process, World

WHOLE, HALF = Placement(("n1",), 4), Placement(("n1",), 2)


class Shrunk:
    """A training on a whole node. A plan gives half of it to another job until it hears of a failure."""

    def __init__(self, spec: JobSpec, *, least: int = 1, exit_s: float = 0.1, uid: int = 1001) -> None:
        self.world = World(nodes=1, gpus=4, policy=self.plan, exit_s=exit_s)
        self.world.words = lambda _job: {"explored_gpus": 4, "explored_nodes": 1}
        self.stood = 0.0
        self.process = Process(self.world)
        self.job = self.world.submit(spec=spec)
        self.world.trainings[self.job].least = least
        self.other = 0
        self.pass_time(10.0)
        self.other = self.world.submit(uid=uid)

    def plan(self, snapshot: Snapshot) -> Plan:
        whole = not self.other or any(job.spec.min_gpus > 2 for job in snapshot.jobs)
        wanted = {self.job: WHOLE if whole else HALF, self.other: NO_PLACEMENT if whole else HALF}
        return build.plan(snapshot.jobs, {n: at for n, at in wanted.items() if n})

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(2 * seconds)):
            self.process.turn_if_due()
            self.world.pass_time(0.5)
            self.stood += 0.5 * (self.world.truth(self.job).state is not JobState.RUNNING)

    def held(self, job_id: int) -> int:
        return sum(self.world.truth(job_id).gpus_per_node_held.values())

    def moves(self, job_id: int) -> list[tuple[str, Step]]:
        return [(move.path, move.step) for move in self.world.rows.moves if move.job_id == job_id]


@pytest.fixture
def own_loop() -> JobSpec:
    return JobSpec(own_size=4, max_gpus=4)


def test_a_trainer_that_fails_on_fewer_gpus_goes_back_at_once(own_loop: JobSpec) -> None:
    life = Shrunk(own_loop, least=3)
    before = life.stood
    life.pass_time(60.0)
    assert (life.held(life.job), life.held(life.other)) == (4, 0), "nobody has taken what it had"
    assert life.moves(life.job)[1:] == [("requeue", Step.FAILED), ("start", Step.TRAINING)], (
        "one try, and back"
    )
    assert life.stood - before < 10.0
    back, planned = (
        next(m for m in life.world.rows.moves if m.path == "start" and m.job_id == n and m.id > 1)
        for n in (life.job, life.other)
    )
    assert planned.times[Step.FAILED] - back.times[Step.PLANNED] < 3.0, (
        "no plan counts on a start that waits in vain"
    )
    assert life.world.truth(life.job).restart_count == 2, "the move's requeue, and the wrapper's"
    life.world.close()


def test_a_trainer_that_fails_and_says_nothing_keeps_nobody_off_for_good(own_loop: JobSpec) -> None:
    life = Shrunk(own_loop, least=3)
    life.world.trainings[life.job].tells = False
    life.pass_time(60.0)
    assert life.held(life.other) == 2
    life.world.close()


def test_a_job_whose_processes_take_long_to_end_goes_back_all_the_same(own_loop: JobSpec) -> None:
    life = Shrunk(own_loop, least=3, exit_s=12.0)
    life.pass_time(80.0)
    assert life.moves(life.job)[1:] == [("requeue", Step.FAILED), ("start", Step.TRAINING)]
    assert life.held(life.job) == 4
    life.world.close()


def test_no_trainer_is_tried_on_fewer_gpus_at_once_for_a_job_of_its_own_user(own_loop: JobSpec) -> None:
    life = Shrunk(own_loop, least=3, uid=1000)
    life.pass_time(60.0)
    assert len(life.moves(life.job)) == 1
    life.world.close()


def test_what_it_leaves_is_given_away_once_it_trains(own_loop: JobSpec) -> None:
    life = Shrunk(own_loop)
    life.pass_time(60.0)
    assert (life.held(life.job), life.held(life.other)) == (2, 2)
    given, taken = (life.world.rows.moves[-n].times for n in (2, 1))
    assert taken[Step.CONFIGURED] >= given[Step.TRAINING], "not before"
    life.world.close()


def test_a_script_that_trains_at_any_size_is_not_waited_for() -> None:
    life = Shrunk(JobSpec(max_gpus=4))
    life.pass_time(60.0)
    given, taken = (life.world.rows.moves[-n].times for n in (2, 1))
    assert taken[Step.CONFIGURED] < given[Step.TRAINING]
    life.world.close()


def test_a_training_is_not_stopped_twice_for_a_start_that_only_waits() -> None:
    world = World(nodes=1, gpus=4, policy=lambda seen: build.plan(seen.jobs, dict.fromkeys([1], WHOLE)))
    process, job = Process(world), world.submit(at=HALF)
    world.pass_time(3.0)
    world.slurm.refusal = lambda job, _nodes: "Priority" if job.gpus_per_node > 2 else ""
    for _ in range(100):
        process.turn_if_due()
        world.pass_time(0.5)
    assert (world.truth(job).restart_count, world.truth(job).gpus_per_node_held) == (1, {"n1": 2})
    world.close()


def test_a_training_that_requeues_itself_on_more_gpus_is_not_brought_there_again() -> None:
    world = World(nodes=1, gpus=4, policy=lambda seen: build.plan(seen.jobs, dict.fromkeys([1], WHOLE)))
    process, job = Process(world), world.submit(at=HALF)
    world.pass_time(3.0)
    for _ in range(100):
        process.turn_if_due()
        if sum(world.truth(job).gpus_per_node_held.values()) > 2:
            world.slurm.requeue_by_hand(job)
        world.pass_time(0.5)
    assert (world.truth(job).restart_count, world.truth(job).gpus_per_node_held) == (2, {"n1": 2})
    world.close()
