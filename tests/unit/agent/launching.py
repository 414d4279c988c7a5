"""Launchers in processes of their own, with workers made by a test."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from pollux.launcher import meeting
from pollux.launcher.machine import Graces, Outcome, StartTerms
from pollux.launcher.supervisor import Supervisor
from pollux.launcher.workers import WATCHED, NodeWorkers

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
    """Run `body` in a forked process. (exit status, what it and its children printed to standard error)."""
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


def run_workers(*bodies: Callable[[], int], graces: Graces = SHORT) -> Outcome:
    """Fork one worker per body and see them through, as the launcher of a job of one node does."""
    workers = NodeWorkers(len(bodies), "here", graces.term)
    for number, body in enumerate(bodies):
        workers.start(number, {"RANK": str(number)}, body)
    terms = StartTerms((len(bodies),), ("here",), graces=graces)
    return Supervisor(terms, workers, {}).wait()


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
    return [meeting.free_port() for _ in range(4)]
