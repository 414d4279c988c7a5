"""The fit on the published measurements predicts held-out ones.

The mean error of step times is below a tenth (tests/benchmarks/fit.md).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pollux.fit import fit
from pollux.goodput import step_time
from polluxd.sim.workload import lines


@pytest.mark.parametrize("application", ["bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"])
def test_step_times_of_held_out_configurations(osdi21: Path, application: str) -> None:
    found = []
    columns = ("placement", "local_bsz", "step_time", "sync_time")
    for line in lines(osdi21 / "profiles" / application / "placements.csv", columns):
        place = [int(digit) for digit in line.text("placement")]
        times = (line.number_in("step_time", 1e-9), line.number_in("sync_time", 0))
        found.append((len(place), sum(place), line.whole("local_bsz", 1), *times))
    rows = np.array(found)
    keys = sorted({tuple(row[:3]) for row in rows.tolist()})
    turn = {
        key: int(k) % 5 for key, k in zip(keys, np.random.default_rng(0).permutation(len(keys)), strict=True)
    }
    part = np.array([turn[tuple(row[:3])] for row in rows.tolist()])
    off = np.empty(len(rows))
    for k in range(5):
        known, unseen = rows[part != k], rows[part == k]
        params = fit(known[:, 0], known[:, 1], known[:, 2], known[:, 3] - known[:, 4], known[:, 3])
        off[part == k] = step_time(params, unseen[:, 0], unseen[:, 1], unseen[:, 2]) / unseen[:, 3] - 1.0
    assert np.abs(off).mean() < 0.1
