"""What is worth a decision before the interval has passed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.apply.reconciler import Reconciler
from polluxd.cycle.triggers import Triggers
from polluxd.model import JobSpec, JobState, Placement, Report
from polluxd.slurm.protocol import Geometry
from tests.build import move
from tests.unit.cycle.two_gpu_types import REPORT, Cycle

SOON = 11.0
"""Seconds: above the floor and below the interval."""


class Watched(Cycle):
    """A cycle whose decisions are counted."""

    def after(self, seconds: float = SOON) -> int:
        """Let some time pass; return how many decisions that brought."""
        before = len(self.seen)
        self.slurm.advance(seconds)
        self.controller.step()
        return len(self.seen) - before


def trained(**spec: object) -> tuple[Watched, int]:
    """A job on all GPUs of one node; another node is idle."""
    cycle = Watched()
    job = cycle.slurm.submit(JobSpec(**spec), lease=1e6)
    cycle.slurm.configure(job, Geometry(("n1",), 4, 4), start=True)
    cycle.after()
    cycle.after()
    assert cycle.after() == 0, "nothing has changed"
    return cycle, job


def fill_other_nodes(cycle: Watched) -> None:
    for node in ("n2", "n3"):
        other = cycle.slurm.submit(JobSpec(), lease=1e6)
        cycle.slurm.configure(other, Geometry((node,), 4, 4), start=True)
    cycle.after()
    cycle.after()


def report(**said: object) -> Report:
    return replace(REPORT, **{"explored_gpus": 4, "first_step_at": 1.0, **said})


def test_a_job_measured_at_its_gpus_is_decided_on_at_once_and_once() -> None:
    cycle, job = trained()
    cycle.rows.reports[job] = report(noise=None)
    assert cycle.after() == 1
    assert cycle.after() == 0
    cycle.rows.reports[job] = report()
    assert cycle.after() == 1, "its noise scale is known now"
    assert [cycle.after() for _ in range(3)] == [0, 0, 0]


def test_beyond_an_equal_share_a_job_grows_as_soon_as_its_progress_was_seen() -> None:
    cycle, job = trained()
    other = cycle.slurm.submit(JobSpec(max_gpus=1, preemptible=False), lease=1e6, uid=1001)
    cycle.slurm.configure(other, Geometry(("n3",), 1, 1), start=True)
    assert cycle.after() == 1, "the other user's job has come"
    decisions = []
    for step in range(9):
        cycle.rows.reports[job] = report(at=cycle.slurm.clock(), progress=float(step))
        decisions.append(cycle.after())
    assert decisions == [1, 0, 0, 0, 0, 1, 0, 0, 0], (
        "measured; then seen, before the interval of 60 s has passed"
    )
    before, after = (plan.of(job) for _, plan in cycle.seen[-2:])
    assert "polluxd has yet to see progress on its 4 GPUs, so at most 6 until then" in before.reason
    assert (before.explanation.limit, before.placement.gpus, after.placement.gpus) == ("progress", 4, 8)


def test_not_more_often_than_the_floor() -> None:
    cycle, job = trained()
    cycle.rows.reports[job] = report(noise=None)
    assert cycle.after() == 1
    cycle.rows.reports[job] = report()
    assert [cycle.after(3.0) for _ in range(4)] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    "said",
    [
        {"explored_gpus": 3},  # it has not been measured here yet
        {"params": None},
        {"first_step_at": None},
        {"attempt": 7},  # of another start
    ],
)
def test_other_reports_wait_for_the_interval(said: dict[str, object]) -> None:
    cycle, job = trained()
    cycle.rows.reports[job] = report(**said)
    assert cycle.after() == 0


@pytest.mark.parametrize("spec", [{"max_gpus": 4}, {"preemptible": False}])
def test_a_job_that_takes_no_more_gpus_waits(spec: dict[str, object]) -> None:
    cycle, job = trained(**spec)
    cycle.rows.reports[job] = report()
    assert cycle.after() == 0


def test_without_an_idle_gpu_it_waits() -> None:
    cycle, job = trained()
    fill_other_nodes(cycle)
    cycle.rows.reports[job] = report()
    assert cycle.after() == 0


def test_a_job_that_moves_or_rests_is_decided_on_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cycle, job = trained()
    occupied = {job}
    monkeypatch.setattr(cycle.acting, "occupied", occupied.__contains__)
    cycle.rows.reports[job] = report()
    assert cycle.after() == 0
    occupied.clear()
    assert cycle.after() == 1
    assert cycle.after() == 0


@pytest.mark.parametrize(("waits", "decisions"), [(True, 1), (False, 0)])
def test_a_job_that_was_left_alone_is_free_again_while_another_one_waits(
    waits: bool, decisions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycle, job = trained()
    fill_other_nodes(cycle)
    occupied = {job}
    monkeypatch.setattr(cycle.acting, "occupied", occupied.__contains__)
    if waits:
        cycle.slurm.submit(JobSpec(), lease=1e6)
        assert cycle.after() == 1, "it has come"
    else:
        assert cycle.after(61.0) == 1
    assert cycle.after() == 0
    occupied.clear()
    assert cycle.after() == decisions
    assert cycle.after() == 0


def test_a_job_whose_move_came_to_nothing_is_decided_on_at_once() -> None:
    cycle, job = trained()
    fill_other_nodes(cycle)
    state = cycle.slurm.observe()
    stopped = replace(
        next(one for one in state.jobs if one.job_id == job),
        state=JobState.PENDING,
        nodes=(),
        gpus_per_node_held={},
        eligible_time=None,
    )
    after = replace(state, jobs=tuple(stopped if one.job_id == job else one for one in state.jobs))
    triggers = cycle.controller.triggers
    triggers.decided(state, {}, [move(job_id=job, target=Placement(("n1",), 2))])
    assert not triggers.since_decision(state, {}), "it trains"
    assert triggers.since_decision(after, {}), "it stands"
    triggers.decided(after, {}, [])
    assert not triggers.since_decision(after, {}), "the decision gave it nothing"


def test_an_end_waits_for_a_resize_in_place_and_an_arrival_with_room_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cycle, job = trained()
    cycle.rows.reports[job] = report()
    assert cycle.after() == 1
    monkeypatch.setattr(Triggers, "resizing", lambda _: True)
    cycle.slurm.finish(job)
    assert [cycle.after() for _ in range(3)] == [0, 0, 1]
    cycle.slurm.submit(JobSpec(min_gpus=4), lease=1e6)
    assert cycle.after() == 1
    cycle.slurm.submit(JobSpec(min_gpus=16), lease=1e6)
    assert [cycle.after() for _ in range(3)] == [0, 0, 1], "there is no room for it: others would give way"


def test_a_resize_that_never_ends_delays_one_decision() -> None:
    cycle = Watched("enforce")
    job = cycle.slurm.submit(JobSpec(), lease=1e6)
    cycle.slurm.configure(job, Geometry(("n1",), 4, 4), start=True)
    others = [cycle.slurm.submit(JobSpec(max_gpus=1, preemptible=False), lease=1e6) for _ in range(4)]
    for other in others:
        cycle.slurm.configure(other, Geometry(("n3",), 1, 1), start=True)
    cycle.after()
    cycle.rows.reports[job] = report(at=cycle.slurm.clock(), resize="in-place")
    cycle.after(61.0)
    cycle.slurm.finish(others[0])
    assert [cycle.after() for _ in range(3)] == [0, 0, 1]
    cycle.slurm.finish(others[1])
    assert cycle.after() == 1
    (move,) = cycle.store.open_moves()
    assert move.path == "resize"
    triggers = cycle.controller.triggers
    for size, waits in ((8, False), (12, True)):
        another = replace(move, target=Placement(("n1", "n2", "n3")[: size // 4], 4))
        cycle.acting.acted_on = {job: another}
        triggers.decided(cycle.slurm.observe(), {}, [another])
        assert triggers.resizing() is waits, "once for each number of GPUs"


def test_gpus_that_a_move_is_to_bring_are_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    cycle, job = trained()
    monkeypatch.setattr(Reconciler, "coming", lambda _, job_id: 12)
    cycle.rows.reports[job] = report()
    assert cycle.after() == 0


def test_whatever_a_job_reports_it_brings_few_decisions() -> None:
    cycle, job = trained()
    decisions = 0
    for i in range(40):
        told = report(explored_gpus=4 + i * (i % 2), noise=None if i % 3 else REPORT.noise)
        cycle.rows.reports[job] = told if i % 2 else replace(told, params=None)
        decisions += cycle.after(10.0)
    # Three for its four GPUs; 400 s have six intervals.
    assert decisions <= 3 + 400 // 60


def test_a_job_that_is_requeued_without_end_is_measured_once_at_its_gpus() -> None:
    cycle, job = trained()
    decisions = 0
    for attempt in range(20):
        cycle.rows.reports[job] = report(attempt=attempt, first_step_at=None)
        decisions += cycle.after(5.0)
        cycle.rows.reports[job] = report(attempt=attempt, noise=REPORT.noise if attempt % 2 else None)
        decisions += cycle.after(5.0)
        cycle.slurm.requeue_by_hand(job)
        cycle.slurm.advance(5.0)
        cycle.slurm.configure(job, Geometry(("n1",), 4, 4), start=True)
    assert cycle.slurm.jobs([job])[job].restart_count == 20
    # Its fit, its noise scale and its progress; 300 s have five intervals.
    assert decisions <= 3 + 300 // 60


def test_jobs_that_are_gone_are_forgotten() -> None:
    cycle, job = trained()
    cycle.rows.reports[job] = report()
    cycle.after()
    triggers = cycle.controller.triggers
    assert triggers.measured == {(job, 4, "fit"), (job, 4, "noise")}
    cycle.slurm.finish(job)
    cycle.after()
    cycle.slurm.advance(1e4)
    cycle.controller.step()
    assert triggers.measured == set()
