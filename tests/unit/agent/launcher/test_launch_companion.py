"""`pollux run --companion FILE`: a job lends its nodes to another job."""

from __future__ import annotations

import json
import os
import queue
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pollux.errors import LaunchError
from pollux.launcher import companion_file
from pollux.launcher.companion_file import CompanionFile, reach_parent, read_companion_file
from pollux.launcher.rank_channel import VARIABLE, LauncherLine
from pollux.ranks.links import RANKS, Door, Link
from tests.unit.agent.launched_step import PRELUDE, step

SECRET = "the other job's"
QUICK = "sibling=0.1"


class Rank0:
    """Something that listens, as the other job's rank 0 does."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self._admitted: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._door = Door(listener, SECRET.encode(), RANKS, lambda link, _: self._admitted.put(link))

    def accept(self) -> Link:
        """The next connection of a launcher that knows the secret."""
        return self._admitted.get(timeout=100.0)

    def close(self) -> None:
        self._door.close()
        while not self._admitted.empty():
            self._admitted.get().close()


def invite(folder: Path, listening: int, body: str, *options: str, **changes: Any) -> Path:
    """The other job's FILE, and the script that it runs."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / "theirs.py").write_text(PRELUDE + body)
    argv = ["--nproc", "2", "--max-restarts", "2", *options, "theirs.py", str(folder), "--lr", "1"]
    document = {
        "address": "127.0.0.1",
        "port": listening,
        "cwd": str(elsewhere),
        "argv": argv,
        "secret": SECRET,
    }
    file = folder / "companion.json"
    file.touch(mode=0o600)
    file.write_text(json.dumps(document | changes))
    return file


def test_it_runs_what_the_other_job_runs_where_that_runs_it(tmp_path: Path) -> None:
    body = """
names = ("POLLUX_COMPANION", "POLLUX_COMMAND", "POLLUX_LAUNCHER_FD", "POLLUX_RESIZED")
note("ran", cwd=os.getcwd(), argv=sys.argv, **{name: os.environ.get(name) for name in names})
sys.exit(76)
"""
    with closing(Rank0()) as parent:
        file = invite(tmp_path, parent.port, body)
        # As if submitted from within a rank of a job that was resized.
        around = {"POLLUX_RESIZED": "4", "POLLUX_LAUNCHER_FD": "3:1", "POLLUX_LEFT": "n9"}
        with step(tmp_path, 2, "", "--companion", str(file), **around) as launched:
            assert launched.statuses() == [0, 0], launched.output()
    ran = launched.log("ran")
    assert sorted((each["rank"], each["world"], each["node"]) for each in ran) == [
        (0, 4, "n0"),
        (1, 4, "n0"),
        (2, 4, "n1"),
        (3, 4, "n1"),
    ]
    for each in ran:
        assert each["cwd"] == str(tmp_path / "elsewhere")
        assert each["argv"] == ["theirs.py", str(tmp_path), "--lr", "1"]
        assert each["POLLUX_COMPANION"] == str(file)
        assert each["POLLUX_LAUNCHER_FD"] is None
        assert each["POLLUX_RESIZED"] is None


def test_what_a_companion_needs_is_in_the_environment_of_every_rank(tmp_path: Path) -> None:
    body = 'note("ran", **json.loads(os.environ["POLLUX_COMMAND"]))'
    with step(tmp_path, 1, body, "--max-restarts", "2", workers=2) as launched:
        assert launched.statuses() == [0], launched.output()
    script = str(tmp_path / "train.py")
    for each in launched.log("ran"):
        assert each["cwd"] == os.getcwd()
        assert each["argv"] == ["--nproc", "2", "--max-restarts", "2", script, str(tmp_path)]


@pytest.mark.parametrize("status", [75, 77, 3])
def test_its_workers_are_never_started_again(tmp_path: Path, status: int) -> None:
    with closing(Rank0()) as parent:
        file = invite(tmp_path, parent.port, f"sys.exit({status})")
        with step(tmp_path, 1, "", "--companion", str(file), settings=QUICK) as launched:
            assert launched.statuses() == [status], launched.output()
    assert len(launched.log("started")) == 2


@pytest.mark.parametrize(("body", "nodes"), [("time.sleep(90)", 1), ("time.sleep(90)", 2), ("stuck()", 1)])
def test_it_ends_with_the_other_job(tmp_path: Path, body: str, nodes: int) -> None:
    with closing(Rank0()) as parent:
        file = invite(tmp_path, parent.port, f'mark(f"up-{{rank}}"); {body}')
        with step(tmp_path, nodes, "", "--companion", str(file), settings=f"{QUICK} term=0.5") as launched:
            held = parent.accept()
            launched.until(lambda: len(list(tmp_path.glob("up-*"))) == 2 * nodes)
            held.close()
            assert all(status not in (0, 76) for status in launched.statuses()), launched.output()


