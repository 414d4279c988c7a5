"""Measured step times, per (nodes, GPUs, local batch): what the throughput model is fitted to.

Each configuration keeps its newest measurements only, and offers their median: neither a straggler nor a pause of
the machine moves it, and a profile from before the cluster changed is forgotten as new steps come in. Times belong to
the GPU type that they were measured on; those of another are kept for when the job comes back to it.
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

from pollux.goodput import ThroughputParams
from pollux.tuning.measurements import Configuration, ProfileRows
from pollux.tuning.prior import Prior
from pollux.tuning.throughput import ThroughputModel, sampled

WINDOW = 64
"""Measurements kept per configuration and kind."""

SAVED = 8
"""Of these, how many a checkpoint carries on."""

EXPIRY = 24 * 3600.0
"""Seconds after which a configuration that was not measured again is forgotten: the cluster has moved on."""

MOST_CONFIGURATIONS = 200
"""Configurations kept, the newest: a job whose batch size never settles costs no more memory and fitting than that."""


@dataclass
class _Times:
    local: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Local forward and backward passes, the wait for other ranks excluded [s]."""
    final: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Synchronising passes, whole [s]."""
    at: float = 0.0
    """When the newest was added [POSIX s]."""


class StepProfile:
    """Times by configuration, on GPUs of one type. One thread adds, others may read.

    `clock` gives POSIX seconds.
    """

    def __init__(self, gpu_type: str = "", *, clock: Callable[[], float] = time.time) -> None:
        self.gpu_type = gpu_type
        self.version = 0
        """Grows with each measurement: says whether a refit could find anything new."""
        self.model: ThroughputModel | None = None
        """The script's own equation of step times; None: Pollux'."""
        self.prior_refuted = False
        """What earlier runs left was found wrong, and dropped."""
        self._clock = clock
        self._times: dict[Configuration, _Times] = {}
        self._elsewhere: dict[str, list[Any]] = {}
        """Saved rows of other GPU types."""
        self._most = (0, 0)
        """Most GPUs and most nodes ever measured on, whatever the type."""
        self._prior: Prior | None = None
        self._prior_at = 0.0
        self._lock = threading.Lock()

    def add(self, key: Configuration, local: Sequence[float] = (), final: Sequence[float] = ()) -> None:
        """Seconds of accumulation passes, or of synchronising ones' own work, and of whole synchronising passes.

        The latter count from one end of step to the next. A time that is not finite, or not above 0, is left out.
        """
        with self._lock:
            times = self._times.get(key)
            if times is None:
                times = self._times[key] = _Times()
                self._forget_old()
            times.local.extend(x for x in local if 0 < x < math.inf)
            times.final.extend(x for x in final if 0 < x < math.inf)
            if times.final:
                self._most = (max(self._most[0], key.gpus), max(self._most[1], key.nodes))
            times.at = self._clock()
            self.version += 1

    def _forget_old(self) -> None:
        """Before the newest configuration, which has no time yet, come those last measured."""
        oldest = self._clock() - EXPIRY
        known = sorted((t.at or math.inf, key) for key, t in self._times.items())
        surplus = len(known) - MOST_CONFIGURATIONS
        for rank, (at, key) in enumerate(known):
            if rank < surplus or at < oldest:
                del self._times[key]

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
        columns = np.array(rows, dtype=np.float64).reshape(len(rows), 7).T
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
        """Most GPUs that steps were ever measured on, of any type."""
        return self._most[0]

    @property
    def explored_nodes(self) -> int:
        return self._most[1]

    def measured(self) -> tuple[int, int]:
        """(most GPUs, most nodes) that the fit rests on: measured on this type of GPU, and not forgotten."""
        with self._lock:
            keys = [key for key, times in self._times.items() if times.final]
        return max((k.gpus for k in keys), default=0), max((k.nodes for k in keys), default=0)

    @property
    def prior(self) -> Prior | None:
        """What earlier runs have left, as far as it still counts; None where there is nothing, or it was wrong."""
        with self._lock:
            prior, at = self._prior, self._prior_at
        return None if prior is None else prior.after(self._clock() - at)

    def learn(self, prior: Prior) -> None:
        """Take over what earlier runs have measured."""
        with self._lock:
            self._prior, self._prior_at = prior, self._clock()
            self.version += 1

    def fit(self) -> ThroughputParams | None:
        """The throughput model's parameters for what was measured, or as earlier runs left them; None without both."""
        rows, prior = self.rows(), self.prior
        if prior is not None and prior.refuted(rows):
            with self._lock:
                self._prior, self.prior_refuted = None, True
            prior = None
        if rows.nodes.size == 0:
            return None if prior is None else prior.params
        if self.model is not None:
            found = sampled(self.model, rows)
            if found is not None:
                return found
        from pollux.fit import fit  # noqa: PLC0415 - scipy costs a second to import: in the thread that needs it

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
                "most": list(self._most),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved profile; what it holds of this GPU type counts, the rest is carried along."""
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
            self._most = (max([gpus, *(k.gpus for k in seen)]), max([nodes, *(k.nodes for k in seen)]))
            self._forget_old()
            self.version += 1

    @property
    def of_other_type(self) -> bool:
        """A checkpoint of this training knows another type of GPU, and nothing of this one."""
        with self._lock:
            return bool(self._elsewhere) and not self._times
