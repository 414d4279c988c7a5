"""Timing passes: on the device's clock, without waiting for the device, stalls of the data loader told apart."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pollux.profile import Configuration, StepProfile

WARM_PASSES = 3
"""Passes of a new configuration that the profile leaves out: first kernels, first connections, cold caches."""

STALL = 0.5
"""A wait for data counts as a stall from this share of a usual pass on, if it is also far above the usual wait."""

_USUAL_WAIT_FACTOR = 4.0
_PENDING = 64  # passes whose marks a device has not reached yet


class HostClock:
    """Marks in time as the host sees them: right on a CPU, where nothing runs on behind its back."""

    def mark(self) -> Any:
        return time.perf_counter()

    def passed(self, mark: Any) -> bool:
        """Whether what came before the mark is over."""
        return True

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start)


class CudaClock:
    """Marks in a device's stream: events, recorded without waiting and read when they have long passed."""

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
    """The clock that passes on this torch device are timed by."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


@dataclass
class _Pass:
    """The marks of one pass; None where there was none."""

    key: Configuration
    started: Any
    fetched: Any
    """The wait for its data began here; it may lie after `started`, where the user did something in between."""
    data: Any
    """Its data was there."""
    ready: Any = None
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    """From the last local gradient to the end of the synchronisation; one for each model that a pass trains."""
    ended: Any = None
    synchronised: bool = False
    counts: bool = False


class PassTimer:
    """Times passes on the device's clock (the host's on a CPU) and files them under their configuration.

    The wait for other ranks is the time from the last local gradient (the hook on the last bucket) to the end of
    the pass; the rest of the step is this rank's own work. On a GPU nothing is waited for: a pass is filed when a later
    one finds it over. A wait for data that is out of all proportion is a stall: it is told (`data_wait`), and the pass
    is left out of the profile; a loader that is always slow is part of what a pass costs.
    """

    def __init__(self, profile: StepProfile, clock: HostClock | CudaClock | None = None) -> None:
        self.profile = profile
        self._clock = clock or HostClock()
        self._from: Any = None
        self._fetched: Any = None
        self._pass: _Pass | None = None
        self._pending: deque[_Pass] = deque(maxlen=_PENDING)
        self._warming = WARM_PASSES
        self._usual_wait, self._usual_body = 0.0, 0.0
        self._waited, self._total = 0.0, 0.0

    @property
    def data_wait(self) -> float | None:
        """Share of the recent training time spent waiting for the data loader; None before anything was timed."""
        return min(self._waited / self._total, 1.0) if self._total > 0 else None

    def pause(self) -> None:
        """Training did something else than training: what ran until now is no measurement."""
        self._from = self._fetched = None

    def cool(self) -> None:
        """A new configuration: leave its first passes out."""
        self._warming = WARM_PASSES
        self._usual_wait, self._usual_body = 0.0, 0.0
        self.pause()

    def fetch(self) -> None:
        """The next pass begins with the wait for its data."""
        self._fetched = self._clock.mark()
        if self._from is None:
            self._from = self._fetched

    def ready(self) -> None:
        """The last local gradient of the synchronising pass is there (called by the communication hook)."""
        if self._pass is not None:
            self._pass.ready = self._clock.mark()

    def begin(self, key: Configuration) -> None:
        """The data is there."""
        self._pass = _Pass(key, self._from, self._fetched, self._clock.mark())

    def passed(self) -> None:
        """The backward pass is over, synchronisation included."""
        if self._pass is not None and self._pass.ready is not None:
            self._pass.waits.append((self._pass.ready, self._clock.mark()))
            self._pass.ready = None

    def end(self, *, synchronised: bool, counts: bool) -> None:
        """The loop's body is over; `counts`: a whole micro-batch like any other of its configuration."""
        done, self._pass = self._pass, None
        started, self._from = self._from, self._clock.mark()
        if started is None or done is None:
            return
        done.started, done.ended = started, self._from
        done.synchronised, done.counts = synchronised, counts and self._warming <= 0
        if counts and self._warming > 0:
            self._warming -= 1
        self._pending.append(done)
        while self._pending and self._reached(self._pending[0]):
            self._file(self._pending.popleft())

    def _reached(self, done: _Pass) -> bool:
        """Whether the device has passed all marks; the hook's may lie in a stream of their own."""
        passed = self._clock.passed
        return passed(done.ended) and all(passed(start) and passed(end) for start, end in done.waits)

    def _file(self, done: _Pass) -> None:
        seconds = self._clock.seconds(done.started, done.ended)
        wait = 0.0 if done.fetched is None else max(self._clock.seconds(done.fetched, done.data), 0.0)
        self._waited, self._total = 0.99 * self._waited + wait, 0.99 * self._total + seconds
        if not done.counts or self._stalled(wait, seconds):
            return
        if not done.synchronised:
            self.profile.add_local(done.key, seconds)
            return
        self.profile.add_final(done.key, seconds)
        if done.key.gpus == 1:
            self.profile.add_local(done.key, seconds)
        elif done.waits:
            waited = sum(self._clock.seconds(*wait) for wait in done.waits)
            self.profile.add_local(done.key, seconds - waited)

    def _stalled(self, wait: float, seconds: float) -> bool:
        """Whether this wait for data is out of proportion to the usual one, which it moves a little."""
        body = seconds - wait
        usual_wait, usual_body = self._usual_wait, self._usual_body or body
        # Single ones far off move the mean by no more than a few of the usual size do.
        self._usual_body = usual_body + 0.1 * (min(body, 4.0 * usual_body) - usual_body)
        self._usual_wait = usual_wait + 0.1 * (min(wait, 4.0 * usual_wait + 0.1 * usual_body) - usual_wait)
        return wait > STALL * usual_body and wait > _USUAL_WAIT_FACTOR * usual_wait
