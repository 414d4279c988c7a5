"""Time passes on the device's clock, without waiting for the device. Stalls of the data loader are counted apart."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from pollux.tuning.measurements import Configuration
from pollux.tuning.measuring_cost import MeasuringCost
from pollux.tuning.profile import StepProfile

WARM_PASSES = 3
"""First passes of a new configuration, which the profile leaves out: first kernels, first connections, cold caches."""

STALL = 0.5
"""A wait for data is a stall from this share of a usual pass on, if it is also far above the usual wait."""

_USUAL_WAIT_FACTOR = 4.0
MOST_PENDING = 64  # passes whose marks the device has not reached yet

FILE_EVERY = 1.0
"""Seconds after which passes are filed, if fewer than _TOGETHER wait."""

_TOGETHER = 32

SPARSE, SPARSEST = 8, 64
"""One step in so many is timed, besides those whose gradients are measured: more rarely where steps are short."""

_TIMED_EVERY = 0.2
"""Seconds of passes from one timed step to the next, at least, where they are that short."""

_DENSE = 16
"""Steps of a new configuration that are all timed."""


class HostClock:
    """Marks of the host's time; exact on a CPU, which computes synchronously."""

    mark: Callable[[], Any] = staticmethod(time.perf_counter)

    def passed(self, mark: Any) -> bool:
        """Tell whether all work before the mark is done."""
        return True

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start)


class CudaClock:
    """Marks in a device's stream: events, read once they have passed."""

    def __init__(self, device: Any) -> None:
        import torch  # noqa: PLC0415 - the profile itself needs none

        self._cuda = torch.cuda
        self._device = device

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._cuda.current_stream(self._device))
        return event

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000.0


