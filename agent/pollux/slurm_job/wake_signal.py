"""SIGUSR1 as "look at the instructions now", over a process's life.

`scancel -s USR1 JOB` reaches every process of the job's steps, and the default action of USR1 ends a process. So the
launcher blocks the signal before it imports anything heavy. Workers, their data-loading processes and the programs that
these start inherit the mask, so the signal kills none of them. A blocked signal stays pending, so none is lost: `watch`
receives it in a thread. A Python signal handler would run between two bytecodes of the main thread, and so not during a
long kernel or collective.
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

    Outside `pollux run`, other threads may not block the signal. So this blocks the signal in this thread and, in the
    main thread, also installs a Python handler.
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
