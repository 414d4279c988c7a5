"""The process beside polluxd."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from types import SimpleNamespace

from polluxd import store
from polluxd.forecast import picture, service
from polluxd.model import JobSpec
from polluxd.model.snapshot_json import to_json
from tests.build import config, nodes, report, running, snapshot

ALONE = JobSpec(min_gpus=4, max_gpus=4)


def test_it_lives_as_long_as_the_work_beside_it():
    with service.beside(config):
        (child,) = multiprocessing.active_children()
        assert child.is_alive()
    assert multiprocessing.active_children() == []
    assert not os.path.exists(f"/proc/{child.pid}")


def test_a_run_forecasts_each_decision_once_and_rests_between_courses(monkeypatch):
    made = snapshot(nodes(1), [running(1, ["n000"], 4, ALONE, report=report(progress=0.0, target=100.0))])
    written, rests = {}, []

    class Kept:
        def __init__(self, url, cluster, **waits):
            pass

        newest_snapshot = staticmethod(lambda: (42, json.loads(to_json(made))))
        cycle = staticmethod(lambda number: SimpleNamespace(id=number, mode="enforce"))
        ended_jobs = staticmethod(lambda since, most: [])
        jobs_view = staticmethod(lambda *, ended: [])
        forecasts = staticmethod(lambda most=1: [*written.values()])
        record_forecast = staticmethod(lambda cycle, found: written.update({cycle: found}))
        close = staticmethod(lambda: None)

    def rest() -> bool:
        rests.append(time.process_time())
        return False

    monkeypatch.setattr(store, "Store", Kept)
    service.run(config(), rest)
    service.run(config(), rest)
    assert len(rests) == picture.DRAWS
    (found,) = written.values()
    assert (found["cycle"], found["at"], found["courses"]) == (42, made.taken_at, picture.DRAWS)
    (one,) = found["jobs"]
    assert made.taken_at < one["told"]["first"] <= one["told"]["last"]


def test_it_sleeps_for_nineteen_times_what_it_took(monkeypatch):
    slept, clock = [], iter([0.0, 2.0, 2.0, 5.0, 5.0])
    monkeypatch.setattr(
        service, "time", SimpleNamespace(process_time=lambda: next(clock), sleep=slept.append)
    )
    rest = service.Rest()
    assert not rest()
    assert not rest()
    assert slept == [38.0, 57.0]
