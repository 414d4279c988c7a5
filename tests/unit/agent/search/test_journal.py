"""The journal of a search, where its writers are killed."""

from __future__ import annotations

import gc
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
    with file.open("r+b") as opened:
        cut_half_line(opened)
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
    (tmp_path / "pollux-searches" / "s.journal").mkdir(parents=True)
    with pytest.raises(SearchError, match=r"pollux-searches/s\.journal of the search cannot be used"):
        open_journal(journal_path("s", tmp_path))


def test_a_journal_of_something_else_is_named(tmp_path: Path) -> None:
    path = journal_path("s", tmp_path)
    path.parent.mkdir()
    path.write_text("no journal\nat all\n")
    with pytest.raises(SearchError, match="cannot be used"):
        open_journal(path)


def test_a_file_that_is_no_journal_is_never_cut(tmp_path: Path) -> None:
    path = journal_path("s", tmp_path)
    path.parent.mkdir(mode=0o700)
    path.write_bytes(bytes(70_000))
    path.chmod(0o600)
    with pytest.raises(SearchError, match="does not begin with a record"):
        Search(path, "s", SearchSettings())
    assert path.read_bytes() == bytes(70_000)


def test_a_link_in_place_of_a_journal_is_not_followed(tmp_path: Path) -> None:
    path, precious = journal_path("s", tmp_path), tmp_path / "precious"
    path.parent.mkdir(mode=0o700)
    for aim in (precious, tmp_path / "new"):
        precious.write_bytes(b"precious")
        path.symlink_to(aim)
        with pytest.raises(SearchError, match="cannot be used"):
            open_journal(path)
        path.unlink()
    assert precious.read_bytes() == b"precious"
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_user_s_folder_of_searches_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have made it first, for all to write to, with a journal of their own in it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    theirs = tmp_path / "pollux-searches"
    theirs.mkdir()
    theirs.chmod(0o777)
    (theirs / "s.journal").write_text('{"op_code":0}\n')
    os.chown(theirs, 65534, 65534)
    own = tmp_path / f"pollux-searches-{os.geteuid()}" / "s.journal"
    assert journal_path("s", tmp_path, make=True) == own
    Search(own, "s", SearchSettings())
    assert journal_path("s", tmp_path) == own
    assert (theirs / "s.journal").read_text() == '{"op_code":0}\n'
    with pytest.raises(SearchError, match="belongs to uid 65534"):
        open_journal(theirs / "s.journal")


def test_a_journal_stays_the_same_when_its_folder_is_replaced(tmp_path: Path) -> None:
    """Whoever may write to the directory above can rename the folder."""
    path = journal_path("s", tmp_path)
    search = Search(path, "s", SearchSettings(pruner="none"))
    path.parent.rename(tmp_path / "away")
    (tmp_path / "pollux-searches").mkdir()
    search.begin("1_0", lambda: None)
    assert not list((tmp_path / "pollux-searches").iterdir())
    assert len(Search(tmp_path / "away" / path.name, "s").trials()) == 1


def test_a_search_that_is_closed_leaves_no_open_folder(tmp_path: Path) -> None:
    path = journal_path("s", tmp_path)
    Search(path, "s", SearchSettings())
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        Search(path, "s").trials()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
