"""One course of the cluster."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pollux.parameters import NoiseScale
from polluxd.forecast.ahead import Newcomer, Work, look_ahead
from polluxd.model import JobSpec
from tests.build import job, nodes, report, running, snapshot

ALONE = JobSpec(min_gpus=4, max_gpus=4, preemptible=False)
HOUR = 3600.0


def seconds(amount, **more):
    return Work(amount, False, **more)


def test_a_job_alone_ends_when_its_work_is_done():
    found = look_ahead(
        snapshot(nodes(1), [running(1, ["n000"], 4, ALONE)]), {1: seconds(500.0)}, horizon_s=HOUR
    )
    assert found[1].starts == 0.0
    assert found[1].ends == pytest.approx(500.0)


def test_a_job_that_waits_for_gpus_starts_when_the_job_before_it_ends():
    snap = snapshot(nodes(1), [running(1, ["n000"], 4, ALONE), job(2, ALONE)])
    found = look_ahead(snap, {1: seconds(1000.0), 2: seconds(200.0)}, horizon_s=HOUR)
    # Within the floor of decisions at that time; then the work: past jobs' seconds have their starts in them.
    assert 1000.0 <= found[2].starts <= 1060.0
    assert found[2].ends == pytest.approx(found[2].starts + 200.0)


def test_a_start_under_way_delays_steps_but_not_an_end_that_is_known_in_seconds():
    one = running(1, ["n000"], 4, ALONE, pinned=True, pin_reason="move to n000 under way", move_cost=126.0)
    found = look_ahead(snapshot(nodes(1), [one]), {1: seconds(20.0, limit_s=60.0)}, horizon_s=HOUR)
    assert found[1].ends == pytest.approx(20.0)
    one = replace(one, report=report(progress=0.0, target=2000.0))
    in_time = replace(one, pinned=False, pin_reason="")
    first, later = (
        look_ahead(snapshot(nodes(1), [each]), {1: Work(2000.0, True)}, horizon_s=100 * HOUR)[1].ends
        for each in (in_time, one)
    )
    assert later == pytest.approx(first + 126.0)


def test_steps_take_as_long_as_the_fit_says_and_more_gpus_less():
    def ends(gpus):
        only = JobSpec(min_gpus=gpus, max_gpus=gpus)
        one = running(1, ["n000"], gpus, only, report=report(progress=100.0, target=2100.0))
        return look_ahead(snapshot(nodes(1), [one]), {1: Work(2000.0, True)}, horizon_s=100 * HOUR)[1].ends

    assert 0 < ends(4) < ends(2) < ends(1)


def test_noise_that_grows_as_in_past_jobs_ends_a_job_sooner():
    one = running(
        1, ["n000"], 4, ALONE, report=report(noise=NoiseScale(1.0, 0.1), progress=0.0, target=2000.0)
    )

    def ends(noise):
        work = {1: Work(2000.0, True, ends_with=noise)}
        return look_ahead(snapshot(nodes(1), [one]), work, horizon_s=100 * HOUR)[1].ends

    same, grown, none = ends(NoiseScale(1.0, 0.1)), ends(NoiseScale(1.0, 1e3)), ends(NoiseScale(0.0, 1e3))
    assert same == pytest.approx(ends(None))
    assert none == same
    assert grown < 0.9 * same


def test_a_newcomer_takes_its_share():
    one = running(1, ["n000"], 4, report=report(progress=0.0, target=1e5))
    snap = snapshot(nodes(1), [one])
    alone = look_ahead(snap, {1: Work(20000.0, True)}, horizon_s=100 * HOUR)[1].ends
    came = Newcomer(60.0, replace(job(2, ALONE), submitted_at=snap.taken_at + 60), seconds(HOUR))
    beside = look_ahead(snap, {1: Work(20000.0, True)}, [came], horizon_s=100 * HOUR)
    assert beside.keys() == {1}
    assert beside[1].ends > alone


def test_slurms_time_limit_ends_a_job():
    one = running(1, ["n000"], 4, ALONE, time_limit=900.0)
    found = look_ahead(snapshot(nodes(1), [one]), {1: seconds(HOUR, limit_s=300.0)}, horizon_s=HOUR)
    assert found[1].ends == pytest.approx(300.0)


def test_what_lies_beyond_the_look_ahead_is_not_told():
    one = running(1, ["n000"], 4, ALONE)
    found = look_ahead(
        snapshot(nodes(1), [one, job(2, ALONE)]), {1: seconds(9e9), 2: seconds(1.0)}, horizon_s=HOUR
    )
    assert (found[1].starts, found[1].ends) == (0.0, None)
    assert (found[2].starts, found[2].ends) == (None, None)


def test_a_drained_node_keeps_its_job_and_takes_no_other():
    snap = snapshot(nodes(1), [running(1, ["n000"], 4, ALONE), job(2, ALONE)])
    work = {1: seconds(1000.0), 2: seconds(10.0)}
    assert look_ahead(snap, work, horizon_s=HOUR)[2].ends is not None
    assert look_ahead(snap, work, horizon_s=HOUR, drains={"n000": 500.0})[2].starts is None


def test_a_course_is_the_same_each_time():
    snap = snapshot(nodes(2), [running(n, ["n000"], 1, report=report(target=1e4)) for n in (1, 2)] + [job(3)])
    work = {1: Work(5000.0, True), 2: Work(9000.0, True), 3: Work(800.0, True, report())}
    assert look_ahead(snap, work, horizon_s=50 * HOUR) == look_ahead(snap, work, horizon_s=50 * HOUR)


def test_a_job_without_a_report_scales_by_what_its_kind_measured():
    def ends(measures):
        work = {1: Work(20000.0, True, measures)}
        return look_ahead(snapshot(nodes(4), [job(1)]), work, horizon_s=1000 * HOUR)[1].ends

    assert math.isfinite(ends(report("scalable", explored=0)))
    assert ends(report("scalable", explored=0)) < 20000.0
