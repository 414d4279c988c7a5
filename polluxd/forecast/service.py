"""The process that forecasts, beside polluxd: it reads the newest snapshot and writes what it foresees.

It takes at most a twentieth of a core: after each course it sleeps for nineteen times the CPU that the course took. It
ends with polluxd, and whatever fails in it costs a forecast and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator

from polluxd.config.config_file import Config
from polluxd.errors import PolluxError

log = logging.getLogger(__name__)

EVERY_S = 300.0
"""Between two runs."""
FIRST_S = 60.0
"""After polluxd's start: a process that ends sooner loads nothing."""
SHARE = 0.05
"""Of a core."""
RUNS = 600
"""Earlier runs whose misses count: all that are kept."""


@contextlib.contextmanager
def beside(load: Callable[[], Config]) -> Iterator[None]:
    """Forecast in a process of its own while the caller works. Call it before the program starts threads."""
    child = multiprocessing.get_context("fork").Process(
        target=_live, args=(load, os.getpid()), name="forecast", daemon=True
    )
    child.start()
    try:
        yield
    finally:
        child.kill()
        child.join()


def _live(load: Callable[[], Config], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed polluxd leaves no process behind
    # systemd's unit may forbid this. The share of a core is kept by sleeping, too.
    with contextlib.suppress(OSError):
        os.nice(19)
    time.sleep(FIRST_S)
    failed = ""
    while os.getppid() == parent:
        began = time.monotonic()
        try:
            run(load())
            failed = ""
        except PolluxError as error:
            if str(error) != failed:
                log.info("no forecast: %s", error)
            failed = str(error)
        except Exception:
            if failed != "fault":
                log.exception("a fault in forecasts: polluxd itself goes on; report the traceback below")
            failed = "fault"
        time.sleep(max(EVERY_S - (time.monotonic() - began), 1.0))


class Rest:
    """Sleep between courses, so that they take no more than a share of a core."""

    def __init__(self) -> None:
        self._spent = time.process_time()

    def __call__(self) -> bool:
        spent = time.process_time() - self._spent
        time.sleep(spent * (1.0 / SHARE - 1.0))
        self._spent = time.process_time()
        return False


def run(config: Config, rest: Callable[[], bool] | None = None) -> None:
    """Forecast from the newest snapshot once, and write it."""
    # Loaded once polluxd has run for a while.
    from polluxd.forecast.picture import Picture, foretold  # noqa: PLC0415
    from polluxd.store import Store  # noqa: PLC0415

    rest = rest or Rest()
    store = Store(config.database.url, config.slurm.cluster, **config.database.waits)
    try:
        picture = Picture.read(store, time.time())
        newest = store.forecasts(1)
        if newest and newest[0]["cycle"] == picture.cycle:
            return
        store.record_forecast(picture.cycle, foretold(picture, store.forecasts(RUNS), enough=rest))
    finally:
        store.close()
