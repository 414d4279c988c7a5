"""Carrying moves out: what Slurm refuses of one job concerns that job alone."""

from __future__ import annotations

from typing import Any

from polluxd.apply.machine import Limits
from polluxd.apply.reconciler import Reconciler
from polluxd.errors import SlurmRefused
from polluxd.model import JobSpec, Node, Placement, Reallocation, Step
from polluxd.slurm.fake import FakeSlurm
from polluxd.slurm.protocol import Geometry


class MemoryStore:
    """Moves in memory."""

    def __init__(self, *moves: Reallocation) -> None:
        self.moves = list(moves)
        self.reached: list[tuple[int, Step]] = []

    def open_reallocations(self) -> list[Reallocation]:
        return self.moves

    def advance(self, number: int, step: Step, at: float, **more: Any) -> bool:
        self.reached.append((number, step))
        return True


def reconciler(slurm: FakeSlurm, store: Any) -> Reconciler:
    return Reconciler(
        slurm,
        store,
        limits=Limits(),
        cooldown=0.0,
        lease=300.0,
        max_concurrent=0,
        authorize=lambda: 1,
        clock=slurm.clock,
        monotonic=slurm.clock,
    )


def running(slurm: FakeSlurm, node: str) -> int:
    job_id = slurm.submit(JobSpec())
    slurm.configure(job_id, Geometry((node,), 1, 1), start=True)
    slurm.advance(5.0)
    return job_id


def move(slurm: FakeSlurm, job_id: int, source: str, step: Step) -> Reallocation:
    times = {Step.PLANNED: slurm.clock() - 1, step: slurm.clock() - 0.5}
    return Reallocation(
        job_id, job_id, 0, "requeue", Placement((source,), 1), Placement((source,), 2), "", step, times
    )


def test_a_refused_requeue_fails_its_move_and_the_others_go_on() -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8), Node("n2", 4, cpus=8)])
    first, second = running(slurm, "n1"), running(slurm, "n2")
    store = MemoryStore(
        move(slurm, first, "n1", Step.CHECKPOINTED), move(slurm, second, "n2", Step.CHECKPOINTED)
    )
    slurm.fail("requeue", SlurmRefused("Requested operation is presently disabled"))
    reconciler(slurm, store).tick(slurm.observe(), {})
    assert store.reached == [(first, Step.FAILED)]
    slurm.advance(5.0)
    assert [slurm.jobs([j])[j].restart_count for j in (first, second)] == [0, 1]


def test_a_refused_renewal_stops_no_move_and_is_not_repeated_at_once() -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8)])
    job_id = running(slurm, "n1")
    slurm.submit(JobSpec())
    store = MemoryStore(move(slurm, job_id, "n1", Step.PLANNED))
    slurm.fail("renew", SlurmRefused("Access denied"), times=2)
    acting = reconciler(slurm, store)
    acting.tick(slurm.observe(), {})
    assert store.reached == [(job_id, Step.DRAINING)]
    acting.tick(slurm.observe(), {})  # a third of the lease has not passed


def test_leases_of_many_jobs_are_renewed_in_bounded_calls() -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8)])
    waiting = {slurm.submit(JobSpec()) for _ in range(600)}
    calls: list[list[int]] = []
    renew = slurm.renew
    slurm.renew = lambda job_ids, until: (calls.append(list(job_ids)), renew(job_ids, until))[1]  # type: ignore[method-assign]
    reconciler(slurm, MemoryStore()).tick(slurm.observe(), {})
    assert {job_id for call in calls for job_id in call} == waiting
    assert max(len(call) for call in calls) <= 250
