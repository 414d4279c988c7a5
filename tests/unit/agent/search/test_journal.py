"""The journal of a search, where its writers are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest

from pollux.errors import SearchError
from pollux.search.journal import cut_half_line, journal_path, open_journal
from pollux.search.study import Search, SearchSettings

WRITER = """
import sys
from pathlib import Path
from pollux.search.study import Search, SearchSettings
search = Search(Path(sys.argv[1]), "s", SearchSettings(pruner="none"))
trial = search.live(search.begin(sys.argv[2], lambda: None))
step = 0
print("writes", flush=True)
while True:
    step += 1
    trial.report(float(step), step)
"""


def test_half_a_line_of_a_killed_writer_is_cut_by_the_next_one(tmp_path: Path) -> None:
    path = journal_path("s", tmp_path)
    first = Search(path, "s", SearchSettings())
    first.begin("1_0", lambda: None)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code":6,"worker_id":"x","trial_')
    assert len(Search(path, "s").trials()) == 1
    Search(path, "s").begin("1_1", lambda: None)
    assert path.read_bytes().startswith(whole)
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert [trial.user_attrs["task"] for trial in Search(path, "s").trials()] == ["1_0", "1_1"]


@pytest.mark.parametrize("content", [b"", b"{}\n", b"{}\n{}\n"])
def test_whole_lines_stay(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "journal"
    file.write_bytes(content)
    cut_half_line(file)
    assert file.read_bytes() == content


def test_a_journal_is_read_after_kills_of_its_writers(tmp_path: Path) -> None:
    path = journal_path("s", tmp_path)
    Search(path, "s", SearchSettings(pruner="none"))
    for number in range(3):
        command = [sys.executable, "-c", WRITER, str(path), f"1_{number}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "writes\n"
            time.sleep(0.05)
            os.kill(writer.pid, signal.SIGKILL)
        path.with_name(path.name + ".lock").unlink(missing_ok=True)  # as Optuna does after 30 s
    found = Search(path, "s").trials()
    assert [trial.user_attrs["task"] for trial in found] == ["1_0", "1_1", "1_2"]
    assert all(
        list(trial.intermediate_values) == list(range(1, (trial.last_step or 0) + 1)) for trial in found
    )


def test_nobody_but_the_user_reads_a_journal(tmp_path: Path) -> None:
    path = journal_path("s", tmp_path)
    open_journal(path)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_plain_optuna_reads_the_journal(tmp_path: Path) -> None:
    path = journal_path("s", tmp_path)
    Search(path, "s", SearchSettings(maximize=True)).begin("1_0", lambda: None)
    backend = optuna.storages.journal.JournalFileBackend(str(path))
    study = optuna.load_study(study_name="s", storage=optuna.storages.JournalStorage(backend))
    assert study.direction is optuna.study.StudyDirection.MAXIMIZE
    assert len(study.trials) == 1


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".x", "x" * 65, "a b", "ä"])
def test_a_name_that_would_leave_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SearchError, match="expected the name of a search"):
        journal_path(name, tmp_path)


def test_a_journal_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "pollux-searches").write_text("a file")
    with pytest.raises(SearchError, match=r"pollux-searches/s\.journal of the search cannot be used"):
        open_journal(journal_path("s", tmp_path))


def test_a_journal_of_something_else_is_named(tmp_path: Path) -> None:
    path = journal_path("s", tmp_path)
    path.parent.mkdir()
    path.write_text("no journal\nat all\n")
    with pytest.raises(SearchError, match="cannot be used"):
        open_journal(path)
