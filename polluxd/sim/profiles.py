"""Applications from measured profiles: the OSDI 2021 artifact's format.

Per application a directory with `placements.csv` (placement, local_bsz, step_time, sync_time), `scalability.csv`
(num_nodes, num_replicas, local_bsz, step_time, sync_time) and `validation-M.csv` (one row per epoch at batch M:
progress, iteration, metric, grad_sqr, grad_var). Of further GPU types, a folder TYPE in it with its own
`placements.csv` and `scalability.csv`; how training converges does not depend on the type.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pollux.goodput import BatchLimits, NoiseScale
from polluxd.sim.applications import Application
from polluxd.sim.workload import TraceError, lines

Floats = NDArray[np.float64]

EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
"""Epochs after which the evaluation's jobs end; applications not named here run as long as they were validated."""
LOCAL_MAX = {"yolov3": 8}
"""Per-GPU batch sizes held below what was measured."""
FIXED = {"ncf": (1, 32768)}
"""Most GPUs and batch size of applications that the evaluation never scales."""
MEASURED_GPUS = 64
"""Most GPUs of any other one: its placements were measured on no more."""
MOST_NODES = 16
"""Node counts beyond are taken as this many: no profile reaches further."""


@dataclass(frozen=True)
class Curve:
    """One validation run: [epochs] each."""

    progress: Floats
    iteration: Floats
    sqr: Floats
    var: Floats


class MeasuredApplication:
    """Noise-free measurements, interpolated as the artifact's simulator does."""

    def __init__(self, directory: Path, times: Path | None = None) -> None:
        """Of a directory; `times`: where the step times stand, if not there."""
        self.name = directory.name
        self._directory = directory
        self._curves = _curves(directory)
        times = times or directory
        sizes = sorted(self._curves)
        self._sizes = sizes
        self._rows: dict[str, list[tuple[int, float, float]]] = {}
        for line in lines(times / "placements.csv", ("placement", "local_bsz", "step_time", "sync_time")):
            row = (
                line.whole("local_bsz", 1),
                line.number_in("step_time", 1e-9),
                line.number_in("sync_time", 0),
            )
            self._rows.setdefault(line.text("placement"), []).append(row)
        if not self._rows:
            raise TraceError(f"{times / 'placements.csv'}: no measurement; at least one row is needed")
        for rows in self._rows.values():
            rows.sort()
        self._scalability = times / "scalability.csv"
        measured = [row[0] for rows in self._rows.values() for row in rows]
        self.limits = BatchLimits(
            sizes[0], sizes[-1], min(measured), min(max(measured), LOCAL_MAX.get(self.name, max(measured)))
        )
        self.epochs = EPOCHS.get(self.name, min(c.progress.size for c in self._curves.values()))
        short = [size for size, c in self._curves.items() if c.progress.size < self.epochs]
        if short:
            raise TraceError(
                f"{directory / f'validation-{short[0]}.csv'}: fewer rows than the {self.epochs} epochs that "
                f"{self.name} trains; validate it to the end"
            )
        most, batch = FIXED.get(self.name, (None, None))
        self.most_gpus: int | None = MEASURED_GPUS if most is None else most
        self.fixed_batch: int | None = batch
        self._progress = [
            0.0,
            *(float(p) for p in np.min([c.progress[: self.epochs] for c in self._curves.values()], 0)),
        ]
        self._times: dict[tuple[tuple[int, ...], int], tuple[float, float]] = {}
        self._noise: dict[tuple[int, int], NoiseScale] = {}

    def on(self, gpu_type: str) -> Application | None:
        there = self._directory / gpu_type
        return MeasuredApplication(self._directory, there) if (there / "placements.csv").is_file() else None

    def times(self, placement: tuple[int, ...], local_batch: int) -> tuple[float, float]:
        key = (placement, local_batch)
        if key not in self._times:
            self._times[key] = self._look_up(placement, local_batch)
        return self._times[key]

    def _look_up(self, placement: tuple[int, ...], local_batch: int) -> tuple[float, float]:
        name = "".join(map(str, min(placement[i:] + placement[:i] for i in range(len(placement)))))
        rows = self._rows.get(name)
        if rows is not None:
            sizes = [row[0] for row in rows]
            if local_batch < sizes[0] or local_batch > sizes[-1]:
                return self._nearest(local_batch, rows)
            i = min(max(bisect_right(sizes, local_batch) - 1, 0), len(rows) - 2) if len(rows) > 1 else 0
            if len(rows) == 1:
                return rows[0][1], rows[0][2]
            (b0, t0, s0), (b1, t1, s1) = rows[i], rows[i + 1]
            share = (local_batch - b0) / (b1 - b0)
            return t0 + share * (t1 - t0), s0 + share * (s1 - s0)
        point = np.array([[min(len(placement), MOST_NODES), sum(placement), local_batch]], dtype=np.float64)
        step, sync = self._volume(point)[0]
        if np.isfinite(step):
            return float(step), float(sync)
        # Outside of everything measured: the nearest measurement, its local part scaled to the batch.
        points, values = self._grid
        distance = np.abs(np.log(points / point[0])) @ np.array([4.0, 4.0, 1.0])
        b, (t, s) = points[int(np.argmin(distance)), 2], values[int(np.argmin(distance))]
        return float((t - s) * local_batch / b + s), float(s)

    @staticmethod
    def _nearest(local_batch: int, rows: list[tuple[int, float, float]]) -> tuple[float, float]:
        """Extrapolate beyond the measured batch sizes by the last slope.

        The wait for other ranks stays.
        """
        (b0, t0, s0), (b1, t1, s1) = rows[:2] if local_batch < rows[0][0] else rows[-2:]
        b, t, s = (b0, t0, s0) if local_batch < rows[0][0] else (b1, t1, s1)
        slope = max(((t1 - s1) - (t0 - s0)) / (b1 - b0), 0.0)
        return max(t + slope * (local_batch - b), 0.5 * t), s

    @cached_property
    def _grid(self) -> tuple[Floats, Floats]:
        """Return every measurement by (nodes, GPUs, local batch).

        Those of several placements are averaged.
        """
        found: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
        for name, rows in self._rows.items():
            for batch, step, sync in rows:
                key = (len(name), sum(map(int, name)), batch)
                found.setdefault(key, []).append((step, sync))
        points = [*sorted(found)]
        values = [tuple(np.mean(found[key], axis=0)) for key in points]
        columns = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
        for line in lines(self._scalability, columns):
            points.append((line.whole(columns[0], 1), line.whole(columns[1], 1), line.whole(columns[2], 1)))
            values.append((line.number_in("step_time", 1e-9), line.number_in("sync_time", 0)))
        return np.array(points, dtype=np.float64), np.array(values, dtype=np.float64)

    @cached_property
    def _volume(self) -> Any:
        from scipy.interpolate import LinearNDInterpolator  # noqa: PLC0415 - half a second, and seldom needed

        return LinearNDInterpolator(*self._grid)

    def noise(self, batch_size: int, epoch: int) -> NoiseScale:
        key = (batch_size, epoch)
        if key not in self._noise:
            self._noise[key] = NoiseScale(
                self._between(batch_size, lambda c: float(c.sqr[epoch])),
                self._between(batch_size, lambda c: float(c.var[epoch])),
            )
        return self._noise[key]

    def progress(self, epoch: int) -> float:
        return self._progress[epoch]

    def iterations(self, batch_size: int, epoch: int) -> float:
        return self._between(batch_size, lambda c: float(c.iteration[epoch]))

    def _between(self, batch_size: int, value: Callable[[Curve], float]) -> float:
        """Interpolate in the batch size; beyond the validated sizes the nearest."""
        sizes = self._sizes
        low = sizes[max(bisect_right(sizes, batch_size) - 1, 0)]
        high = sizes[min(bisect_left(sizes, batch_size), len(sizes) - 1)]
        if low >= high:
            return value(self._curves[low])
        share = (batch_size - low) / (high - low)
        return (1 - share) * value(self._curves[low]) + share * value(self._curves[high])


