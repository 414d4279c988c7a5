"""Choosing the batch size: (m, s) = argmax GOODPUT on the GPUs that the job holds (model.md, "Tuning")."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from pollux.errors import BatchError
from pollux.goodput import BatchChoice, BatchLimits, Goodput, NoiseScale, ThroughputParams
from pollux.tuning.profile import StepProfile
from pollux.tuning.throughput import goodput_of

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


def batch_limits(
    initial: int, maximum: int | None, per_gpu: tuple[int, int] | None, *, adaptive: bool
) -> BatchLimits:
    """The limits that a user's words mean: M0, M_max (None: M0), and the range of m (None: M0 / 32 to M0).

    Raises BatchError where they contradict each other. Where no batch size could be run on one GPU, because the least
    share of a GPU is above M0 and the batch size may not grow that far, M0 itself is the least share.
    """
    low, high = per_gpu if per_gpu is not None else (max(1, initial // 32), initial)
    try:
        limits = BatchLimits(initial, initial if maximum is None else maximum, low, high)
    except ValueError as error:
        raise BatchError(str(error)) from error
    if low > limits.maximum:
        raise BatchError(
            f"one GPU's share is at least {low} examples, more than the largest batch size ({limits.maximum}): "
            "lower per_gpu's first number, or raise max_batch_size"
        )
    # One GPU accumulates at least once above M0, so that the noise scale stays measurable.
    if low > initial and (not adaptive or 2 * low > limits.maximum):
        logger.warning(
            "per_gpu starts at %d examples, above the batch size of %d: it is taken to start there",
            low,
            initial,
        )
        limits = replace(limits, local_min=initial)
    return limits


def within_pass(limits: BatchLimits, length: int) -> BatchLimits:
    """No step holds more than a pass of `length` examples (M0 or more): it would never be whole, nor measured."""
    return replace(limits, maximum=min(limits.maximum, length))


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
    if gpus == 1 and size > limits.initial:
        # In two passes at least, so that the noise scale stays measurable.
        passes = max(2, -(-size // limits.local_max))
        return BatchChoice(max(size // passes, limits.local_min), passes - 1)
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
    growth: float = GROWTH,
) -> BatchChoice | None:
    """A better batch size than `current` on this placement, or None where none promises 5 % more.

    `current_size` is the batch size that was in use (at another placement, perhaps): no choice is larger than it by
    more than a factor of `growth`, except to reach the smallest batch size that the placement can run. Towards a size
    beyond that reach which promises as much, it goes as far as it may where that costs under 5 %.
    """
    size = current_size if current_size is not None else current.size(gpus) if current else limits.initial
    # The least examples per GPU may lift the smallest batch size above M0; a cap below it would forbid everything.
    least = max(limits.initial, min(gpus * limits.local_min, limits.maximum))
    top = int(max(min(limits.maximum, growth * size), least))
    goodput = goodput_of(params, noise, replace(limits, maximum=top))
    best = goodput.optimize(nodes, gpus)
    if int(best.batch_size) <= 0:
        return None
    choice = BatchChoice(int(best.local_batch), int(best.accumulation))
    if current is None:
        return choice
    now = float(goodput.evaluate(nodes, gpus, current.local_batch, current.accumulation))
    if choice != current and float(best.goodput) > HYSTERESIS * now:
        return choice
    if top >= limits.maximum:
        return None
    # What lies beyond the cap may be better than what lies below it: one GPU gains nothing from twice its batch in two
    # passes, and much from twice its batch in each of them. The way there may cost a little.
    beyond = goodput_of(params, noise, limits).optimize(nodes, gpus)
    if int(beyond.batch_size) <= top or float(beyond.goodput) <= HYSTERESIS * now:
        return None
    edge = nearest_choice(limits, nodes, gpus, top)
    there = float(goodput.evaluate(nodes, gpus, edge.local_batch, edge.accumulation))
    return edge if size < edge.size(gpus) <= top and HYSTERESIS * there >= now else None


def choose_on_arrival(
    limits: BatchLimits,
    nodes: int,
    gpus: int,
    *,
    noise: NoiseScale | None,
    params: ThroughputParams | None,
    size: int | None,
) -> BatchChoice:
    """On a new placement: by the model where it is known already, near `size`, the batch size in use before.

    M0 where there was none, or where nothing is known of the noise.
    """
    if size is None or noise is None:
        return initial_choice(limits, nodes, gpus, adaptive=True)
    found = None
    if params is not None:
        found = choose(params, noise, limits, nodes, gpus, None, current_size=size)
    return found or nearest_choice(limits, nodes, gpus, size)


@dataclass(frozen=True)
class Advice:
    """What mode `advise` would train with, were it `enforce`."""

    choice: BatchChoice
    batch_size: int
    goodput: float
    """Predicted, over the goodput predicted of the batch size in use; above HYSTERESIS."""


def advise(
    params: ThroughputParams,
    noise: NoiseScale,
    limits: BatchLimits,
    nodes: int,
    gpus: int,
    current: BatchChoice,
) -> Advice | None:
    """Where `choose` would end on this placement, one step of growth after the other; None: where it is."""
    choice = choose(params, noise, limits, nodes, gpus, current, growth=math.inf)
    if choice is None:
        return None
    goodput = goodput_of(params, noise, limits)
    now, then = (
        float(goodput.evaluate(nodes, gpus, c.local_batch, c.accumulation)) for c in (current, choice)
    )
    return Advice(choice, choice.size(gpus), then / now)


class Advisor:
    """Refits the model and looks for a better batch size in a thread of its own, on rank 0.

    `inputs` gives what the main thread knows now (noise, current choice) from plain attributes; the result waits in
    `proposal` until the main thread takes it at a step's end. In mode `advise` it becomes `advice` instead, which
    nobody follows.
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
        advises: bool = False,
        params: ThroughputParams | None = None,
    ) -> None:
        self.params = params
        self.proposal: BatchChoice | None = None
        self.advice: Advice | None = None
        """The newest, in mode `advise`; None where the batch size in use is as good as any."""
        self._profile = profile
        self.limits = limits
        self._nodes, self._gpus = nodes, gpus
        self._inputs = inputs
        self._adaptive, self._advises = adaptive, advises
        self._seen = -1
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="pollux-advisor", daemon=True)
        self._thread.start()

    def moved(self, nodes: int, gpus: int) -> None:
        """The job has other GPUs now: what was found for those before is void."""
        self._nodes, self._gpus = nodes, gpus
        self.proposal = self.advice = None
        self._seen = -1

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
        nodes, gpus = self._nodes, self._gpus
        noise, current = self._inputs()
        if self.params is not None and noise is not None:
            if self._adaptive:
                proposal = choose(self.params, noise, self.limits, nodes, gpus, current)
                if gpus == self._gpus:  # the job may have been resized meanwhile
                    self.proposal = proposal
            elif self._advises:
                self._say(advise(self.params, noise, self.limits, nodes, gpus, current))
        return self.params is not None

    def _say(self, advice: Advice | None) -> None:
        """Log advice that is news: another batch size than the last time."""
        before, self.advice = self.advice, advice
        if advice is not None and (before is None or before.choice != advice.choice):
            logger.info(
                "would train with batches of %d (%d per GPU, %d accumulation passes): %.0f %% more goodput",
                advice.batch_size,
                advice.choice.local_batch,
                advice.choice.accumulation,
                100 * (advice.goodput - 1),
            )

    def close(self) -> None:
        self._closed.set()
