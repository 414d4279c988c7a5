"""How a node's workers start and end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pollux.errors import LEFT_STATUS, RETRY_STATUS, RankLost
from pollux.launcher.node import Task
from pollux.launcher.workers import adopt_orphans
from pollux.slurm_job.environment import LENT_RANKS
from tests.unit.agent.launching import (  # noqa: F401 - fixtures among them
    SHORT,
    fail,
    hold_on,
    in_child,
    killed,
    launcher_signals,
    linger,
    run_workers,
)

pytestmark = [
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.usefixtures("launcher_signals"),
]


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (fail, 1, "ValueError: on purpose"),
        (lambda: sys.exit(7), 7, "sys.exit(7)"),
        (lambda: sys.exit("in words"), 1, "in words"),
        (killed, 137, "SIGKILL (out of memory"),
        (lambda: os._exit(5), 5, "exited with status 5"),
    ],
)
def test_when_one_fails_the_others_end_and_the_cause_is_told(
    body: Callable[[], int], status: int, why: str
) -> None:
    def launcher() -> int:
        ended = run_workers(linger, body, hold_on)
        assert ended.failure is not None
        print(ended.failure, file=sys.stderr)
        return ended.status

    code, text = in_child(launcher)
    assert code == status, text
    assert "rank 1 (pid" in text
    assert why in text


def test_of_two_failures_the_earlier_one_is_the_cause() -> None:
    failed, has_failed = os.pipe()

    def later() -> int:
        assert os.read(failed, 1)
        raise RuntimeError("connection closed by peer")

    def slow_to_exit() -> int:
        import atexit

        atexit.register(time.sleep, 0.5)
        atexit.register(os.write, has_failed, b"!")  # called first, and after the failure was noted
        return fail()

    def launcher() -> int:
        ended = run_workers(later, slow_to_exit)
        assert ended.failure is not None
        return 10 + ended.failure.rank

    assert in_child(launcher)[0] == 11


def test_a_trace_begins_in_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def deep():\n    raise ValueError('on purpose')\ndeep()\n")
    task = Task(str(script), [], [])
    _, text = in_child(lambda: run_workers(task.run).status)
    assert "workers.py" not in text
    assert "runpy" not in text
    assert f'File "{script}", line 3' in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_all(number: signal.Signals) -> None:
    def launcher() -> int:
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
        return run_workers(linger, hold_on, graces=replace(SHORT, stop=0.5)).status

    assert in_child(launcher)[0] == 128 + number


def test_usr1_is_the_workers_own_and_does_not_end_the_launcher() -> None:
    def handled() -> int:
        taken: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _: taken.append(number))
        signal.raise_signal(signal.SIGUSR1)
        return 0 if taken == [signal.SIGUSR1] else 5

    def not_handled() -> int:
        signal.raise_signal(signal.SIGUSR1)
        return 5

    def launcher(worker: Callable[[], int]) -> int:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # as `pollux run` does first
        os.kill(os.getpid(), signal.SIGUSR1)
        return run_workers(worker).status

    assert in_child(lambda: launcher(handled))[0] == 0
    assert in_child(lambda: launcher(not_handled))[0] == 128 + signal.SIGUSR1


def test_what_a_worker_leaves_behind_is_ended() -> None:
    def leave_orphans() -> int:
        # Each in a session of its own, holding the output open as a data-loading process would.
        subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"], start_new_session=True)
        return 3

    def launcher() -> int:
        adopt_orphans()
        return run_workers(leave_orphans).status

    # in_child reads the output to its end, so it returns only when no descendant holds it.
    before = time.monotonic()
    assert in_child(launcher)[0] == 3
    assert time.monotonic() - before < 50


def test_workers_die_with_a_killed_launcher() -> None:
    def launcher() -> int:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return run_workers(linger, hold_on).status

    before = time.monotonic()
    assert in_child(launcher)[0] == -signal.SIGKILL
    assert time.monotonic() - before < 50


@pytest.mark.slow
def test_a_rank_that_ends_in_a_move_leaves_nothing_undone(tmp_path: Path) -> None:
    """The rank skips the interpreter's teardown, with nothing lost.

    It ends as a rank that waits for the teardown: files are flushed, threads joined and `atexit` functions called.
    """
    # Loaders that other tests have left: the rank's `atexit` functions would kill their processes.
    gc.collect()
    script = tmp_path / "train.py"
    script.write_text(f"""
import atexit, sys, threading, time
from pathlib import Path
here = Path({str(tmp_path)!r})
text, raw = open(here / "text", "w"), open(here / "raw", "wb")
text.write("unflushed")
raw.write(b"unflushed, too")
closed = open(here / "closed", "w")
closed.close()
def late():
    time.sleep(0.1)
    (here / "thread").touch()
threading.Thread(target=late).start()
atexit.register(lambda: (here / "atexit").touch())
print("last words", end="")
sys.exit({LEFT_STATUS})
""")
    ended, text = in_child(lambda: run_workers(Task(str(script), [], []).run).status)
    assert ended == LEFT_STATUS, "no move was announced"
    assert "last words" in text
    assert (tmp_path / "text").read_text() == "unflushed"
    assert (tmp_path / "raw").read_bytes() == b"unflushed, too"
    assert (tmp_path / "thread").exists()
    assert (tmp_path / "atexit").exists()


@pytest.mark.parametrize(
    ("lent", "error", "status"),
    [
        (True, RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer"), RETRY_STATUS),
        (True, RankLost("gone"), RETRY_STATUS),
        (True, ValueError("on purpose"), 1),
        (False, RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer"), 1),
        (False, RankLost("gone"), 1),
    ],
)
def test_while_ranks_are_lent_the_loss_of_one_asks_for_another_start(
    monkeypatch: pytest.MonkeyPatch, lent: bool, error: Exception, status: int
) -> None:
    """An error in the script's own collectives counts, too.

    Such collectives know nothing of the agent's errors.
    """
    monkeypatch.setenv(LENT_RANKS, "2" if lent else "0")

    def body() -> int:
        raise error

    assert in_child(lambda: run_workers(body).status)[0] == status


def test_a_rank_that_is_ended_on_its_way_out_has_the_status_that_it_meant() -> None:
    """The teardown of torch may last longer than the other ranks wait."""

    asked, has_asked = os.pipe()

    def asks() -> int:
        import atexit

        atexit.register(linger)
        atexit.register(os.write, has_asked, b"!")  # called first, and after the status was noted
        sys.exit(RETRY_STATUS)

    def other() -> int:
        assert os.read(asked, 1)
        sys.exit(3)

    code, text = in_child(lambda: run_workers(asks, other).status)
    assert code == RETRY_STATUS, text


@pytest.mark.parametrize("status", [0, 3])
def test_functions_at_exit_see_whether_the_rank_failed(status: int) -> None:
    """A rank that has failed must not wait for others to end their process groups with it."""
    vars(sys).pop("last_value", None)  # pytest's, of another test that failed

    def launcher_and_rank() -> int:
        try:
            return run_workers(lambda: sys.exit(status)).status
        finally:
            print(f"failed: {hasattr(sys, 'last_value')}")

    assert ("failed: True" in in_child(launcher_and_rank)[1]) == bool(status)