def _curves(directory: Path) -> dict[int, Curve]:
    found = {}
    for path in directory.glob("validation-*.csv"):
        size = path.stem.removeprefix("validation-")
        if not size.isdigit() or int(size) < 1:
            raise TraceError(f"{path}: the name must give the batch size; rename it to validation-M.csv")
        rows = [
            (
                line.number_in("progress", 0),
                line.number_in("iteration", 0),
                line.number_in("grad_sqr", 0),
                line.number_in("grad_var", 0),
            )
            for line in lines(path, ("progress", "iteration", "grad_sqr", "grad_var"))
        ]
        if not rows:
            raise TraceError(f"{path}: no epoch; at least one row is needed")
        found[int(size)] = Curve(*np.array(rows, dtype=np.float64).T)
    if not found:
        raise TraceError(f"{directory}: no validation-M.csv; give one per validated batch size M")
    return found


def load_profiles(directory: Path, names: Iterable[str] | None = None) -> Mapping[str, MeasuredApplication]:
    """The applications of a directory, or those named. Raises TraceError."""
    if not directory.is_dir():
        raise TraceError(
            f"{directory}: no such directory; --profiles takes one with a folder per application"
        )
    present = sorted(p.parent.name for p in directory.glob("*/placements.csv"))
    if not present:
        raise TraceError(
            f"{directory}: no APPLICATION/placements.csv in it; --profiles takes their parent folder"
        )
    wanted = present if names is None else [n for n in sorted(set(names)) if n in present]
    return {name: MeasuredApplication(directory / name) for name in wanted}
