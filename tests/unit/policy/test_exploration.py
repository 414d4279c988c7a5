"""The number of GPUs that a job's measurements justify.

The job's own measurements count, and those of earlier runs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.config.settings import PolicySettings
from polluxd.model import JobSpec, Placement, Report
from polluxd.policy import decide
from polluxd.policy.domains import split
from polluxd.policy.feasible import Caps
from tests.build import job, nodes, report, snapshot


@pytest.mark.parametrize(
    ("explored", "prior", "unseen", "least", "most"),
    [
        (0, 0, None, 1, 1),
        (2, 0, None, 1, 4),
        (1, 4, None, 1, 8),
        (4, 1, None, 1, 8),
        (0, 2, None, 6, 6),
        (4, 0, 5, 1, 5),
        (2, 0, 5, 1, 4),
        (4, 0, 5, 6, 6),
    ],
)
def test_twice_what_was_measured_by_this_run_or_an_earlier_one(
    explored: int, prior: int, unseen: int | None, least: int, most: int
) -> None:
    told = report(explored=explored, prior_gpus=prior, most_gpus=unseen)
    measured = job(1, JobSpec(min_gpus=least), report=told)
    (domain,) = split(snapshot(nodes(4), [measured]))
    assert Caps(domain, PolicySettings(start_gpus=1)).of(measured) == most


def test_a_run_that_knows_of_an_earlier_one_is_not_led_there_step_by_step() -> None:
    new, known = (
        decide(snapshot(nodes(4), [job(1, report=report(explored=1, prior_gpus=prior))])).of(1)
        for prior in (0, 8)
    )
    assert new is not None
    assert known is not None
    assert (new.placement.gpus, known.placement.gpus) == (2, 16)


@pytest.mark.parametrize(
    "said",
    [None, report(explored=0, first_step_at=None), report(explored=4, prior_gpus=64, first_step_at=None)],
)
def test_silent_jobs_that_come_one_after_another_start_on_no_more_than_the_share(said: Report | None) -> None:
    others = job(99, user="bea", report=report(explored=16, first_step_at=1.0))
    jobs = []
    for number in range(1, 9):
        plan = decide(
            snapshot(nodes(6), [*jobs, job(number), others], objective="completion-time", waiting_power=0.0)
        )
        placed = plan.of(number)
        assert placed is not None
        jobs.append(job(number, placement=placed.placement, report=said, started=True, pinned=True))
    # Half of 24 GPUs, and then one GPU each.
    assert [each.placement.gpus for each in jobs] == [4, 4, 4, 1, 1, 1, 1, 1]


def test_a_job_that_held_gpus_and_never_reported_starts_again_on_min_gpus() -> None:
    (domain,) = split(snapshot(nodes(4), [job(1, attempt=1), job(2), job(3, JobSpec(min_gpus=2), attempt=1)]))
    assert [Caps(domain, PolicySettings()).of(each) for each in domain.jobs] == [1, 4, 2]


def test_jobs_that_came_at_once_divide_the_whole_share() -> None:
    new = [job(number) for number in range(1, 6)]
    (domain,) = split(snapshot(nodes(4), [*new, job(9, user="bea")]))
    caps = Caps(domain, PolicySettings())
    assert [caps.of(each) for each in domain.jobs] == [2, 2, 2, 1, 1, 4]


def test_a_job_that_rests_after_its_move_takes_nothing_from_the_start_of_others() -> None:
    seen = replace(report(explored=8), first_step_at=1.0)
    resting = job(1, placement=Placement(("n000", "n001"), 4), report=seen, started=True, pinned=True)
    (domain,) = split(snapshot(nodes(4), [resting, job(2)]))
    assert Caps(domain, PolicySettings()).of(domain.jobs[1]) == 4


def test_a_job_that_reported_once_and_fell_silent_after_a_requeue_counts_against_the_share() -> None:
    seen = report(explored=4, first_step_at=1.0)
    silent = job(1, placement=Placement(("n000",), 4), report=seen, started=True, pinned=True, attempt=1)
    trains = replace(silent, report=replace(seen, attempt=1))
    other = job(9, user="bea")
    for held, starts in ((silent, 2), (trains, 4)):
        (domain,) = split(snapshot(nodes(3), [held, job(2), other]))
        assert Caps(domain, PolicySettings()).of(domain.jobs[1]) == starts


@pytest.mark.parametrize(("attempt", "most"), [(0, 8), (1, 8), (2, 2), (5, 2)])
def test_a_job_starts_again_on_min_gpus_after_a_silent_attempt_whatever_earlier_ones_reported(
    attempt: int, most: int
) -> None:
    requeued = job(1, JobSpec(min_gpus=2), report=report(explored=4, first_step_at=1.0), attempt=attempt)
    (domain,) = split(snapshot(nodes(4), [requeued]))
    assert Caps(domain, PolicySettings()).of(requeued) == most
