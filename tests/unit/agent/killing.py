"""Kill a process with SIGKILL before its n-th counted call.

Processes that do the same make the same n-th call, so the place of the kill is reproducible.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Counted = Callable[[Any, str, Any], bool]
"""(frame, event, argument), as `sys.setprofile` tells them -> whether to count the call that is about to be made."""

PATIENCE = 100.0


def of_system(event: str, function: Any) -> bool:
    """Return whether the event is a call into the operating system.

    Calls into Python's own file objects count, because these call the system.
    """
    if event != "c_call":
        return False
    module, owner = getattr(function, "__module__", None), getattr(function, "__self__", None)
    if module == "posix":
        return bool(function.__name__ not in ("fspath", "getpid", "urandom"))
    if isinstance(owner, io.IOBase):
        return not isinstance(owner, io.BytesIO)
    return bool(module in ("_io", "io"))  # open


def die_at(at: int, counts: Counted) -> None:
    """Kill this process before its `at`-th counted call.

    Counting begins now, in this thread and in the threads that it starts.
    """
    calls = 0
    lock = threading.Lock()

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        if counts(frame, event, argument):
            with lock:
                calls += 1
                if calls == at:
                    os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(count)
    sys.setprofile(count)


def forked(body: Callable[[], int]) -> int:
    """Run `body` in a forked process; return that process's id. The child exits with the result of `body`."""
    child = os.fork()
    if not child:
        status = 1
        try:
            status = body()
        finally:
            os._exit(status)
    return child


def exit_codes(children: list[int]) -> list[int]:
    """Return each child's exit status, or minus the signal that killed it.

    Raises AssertionError, and kills the remaining children, if one does not end within PATIENCE seconds.
    """
    codes: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE
    while len(codes) < len(children):
        for child in children:
            if child not in codes and (ended := os.waitpid(child, os.WNOHANG)) != (0, 0):
                codes[child] = os.waitstatus_to_exitcode(ended[1])
        if time.monotonic() > deadline:
            left = [child for child in children if child not in codes]
            for child in left:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            raise AssertionError(f"{len(left)} of {len(children)} processes did not end in {PATIENCE} s")
        time.sleep(0.002)
    return [codes[child] for child in children]


def leftovers(directory: Path) -> bool:
    """Return whether an interrupted save left temporary files."""
    return any(path.suffix == ".tmp" for path in directory.iterdir())
