"""polluxctl: output, JSON, exit status, one line of error."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import subprocess
import sys
import termios
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import typer

from polluxd.cli import access, answering
from polluxd.cli.ctl import COMMANDS
from polluxd.cli.output import PrintableConsole
from polluxd.cli.show import Screen, Seen, SortKey
from polluxd.cli.slurm_view import PLAIN_COLUMNS, Beside
from polluxd.cli.table_rows import JOB_COLUMNS, job_row
from polluxd.config.settings import PolicySettings
from polluxd.errors import StoreUnavailable
from polluxd.model import NO_PLACEMENT, Move, Placement, Step
from polluxd.store import HistoryPoint

from .conftest import NOW, VIEW


def test_jobs_prints_a_line_per_job_that_lives(store, polluxctl):
    store.views.append(
        replace(store.views[0], job_id=8, name="done-job", state="COMPLETED", ended_at=1.0, gpus=0)
    )
    said = polluxctl("jobs")
    assert said.status == 0
    assert "resnet" in said.out
    assert "grows from 2 to 4 GPUs" in said.out
    assert "done-job" not in said.out
    assert "done-job" in polluxctl("jobs", "--all").out


def test_jobs_json_is_unrounded_and_keeps_every_column(store, polluxctl):
    (job,) = json.loads(polluxctl("jobs", "--json").out)
    assert job["goodput"] == 1234.5678
    assert job["progress"] == pytest.approx(0.25)
    assert job["nodes"] == "n1"
    assert set(job) == {column.key for column in JOB_COLUMNS}


def test_jobs_tell_what_each_agent_may_change(store, polluxctl, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    view = store.views[0]
    modes = ("observe", "advise", "enforce", None)
    store.views = [replace(view, job_id=number, mode=mode) for number, mode in enumerate(modes, 1)]
    head, *lines = (line.split() for line in polluxctl("jobs").out.splitlines())
    # At this width the account has left, for this and the reason.
    assert ("ACCOUNT" in head, "REASON" in head) == (False, True)
    at = head.index("MODE")
    assert [line[at] for line in lines] == ["observe", "advise", "enforce", "-"]
    assert [job["mode"] for job in json.loads(polluxctl("jobs", "--json").out)] == list(modes)
    assert [job["mode"] for job in json.loads(polluxctl("top", "--json").out)["jobs"]] == list(modes)


def test_what_a_waiting_job_once_reported_is_not_shown_as_current(store, polluxctl):
    store.views[0] = replace(store.views[0], state="PENDING", gpus=0, nodes=(), mode="advise")
    (job,) = json.loads(polluxctl("jobs", "--json").out)
    assert job["goodput"] is None
    assert job["batch_size"] is None
    assert job["mode"] is None


def test_no_jobs_is_said_in_words_and_as_an_empty_list(store, polluxctl):
    store.views.clear()
    assert polluxctl("jobs").out == "no Pollux jobs\n"
    assert json.loads(polluxctl("jobs", "--json").out) == []


@pytest.mark.parametrize("width", ["40", "60", "80", "120"])
def test_no_line_is_wider_than_the_terminal(store, polluxctl, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    lines = polluxctl("jobs").out.splitlines()
    assert len(lines) == 2  # a header and a job: nothing wraps
    assert max(len(line.rstrip()) for line in lines) <= int(width)
    assert "7" in lines[1]


def test_top_prints_once_where_there_is_no_terminal(store, polluxctl):
    said = polluxctl("top")
    assert "enforce" in said.out
    assert "1 running, 0 waiting  4 GPUs held" in said.out
    assert "resnet" in said.out
    both = json.loads(polluxctl("top", "--json").out)
    assert both["status"]["cycle"] == 42
    assert both["jobs"][0]["job_id"] == 7


def test_reallocations_of_one_job_or_all(store, polluxctl):
    parked = Move(
        *(4, 8, 2, "park", Placement(("n2", "n3"), 4), NO_PLACEMENT, "makes room", Step.DRAINING),
        times={Step.PLANNED: 1.0, Step.DRAINING: 2.0},
    )
    store.known_moves.append(parked)
    said = polluxctl("moves")
    assert "n2:4,n3:4" in said.out
    assert "draining" in said.out
    (move,) = json.loads(polluxctl("moves", "8", "--json").out)
    assert (move["from"], move["to"], move["total_s"]) == ("n2:4,n3:4", "none", None)
    assert polluxctl("moves", "12345").out == "no moves\n"


def test_cost_adds_up_by_what_it_is_asked_for(store, polluxctl, monkeypatch):
    row = {"day": "2026-11-20", "type": "p4d", "account": "vision", "user_name": "ada", "job_id": 7}
    row |= {"node_seconds": 3600.0, "gpu_seconds": 7200.0, "cost": 3.0, "saved_seconds": 1800.0}
    idle = row | {
        "account": "",
        "user_name": "",
        "job_id": 0,
        "gpu_seconds": 0.0,
        "cost": 1.0,
        "saved_seconds": 0.0,
    }
    rentals = [row, {**row, "job_id": 8, "day": "2026-11-21"}, idle]
    asked = []
    monkeypatch.setattr(store, "rentals", lambda since: asked.append(since) or rentals, raising=False)
    found = json.loads(polluxctl("cost", "--json", "--since", "2026-11-20").out)
    assert found == [
        {"name": "vision", "node_hours": 2.0, "gpu_hours": 4.0, "cost": 6.0, "share": 6 / 7}
        | {"saved_hours": 1.0},
        {"name": "", "node_hours": 1.0, "gpu_hours": 0.0, "cost": 1.0, "share": 1 / 7} | {"saved_hours": 0.0},
    ]
    assert asked == [datetime.fromisoformat("2026-11-20").timestamp()]
    assert [r["name"] for r in json.loads(polluxctl("cost", "--by", "job", "--json").out)] == ["7", "8", ""]
    assert [r["cost"] for r in json.loads(polluxctl("cost", "--by", "day", "--json").out)] == [4.0, 3.0]
    assert "p4d" in polluxctl("cost", "--by", "type").out
    rentals.clear()
    assert polluxctl("cost").out == "no node was rented\n"


def test_pause_and_resume_are_durable_and_audited(store, polluxctl, monkeypatch):
    monkeypatch.setenv("SUDO_USER", "grace")
    assert polluxctl("pause").status == 0
    assert store.current.paused is True
    assert "PAUSED" in polluxctl("top").out
    told = polluxctl("explain", "7").out
    assert "paused: it moves nothing" in told
    assert "not carried out, since polluxd is paused): " in told
    assert polluxctl("resume").out == "resumed\n"
    assert store.current.paused is False
    changes = json.loads(polluxctl("audit", "--json").out)
    assert [(c["name"], c["from"], c["to"]) for c in changes] == [
        ("paused", True, False),
        ("paused", False, True),
    ]
    assert changes[0]["who"].startswith("grace@")


def test_settings_set_checks_everything_before_it_changes_anything(store, polluxctl):
    said = polluxctl("settings", "set", "--power", "-2", "--account-weight", "vision=zero")
    assert said.status == 2
    assert "setting account_weights.vision: expected a weight above 0" in said.err
    assert store.changes == []


def test_settings_set_weighs_qos_and_jobs(store, polluxctl):
    said = polluxctl(
        "settings", "set", "--qos-weight", "high=4", "--qos-weight", "low=0.5", "--job-weight", "17=2"
    )
    assert "high=4, low=0.5" in said.out
    assert (store.current.qos_weights, store.current.job_weights) == ({"high": 4.0, "low": 0.5}, {"17": 2.0})
    wrong = polluxctl("settings", "set", "--power", "1", "--job-weight", "resnet=2")
    assert (wrong.status, store.current.power) == (2, -1.0)
    assert "a Slurm job id" in wrong.err


def test_settings_set_merges_weights_and_shows_the_result(store, polluxctl):
    store.current = replace(store.current, account_weights={"vision": 2.0, "nlp": 3.0})
    weights = ("vision=none", "bio=0.5")
    words = (
        "--power",
        "max-min",
        *(w for each in weights for w in ("--account-weight", each)),
        "--user-weight",
        "ada=4",
    )
    said = polluxctl("settings", "set", *words, "--json")
    shown = json.loads(said.out)
    assert shown["power"] == "-inf"
    assert shown["account_weights"] == {"bio": 0.5, "nlp": 3.0}
    assert shown["user_weights"] == {"ada": 4.0}
    assert set(shown) == set(PolicySettings.__dataclass_fields__)
    assert store.current.power == -math.inf
    assert "-inf" in polluxctl("settings", "get").out


def test_status_in_words_and_json(store, polluxctl):
    store.decided_at = time.time() - 7
    said = polluxctl("status")
    assert said.status == 0
    assert re.search(r"^health +ok$", said.out, re.MULTILINE)
    assert "1.22 %" in said.out
    assert "host:123" in said.out
    assert (
        "most by ada: 300000, 128 MiB, 120 % of what a user may; the jobs of ada report once in 5 min"
        in said.out
    )
    found = json.loads(polluxctl("status", "--json").out)
    assert (found["mode"], found["health"], found["stuck_since"]) == ("enforce", "ok", None)


def test_status_fails_where_nobody_leads(store, polluxctl):
    store.decided_at, store.leased = time.time(), False
    said = polluxctl("status")
    assert said.status == 1
    assert "no polluxd leads" in said.out


@pytest.mark.parametrize(("age", "status"), [(179.0, 0), (190.0, 1)])
def test_status_fails_after_three_intervals_without_a_decision(store, polluxctl, age, status):
    store.decided_at = time.time() - age
    said = polluxctl("status", "--json")
    assert said.status == status
    assert ("expected one every 1m00s" in json.loads(said.out)["health"]) == bool(status)


def test_status_names_a_stuck_move_and_since_when(store, polluxctl):
    since = time.time() - 600
    moving = replace(store.known_moves[0], step=Step.DRAINING, times={Step.DRAINING: since})
    store.decided_at, store.known_moves = time.time(), [moving]
    said = polluxctl("status")
    assert said.status == 2
    assert (
        f"stuck since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(since))}: the move of job 7"
        in said.out
    )
    assert json.loads(polluxctl("status", "--json").out)["stuck_since"] == since
    store.known_moves = [replace(moving, times={Step.DRAINING: time.time() - 60})]
    assert polluxctl("status").status == 0


def test_a_database_that_is_down_is_one_line_and_status_1(store, polluxctl, monkeypatch):
    def fail(**_: object) -> None:
        raise StoreUnavailable("Postgres at db:5432 does not answer\n  connection refused")

    monkeypatch.setattr(store, "jobs_view", fail)
    said = polluxctl("jobs")
    assert said.status == 1
    assert said.err == "polluxctl: Postgres at db:5432 does not answer; connection refused\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("frobnicate",), "there is no command 'frobnicate'"),
        (("jobs", "--colour"), "--colour"),
        (("explain", "seven"), "expected a job id such as 1234, or a task such as 1234_5, got 'seven'"),
        (("moves", "--", "-1"), "expected a job id such as 1234, or a task such as 1234_5, got '-1'"),
        (("history", "0"), "expected a job id such as 1234, or a task such as 1234_5, got '0'"),
        (("pin", "1.5"), "expected a job id such as 1234, or a task such as 1234_5, got '1.5'"),
        (("explain",), "JOB"),
        (("top", "4"), "`polluxctl explain 4 --watch` shows one"),
    ],
)
def test_a_wrong_call_is_one_line_and_status_2(store, polluxctl, words, told):
    said = polluxctl(*words)
    assert said.status == 2
    assert told in said.err
    assert said.err.startswith("polluxctl: ")
    assert said.err.count("\n") == 1


def test_a_missing_configuration_is_one_line_that_names_it(polluxctl, tmp_path):
    said = polluxctl("jobs", "--config", str(tmp_path / "absent.toml"))
    assert said.status == 2
    assert "absent.toml" in said.err
    assert said.err.count("\n") == 1


def test_an_ordinary_user_learns_which_commands_are_for_administrators(polluxctl, monkeypatch, tmp_path):
    monkeypatch.delenv("POLLUXD_CONFIG", raising=False)
    monkeypatch.setattr(access, "DEFAULT_PATH", tmp_path / "polluxd.toml")
    monkeypatch.setattr(access.os, "geteuid", lambda: 1000)
    said = polluxctl("moves", "1")
    assert said.status == 2
    assert "for administrators" in said.err
    assert "`polluxctl jobs`" in said.err
    assert "example-config" not in said.err


def test_help_lists_every_command(polluxctl):
    said = polluxctl("--help")
    assert said.status == 0
    for command in COMMANDS:
        assert f"  {command} " in said.out


def test_top_sorts_and_filters_by_user(store, polluxctl):
    store.views = [
        replace(store.views[0], job_id=1, user="bob", gpus=8, goodput=None),
        replace(store.views[0], job_id=2, user="ada", gpus=2, goodput=9.0),
        replace(store.views[0], job_id=3, user="ada", gpus=4, goodput=20.0),
    ]

    def shown(*words):
        return [job["job_id"] for job in json.loads(polluxctl("top", "--json", *words).out)["jobs"]]

    assert shown() == [1, 2, 3]
    assert shown("--sort", "gpus") == [1, 3, 2]
    assert shown("--sort", "goodput") == [3, 2, 1]
    assert shown("--sort", "user") == [2, 3, 1]
    assert shown("--user", "ada", "--sort", "gpus") == [3, 2]
    assert polluxctl("top", "--sort", "colour").status == 2
    for key in SortKey:
        assert len(shown("--sort", key.value)) == 3


@pytest.mark.parametrize("words", [("jobs",), ("explain", "7"), ("usage", "7")])
def test_where_there_is_no_slurm_a_short_sentence_says_so(polluxctl, monkeypatch, words):
    monkeypatch.setattr(access, "may_read_database", lambda _config: False)
    monkeypatch.setenv("PATH", "/proc/nowhere")
    said = polluxctl(*words)
    assert re.fullmatch(
        r"polluxctl: no Slurm answers here: run polluxctl where squeue works \(.{5,60}\)\n", said.err
    )


def test_ordinary_users_list_their_own_jobs_unless_they_say_all(store, polluxctl, monkeypatch):
    def ask(question, *, ended):
        return [{"job_id": n, "user": user} for n, user in enumerate(("ada", "bob"))]

    monkeypatch.setattr(access, "may_read_database", lambda _config: False)
    monkeypatch.setattr(answering, "source", lambda _config: ask)
    monkeypatch.setattr("getpass.getuser", lambda: "bob")

    def shown(*words):
        return [row["user"] for row in json.loads(polluxctl("jobs", "--json", *words).out)]

    assert shown() == ["bob"]
    assert shown("-u", "ada") == ["ada"]
    assert shown("-u", "all") == ["ada", "bob"]
    monkeypatch.setattr(access, "may_read_database", lambda _config: True)
    assert shown() == ["ada", "bob"]


@pytest.mark.parametrize("words", [("top",), ("explain", "7", "-w"), ("history", "7", "-w"), ("moves", "-w")])
def test_watching_redraws_and_survives_a_failure(store, polluxctl, monkeypatch, words):
    screen, waits = io.StringIO(), []
    console = PrintableConsole(file=screen, force_terminal=True, width=200, height=40)
    monkeypatch.setattr(access, "console", lambda: console)
    store.points = [HistoryPoint(7, 1, NOW, 4, 1, 256, 64, 0, 900.0, 950.0, 5.0, 10.0, 1.0, 1.5, 80.0, 9)]

    def away(*_words, **_more):
        raise StoreUnavailable("the database has gone")

    def next_look(_seconds):
        waits.append(len(screen.getvalue()))
        if len(waits) == 2:
            for name in ("explain", "report_history", "moves", "leader"):
                monkeypatch.setattr(store, name, away)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("polluxd.cli.output.time.sleep", next_look)
    assert polluxctl(*words).status == 0
    assert waits[0] < waits[1] < waits[2]
    assert "the database has gone" in screen.getvalue()[waits[1] :]
    assert "the database has gone" not in screen.getvalue()[: waits[1]]


def test_top_answers_keys_and_gives_the_terminal_back(store) -> None:
    """`s` and `p` in a real terminal, then `q`."""
    terminal, ours = pty.openpty()
    before = termios.tcgetattr(ours)
    script = (
        "from rich.console import Console\nfrom rich.text import Text\nfrom polluxd.cli.output import redraw\n"
        "pressed = []\nredraw(lambda: Text('keys<' + ''.join(pressed) + '>'), Console(force_terminal=True), 3600.0, "
        "pressed.append)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=ours, stdout=ours, stderr=ours) as shown:
        said = ""
        for key, answer in (("", "keys<>"), ("s", "keys<s>"), ("p", "keys<sp>")):
            os.write(terminal, key.encode())
            while answer not in said:
                said += os.read(terminal, 4096).decode()
        os.write(terminal, b"q")
        assert shown.wait(60) == 0
    assert termios.tcgetattr(ours)[3] == before[3], "echo and lines are as they were"
    os.close(ours)
    os.close(terminal)


def test_top_sorts_by_keys_and_shows_plain_jobs_below_those_of_pollux(store) -> None:
    rows = [{**job_row(VIEW, 0.0, NOW), "job_id": n, "gpus": n, "name": f"job{n}"} for n in (1, 2, 3)]
    plain = [
        {**dict.fromkeys(c.key for c in PLAIN_COLUMNS), "job_id": n, "name": "cfd"} for n in range(50, 90)
    ]
    seen = Seen({"mode": "enforce"}, rows, Beside(plain, {}, gpus=16, used=10), None)
    view = Screen(SortKey.job)

    def text(height: int = 24) -> str:
        console = PrintableConsole(width=150, height=height, file=io.StringIO())
        console.print(view.draw(seen, 150, height, NOW))
        return console.file.getvalue()

    first = text()
    assert "16 GPUs: 6 held by Pollux jobs, 4 by others, 6 idle" in first
    assert first.index("job1") < first.index("job3") < first.index("PLAIN JOB") < first.index("q quit")
    assert "and 26 more" in first
    assert all(len(text(height).splitlines()) <= height for height in (12, 24, 60))
    while view.sort != SortKey.gpus:
        view.press("s")
    assert text().index("job3") < text().index("job1")
    view.press("p")
    assert "cfd" not in text()


def test_a_task_is_named_as_squeue_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "squeue"
    command.write_text('#!/bin/sh\ncase "$*" in *--jobs=7_3*) echo "12                  3 ";; esac\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert access.job_id("7_3") == 12
    for gone in ("7_4", "7_", "_3", "7_3_1"):
        with pytest.raises(typer.BadParameter, match=r"JobIDRaw|expected a job id"):
            access.job_id(gone)
