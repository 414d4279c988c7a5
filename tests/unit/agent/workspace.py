"""The memory that a measurement needs beside the gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch.profiler import ProfilerActivity, profile


def assert_bounded(body: Callable[[], object], most: int = 32 << 20) -> None:
    """Assert that `body` never holds more than `most` bytes.

    Also assert that `body` frees all the memory that it allocates.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        body()
    results = profiler.profiler.kineto_results
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    sizes = np.cumsum([size for _, size in changes])
    assert len(sizes) > 10
    assert sizes.max() <= most
    assert abs(sizes[-1]) < 4096, "all of it is given back"
