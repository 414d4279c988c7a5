"""Logs as they come: requeued, pending and hostile records, and what each broken row costs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from polluxd.sim.workload import TraceError
from polluxd.site_report.document import period_of, settled
from polluxd.site_report.job_log import COLUMNS, STATES, command, read
from polluxd.site_report.machine import Nodes, placed, read_closed, read_nodes

from .site_text import T0, line, sacct_text, written

GOOD = {"id": 1, "gpus": 4, "eligible": 0, "start": 10, "end": 70, "places": ("n1",)}
HOSTILE = [
    "a|b|c",
    "x" * 5000,
    "\x1b[2J",
    "<script>alert(1)</script>",
    "é\udcff",
    "a\rb",
    "'\"`$(x)",
    "\x00",
    "|" * 40,
]


def states(records):
    return [STATES[int(code)] for code in records.state]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_costs_no_record(tmp_path, name):
    path = tmp_path / "log"
    text = sacct_text([GOOD | {"name": name}, GOOD | {"id": 2}])
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    records = read(path)
    assert (records.job.tolist(), dict(records.left_out)) == ([1, 2], {})
    assert records.gpus.tolist() == [4, 4]


def test_a_line_break_in_a_name_costs_the_rest_of_the_name(tmp_path):
    path = written(tmp_path / "log", [GOOD | {"name": "a\n999|b"}, GOOD | {"id": 2}])
    records = read(path)
    assert records.job.tolist() == [1, 2]
    assert dict(records.left_out) == {"broken: not as many fields as columns": 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"id": "x1"}, "broken: JobIDRaw is no number"),
        ({"id": "1.batch"}, "step of a job"),
        ({"state": "<b>"}, "broken: unknown state"),
        ({"start": 80}, "broken: it ends before it starts"),
        ({"gpus": 0}, "no GPU"),
        ({"gpus": 2_000_000}, "broken: more GPUs than any cluster has"),
        ({"end": None}, "broken: its state is one of the end, and it has no end"),
    ],
)
def test_a_broken_record_is_counted_by_its_reason_and_costs_itself(tmp_path, change, reason):
    records = read(written(tmp_path / "log", [GOOD | change, GOOD | {"id": 2}]))
    assert dict(records.left_out) == {reason: 1}
    assert records.job.tolist() == [2]
    assert records.read == 2


def test_a_cut_off_file_costs_its_last_row(tmp_path):
    path = tmp_path / "log"
    path.write_text(sacct_text([GOOD, GOOD | {"id": 2}])[:-60])
    records = read(path)
    assert len(records) == 1
    assert sum(records.left_out.values()) == 1


def test_a_requeued_completing_jobs_lost_start_is_told(tmp_path):
    text = line(GOOD | {"state": "REQUEUED"}).split("|")
    text[COLUMNS.index("Start")] = "Unknown"
    path = tmp_path / "log"
    path.write_text("\n".join(["|".join(COLUMNS), "|".join(text), line(GOOD | {"id": 2})]) + "\n")
    (reason,) = read(path).left_out
    assert reason.startswith("held GPUs, and the record has no start")


def test_the_same_log_with_times_in_words_is_read_alike(tmp_path):
    from datetime import UTC, datetime

    text = sacct_text([GOOD])
    for minute in (0, 10, 70):
        at = datetime.fromtimestamp(T0 + 60 * minute, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        text = text.replace(str(T0 + 60 * minute), at)
    path = tmp_path / "log"
    path.write_text(text)
    records = read(path)
    assert (records.start.tolist(), records.end.tolist()) == ([T0 + 600], [T0 + 4200])
    assert records.zoned
    assert not read(written(tmp_path / "epoch", [GOOD])).zoned


@pytest.mark.parametrize(
    ("shown", "tasks"),
    [("1_[0-9%2]", 10), ("1_[1,3,5-7]", 5), ("1_[0-8:4]", 3), ("1_[", 1), ("1_[9-1]", 1), ("1", 1)],
)
def test_a_pending_array_counts_its_tasks(tmp_path, shown, tasks):
    pending = GOOD | {"state": "PENDING", "start": None, "end": None, "shown": shown}
    assert read(written(tmp_path / "log", [pending])).tasks.tolist() == [tasks]


def test_a_file_that_is_no_sacct_says_which_command_makes_one(tmp_path):
    path = tmp_path / "log"
    path.write_text("JobID|State\n1|COMPLETED\n")
    with pytest.raises(TraceError, match=r"no column JobIDRaw.*sacct --allusers --duplicates"):
        read(path)


def test_a_log_without_gpus_says_what_slurm_needs(tmp_path):
    with pytest.raises(TraceError, match=r"2 no GPU.*AccountingStorageTRES"):
        period_of(read(written(tmp_path / "log", [GOOD | {"gpus": 0}, GOOD | {"gpus": 0}])))


def test_the_period_of_a_file_begins_where_it_is_complete(tmp_path):
    early = GOOD | {"id": 2, "eligible": -500, "start": -400, "end": 30}
    records = read(written(tmp_path / "log", [GOOD, early]))
    assert period_of(records) == (T0 + 1800, T0 + 4200), "sacct lists jobs that ended after its --starttime"


def test_the_command_names_every_column_and_the_name_last():
    words = command("A", "B").split()
    assert words[-1].endswith(",JobName")
    assert {"--duplicates", "--allocations", "--parsable2", "SLURM_TIME_FORMAT=%s"} <= set(words)


def test_an_end_that_accounting_lost_and_overlapping_runs_are_mended_and_told(tmp_path):
    lost = GOOD | {"state": "RUNNING", "end": None, "limit": 60}
    twice = [
        GOOD | {"id": 2, "end": 90, "state": "REQUEUED"},
        GOOD | {"id": 2, "submit": 40, "eligible": 40, "start": 50},
    ]
    records, said = settled(read(written(tmp_path / "log", [lost, *twice])), T0 + 86400 * 9)
    assert ((records.end - T0) / 60).tolist() == [70, 50, 70]
    assert ["runawayjobs" in said[0], "overlap" in said[1]] == [True, True]


def test_a_record_that_stands_twice_counts_once(tmp_path):
    running = GOOD | {"id": 2, "state": "RUNNING", "end": None}
    text = sacct_text([GOOD, running]) + sacct_text([GOOD, running | {"state": "COMPLETED", "end": 90}])
    path = tmp_path / "log"
    path.write_text(text)
    read_once = read(path)
    assert dict(read_once.left_out) == {"broken: JobIDRaw is no number": 1}, "the second header"
    records, said = settled(read_once, T0 + 6000)
    assert sorted(zip(records.job, (records.end - T0) / 60, strict=True)) == [(1, 70), (2, 90)]
    assert "2 records stand twice" in said[0]


def test_one_broken_time_does_not_stretch_the_period(tmp_path):
    jobs = [GOOD | {"id": n, "start": 10 + n, "end": 70 + n} for n in range(1, 2001)]
    wrong = [GOOD | {"id": 5000, "eligible": -9_000_000, "start": -9_000_000, "end": -8_999_000}]
    wrong += [GOOD | {"id": 5001, "end": 100_000_000}]
    records = read(written(tmp_path / "log", jobs + wrong))
    assert dict(records.left_out) == {"broken: a time in the future": 1}
    since, until = period_of(records)
    assert T0 < since < until <= T0 + 60 * 2070


def test_philly_is_read_and_says_what_it_lacks(tmp_path):
    path = tmp_path / "philly.csv"
    path.write_text("timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66.0,2,132.0,11cb48\n")
    assert read(path).names["partition"] == ("11cb48",)
    assert any("nothing is known of waits" in missing for missing in read(path).missing)


NODES = (
    "NodeName=n1 Arch=x86_64 Gres=gpu:a100:4(S:0-1) State=IDLE Partitions=a,b BootTime=1\n"
    "NodeName=n2 Gres=gpu:v100:2 State=MIXED+DRAIN Partitions=b Comment=x Reason=bad fan [root@1700000060]\n"
    "NodeName=n3 Gres=(null) State=IDLE Partitions=b\n"
    "NodeName=n4 Gres=gpu:[ State=IDLE\nrubbish\n"
)


def test_nodes_and_their_closures_are_read(tmp_path):
    nodes = Nodes()
    read_nodes(nodes, NODES)
    assert (nodes.gpus, nodes.kind["n1"], nodes.partitions["n1"]) == (
        {"n1": 4, "n2": 2, "n3": 0},
        "a100",
        ("a", "b"),
    )
    assert nodes.unreadable == 2
    (drained,) = nodes.closed
    assert (drained.node, drained.begin, drained.end, drained.cause) == ("n2", 1700000060, math.inf, "down")
    events, reservations = tmp_path / "events", tmp_path / "reservations"
    events.write_text(
        "NodeName|TimeStart|TimeEnd|State\nn1|1700000000|1700000100|DOWN\n|1700000000|Unknown|\nbad\n"
    )
    reservations.write_text("NodeName|TimeStart|TimeEnd\nn[1-2]|1700000000|1700000100\nn[1-99999999]|1|2\n")
    assert (read_closed(nodes, events), read_closed(nodes, reservations)) == ("down", "reserved")
    assert [(c.node, c.cause) for c in nodes.closed[1:]] == [
        ("n1", "down"),
        ("n1", "reserved"),
        ("n2", "reserved"),
    ]
    assert nodes.unreadable == 4
    with pytest.raises(TraceError, match="sacctmgr"):
        read_closed(nodes, written(tmp_path / "log", [GOOD]))


def test_without_a_node_list_a_node_has_the_most_gpus_that_jobs_held_there(tmp_path):
    jobs = [
        GOOD,
        GOOD | {"id": 2, "gpus": 2, "start": 20, "end": 40},
        GOOD | {"id": 3, "gpus": 3, "start": 70, "end": 90},
        GOOD | {"id": 4, "gpus": 5, "nodes": 2, "places": ("n2", "n3")},
        GOOD | {"id": 5, "places": ("n[1-999999999999]",)},
        GOOD | {"id": 6, "places": ()},
    ]
    found = placed(read(written(tmp_path / "log", jobs)), Nodes())
    assert dict(zip(found.names, found.gpus.tolist(), strict=True)) == {
        "n1": 6,
        "n2": 3,
        "n3": 2,
        "(nodes of a)": 8,
    }
    assert np.isin(found.held, [2, 3, 4]).all()
