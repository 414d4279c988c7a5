"""Choose the batch size: (m, s) = argmax GOODPUT on the GPUs of the job."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

from pollux.errors import BatchError
from pollux.goodput import BatchChoice, BatchLimits, Goodput, NoiseScale, ThroughputParams
from pollux.tuning.profile import StepProfile

logger = logging.getLogger("pollux")

HYSTERESIS = 1.05
"""Least relative gain in goodput for a change of the batch size (5 %)."""

GROWTH = 2.0
"""Largest factor between successive batch sizes: the noise scale is known near the present batch size only."""

FIRST_REFIT = 1.0
LAST_REFIT = 30.0
"""Seconds between refits: few at first, when each step adds information, then many."""

# Without measured times only ratios of these matter, and for a single candidate not even the ratios.
_UNMEASURED = ThroughputParams(0.05, 0.001, 0.0, 0.0, 0.0, 0.0, 1.0)


def batch_limits(
    initial: int,
    maximum: int | None,
    per_gpu: tuple[int, int] | None,
    grow_after: int = 0,
    *,
    adaptive: bool,
) -> BatchLimits:
    """Return the limits of a user's settings. Raises BatchError where they contradict each other.

    Defaults: M_max is M0, and m runs from M0 / 32 to M0. `grow_after`, epochs in which M0 is kept, is checked alone.

    Where a GPU's least share is above M0, and the batch size may not grow that far, M0 becomes that share.
    """
    for name, size in (("batch_size", initial), ("max_batch_size", maximum)):
        if size is not None and not isinstance(size, Integral):
            raise BatchError(f"expected {name} as a whole number of examples, got {size!r}")
    if per_gpu is not None and not (
        isinstance(per_gpu, Sequence) and [isinstance(n, Integral) for n in per_gpu] == [True] * 2
    ):
        raise BatchError(
            f"expected per_gpu=(least, most), the examples of one GPU in a pass, got {per_gpu!r}; "
            "leave it out unless you know both"
        )
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
    if not isinstance(grow_after, Integral) or grow_after < 0:
        raise BatchError(f"expected grow_after as a number of epochs, 0 or more, got {grow_after!r}")
    if grow_after and low > initial:
        raise BatchError(
            f"one GPU's share is at least {low} examples, more than the batch size ({initial}) that grow_after keeps: "
            "lower per_gpu's first number, or leave grow_after out"
        )
    # One GPU accumulates at least once above M0, so that its noise scale can be measured.
    if low > initial and (not adaptive or 2 * low > limits.maximum):
        logger.warning(
            "per_gpu starts at %d examples, above the batch size of %d: it is taken to start there",
            low,
            initial,
        )
        limits = replace(limits, local_min=initial)
    return limits


def initial_choice(limits: BatchLimits, nodes: int, gpus: int, *, adaptive: bool) -> BatchChoice:
    """Return M0, rounded up to a multiple of the GPUs and passes, or the least that so many GPUs can run."""
    best = Goodput(_UNMEASURED, None, limits, adaptive).optimize(nodes, gpus)
    if int(best.batch_size) > 0:
        return BatchChoice(int(best.local_batch), int(best.accumulation))
    if adaptive and gpus * limits.local_min <= limits.maximum:
        return BatchChoice(
            limits.local_min, 0
        )  # the least share of each GPU lifts the smallest batch above M0
    # More GPUs than the limits can feed: the scheduler should not choose this, but training must go on.
    local = min(max(-(-limits.initial // gpus), 1), limits.local_max)
    logger.warning("batch limits %s cannot be met on %d GPUs: using %d examples per GPU", limits, gpus, local)
    return BatchChoice(local, 0)


def nearest_choice(limits: BatchLimits, nodes: int, gpus: int, size: int) -> BatchChoice:
    """Return the allowed batch size nearest to `size`, without measured times."""
    size = min(max(size, limits.initial), limits.maximum)
    if gpus == 1 and size > limits.initial:
        # At least two passes, so that the noise scale can be measured.
        passes = max(1 if limits.halves else 2, -(-size // limits.local_max))
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
    """Return a batch size better than `current` here; None: no batch size promises 5 % more goodput.

    `current_size` is the total batch size in use, possibly at
    another placement. The result exceeds it by at most a factor of `growth`, except to reach the smallest batch size
    that the placement can run. If a size beyond this limit promises 5 % more, the result goes towards it as far as it
    may while this costs under 5 %.
    """
    size = current_size if current_size is not None else current.size(gpus) if current else limits.initial
    # The least examples per GPU may lift the smallest batch size above M0; a lower cap would forbid all sizes.
    least = max(limits.initial, min(gpus * limits.local_min, limits.maximum))
    top = int(max(min(limits.maximum, growth * size), least))
    goodput = Goodput(params, noise, replace(limits, maximum=top))
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
    # Sizes beyond the cap may be better than sizes below it: one GPU gains nothing from a double batch in two passes,
    # but much from a double batch in each pass. The sizes on the way there may cost a little.
    beyond = Goodput(params, noise, limits).optimize(nodes, gpus)
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
    """Return the first batch size on a new placement.

    With a known model it is the best one near `size`, the total batch size in use before. It is M0 without such a size,
    or without a noise scale.
    """
    if size is None or noise is None:
        return initial_choice(limits, nodes, gpus, adaptive=True)
    found = None
    if params is not None:
        found = choose(params, noise, limits, nodes, gpus, None, current_size=size)
    return found or nearest_choice(limits, nodes, gpus, size)


@dataclass(frozen=True)
class Advice:
    """The batch size that mode `advise` would use in mode `enforce`."""

    choice: BatchChoice
    batch_size: int
    goodput: float
    """Predicted goodput over that of the batch size in use; above HYSTERESIS."""


def advise(
    params: ThroughputParams,
    noise: NoiseScale,
    limits: BatchLimits,
    nodes: int,
    gpus: int,
    current: BatchChoice,
) -> Advice | None:
    """Return the end of repeated `choose` on this placement; None: no change."""
    choice = choose(params, noise, limits, nodes, gpus, current, growth=math.inf)
    if choice is None:
        return None
    goodput = Goodput(params, noise, limits)
    now, then = (
        float(goodput.evaluate(nodes, gpus, c.local_batch, c.accumulation)) for c in (current, choice)
    )
    return Advice(choice, choice.size(gpus), then / now)


class Advisor:
    """Refit the model and look for a better batch size, in a thread of rank 0.

    `inputs` returns the present noise and choice from plain attributes of the main thread. The result waits in
    `proposal` until the main thread takes it at a step's end. In mode `advise` the result is `advice`, and the batch
    size stays. The thread calls `on_first` when a measurement must reach the scheduler at once.
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
        on_first: Callable[[], None] = lambda: None,
    ) -> None:
        self.params = params
        self.explored = profile.explored
        """Most GPUs and nodes measured before `params` was fitted; set after it."""
        self.proposal: BatchChoice | None = None
        self.advice: Advice | None = None
        """Newest advice in mode `advise`; None if the batch size in use is as good as any."""
        self._profile = profile
        self.limits = limits
        self._nodes, self._gpus = nodes, gpus
        self._inputs = inputs
        self._adaptive, self._advises = adaptive, advises
        self._seen = -1
        self._pause = FIRST_REFIT
        self._on_first = on_first
        self._reported = (0, False)
        """The most GPUs that the fit knew at the last early report, and whether the noise scale was known."""
        self._closed = False
        self._bell = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="pollux-advisor", daemon=True)
        self._thread.start()

    def moved(self, nodes: int, gpus: int) -> None:
        """Discard results for the GPUs that the job had before.

        Each step there adds information again: the refits come as often as at first.
        """
        self._nodes, self._gpus = nodes, gpus
        self.proposal = self.advice = None
        self._seen = -1
        self._pause = FIRST_REFIT
        self._bell.set()

    def _run(self) -> None:
        while not self._closed:
            if self._bell.wait(self._pause):
                self._bell.clear()
                continue
            try:
                if self.advise():
                    self._pause = min(self._pause * 1.3, LAST_REFIT)
                    self.report_early()
            except Exception:  # advice must never end a training
                logger.exception("the throughput model could not be refitted; the batch size stays")
                self._pause = LAST_REFIT

    def report_early(self) -> None:
        """Report the first fit on more GPUs, and the first noise scale, at once.

        After each of them the scheduler may let the job grow.
        """
        known = (self.explored[0], self._inputs()[0] is not None)
        if known != self._reported:
            self._reported = known
            self._on_first()

    def advise(self) -> bool:
        """Refit after new measurements, and look for a better batch size. Returns True if a fit exists."""
        version = self._profile.version
        if version != self._seen:
            explored = self._profile.explored
            params = self._profile.fit()
            if params is None:
                return False
            self.params, self._seen = params, version
            self.explored = explored
        nodes, gpus = self._nodes, self._gpus
        noise, current = self._inputs()
        if self.params is not None and noise is not None:
            if self._adaptive:
                proposal = choose(self.params, noise, self.limits, nodes, gpus, current)
                if gpus == self._gpus:  # the job may have been resized during the fit
                    self.proposal = proposal
            elif self._advises:
                self._say(advise(self.params, noise, self.limits, nodes, gpus, current))
        return self.params is not None

    def _say(self, advice: Advice | None) -> None:
        """Log advice that differs from the last one."""
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
        self._closed = True
        self._bell.set()
