"""Launchers in processes of their own, with workers made by a test."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pollux.launcher import launcher_channel, outcome
from pollux.launcher.launcher_channel import LauncherChannels
from pollux.launcher.node import WORKERS_OWN
from pollux.launcher.outcome import Outcome
from pollux.launcher.state import Graces
from pollux.launcher.supervisor import WATCHED, LaunchContext, Supervisor
from pollux.launcher.workers import Notes, start_worker

SHORT = Graces(sibling=0.1, term=0.3)


@pytest.fixture
def launcher_signals() -> Iterator[None]:
    """Block the launcher's signals, and restore the test process's mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    yield
    while signal.sigtimedwait(WATCHED, 0) is not None:
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_child(body: Callable[[], int]) -> tuple[int, str]:
    """Run `body` in a forked process.

    (exit status, what it and its children printed to standard error).
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(read)
        os.close(write)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        code = 99
        try:
            code = body()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 98
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    with os.fdopen(read, errors="replace") as output:
        text = output.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), text


def run_workers(
    *bodies: Callable[[], int],
    channels: LauncherChannels | None = None,
    first: int = 0,
    graces: Graces = SHORT,
) -> Outcome:
    """Fork one worker per body and see them through, as the launcher does."""
    notes = Notes(len(bodies))
    workers = [
        start_worker(first + number, number, {"RANK": str(first + number)}, body, notes, unblock=WORKERS_OWN)
        for number, body in enumerate(bodies)
    ]
    channels = channels or LauncherChannels.alone(len(bodies), "here")
    return Supervisor(workers, notes, channels, LaunchContext("here", graces=graces)).wait()


def succeed() -> int:
    return 0


def linger() -> int:
    time.sleep(60)
    return 0


def hold_on() -> int:
    """Ignore TERM, as a worker stuck in a kernel does."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return linger()


def killed() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def fail() -> int:
    raise ValueError("on purpose")


def ports() -> list[int]:
    return [launcher_channel.free_port() for _ in range(4)]


def on_nodes(*bodies: Callable[[], int]) -> list[tuple[int, str]]:
    """One launcher per body, each in its own process with one worker.

    (exit status, output) of each.
    """
    candidates = ports()
    results: dict[int, tuple[int, str]] = {}

    def node(number: int, body: Callable[[], int]) -> None:
        def launcher() -> int:
            if number == 0:
                mine = launcher_channel.gather(
                    launcher_channel.listen(candidates), b"key", 1, len(bodies), timeout=80
                )
            else:
                mine = launcher_channel.join("127.0.0.1", candidates, b"key", number, 1, timeout=80)
            mine.signal_arrivals()

            def worker() -> int:
                mine.close()
                return body()

            ended = run_workers(worker, channels=mine, first=number)
            if ended.failure is not None:
                print(outcome.describe(ended.failure), file=sys.stderr)
            return ended.status

        results[number] = in_child(launcher)

    threads = [threading.Thread(target=node, args=item) for item in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(bodies))]
