"""What is drawn of lengths and arrivals."""

from __future__ import annotations

import numpy as np
import pytest

from polluxd.forecast.history import ANYBODY, DECLARED, SAME_NAME, SAME_USER, UNKNOWN, History, family
from polluxd.model import JobSpec
from polluxd.store import EndedJob
from tests.build import job, report, running

DAY = 86400.0
RANDOM = np.random.default_rng(0)


def ended(number, seconds, *, user="user-1", name="bert-1", at=0.0, **reported):
    return EndedJob(
        *(number, user, name, "a", "", JobSpec(), at, at, at + seconds),
        report(**reported) if reported else None,
    )


def drawn(past, one, held=0.0):
    history = History(past, [each.submitted_at for each in past], 0.0)
    return [history.work(one, held, np.random.default_rng(n)) for n in range(20)]


def test_numbers_do_not_tell_names_apart():
    assert family("bert-17") == family("bert-3") == family("bert_0042")
    assert family("bert-17") != family("gpt-17")
    assert family("_" * 10**6) == "_" * 10**6, "one pass"


def test_a_declared_length_holds_where_nothing_else_is_known():
    one = running(1, ["n000"], 4, user="ada", report=report(progress=30.0, target=100.0))
    assert {(work.amount, by) for work, by in drawn([], one)} == {(70.0, DECLARED)}


def test_a_user_whose_jobs_stop_early_is_expected_to_do_so_again():
    past = [ended(n, 60.0, user="ada", progress=50.0, target=100.0) for n in (1, 2, 3)]
    one = running(4, ["n000"], 4, user="ada", name="bert-4", report=report(progress=30.0, target=100.0))
    assert {work.amount for work, _ in drawn(past, one)} == {20.0}
    # What others declare says nothing of this user.
    other = running(4, ["n000"], 4, user="bob", name="bert-4", report=report(progress=30.0, target=100.0))
    assert {work.amount for work, _ in drawn(past, other)} == {70.0}


@pytest.mark.parametrize(
    ("user", "name", "by"),
    [("ada", "bert-9", SAME_NAME), ("ada", "gpt-9", SAME_USER), ("bob", "bert-9", ANYBODY)],
)
def test_an_undeclared_length_goes_by_the_nearest_ended_jobs(user, name, by):
    past = [ended(n, 100.0 * n, user="ada", progress=1000.0 * n) for n in (1, 2, 3)]
    one = job(9, user=user, name=name)
    found = drawn(past, one)
    assert {said for _, said in found} == {by}
    if by == SAME_NAME:
        assert {work.amount for work, _ in found} == {1000.0, 2000.0, 3000.0}
        assert all(work.in_steps and work.measures.progress == 0.0 for work, _ in found)
    else:
        assert {work.amount for work, _ in found} == {100.0, 200.0, 300.0}


def test_a_job_ends_after_those_that_it_has_outlived():
    past = [ended(n, 100.0 * n) for n in (1, 2, 3)]
    one = running(9, ["n000"], 4, user="user-1", name="bert-9")
    assert {work.amount for work, _ in drawn(past, one, held=150.0)} == {50.0, 150.0}
    assert {by for _, by in drawn(past, one, held=1000.0)} == {UNKNOWN}


def test_two_ended_jobs_are_too_few():
    assert {by for _, by in drawn([ended(n, 100.0) for n in (1, 2)], job(9))} == {UNKNOWN}


def test_a_time_limit_bounds_what_is_left():
    one = running(1, ["n000"], 4, time_limit=600.0, report=report(target=1e9))
    assert {work.limit_s for work, _ in drawn([], one, held=450.0)} == {150.0}


def test_arrivals_are_those_of_a_day_before_at_this_time():
    past = [ended(n, 60.0, at=day * DAY + hour * 3600.0) for day in (0, 1) for n, hour in ((1, 9), (2, 10))]
    history = History(past, [each.submitted_at for each in past], 0.0)
    came = history.arrivals(2 * DAY + 8.5 * 3600.0, 3600.0, 100, RANDOM)
    assert [(each.after, each.job.job_id) for each in came] == [(1800.0, 100)]


def test_within_the_first_day_arrivals_come_at_the_rate_so_far():
    past = [ended(n, 60.0, at=600.0 * n) for n in range(1, 7)]
    history = History(past, [each.submitted_at for each in past], 0.0)
    for ahead in (3600.0, 8 * 3600.0):
        counts = [len(history.arrivals(3600.0, ahead, 100, np.random.default_rng(n))) for n in range(50)]
        assert 4 < np.mean(counts) < 8, "a first hour with six jobs says nothing of the next eight"
    assert History(past[:2], [], 0.0).arrivals(3600.0, 3600.0, 100, RANDOM) == []