def clock_of(device: Any) -> HostClock | CudaClock:
    """Return the clock for passes on this torch device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


class _Pass(NamedTuple):
    """The marks of one pass; None: not reached."""

    key: Configuration
    fetched: Any
    """Begin of the wait for data."""
    data: Any
    """The data was there."""
    waits: tuple[tuple[Any, Any], ...]
    """From the last local gradient to the end of the synchronisation, for each model that a pass trains."""
    ended: Any
    synchronised: bool
    counts: bool
    warm: bool
    measured: bool


class PassTimer:
    """Time passes on the device's clock and file them by configuration.

    On a CPU the clock is the host's. The wait for other ranks lasts from the last local gradient (as the estimator
    between ranks sees it) to the end of the pass; the rest of the step is this rank's own work. On a GPU nothing waits:
    a later pass files an earlier one once its marks have passed. Only some steps are timed: the first ones of a
    configuration, one in `sparse` or fewer, and those whose gradients are measured. A disproportionate wait for data is
    a stall: it counts in `data_wait`, and the profile leaves the pass out. A loader that is always slow is part of the
    pass's time. `file_every` seconds lie between two times that passes are filed.
    """

    def __init__(
        self,
        profile: StepProfile,
        clock: HostClock | CudaClock | None = None,
        *,
        file_every: float = FILE_EVERY,
        sparse: int = SPARSE,
    ) -> None:
        self.profile = profile
        self._file_every = file_every
        self._sparse = self._every = sparse
        """`_every`: steps from one timed step to the next."""
        self._clock = clock or HostClock()
        self._mark = self._clock.mark
        self.cost = MeasuringCost()
        self.timing = True
        """The present step is timed. Where it is not, `fetch` alone is called."""
        self.steps = 0
        """Begun; counted by `fetch`, and by its caller for steps that `untimed` has promised."""
        self._dense = _DENSE
        self._step: float | None = 0.0
        """Seconds of the passes of a step that are filed; None if one of them does not count."""
        self._fetched: Any = None
        self._data: Any = None
        self._ready: Any = None
        self._waits: tuple[tuple[Any, Any], ...] = ()
        self._key: Configuration | None = None
        """Of the present pass."""
        self.pending: deque[_Pass] = deque(maxlen=MOST_PENDING)
        self._filed_at = 0.0
        self._measured = False
        self._warming = WARM_PASSES
        self._usual_wait, self._usual_body = 0.0, 0.0
        self._waited, self._total = 0.0, 0.0

    @property
    def data_wait(self) -> float | None:
        """Share of recent training time spent waiting for data; None: none timed."""
        return min(self._waited / self._total, 1.0) if self._total > 0 else None

    def pause(self) -> None:
        """Discard the present pass: the script did something else than training."""
        self._fetched = None
        self._file_all()

    def cool(self) -> None:
        """Leave the first passes of a new configuration out."""
        self.pause()
        self._warming = WARM_PASSES
        self._dense = _DENSE
        self._usual_wait, self._usual_body = 0.0, 0.0
        self.cost.cool()

    def fetch(self, *, begins: bool = True, measured: bool = False) -> None:
        """Begin the next pass, with the wait for its data.

        `begins`: a step begins with it. `measured`: the step's gradients are.
        """
        if begins:
            self.timing = measured or self._dense > 0 or self.steps % self._every == 0
            self.steps += 1
            self._measured = measured
        self._key, self._fetched = None, self._mark() if self.timing else None

    def untimed(self) -> int:
        """Return how many coming steps are not timed, unless they are measured."""
        return 0 if self._dense > 0 else -self.steps % self._every

    def ready(self) -> None:
        """Mark the last local gradient; called in the backward pass."""
        if self._key is not None:
            self._ready = self._mark()

    def begin(self, key: Configuration) -> None:
        """Mark the data's arrival."""
        self._key, self._data, self._ready, self._waits = key, self._mark(), None, ()

    def passed(self) -> None:
        """Mark the end of the backward pass, synchronisation included."""
        if self._ready is not None:
            self._waits = (*self._waits, (self._ready, self._mark()))
            self._ready = None

    def end(self, *, synchronised: bool, counts: bool) -> None:
        """Mark the end of the loop's body; `counts`: a whole micro-batch."""
        key, self._key, self._ready = self._key, None, None
        if synchronised:
            self._dense -= 1
        fetched, self._fetched = self._fetched, None
        if fetched is None or key is None:
            return
        warm = self._warming <= 0
        if counts and not warm:
            self._warming -= 1
        self.pending.append(
            _Pass(
                key,
                fetched,
                self._data,
                self._waits,
                self._mark(),
                synchronised,
                counts and warm,
                warm,
                self._measured,
            )
        )
        if len(self.pending) >= _TOGETHER or time.monotonic() - self._filed_at >= self._file_every:
            self._file_all()

    def _file_all(self) -> None:
        """File the passes that the device has completed, several at a time."""
        self._filed_at = time.monotonic()
        found: dict[Configuration, tuple[list[float], list[float]]] = {}
        while self.pending and self._reached(self.pending[0]):
            done = self.pending.popleft()
            self._file(done, *found.setdefault(done.key, ([], [])))
        if self._usual_body > 0:
            self._every = max(self._sparse, min(round(_TIMED_EVERY / self._usual_body), SPARSEST))
        for key, (local, final) in found.items():
            if local or final:
                self.profile.add(key, local, final)

    def _reached(self, done: _Pass) -> bool:
        """Tell whether the device has passed all marks of a pass."""
        passed = self._clock.passed
        return passed(done.ended) and all(passed(start) and passed(end) for start, end in done.waits)

    def _file(self, done: _Pass, local: list[float], final: list[float]) -> None:
        """File one pass's seconds."""
        seconds = self._clock.seconds(done.fetched, done.ended)
        wait = max(self._clock.seconds(done.fetched, done.data), 0.0)
        self._waited, self._total = 0.99 * self._waited + wait, 0.99 * self._total + seconds
        self._step = None if self._step is None or not done.warm else self._step + seconds - wait
        if done.synchronised:
            if self._step is not None:
                self.cost.add(self._step, measured=done.measured)
            self._step = 0.0
        if not done.counts or self._stalled(wait, seconds):
            return
        if not done.synchronised:
            local.append(seconds)
            return
        final.append(seconds)
        if done.key.gpus == 1:
            local.append(seconds)
        elif done.waits:
            local.append(seconds - sum(self._clock.seconds(*wait) for wait in done.waits))

    def _stalled(self, wait: float, seconds: float) -> bool:
        """Tell whether a wait is a stall; it also moves the usual wait a little."""
        body = seconds - wait
        usual_wait, usual_body = self._usual_wait, self._usual_body or body
        # A single long wait moves the mean by a few usual waits at most.
        self._usual_body = usual_body + 0.1 * (min(body, 4.0 * usual_body) - usual_body)
        self._usual_wait = usual_wait + 0.1 * (min(wait, 4.0 * usual_wait + 0.1 * usual_body) - usual_wait)
        return wait > STALL * usual_body and wait > _USUAL_WAIT_FACTOR * usual_wait