def test_ranks_that_end_well_with_the_other_job_have_not_failed(tmp_path: Path) -> None:
    with closing(Rank0()) as parent:
        file = invite(tmp_path, parent.port, 'mark(f"up-{rank}"); wait_for("over")')
        with step(tmp_path, 1, "", "--companion", str(file), settings="sibling=60") as launched:
            held = parent.accept()
            launched.until(lambda: len(list(tmp_path.glob("up-*"))) == 2)
            held.close()
            (tmp_path / "over").touch()
            assert launched.statuses() == [0], launched.output()


def test_a_file_that_is_no_companion_file_is_refused(tmp_path: Path) -> None:
    def why(file: Path) -> str:
        with pytest.raises(LaunchError) as refused:
            read_companion_file(file)
        return str(refused.value)

    good = invite(tmp_path, 1234, "")
    found = read_companion_file(good)
    assert (found.address, found.port, found.cwd) == ("127.0.0.1", 1234, str(tmp_path / "elsewhere"))
    for mode in (0o640, 0o604, 0o660):
        good.chmod(mode)
        assert "expected mode 0600" in why(good)
    good.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(good)
    assert "invites nobody" in why(link)
    assert "is gone" in why(tmp_path / "nowhere")
    assert "invites nobody" in why(tmp_path)
    for change in (
        {"port": 0},
        {"port": "1"},
        {"port": True},
        {"argv": "train.py"},
        {"argv": [1]},
        {"cwd": None},
        {"secret": ""},
        {"secret": None},
    ):
        assert "expected an object with address, port, cwd, argv and secret" in why(
            invite(tmp_path, 1234, "", **change)
        )
    for text in ("", "[]", '{"address": ', "\xff", "{}"):
        good.write_text(text, encoding="latin-1")
        assert "invites nobody" in why(good)
    good.write_text(" " * 70_000)
    assert "at most" in why(good)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_refused(tmp_path: Path) -> None:
    file = invite(tmp_path, 1234, "")
    os.chown(file, 65534, 65534)
    with pytest.raises(LaunchError, match="belongs to uid 65534"):
        read_companion_file(file)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"argv": ["--nproc", "none", "x.py"]}, "its argv is none of `pollux run`"),
        ({"argv": ["--companion", "/x"]}, "it is of a companion itself"),
        ({"argv": []}, "expected a SCRIPT to run"),
        ({"cwd": "/proc/nowhere"}, "expected the directory of the other job's `pollux run` here"),
        ({}, "does not answer at 127.0.0.1"),
    ],
)
def test_a_companion_file_that_leads_nowhere_starts_nobody(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    with closing(Rank0()) as parent:
        pass  # nobody listens there any more
    file = invite(tmp_path, parent.port, "", **changes)
    with step(tmp_path, 1, "", "--companion", str(file)) as launched:
        assert launched.statuses() == [2]
    assert why in launched.output()
    assert launched.log("started") == []


def test_the_end_of_the_other_rank_0_is_noticed_and_its_words_are_not() -> None:
    with closing(Rank0()) as other:
        parent = reach_parent(CompanionFile(Path("file"), "127.0.0.1", other.port, "/", (), SECRET))
        connection = other.accept()
        connection.send(b"something")
        assert not [*parent.pending()]
        assert parent.open
        connection.close()
        while parent.open:
            assert not [*parent.pending()]
        parent.close()


def test_whoever_listens_in_the_other_jobs_place_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companion_file, "CONNECT_TIMEOUT_S", 0.2)
    with closing(Rank0()) as parent, pytest.raises(LaunchError, match="does not answer"):
        reach_parent(CompanionFile(Path("file"), "127.0.0.1", parent.port, "/", (), "another secret"))


@pytest.mark.parametrize("value", ["", "3", "x:1", "3:1", "{other}:{nobody}", "{closed}:{me}", "{file}:{me}"])
def test_only_rank_0_itself_takes_up_its_line(tmp_path: Path, value: str) -> None:
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    with socket.socket() as other:
        numbers = {"other": other.fileno(), "file": file, "closed": 1 << 30}
        named = value.format(nobody=os.getpid() + 1, me=os.getpid(), **numbers)
        assert LauncherLine.from_environment({VARIABLE: named}) is None
    os.close(file)
