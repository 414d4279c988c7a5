"""`polluxctl tune`, with stand-ins for sbatch and scancel."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from pollux.search.journal import journal_path
from pollux.search.study import Search
from polluxd.cli import ctl
from polluxd.cli.tune import status_parts

STAND_IN = """#!/bin/sh
echo "$(basename $0) $* search=$POLLUX_SEARCH directives=$SBATCH_POLLUX" >>{calls}
[ ! -e {refuses} ] || {{ echo "sbatch: error: no such partition" >&2; exit 1; }}
[ "$(basename $0)" = squeue ] && exec cat {queue} || echo "77;cluster"
"""

Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    for name in ("sbatch", "scancel", "squeue"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            STAND_IN.format(calls=tmp_path / "calls", refuses=tmp_path / "refuses", queue=tmp_path / "queue")
        )
        program.chmod(0o755)
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("SBATCH_POLLUX", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["polluxctl", "tune", *words])
        with pytest.raises(SystemExit) as end:
            ctl.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out + err

    return run


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def search(folder: Path) -> Search:
    return Search(journal_path("train", folder), "train")


def test_a_search_is_one_array(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_POLLUX", "max-gpus=8")
    code, printed = call("train.sh", "--trials", "64", "--metric", "accuracy", "--max", "--", "--epochs", "9")
    assert (code, "array 77 of 64 trials, 16 at a time" in printed) == (0, True)
    (made,) = calls(tmp_path)
    assert made == (
        f"sbatch --parsable --array=0-63%16 {tmp_path}/train.sh --epochs 9 search=train "
        "directives=max-gpus=8 search=train"
    )
    settings = search(tmp_path).settings
    assert (settings.maximize, settings.metric, settings.trials) == (True, "accuracy", 64)
    again, complaint = call("train.sh")
    assert (again, "there is a search train in this folder" in complaint) == (2, True)


def test_a_search_that_slurm_refuses_leaves_nothing_behind(call: Call, tmp_path: Path) -> None:
    (tmp_path / "refuses").touch()
    code, complaint = call("train.sh")
    assert (code, "sbatch: sbatch: error: no such partition" in complaint) == (1, True)
    (tmp_path / "refuses").unlink()
    assert call("train.sh")[0] == 0


def test_what_a_search_has_found(call: Call, tmp_path: Path) -> None:
    call("train.sh", "--trials", "3", "--max", "--sampler", "random")
    assert call("best", "train") == (1, "polluxctl: no trial of search train is complete yet\n")
    begun = search(tmp_path)
    for number, value in enumerate((0.25, 0.75)):
        trial = begun.live(begun.begin(f"77_{number}", lambda: None))
        trial.suggest_float("lr", 0.0, 1.0)
        begun.report(trial, 10, value, 1800.0)
        begun.complete(trial, value)
    code, printed = call("status", "train")
    assert code == 0
    assert "2 of 3 trials have ended, in 1 GPU hours\nbest: trial 1, value 0.75\n" in printed
    assert json.loads(call("best", "train")[1])["value"] == 0.75
    shown = json.loads(call("status", "train", "--json")[1])
    assert [(t["state"], t["done"], t["gpu_hours"]) for t in shown["trials"]] == [("complete", 0.5, 0.5)] * 2
    assert "2 of 3 trials" in call("status", "train", "--watch")[1], "no terminal: once"
    code, drawn = call("plot", "train")
    assert code == 0
    page = Path(drawn.strip().removeprefix("written: ")).read_text()
    assert page.count('class="line') == 4, "two trials, in both charts"


def test_a_terminal_shows_the_newest_trials_and_a_bar(call: Call, tmp_path: Path) -> None:
    call("train.sh", "--trials", "20", "--metric", "[red]")
    begun = search(tmp_path)
    for number in range(9):
        begun.complete(begun.live(begun.begin(f"77_{number}", lambda: None)), float(number))
    console = Console(force_terminal=True, width=90, height=12, color_system=None, record=True)
    console.print(*status_parts(begun, console), sep="\n")
    text = console.export_text()
    assert "77_2" not in text
    assert all(f"77_{number}" in text for number in range(3, 9))
    assert "9 of 20 trials" in text
    assert "best: trial 0, [red] 0" in text
    assert re.search("━{25,}", text)


def test_a_search_is_stopped_and_goes_on(call: Call, tmp_path: Path) -> None:
    call("train.sh", "--trials", "3", "--gpu-hours", "1")
    begun = search(tmp_path)
    trials = [begun.live(begun.begin(f"77_{number}", lambda: None)) for number in range(2)]
    begun.complete(trials[0], 1.0)
    assert call("stop", "train")[0] == 0
    assert calls(tmp_path)[-1].startswith("scancel 77 ")
    assert search(tmp_path).over() == "the search was stopped"
    assert call("resume", "train", "--gpu-hours", "2")[0] == 0
    assert "--array=0-1%2" in calls(tmp_path)[-1], "one trial is complete"
    assert search(tmp_path).settings.gpu_hours == 2
    call("resume", "train", "--trials", "5")
    assert "--array=0-4%5" in calls(tmp_path)[-1]


def test_slurm_says_which_trials_are_lost(call: Call, tmp_path: Path) -> None:
    call("train.sh", "--trials", "3")
    begun = search(tmp_path)
    for number in range(2):
        begun.begin(f"77_{number}", lambda: None)

    def states() -> list[str]:
        return [trial["state"] for trial in json.loads(call("status", "train", "--json")[1])["trials"]]

    assert states() == ["running"] * 2, "Slurm does not answer"
    (tmp_path / "queue").write_text("77_1\n77_2\n")
    assert states() == ["lost", "running"]
    assert f"squeue --noheader --array --format=%i --user={os.getuid()}" in calls(tmp_path)[-1]
    call("resume", "train", "--trials", "1")
    assert states() == ["failed", "running"]


def test_until_is_the_next_such_time(call: Call, tmp_path: Path) -> None:
    soon = datetime.now() + timedelta(minutes=2)
    call("train.sh", "--until", soon.strftime("%H:%M"))
    until = search(tmp_path).settings.until
    assert until is not None
    assert abs(until - soon.timestamp()) <= 60


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("status", "nothing"), "there is no search nothing in this folder"),
        (("status", "../x"), "expected the name of a search"),
        (("train.sh", "--until", "8"), "expected --until HH:MM, such as 08:00, got '8'"),
        (("train.sh", "--sampler", "best"), "--sampler"),
        (("gone.sh",), "gone.sh"),
    ],
)
def test_what_is_no_search_is_named(words: tuple[str, ...], complaint: str, call: Call) -> None:
    code, printed = call(*words)
    assert code == 2
    assert complaint in printed


def test_optuna_is_missing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("pollux.search", "optuna"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert call("train.sh") == (
        2,
        "polluxctl: `polluxctl tune` needs Optuna: pip install 'optuna>=5,<6' cmaes\n",
    )
