"""The fit on the published measurements predicts held-out ones: the mean error of step times is below a tenth."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.held_out import by_turns, measurements


@pytest.mark.parametrize("application", ["bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"])
def test_step_times_of_held_out_configurations(osdi21: Path, application: str) -> None:
    rows = measurements(osdi21 / "profiles" / application)
    assert by_turns(rows, lambda row: tuple(row[:3])).mean() < 0.1
