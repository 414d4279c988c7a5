"""Choosing the batch size: (m, s) = argmax GOODPUT on the GPUs that the job holds (model.md, "Tuning")."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from pollux.goodput import BatchLimits, Goodput, NoiseScale, ThroughputParams
from pollux.profile import StepProfile

logger = logging.getLogger("pollux")

HYSTERESIS = 1.05
"""A change must promise this much more goodput than the batch size in use (5 %)."""

GROWTH = 2.0
"""Largest factor between one batch size and the next: the noise scale is known near the present one only."""

FIRST_REFIT = 1.0
LAST_REFIT = 30.0
"""Seconds between refits: soon at first, when each step says something new, then seldom."""

# Where no time was ever measured, only ratios of these matter, and to a single candidate not even they.
_UNMEASURED = ThroughputParams(0.05, 0.001, 0.0, 0.0, 0.0, 0.0, 1.0)


@dataclass(frozen=True)
class BatchChoice:
    """A batch size as it is run: `gpus * local_batch * (accumulation + 1)` examples."""

    local_batch: int
    accumulation: int

    def size(self, gpus: int) -> int:
        return gpus * self.local_batch * (self.accumulation + 1)


def initial_choice(limits: BatchLimits, nodes: int, gpus: int, *, adaptive: bool) -> BatchChoice:
    """M0, as near as the division among GPUs and passes allows; never fewer than one example per GPU."""
    best = Goodput(_UNMEASURED, None, limits, adaptive).optimize(nodes, gpus)
    if int(best.batch_size) > 0:
        return BatchChoice(int(best.local_batch), int(best.accumulation))
    # More GPUs than the limits can feed: the scheduler should not do so, but training must go on.
    local = min(max(-(-limits.initial // gpus), 1), limits.local_max)
    logger.warning("batch limits %s cannot be met on %d GPUs: using %d examples per GPU", limits, gpus, local)
    return BatchChoice(local, 0)


def nearest_choice(limits: BatchLimits, nodes: int, gpus: int, size: int) -> BatchChoice:
    """A batch size as near to `size` as the division and the limits allow, where times were never measured."""
    size = min(max(size, limits.initial), limits.maximum)
    return initial_choice(replace(limits, initial=size), nodes, gpus, adaptive=True)


def choose(
    params: ThroughputParams,
    noise: NoiseScale | None,
    limits: BatchLimits,
    nodes: int,
    gpus: int,
    current: BatchChoice | None,
    *,
    current_size: int | None = None,
) -> BatchChoice | None:
    """A better batch size than `current` on this placement, or None where none promises 5 % more.

    `current_size` is the batch size that was in use (at another placement, perhaps): no choice leaves it by more
    than a factor of GROWTH.
    """
    size = current_size if current_size is not None else current.size(gpus) if current else limits.initial
    top = max(min(limits.maximum, int(GROWTH * size)), limits.initial)
    goodput = Goodput(params, noise, replace(limits, maximum=top))
    best = goodput.optimize(nodes, gpus)
    if int(best.batch_size) <= 0:
        return None
    choice = BatchChoice(int(best.local_batch), int(best.accumulation))
    if current is None:
        return choice
    now = float(goodput.evaluate(nodes, gpus, current.local_batch, current.accumulation))
    if choice == current or float(best.goodput) <= HYSTERESIS * now:
        return None
    return choice


class Advisor:
    """Refits the model and looks for a better batch size in a thread of its own, on rank 0.

    `inputs` gives what the main thread knows now (noise, current choice) from plain attributes; the result waits in
    `proposal` until the main thread takes it at a step's end.
    """

    def __init__(
        self,
        profile: StepProfile,
        limits: BatchLimits,
        nodes: int,
        gpus: int,
        inputs: Callable[[], tuple[NoiseScale | None, BatchChoice]],
        *,
        adaptive: bool,
        params: ThroughputParams | None = None,
    ) -> None:
        self.params = params
        self.proposal: BatchChoice | None = None
        self._profile = profile
        self._limits = limits
        self._nodes, self._gpus = nodes, gpus
        self._inputs = inputs
        self._adaptive = adaptive
        self._seen = -1
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="pollux-advisor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause = FIRST_REFIT
        while not self._closed.wait(pause):
            try:
                if self.advise():
                    pause = min(pause * 1.3, LAST_REFIT)
            except Exception:  # advice must never end a training
                logger.exception("the throughput model could not be refitted; the batch size stays")
                pause = LAST_REFIT

    def advise(self) -> bool:
        """Refit where something new was measured, and look for a better batch size. True where a fit exists."""
        version = self._profile.version
        if version != self._seen:
            params = self._profile.fit()
            if params is None:
                return False
            self.params, self._seen = params, version
        noise, current = self._inputs()
        if self._adaptive and self.params is not None and noise is not None:
            self.proposal = choose(self.params, noise, self._limits, self._nodes, self._gpus, current)
        return self.params is not None

    def close(self) -> None:
        self._closed.set()
