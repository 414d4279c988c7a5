"""When jobs are predicted to end, those that wait included."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.model import JobSpec, Placement
from polluxd.policy import decide
from tests.build import job, nodes, report, running, snapshot

FOUR = JobSpec(min_gpus=4, max_gpus=4)


def seconds_left(jobs, count=1, **settings):
    plan = decide(snapshot(nodes(count), jobs, **settings))
    return {a.job_id: a.explanation.seconds_left for a in plan.allocations}


def holding(number, left):
    return running(number, ["n000"], 4, FOUR, report=report(progress=0.0, target=left), pinned=True)


def waiting(number, left, **more):
    return job(number, FOUR, report=report(progress=0.0, target=left), started=True, **more)


@pytest.mark.parametrize("objective", ["completion-time", "fair-share"])
def test_a_job_that_waits_ends_after_those_before_it(objective):
    found = seconds_left([holding(1, 1e5), waiting(2, 2e5), waiting(3, 4e5)], objective=objective)
    own = found[1]
    # The waiting jobs take twice and four times as long as the first; the shorter, or else the first, goes first.
    order = (3 * own, 7 * own) if found[2] < found[3] else (7 * own, 5 * own)
    assert (found[2], found[3]) == pytest.approx(order)


def test_nothing_is_promised_where_a_length_is_unknown():
    endless = replace(holding(1, 1e5), report=report())
    assert seconds_left([endless, waiting(2, 2e5)])[2] is None
    silent = replace(waiting(2, 2e5), report=report())
    assert seconds_left([holding(1, 1e5), silent])[2] is None
    assert seconds_left([holding(1, 1e5), job(2, FOUR)])[2] is None


def test_nothing_is_promised_to_a_job_whose_ceiling_is_the_limit():
    jobs = [holding(1, 1e5), waiting(2, 2e5, account="poor")]
    assert seconds_left(jobs, count=2, account_ceilings={"poor": 2})[2] is None
    assert seconds_left(jobs, count=2, account_ceilings={"poor": 8})[2] is not None


def test_a_job_waits_for_the_first_to_end_whatever_the_order_of_the_others():
    first, second = holding(1, 2e5), holding(2, 1e5)
    second = replace(second, placement=Placement(("n001",), 4))
    found = seconds_left([first, second, waiting(3, 4e5)], count=2)
    assert found[2] == pytest.approx(found[1] / 2)
    assert found[3] == pytest.approx(found[2] + 4 * found[2])
