"""Fits to a part of the published measurements, and their errors on the rest.

Three kinds of rows can be held out: see `by_turns`. Errors are relative and absolute: |predicted / measured - 1|.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pollux.fit import fit
from pollux.goodput import step_time
from polluxd.sim.workload import Line, lines

Floats = NDArray[np.float64]
FOLDS = 5


def measurements(directory: Path) -> Floats:
    """Read the measured step times, as [n, 5].

    The columns are nodes, GPUs, examples per GPU, seconds of a step, and the seconds of it that were spent waiting for
    other ranks.
    """
    rows = []
    for line in lines(directory / "placements.csv", ("placement", "local_bsz", "step_time", "sync_time")):
        place = [int(digit) for digit in line.text("placement")]
        rows.append([len(place), sum(place), *_times(line)])
    columns = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
    for line in lines(directory / "scalability.csv", columns):
        rows.append([line.whole("num_nodes", 1), line.whole("num_replicas", 1), *_times(line)])
    return np.array(rows, dtype=np.float64)


def _times(line: Line) -> list[float]:
    return [line.whole("local_bsz", 1), line.number_in("step_time", 1e-9), line.number_in("sync_time", 0)]


def errors(rows: Floats, test: NDArray[np.bool_]) -> Floats:
    """Return the errors on the tested rows of a fit to the others."""
    known, asked = rows[~test], rows[test]
    found = fit(known[:, 0], known[:, 1], known[:, 2], known[:, 3] - known[:, 4], known[:, 3])
    return np.abs(step_time(found, asked[:, 0], asked[:, 1], asked[:, 2]) / asked[:, 3] - 1.0)


def by_turns(rows: Floats, key: Callable[[Sequence[float]], Hashable]) -> Floats:
    """Return the errors of all rows; no fit saw the group of its row."""
    groups = [key(row) for row in rows.tolist()]
    names = sorted(set(groups))
    place = np.random.default_rng(0).permutation(len(names))
    fold = dict(zip(names, (int(p) % FOLDS for p in place), strict=True))
    folds = np.array([fold[group] for group in groups])
    found = np.empty(len(rows))
    for k in range(FOLDS):
        found[folds == k] = errors(rows, folds == k)
    return found
