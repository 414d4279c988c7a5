"""The time of a job alone on a share of the cluster.

It is the yardstick of finish-time fairness.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polluxd.sim.applications import Application, most_gpus, placement_of, split_batch

Floats = NDArray[np.float64]

SIZES = 16
"""Batch sizes tried, in geometric spacing."""


class Alone:
    """Times of one application alone on GPUs of one kind of node.

    Its batch size is tuned in every epoch.

    The same yardstick for all policies: true step times and true noise, no restarts.
    """

    def __init__(self, app: Application, gpus_per_node: int, sizes: int = SIZES) -> None:
        """Tune over so many batch `sizes`."""
        self._app = app
        self._per_node = gpus_per_node
        limits = app.limits
        grid = np.geomspace(limits.initial, limits.maximum, sizes).round().astype(np.int64)
        self._sizes = (
            [app.fixed_batch] if app.fixed_batch is not None else sorted({int(size) for size in grid})
        )
        epochs = range(app.epochs)
        noise = [[app.noise(size, epoch) for epoch in epochs] for size in self._sizes]
        var = np.array([[n.var for n in row] for row in noise])
        sqr = np.array([[n.sqr for n in row] for row in noise])
        scale = np.array(self._sizes, dtype=np.float64)[:, None] / limits.initial
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = (var + sqr) / (var / scale + sqr)
        self._gain = np.where(np.isfinite(gain), gain, scale)
        self._work = np.diff([app.progress(epoch) for epoch in range(app.epochs + 1)])
        self._known: dict[int, Floats] = {}

    def on(self, share: float) -> float:
        """Return seconds on `share` GPUs, packed.

        Below one GPU by time slices, between two counts in proportion.
        """
        most = most_gpus(self._app)
        if share < 1:
            return self._at(1) / max(share, 1e-9)
        low, high = int(share), min(int(share) + 1, most)
        if low >= high:
            return self._at(min(low, most))
        part = share - low
        return 1.0 / ((1.0 - part) / self._at(low) + part / self._at(high))

    def _at(self, gpus: int) -> float:
        """Return the best time of all counts up to this one.

        A share need not be used up. Beyond one node, whole nodes count.
        """
        return min(self._exactly(k) for k in self._counts(gpus))

    def least(self, gpus: int) -> tuple[float, float]:
        """Return the fewest GPU-seconds and the fewest seconds of the training.

        The job has up to `gpus` GPUs, and the best number of them in every epoch.
        """
        counts = self._counts(min(gpus, most_gpus(self._app)))
        seconds = np.array([self._epochs(k) for k in counts])
        return float((seconds * np.array(counts)[:, None]).min(axis=0).sum()), float(
            seconds.min(axis=0).sum()
        )

    def _counts(self, gpus: int) -> list[int]:
        return [k for k in range(1, gpus + 1) if k <= self._per_node or k % self._per_node == 0]

    def _exactly(self, gpus: int) -> float:
        return float(self._epochs(gpus).sum())

    def _epochs(self, gpus: int) -> Floats:
        """Return the seconds of each epoch on exactly so many GPUs."""
        if gpus not in self._known:
            limits = self._app.limits
            times = np.full(len(self._sizes), np.inf)
            for i, size in enumerate(self._sizes):
                m, s = split_batch(size, gpus, limits)
                if limits.local_min <= m <= limits.local_max:
                    step, sync = self._app.times(placement_of(gpus, self._per_node), m)
                    times[i] = step + s * (step - sync)
            with np.errstate(divide="ignore"):
                self._known[gpus] = self._work / (self._gain / times[:, None]).max(axis=0)
        return self._known[gpus]


def contention(submitted: Floats, ended: Floats) -> Floats:
    """[J]: jobs in the system, itself included, averaged over each job's life."""
    order = np.sort(submitted), np.sort(ended)

    def area(times: Floats) -> Floats:
        """Job-seconds in the system up to each time."""
        total = np.zeros(times.size)
        for edges, sign in ((order[0], 1.0), (order[1], -1.0)):
            sums = np.concatenate([[0.0], np.cumsum(edges)])
            count = np.searchsorted(edges, times, side="right")
            total += sign * (count * times - sums[count])
        return total

    life = np.maximum(ended - submitted, 1e-9)
    return np.maximum((area(ended) - area(submitted)) / life, 1.0)
