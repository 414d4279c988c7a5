"""SIGUSR1 as "look at the instructions now", over a process's life.

`scancel -s USR1 JOB` reaches every process of the job's steps, and the default action of USR1 is to end the
process. So the launcher blocks the signal before it imports anything heavy; workers, their data-loading processes
and whatever programs these start inherit the mask, and none of them can be killed by it. A blocked signal stays
pending, so none is lost either: `watch` takes it up in a thread of its own. Unlike a Python signal handler,
which runs between two bytecodes of the main thread, that also works while the main thread is inside a long
kernel or collective.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

WAKE_SIGNAL = signal.SIGUSR1


def block() -> None:
    """Block USR1 in this thread, and in threads and processes it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {WAKE_SIGNAL})


def watch(callback: Callable[[], object]) -> Callable[[], None]:
    """Call `callback` at each USR1; return a function that stops watching.

    The calls come off the main thread.

    Outside of `pollux run` other threads exist that may not block the signal, so it is blocked in this thread
    and a Python handler backs it up where this is the main thread.
    """
    stopped = threading.Event()
    block()
    if threading.current_thread() is threading.main_thread():
        # A thread that was started before the signal was blocked may still be chosen to receive it.
        signal.signal(WAKE_SIGNAL, lambda _number, _frame: callback())

    def wait() -> None:
        while not stopped.is_set():
            signal.sigwait({WAKE_SIGNAL})
            if not stopped.is_set():
                callback()

    thread = threading.Thread(target=wait, name="pollux-wake", daemon=True)
    thread.start()

    def stop() -> None:
        stopped.set()
        if thread.ident is not None and thread.is_alive():
            signal.pthread_kill(thread.ident, WAKE_SIGNAL)

    return stop
