"""Jobs that train more slowly after a move that was to help them."""

from __future__ import annotations

from dataclasses import replace

from polluxd.apply.move_outcomes import SETTLED_S, MoveOutcomes
from polluxd.model import JobState, Placement, Report, Step
from tests.build import move, report, slurm_job

ONE, TWO = Placement(("n1",), 2), Placement(("n2",), 4)


def reports(goodput: float, gpus: int, attempt: int, at: float) -> dict[int, Report]:
    return {7: replace(report(), attempt=attempt, goodput=goodput, gpus=gpus, at=at)}


def observed(outcomes: MoveOutcomes, at: Placement, attempt: int, found: dict[int, Report]) -> str:
    outcomes.observe([slurm_job(7, at=at, restart_count=attempt)], found, ())
    return outcomes.note()


def begun(source: Placement, target: Placement, before: float = 100.0) -> MoveOutcomes:
    outcomes = MoveOutcomes()
    planned = move("requeue", source, target, Step.PLANNED, {})
    outcomes.begun([planned], reports(before, source.gpus, planned.attempt, 0.0))
    return outcomes


def test_a_job_that_trains_more_slowly_where_it_was_moved_is_named_until_it_moves_on() -> None:
    outcomes = begun(ONE, TWO)
    assert observed(outcomes, TWO, 1, reports(80.0, 4, 1, 1000.0)) == "", "first steps are slow"
    told = observed(outcomes, TWO, 1, reports(80.0, 4, 1, 1000.0 + SETTLED_S))
    assert told == "worse off after a move: jobs 7 (100 to 80 examples/s on n2:4)"
    assert observed(outcomes, TWO, 1, reports(95.0, 4, 1, 1400.0)) == "", "it has recovered"
    observed(outcomes, TWO, 1, reports(80.0, 4, 1, 1500.0))
    outcomes.begun([move("requeue", TWO, ONE, Step.PLANNED, {}, attempt=1)], reports(80.0, 4, 1, 1500.0))
    assert observed(outcomes, TWO, 1, reports(80.0, 4, 1, 1600.0)) == ""


def test_reports_of_another_placement_and_moves_that_help_others_count_for_nothing() -> None:
    later = 1000.0 + 2 * SETTLED_S
    for outcomes, at, attempt, found in (
        (begun(TWO, ONE), ONE, 1, reports(10.0, 2, 1, later)),  # it gave GPUs back
        (begun(Placement(), TWO), TWO, 1, reports(10.0, 4, 1, later)),  # it had none
        (begun(ONE, TWO), ONE, 0, reports(10.0, 2, 0, later)),  # the move failed
        (begun(ONE, TWO), TWO, 1, reports(10.0, 2, 0, later)),  # of the attempt before
        (begun(ONE, TWO, 0.0), TWO, 1, reports(10.0, 4, 1, later)),  # nothing to compare with
    ):
        outcomes.observe(
            [slurm_job(7, at=at, restart_count=attempt)], reports(10.0, at.gpus, attempt, 900.0), ()
        )
        assert observed(outcomes, at, attempt, found) == ""


def test_jobs_that_have_ended_are_forgotten() -> None:
    outcomes = begun(ONE, TWO)
    observed(outcomes, TWO, 1, reports(80.0, 4, 1, 1000.0))
    observed(outcomes, TWO, 1, reports(80.0, 4, 1, 2000.0))
    outcomes.observe([slurm_job(7, JobState.COMPLETED)], {}, ())
    assert outcomes.note() == ""
