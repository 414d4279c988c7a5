"""The summary: its contract, its pictures and its tables.

The tests also cover the reasons for which a summary is incomplete.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from contrib.demo.gain import gain, measured
from contrib.demo.measure import Recording, Seen, Track
from contrib.demo.summary import Move, Summary, job_table, move_table

MOVE = Move(4, "requeue", "n1:1", "n1:4", 1012.0, 9.5, {"drain": 0.5, "start": 9.0})


def recording():
    made = Recording(started_at=1000.0)
    track = Track("one", 4, submitted_at=1000.5)
    made.tracks[4] = track
    for at, seen in (
        (1001.0, Seen("PENDING", 0, "")),
        (1002.0, Seen("RUNNING", 1, "n1")),
        (1003.0, Seen("RUNNING", 1, "n1")),
        (1012.0, Seen("PENDING", 0, "")),
        (1020.0, Seen("RUNNING", 4, "n1")),
        (1060.0, Seen("COMPLETED", 0, "")),
        (1061.0, Seen("COMPLETED", 0, "")),
    ):
        made.note(at, {4: seen, 99: Seen("RUNNING", 2, "n2")})
    return made


@pytest.fixture
def summary():
    return Summary(recording(), 4, {"one": 0.91}, {4: [(1004.0, 32), (1025.0, 128)]}, [MOVE])


def test_the_document_is_the_contract(summary, tmp_path):
    path = tmp_path / "summary.json"
    summary.write(path)
    assert json.loads(path.read_text()) == {
        "jobs": [
            {
                "name": "one",
                "job_id": 4,
                "state": "COMPLETED",
                "jct_s": 59.5,
                "accuracy": 0.91,
                "moves": 1,
                "gpus": [[1.0, 0], [2.0, 1], [12.0, 0], [20.0, 4], [60.0, 0]],
                "batch_size": [[4.0, 32], [25.0, 128]],
            }
        ],
        "moves": [
            {
                "job_id": 4,
                "path": "requeue",
                "from": "n1:1",
                "to": "n1:4",
                "total_s": 9.5,
                "steps": {"drain": 0.5, "start": 9.0},
            }
        ],
        "mean_jct_s": 59.5,
        "idle_gpu_s": 4 * 59.5 - 10 - 160,
        "lost_gpu_s": 0.0,
    }
    assert summary.faults() == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s.recording.tracks[4].__setattr__("state", "FAILED"), "state FAILED"),
        (lambda s: s.__setattr__("accuracy", {}), "no final accuracy"),
        (lambda s: s.__setattr__("batch_size", {}), "no batch size over time"),
        (lambda s: s.recording.tracks[4].__setattr__("gpus", []), "no GPUs over time"),
        (lambda s: s.recording.tracks[4].__setattr__("ended_at", None), "no completion time"),
    ],
)
def test_what_is_missing_is_said(summary, change, told):
    change(summary)
    (fault,) = summary.faults()
    assert told in fault
    assert "one (job 4)" in fault


def test_the_mean_is_of_all_jobs_or_none(summary):
    summary.recording.tracks[5] = Track("two", 5, submitted_at=1010.0)
    assert summary.document()["mean_jct_s"] is None
    summary.recording.tracks[5].ended_at = 1040.0
    assert summary.document()["mean_jct_s"] == pytest.approx((59.5 + 30.0) / 2, abs=0.06)


def test_idle_gpus_count_until_the_last_job_ends(summary):
    summary.recording.tracks[5] = late = Track("two", 5, submitted_at=1010.0)
    assert summary.idle_gpu_s is None
    late.note(1050.0, Seen("RUNNING", 4, "n2"))
    late.note(1070.0, Seen("COMPLETED", 0, ""))
    assert summary.idle_gpu_s == pytest.approx(4 * 69.5 - 10 - 160 - 80)


def rendered(table):
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_tables_tell_sizes_over_time_and_costs(summary):
    text = rendered(job_table(summary))
    assert "1 > 4" in text
    assert "32 > 128" in text
    assert "0.910" in text
    moves = [MOVE, replace(MOVE, total_s=12.5, steps={"drain": 1.5, "start": 11.0})]
    text = rendered(move_table(moves))
    assert "in all" in text
    assert "11.00" in text
    assert "12.50" in text


def test_costs_are_told_by_path():
    resized = replace(MOVE, path="resize", total_s=0.25, steps={"resize": 0.25})
    lines = rendered(move_table([MOVE, MOVE, resized])).splitlines()
    (told,) = (line.split() for line in lines if "resize" in line)
    assert told == ["resize", "(1)", "resize", "0.25", "0.25", "0.25"]
    (first,) = (line for line in lines if line.startswith("requeue"))
    assert "(2)" in first
    assert sum("in all" in line for line in lines) == 1


def test_the_picture_is_drawn_for_any_series(summary, tmp_path):
    from contrib.demo.timeline import draw, draw_side_by_side

    jobs = summary.document()["jobs"]
    jobs.append(dict(jobs[0], name="never ran", job_id=5, gpus=[], batch_size=[]))
    draw(jobs, [{"job_id": 4, "at": 12.0}], tmp_path / "t.png", capacity=16, title="t")
    draw_side_by_side([("one run", jobs), ("another", jobs[:1])], tmp_path / "s.png", capacity=16)
    for name in ("t.png", "s.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (
            (50.0,),
            "after 50 s on average. .* sizes their jobs: b 100 s, a 200 s. So polluxd is 50 to 75 % sooner.",
        ),
        ((150.0,), "So polluxd is between 50 % later and 25 % sooner."),
        ((240.0, 260.0), r"after 250 s \(240 to 260 in 2 runs\) .* So polluxd is 25 to 150 % later."),
    ],
)
def test_the_gain_is_a_range_over_all_ways_to_size_plain_jobs(ours, said):
    arms = {"polluxd": {"mean_jct_s": ours}, "a": {"mean_jct_s": [200.0]}, "b": {"mean_jct_s": [100.0]}}
    assert re.search(said.replace("sizes their", "size their"), gain({"arms": arms}))


def test_the_readme_has_the_gain_of_the_committed_comparison() -> None:
    readme = " ".join((Path(__file__).parents[3] / "README.md").read_text().split())
    assert gain(measured()) in readme
