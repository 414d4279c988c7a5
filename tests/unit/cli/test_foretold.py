"""What `explain`, `jobs` and `forecast` tell of forecasts."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from polluxd.cli import access
from polluxd.cli.forecast import ahead_of_time
from polluxd.cli.forecast.foretold import FRESH_S, sentence, when
from polluxd.errors import ConfigError
from polluxd.forecast.courses import MOST_JOBS
from polluxd.forecast.picture import CannotTell, Picture
from polluxd.model import DaemonMode, JobSpec
from polluxd.model.snapshot_json import to_json
from tests.build import job, nodes, report, running, snapshot

NOW = 1_700_000_000.0
ALONE = JobSpec(min_gpus=4, max_gpus=4, preemptible=False)


def document(at=NOW, **changes):
    told = {"starts": at + 600, "first": at + 3600, "last": at + 7200}
    one = {"job_id": 7, "at": at, "by": "declared", "drawn": told, "told": told, "checked": 83, **changes}
    return {"cycle": 42, "at": at, "courses": 12, "days": 6.1, "jobs": [one]}


def test_a_sentence_says_when_and_how_it_was_obtained():
    said = sentence([document()], 7, NOW)
    assert said.startswith(
        f"It starts by {when(NOW + 600, NOW)}, ends between {when(NOW + 3600, NOW)} and {when(NOW + 7200, NOW)} (80 %)."
    )
    for part in ("12 courses", "last 6.1 days", "as it declares it", "the forecasts of 83 ended jobs missed"):
        assert part in said


def test_a_forecast_that_nothing_has_checked_says_so():
    assert "not yet checked against what happened" in sentence([document(checked=0)], 7, NOW)


def test_where_it_cannot_tell_it_says_so():
    assert sentence([document(by="", told={})], 7, NOW).startswith("polluxd cannot tell when it ends")
    only_start = sentence([document(by="", told={"starts": NOW + 60})], 7, NOW)
    assert only_start.startswith("It starts by")
    assert "cannot tell when it ends" in only_start
    assert "ends after" in sentence([document(told={"first": NOW + 60})], 7, NOW)
    assert "no forecast of it yet" in sentence([document()], 8, NOW)
    assert "and none since" in sentence([document()], 7, NOW + FRESH_S + 1)
    assert sentence([], 7, NOW) == ""


def test_explain_and_jobs_tell_the_forecast(store, polluxctl):
    assert "ENDS BY" not in polluxctl("jobs").out
    now = time.time()
    store.foretold = [document(at=now)]
    assert "(80 %). This comes from 12 courses" in polluxctl("explain", "7").out
    assert "ENDS BY" in polluxctl("jobs").out
    row = json.loads(polluxctl("jobs", "--json").out)[0]
    assert (row["starts_by"], row["ends_from"], row["ends_by"]) == (now + 600, now + 3600, now + 7200)


class Kept:
    """What a forecast asks of the store."""

    def __init__(self, snap, mode=DaemonMode.ENFORCE, documents=()):
        self._snapshot, self._mode, self._documents = snap, mode, [*documents]

    def newest_snapshot(self):
        return 42, json.loads(to_json(self._snapshot))

    def cycle(self, number):
        return SimpleNamespace(id=number, mode=self._mode)

    def ended_jobs(self, since, most):
        return []

    def jobs_view(self, *, ended):
        return []

    def forecasts(self, most=1):
        return self._documents[:most]


@pytest.fixture
def foretell(monkeypatch, polluxctl):
    """Return a function that runs `polluxctl forecast` on a snapshot."""

    def run(kept, *words):
        monkeypatch.setattr(access, "open_store", lambda config: (kept, None))
        return polluxctl("forecast", *words)

    return run


def two_jobs(**settings):
    made = snapshot(
        nodes(1),
        [
            running(1, ["n000"], 4, ALONE, report=report(progress=0.0, target=1000.0)),
            job(2, ALONE, report=report(progress=0.0, target=10.0)),
        ],
        **settings,
    )
    return replace(made, taken_at=float(int(time.time())))


def test_forecast_shows_each_job_and_how_it_was_obtained(foretell):
    said = foretell(Kept(two_jobs()))
    assert said.status == 0
    for part in (
        "STARTS BY",
        "declared",
        "12 courses of the cluster from decision 42",
        "no job that was forecast has",
    ):
        assert part in said.out
    rows = json.loads(foretell(Kept(two_jobs()), "--json").out)["jobs"]
    assert rows[0]["starts_by"] is None
    assert rows[0]["ends_by"] < rows[1]["ends_from"]
    assert rows[1]["starts_by"] >= rows[0]["ends_by"]


def test_a_drained_node_makes_jobs_later(foretell):
    # The second job never starts: no course has an end of it with the change.
    said = json.loads(foretell(Kept(two_jobs()), "--drain", "n000", "--json").out)["jobs"]
    assert [(row["job_id"], row["later_s"]) for row in said] == [(1, 0.0), (2, None)]
    with pytest.raises(ConfigError, match="no node n9"):
        ahead_of_time.show_change(Picture.read(Kept(two_jobs()), NOW), "n9", NOW, [], as_json=True)


def test_a_weight_is_asked_of_the_same_engine(foretell):
    one = report(progress=0.0, target=1e3)
    both = [job(n, ALONE, account=name, report=one, user=name) for n, name in ((1, "a"), (2, "b"))]
    made = replace(snapshot(nodes(1), both), taken_at=time.time())
    first, second = json.loads(foretell(Kept(made), "--account-weight", "b=4", "--json").out)["jobs"]
    assert first["later_s"] > 0
    assert second["later_s"] < 0
    assert foretell(Kept(made), "--account-weight", "a").status != 0


def test_a_user_with_many_waiting_jobs_takes_no_forecast_from_others():
    made = two_jobs()
    late = replace(made.jobs[1], job_id=900, user="bob", submitted_at=made.taken_at)
    many = [replace(made.jobs[1], job_id=n) for n in range(10, 10 + MOST_JOBS)]
    kept = Picture.read(Kept(replace(made, jobs=(*made.jobs, *many, late))), NOW).snapshot.jobs
    assert len(kept) == MOST_JOBS
    assert {1, 2, 900} <= {one.job_id for one in kept}


def test_without_a_controller_that_acts_nothing_is_foretold():
    with pytest.raises(CannotTell, match="mode observe"):
        Picture.read(Kept(two_jobs(), DaemonMode.OBSERVE), NOW)
    with pytest.raises(CannotTell, match="paused"):
        Picture.read(Kept(two_jobs(paused=True)), NOW)


@pytest.mark.parametrize("text", ["noon", "18:30", "2030-01-01T08:00"])
def test_times_of_a_change_lie_ahead(text):
    assert ahead_of_time.moment(text, NOW) > NOW


@pytest.mark.parametrize("text", ["soon", "25:00", "9999999-01-01"])
def test_a_wrong_time_says_what_was_expected(text):
    with pytest.raises(ConfigError, match="expected a time such as noon"):
        ahead_of_time.moment(text, NOW)
