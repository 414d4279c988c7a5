"""Measured step times per configuration, for the throughput model.

Each configuration keeps its newest measurements and offers their median: neither a straggler nor a pause of the machine
moves it, and new steps replace the times from before a change of the cluster. Times belong to the GPU type of their
measurement; those of another type are kept until the job returns to it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pollux.fit import fit
from pollux.goodput import ThroughputParams
from pollux.tuning.measurements import Configuration, ProfileRows
from pollux.tuning.prior import Prior

WINDOW = 64
"""Measurements kept per configuration and kind."""

SAVED = 8
"""Measurements of these that a checkpoint carries."""

EXPIRY = 24 * 3600.0
"""Seconds after which an unconfirmed configuration is dropped: the cluster may have changed."""

MOST_CONFIGURATIONS = 200
"""Configurations kept, the newest ones: bounds memory and fitting for a job whose batch size never settles."""


@dataclass
class _Times:
    local: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Local forward and backward passes, without the wait for other ranks [s]."""
    final: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Synchronising passes, whole [s]."""
    at: float = 0.0
    """Time of the newest measurement [POSIX s]."""


class StepProfile:
    """Times by configuration, on GPUs of one type.

    One thread adds times, others may read. `clock` returns POSIX seconds.
    """

    def __init__(self, gpu_type: str = "", *, clock: Callable[[], float] = time.time) -> None:
        self.gpu_type = gpu_type
        self.version = 0
        """Grows with each measurement. If it has not grown, a refit finds nothing new."""
        self.prior_refuted = False
        """Measured times have refuted the prior."""
        self._clock = clock
        self._times: dict[Configuration, _Times] = {}
        self._elsewhere: dict[str, list[Any]] = {}
        """Saved rows of other GPU types."""
        self.explored = (0, 0)
        """Most GPUs and most nodes of any measured step, of any GPU type."""
        self._prior: Prior | None = None
        self._prior_at = 0.0
        self._lock = threading.Lock()

    def add(self, key: Configuration, local: Sequence[float] = (), final: Sequence[float] = ()) -> None:
        """Add times of one configuration [s]; those that are not positive and finite are left out.

        `local` holds whole accumulation passes and the own work of synchronising passes; `final` holds whole
        synchronising passes, from the wait for their data to the end of the loop's body.
        """
        with self._lock:
            times = self._times.get(key)
            if times is None:
                times = self._times[key] = _Times()
                self._forget_old()
            times.local.extend(x for x in local if 0 < x < math.inf)
            times.final.extend(x for x in final if 0 < x < math.inf)
            if times.final:
                self.explored = max(self.explored[0], key.gpus), max(self.explored[1], key.nodes)
            times.at = self._clock()
            self.version += 1

    def _forget_old(self) -> None:
        """Put the configurations last measured before the newest one. The newest one has no time yet."""
        oldest = self._clock() - EXPIRY
        known = sorted((t.at or math.inf, key) for key, t in self._times.items())
        surplus = len(known) - MOST_CONFIGURATIONS
        for rank, (at, key) in enumerate(known):
            if rank < surplus or at < oldest:
                del self._times[key]

    def rows(self) -> ProfileRows:
        """Return the medians of all configurations that can be fitted.

        A configuration needs a whole synchronising pass, or any pass on one GPU.
        """
        with self._lock:
            items = [(k, list(t.local), list(t.final)) for k, t in self._times.items()]
        rows = []
        for key, local, final in items:
            # One GPU synchronises nothing: each of its passes is like a step's last one.
            steps = local if not final and key.gpus == 1 else final
            if steps:
                t_local = float(np.median(local)) if local else math.nan
                rows.append((*key, t_local, float(np.median(steps)), float(len(steps))))
        columns = np.array(rows, dtype=np.float64).reshape(len(rows), 7).T
        return ProfileRows(*columns)

    def medians(self, key: Configuration) -> tuple[float | None, float | None]:
        """Return the median local part and the median synchronising pass [s]; None if never measured."""
        with self._lock:
            times = self._times.get(key, _Times())
            local, final = list(times.local), list(times.final)
        return float(np.median(local)) if local else None, float(np.median(final)) if final else None

    def measured(self) -> tuple[int, int]:
        """Return (most GPUs, most nodes) of the measurements behind the fit."""
        with self._lock:
            keys = [key for key, times in self._times.items() if times.final]
        return max((k.gpus for k in keys), default=0), max((k.nodes for k in keys), default=0)

    @property
    def prior(self) -> Prior | None:
        """Return the faded prior; None without one, or after it was refuted."""
        with self._lock:
            prior, at = self._prior, self._prior_at
        return None if prior is None else prior.after(self._clock() - at)

    def learn(self, prior: Prior) -> None:
        """Take the prior of earlier runs."""
        with self._lock:
            self._prior, self._prior_at = prior, self._clock()
            self.version += 1

    def fit(self) -> ThroughputParams | None:
        """Return the fitted parameters, or the prior's; None without both."""
        rows, prior = self.rows(), self.prior
        if prior is not None and prior.refuted(rows):
            with self._lock:
                self._prior, self.prior_refuted = None, True
            prior = None
        if rows.nodes.size == 0:
            return None if prior is None else prior.params
        return fit(
            rows.nodes,
            rows.gpus,
            rows.local_batch,
            rows.local,
            rows.final,
            racks=rows.racks,
            weights=rows.weights,
            prior=None if prior is None else prior.params,
        )

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            rows = [
                [list(key), list(t.local)[-SAVED:], list(t.final)[-SAVED:], t.at]
                for key, t in self._times.items()
            ]
            return {
                "gpu_type": self.gpu_type,
                "rows": rows,
                "elsewhere": dict(self._elsewhere),
                "most": list(self.explored),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved profile; rows of other GPU types are kept aside."""
        types = dict(state.get("elsewhere", {}))
        types[state.get("gpu_type", self.gpu_type)] = state["rows"]
        now = self._clock()
        with self._lock:
            self._times = {
                Configuration(*key): _Times(deque(local, WINDOW), deque(final, WINDOW), *(at or [now]))
                for key, local, final, *at in types.pop(self.gpu_type, [])
            }
            self._elsewhere = types
            seen = [Configuration(*key) for key, _, final, *_ in state["rows"] if final]
            gpus, nodes = state.get("most", (0, 0))
            self.explored = max([gpus, *(k.gpus for k in seen)]), max([nodes, *(k.nodes for k in seen)])
            self._forget_old()
            self.version += 1

    @property
    def of_other_type(self) -> bool:
        """Tell whether a checkpoint knows only other GPU types than this one."""
        with self._lock:
            return bool(self._elsewhere) and not self._times
