"""Quantiles of courses, and what earlier forecasts missed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from polluxd.forecast.ahead import INTERVAL_S, Course
from polluxd.forecast.intervals import CHECKED, Forecast, Happened, Misses, drawn, score


def test_an_interval_is_the_quantiles_of_the_courses():
    found = drawn(1, 1000.0, "declared", [Course(0.0, 10.0 * n) for n in range(11)])
    assert found.drawn == pytest.approx({"first": 1010.0, "last": 1090.0})
    assert found.told == found.drawn


def test_a_job_that_waits_is_told_a_start_and_one_that_runs_is_not():
    courses = [Course(float(n), 100.0 + n) for n in range(11)]
    assert drawn(1, 0.0, "declared", courses).drawn["starts"] == pytest.approx(8.0 + INTERVAL_S)


def test_a_side_that_too_few_courses_reach_is_not_told():
    courses = [Course(0.0, 10.0)] * 5 + [Course(0.0, None)] * 6
    assert drawn(1, 0.0, "declared", courses).drawn == {"first": 10.0}


def test_nothing_is_told_of_an_end_that_nothing_foretells():
    assert drawn(1, 0.0, "", [Course(0.0, 10.0)] * 5).drawn == {}


def past(jobs, miss):
    """Forecasts of 100 s more, each a little wrong, and what happened."""
    forecasts = [Forecast(n, 0.0, "declared", {"first": 100.0, "last": 100.0}) for n in range(jobs)]
    return forecasts, {n: Happened(0.0, 100.0 * math.exp(miss(n))) for n in range(jobs)}


def test_too_few_ended_jobs_move_nothing():
    forecast = Forecast(99, 0.0, "declared", {"first": 50.0, "last": 60.0})
    moved = Misses(*past(CHECKED - 1, lambda _: 1.0)).move(forecast)
    assert moved.told == forecast.drawn
    assert moved.checked == 0


def test_an_interval_is_widened_until_it_would_have_held_for_four_in_five():
    random = np.random.default_rng(1)
    errors = random.normal(0.2, 0.3, 400)
    forecasts, happened = past(200, lambda n: errors[n])
    misses = Misses(forecasts, happened)
    moved = misses.move(Forecast(999, 0.0, "declared", {"first": 100.0, "last": 100.0}))
    assert moved.checked == 200
    within = np.mean([moved.told["first"] <= 100.0 * math.exp(e) <= moved.told["last"] for e in errors[200:]])
    assert 0.73 < within < 0.88
    # It follows that forecasts were too early on the whole.
    assert moved.told["first"] > 80.0


def test_no_job_is_told_to_start_after_its_end():
    told = Misses([], {}).move(Forecast(1, 0.0, "name", {"starts": 90.0, "first": 50.0, "last": 70.0})).told
    assert told == {"starts": 70.0, "first": 50.0, "last": 70.0}


def test_each_job_counts_once_however_often_it_was_forecast():
    forecasts, happened = past(CHECKED, lambda n: 3.0 if n == 0 else 0.0)
    misses = Misses([*forecasts, *[forecasts[0]] * 500], happened)
    told = misses.move(Forecast(99, 0.0, "declared", {"first": 100.0, "last": 100.0})).told
    assert told["last"] == pytest.approx(100.0)


def test_a_user_who_declares_false_lengths_spoils_no_forecast_of_others():
    lies = [Forecast(n, 0.0, "declared", {"last": 1.0}, user="eve") for n in range(1000)]
    fair = [Forecast(1000 + n, 0.0, "declared", {"last": 100.0}, user="ada") for n in range(10)]
    others = [Forecast(2000 + n, 0.0, "declared", {"last": 100.0}, user=f"u{n}") for n in range(300)]
    misses = Misses([*lies, *fair, *others], {n: Happened(0.0, 100.0) for n in range(2300)})
    for user, last in (("ada", 100.0), ("bob", 100.0), ("eve", 10000.0)):
        told = misses.move(Forecast(9, 0.0, "declared", {"last": 100.0}, user=user))
        assert told.told["last"] == pytest.approx(last)


def test_a_score_counts_what_was_told():
    forecasts = [
        Forecast(1, 0.0, "declared", {}, {"first": 90.0, "last": 110.0}),
        Forecast(2, 0.0, "declared", {}, {"starts": 5.0, "first": 90.0, "last": 110.0}),
        Forecast(3, 0.0, "declared", {}, {"first": 90.0, "last": 110.0}),
    ]
    found = score(forecasts, {1: Happened(-100.0, 100.0), 2: Happened(20.0, 120.0), 3: Happened(0.0, None)})
    assert (found.jobs, found.within, found.by_start, found.width_s) == (2, 0.5, 0.0, 20.0)
    assert found.relative == pytest.approx((20 / 200 + 20 / 100) / 2)
    assert score(forecasts, {}) is None
