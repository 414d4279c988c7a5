"""The report as a whole: its command, its page and its figures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from polluxd.cli.report.site import page
from polluxd.model.snapshot_json import encode
from polluxd.site_report import document, replay, right_sizes
from polluxd.site_report.gpu_hours import CAUSES
from polluxd.site_report.job_log import read
from polluxd.site_report.machine import Nodes
from polluxd.site_report.replay import lines, replayed_log
from polluxd.store import CycleView
from tests.unit.site_report.shadow_site import LOG, snapshots
from tests.unit.site_report.site_text import T0, written

EVIL = "<script>alert(1)</script>"


def running(count=40, **more):
    """Return jobs one after the other on two nodes of 4 GPUs, each half an hour long."""
    return [
        {
            "id": n + 1,
            "gpus": 4,
            "eligible": 15 * n,
            "start": 15 * n + 15,
            "end": 15 * n + 45,
            "places": (f"n{n % 2}",),
        }
        | more
        for n in range(count)
    ]


@pytest.fixture
def site(tmp_path):
    records = read(written(tmp_path / "log", running()))
    return document.Sources(records, Nodes(), *document.period_of(records), False, False)


def test_all_hours_have_a_cause_and_the_ways_that_they_were_obtained(site):
    found = document.made(site)
    assert sum(row["gpu_hours"] for row in found["causes"]) == pytest.approx(found["capacity_gpu_hours"])
    assert sum(row["share"] for row in found["causes"]) == pytest.approx(1.0)
    assert [row["cause"] for row in found["causes"]] == list(CAUSES)
    assert found["capacity_gpu_hours"] == pytest.approx(8 * (site.until - site.since) / 3600)
    assert sum(sum(row[c] for c in CAUSES) for row in found["by_month"]) == pytest.approx(
        found["capacity_gpu_hours"]
    )
    assert found["by_user"][0]["gpu_hours"] == pytest.approx(found["causes"][0]["gpu_hours"])
    assert found["waits_by_size"][0]["median_s"] == 900
    said = " ".join(found["obtained"])
    for word in ("a lower bound", "AllocTRES", "no events of nodes", "cannot tell"):
        assert word in said


def test_jobs_that_did_not_wait_count_among_the_waits(tmp_path):
    jobs = running(41)
    for job in jobs[:30]:
        job["start"] = job["eligible"]
    records = read(written(tmp_path / "log", jobs))
    found = document.made(document.Sources(records, Nodes(), T0, T0 + 86400.0, False, False))
    (row,) = found["waits_by_size"]
    assert (row["jobs"], row["median_s"], row["p90_s"]) == (41, 0.0, 900.0)
    waited = [(15 * n // 60, 900.0 if n >= 30 else 0.0) for n in range(41)]
    means = [wait for day in found["wait_by_hour"] for wait in day if wait is not None]
    assert means == [
        pytest.approx(np.mean([w for at, w in waited if at == hour]))
        for hour in sorted({at for at, _ in waited})
    ]
    assert "median 0 s, 1 in 10 above 15.0 min" in document.summary(found)[3]


def test_hostile_names_stay_text_on_the_page_and_leave_the_terminal_alone(tmp_path, polluxctl):
    jobs = running(name=EVIL + "\x1b[2J", user=EVIL, account='"><img src=x>\x1b', partition="<p>")
    path, html, out = written(tmp_path / "log", jobs), tmp_path / "r.html", tmp_path / "r.json"
    said = polluxctl("report", "--sacct", str(path), "--html", str(html), "--json", str(out))
    assert said.status == 0, said.err
    assert len(said.out.splitlines()) == 6
    assert all(character.isprintable() or character == "\n" for character in said.out)
    text = html.read_text()
    seen: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: seen.extend([tag, *(name for name, _ in attributes)])
    parser.feed(text)
    assert "table" in seen
    assert not {"script", "img", "link", "src", "href", "onerror"} & set(seen), "and it needs no network"
    assert "&lt;script&gt;" in text
    assert "\x1b" not in text
    assert json.loads(out.read_text())["records"] == 40


def test_anonymised_no_name_is_left(tmp_path, polluxctl):
    jobs = running(
        name="secretname", user="secretuser", account="secretlab", partition="secretpart,b", type="secrettype"
    )
    path, html, out = written(tmp_path / "log", jobs), tmp_path / "r.html", tmp_path / "r.json"
    assert (
        polluxctl(
            "report", "--anonymise", "--sacct", str(path), "--html", str(html), "--json", str(out)
        ).status
        == 0
    )
    for text in (html.read_text(), out.read_text()):
        assert "secret" not in text
    plain = document.made(document.Sources(read(path), Nodes(), T0, T0 + 86400, False, False))
    hidden = document.made(
        document.anonymised(document.Sources(read(path), Nodes(), T0, T0 + 86400, False, False))
    )
    assert [row["gpu_hours"] for row in plain["causes"]] == [row["gpu_hours"] for row in hidden["causes"]]
    assert plain["waited_where"] == hidden["waited_where"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--since", "yesterday"), "expected a time such as 24h"),
        (("--since", "1h", "--until", "2h"), "expected a time before the end"),
        (("--sacct", "nowhere"), "cannot be read"),
    ],
)
def test_a_wrong_call_is_refused(polluxctl, words, why):
    said = polluxctl("report", *words)
    assert said.status == 2
    assert why in said.err


def test_the_commands_that_it_needs_are_printed(polluxctl):
    said = polluxctl("report", "--commands", "--since", "2026-11-01", "--until", "2026-11-20")
    assert (said.status, said.err) == (0, "")
    assert [line.rpartition("> ")[2] for line in said.out.splitlines()] == [
        *("sacct.txt", "nodes.txt", "events.txt", "reservations.txt")
    ]


def test_speedups_come_with_an_interval_that_holds_the_truth_as_often_as_it_says():
    random = np.random.default_rng(3)
    held = 0
    for _ in range(400):
        few = np.log(3600 * random.lognormal(0, 0.2, 8))
        many = np.log(3600 / 3 * random.lognormal(0, 0.3, 5))
        _, low, high = right_sizes.ratio(few, many)
        held += low <= 3 <= high
    assert 0.92 <= held / 400 <= 0.98


def test_one_training_at_two_sizes_tells_what_the_larger_costs(tmp_path):
    jobs = []
    for n, (gpus, minutes) in enumerate([(1, 100)] * 4 + [(8, 50)] * 3 + [(4, 25)] * 2):
        jobs.append(
            {
                "id": n + 1,
                "gpus": gpus,
                "eligible": 200 * n,
                "start": 200 * n,
                "end": 200 * n + minutes + n % 2,
            }
            | {"name": f"resnet-{n}", "places": ("n1",)}
        )
    jobs.append(jobs[0] | {"id": 99, "user": "bob"})
    records = read(written(tmp_path / "log", jobs))
    (row,) = right_sizes.experiments(records, (T0, T0 + 86400 * 9))
    assert (row["name"], row["from_gpus"], row["gpus"], row["jobs"]) == ("resnet-#", 1, 8, [4, 3])
    assert row["low"] < row["speedup"] < row["high"]
    assert row["speedup"] == pytest.approx(2.0, rel=0.03)
    assert row["past_half"]
    (user,) = right_sizes.past_half([row])
    assert (user["name"], user["gpu_hours"]) == ("ann", pytest.approx(8 * 151 / 60, rel=0.02))


@pytest.fixture
def all_elastic(monkeypatch):
    monkeypatch.setattr(replay, "ELASTIC", (1.0,))


@pytest.mark.usefixtures("all_elastic")
def test_a_replay_states_its_error_before_any_change(site):
    found = replayed_log(site, 20)
    assert found["error"]["recorded_wait_s"] == 900
    said = lines(found)
    assert "recorded" in said[0]
    assert "cannot_tell" in found or all(math.isfinite(row["change"]) for row in found["changes"])


@pytest.mark.usefixtures("all_elastic")
def test_a_replay_of_jobs_that_slurm_ran_in_order_is_right(tmp_path):
    """Two nodes, jobs that never wait: the simulated waits are the recorded ones."""
    jobs = [job | {"eligible": job["start"], "end": job["end"] - 10} for job in running(25)]
    records = read(written(tmp_path / "log", jobs))
    found = replayed_log(document.Sources(records, Nodes(), *document.period_of(records), False, False), 20)
    assert found["error"]["mean_error_s"] <= 60
    assert found["error"]["completion"] <= 0.05
    assert [row["tuned"] for row in found["changes"]] == [False, True]


def test_a_log_that_cannot_tell_says_why(tmp_path, site):
    few = read(written(tmp_path / "few", running(5)))
    assert (
        "20 are needed"
        in lines(replayed_log(document.Sources(few, Nodes(), T0, T0 + 9000, False, False), 30))[0]
    )
    path = tmp_path / "philly.csv"
    path.write_text(
        "timestamp,duration,num_gpus,gpu_time,cluster\n" + "2017-10-09 07:01:55,66.0,2,132.0,x\n" * 30
    )
    philly = read(path)
    begin = float(philly.submit[0])
    submitted = document.Sources(philly, Nodes(), begin, begin + 66.0, False, False)
    told = replayed_log(submitted, 30)
    assert "no starts" in lines(told)[0]
    assert document.summary(document.made(submitted))[3] == "Waits: this log cannot tell"
    assert page(document.made(site) | {"replay": told}).startswith("<!doctype html>")


def test_the_chapter_on_mode_observe_is_read_from_the_database_and_shows_hostile_names_as_text(
    tmp_path, store, polluxctl
):
    (_, first), (_, second) = snapshots()
    ends = replace(second, taken_at=second.taken_at + 600.0)
    for number, snapshot in enumerate((first, second, ends), 1):
        view = CycleView(number, 5, "observe", snapshot.taken_at, "", 1.0, 1.0, 0.0, "counts", {})
        store.shadowed.append(view)
    store.cycle_snapshot = lambda number: encode((first, second, ends)[number - 1])
    path, html, out = written(tmp_path / "log", LOG), tmp_path / "r.html", tmp_path / "r.json"
    words = ("--sacct", str(path), "--html", str(html), "--json", str(out), "--since", "2000-01-01")
    said = polluxctl("report", "--shadow", *words)
    assert said.status == 0, said.err
    assert "In the shadow: 0.333 h of decisions in mode observe. 3 jobs" in said.out
    assert json.loads(out.read_text())["shadow"]["hours"] == pytest.approx(1 / 3)
    text = html.read_text()
    assert "What polluxd would have done in mode observe" in text
    assert "<script" not in text
    assert "\x1b" not in text + said.out
    assert "shadow" not in polluxctl("report", *words[:2]).out
