"""AdaScale keeps the small batch's quality at 32 times its size.

It takes as many examples as its gain predicts.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def benchmark() -> Any:
    """The benchmark's training with one short seed."""
    path = Path(__file__).parents[3] / "benchmarks" / "adascale.py"
    spec = importlib.util.spec_from_file_location("adascale_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    before = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


def test_adascale_keeps_quality_where_linear_scaling_loses_it() -> None:
    b = benchmark()
    small = b.train(0, 1, "adascale", epochs=5)
    large = b.train(0, 32, "adascale", epochs=5)
    linear = b.train(0, 32, "linear", epochs=5, passes=True)
    assert len(large.loss) < len(small.loss) / 3, "the larger batches bought nothing"
    assert large.loss[-1] < 1.3 * small.loss[-1]
    assert linear.loss[-1] > 1.5 * small.loss[-1]
    for target in (1.5, 1.0):
        used, predicted = b.predicted(small, large, target)
        assert abs(used / predicted - 1.0) < 0.15
