"""Measured step times, per (nodes, GPUs, local batch): what the throughput model is fitted to.

Each configuration keeps its newest measurements only, and offers their median: neither a straggler nor a pause of
the machine moves it, and a profile from before the cluster changed is forgotten as new steps come in.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pollux.goodput import ThroughputParams

WINDOW = 64
"""Measurements kept per configuration and kind."""

SAVED = 8
"""Of these, how many a checkpoint carries on."""

WARM_PASSES = 3
"""Passes of a new configuration that the profile leaves out: first kernels, first connections, cold caches."""


class Configuration(NamedTuple):
    """What a step time depends on."""

    nodes: int
    gpus: int
    local_batch: int


@dataclass
class _Times:
    local: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Local forward and backward passes, the wait for other ranks excluded [s]."""
    final: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Synchronising passes, whole [s]."""


class ProfileRows(NamedTuple):
    """The profile as columns, one row per configuration; the arguments of `pollux.fit.fit`."""

    nodes: NDArray[np.float64]
    gpus: NDArray[np.float64]
    local_batch: NDArray[np.float64]
    local: NDArray[np.float64]
    """T_grad as measured; NaN where never."""
    final: NDArray[np.float64]
    """Synchronising pass as measured; NaN where never."""
    weights: NDArray[np.float64]


class StepProfile:
    """Times by configuration. One thread adds, another may read."""

    def __init__(self) -> None:
        self._times: dict[Configuration, _Times] = {}
        self._lock = threading.Lock()
        self.version = 0
        """Grows with each measurement: says whether a refit could find anything new."""

    def add_local(self, key: Configuration, seconds: float) -> None:
        """An accumulation pass, or the local part of a synchronising one [s]."""
        self._add(key, local=seconds)

    def add_final(self, key: Configuration, seconds: float) -> None:
        """A synchronising pass, from one end of step to the next [s]."""
        self._add(key, final=seconds)

    def _add(self, key: Configuration, local: float | None = None, final: float | None = None) -> None:
        with self._lock:
            times = self._times.setdefault(key, _Times())
            if local is not None and math.isfinite(local) and local > 0:
                times.local.append(local)
            if final is not None and math.isfinite(final) and final > 0:
                times.final.append(final)
            self.version += 1

    def rows(self) -> ProfileRows:
        """Medians of all configurations with a whole synchronising pass, or on one GPU with any pass."""
        with self._lock:
            items = [(k, list(t.local), list(t.final)) for k, t in self._times.items()]
        rows = []
        for key, local, final in items:
            # One GPU has nothing to synchronise: each of its passes is like a step's last.
            steps = local if not final and key.gpus == 1 else final
            if steps:
                t_local = float(np.median(local)) if local else math.nan
                rows.append((*key, t_local, float(np.median(steps)), float(len(steps))))
        columns = np.array(rows, dtype=np.float64).reshape(len(rows), 6).T
        return ProfileRows(*columns)

    def final_time(self, key: Configuration) -> float | None:
        """Median of the synchronising pass there [s]; None where never measured."""
        with self._lock:
            times = self._times.get(key)
            values = list(times.final) if times is not None else []
        return float(np.median(values)) if values else None

    def local_time(self, key: Configuration) -> float | None:
        """Median of the local part there [s]; None where never measured."""
        with self._lock:
            times = self._times.get(key)
            values = list(times.local) if times is not None else []
        return float(np.median(values)) if values else None

    @property
    def explored_gpus(self) -> int:
        """Most GPUs that steps were ever measured on."""
        with self._lock:
            return max((k.gpus for k, t in self._times.items() if t.final), default=0)

    @property
    def explored_nodes(self) -> int:
        with self._lock:
            return max((k.nodes for k, t in self._times.items() if t.final), default=0)

    def fit(self, prior: ThroughputParams | None = None) -> ThroughputParams | None:
        """The throughput model's parameters for what was measured; None before the first measurement."""
        rows = self.rows()
        if rows.nodes.size == 0:
            return None
        from pollux.fit import fit  # noqa: PLC0415 - scipy costs a second to import: in the thread that needs it

        return fit(
            rows.nodes, rows.gpus, rows.local_batch, rows.local, rows.final, weights=rows.weights, prior=prior
        )

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                "rows": [
                    [list(key), list(t.local)[-SAVED:], list(t.final)[-SAVED:]]
                    for key, t in self._times.items()
                ]
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._times = {
                Configuration(*key): _Times(deque(local, WINDOW), deque(final, WINDOW))
                for key, local, final in state["rows"]
            }
            self.version += 1


class PassTimer:
    """Times passes on the host's clock and files them under their configuration.

    The wait for other ranks is the time from the last local gradient (the hook on the last bucket) to the end of
    the pass; the rest of the step is this rank's own work. The queue of a device that is busy holds the host back, so
    that over many steps the host's clock is the device's.
    """

    def __init__(self, profile: StepProfile) -> None:
        self.profile = profile
        self._from: float | None = None
        self._ready: float | None = None
        self._wait: float | None = None
        self._key: Configuration | None = None
        self._warming = WARM_PASSES

    def pause(self) -> None:
        """Training did something else than training: what ran until now is no measurement."""
        self._from = None

    def cool(self) -> None:
        """A new configuration: leave its first passes out."""
        self._warming = WARM_PASSES
        self.pause()

    def fetch(self) -> None:
        """The next pass begins with the wait for its data."""
        if self._from is None:
            self._from = time.perf_counter()

    def ready(self) -> None:
        """The last local gradient of the synchronising pass is there (called by the communication hook)."""
        self._ready = time.perf_counter()

    def begin(self, key: Configuration) -> None:
        """The data is there."""
        self._key, self._ready, self._wait = key, None, None

    def passed(self) -> None:
        """The backward pass is over, synchronisation included."""
        if self._ready is not None:
            self._wait = time.perf_counter() - self._ready

    def end(self, *, synchronised: bool, counts: bool) -> None:
        """The loop's body is over; `counts`: a whole micro-batch like any other of its configuration."""
        now = time.perf_counter()
        started, self._from = self._from, now
        if started is None or self._key is None or not counts:
            return
        if self._warming > 0:
            self._warming -= 1
            return
        seconds = now - started
        if not synchronised:
            self.profile.add_local(self._key, seconds)
            return
        self.profile.add_final(self._key, seconds)
        if self._key.gpus == 1:
            self.profile.add_local(self._key, seconds)
        elif self._wait is not None:
            self.profile.add_local(self._key, seconds - self._wait)
