"""Values that hold from one time to the next, as pairs of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .job_log import Numbers


class StepFunction(NamedTuple):
    """`values[i]` holds from `times[i]` to `times[i + 1]`, and 0 before the first. Times ascend, each once."""

    times: Numbers
    values: Numbers


def summed(times: Numbers, changes: Numbers) -> StepFunction:
    """Add up changes of a value."""
    order = np.argsort(times, kind="stable")
    return in_order(times[order], changes[order])


def in_order(at: Numbers, changes: Numbers) -> StepFunction:
    """Add up changes of a value whose times ascend."""
    level = np.cumsum(changes)
    last = np.append(at[1:] != at[:-1], True) if len(at) else np.zeros(0, dtype=bool)
    return StepFunction(at[last], level[last])


def at(steps: StepFunction, times: Numbers) -> Numbers:
    """Return the values at some times."""
    place = np.searchsorted(steps.times, times, side="right")
    return np.concatenate([[0.0], steps.values])[place]


def turns(steps: StepFunction, least: float) -> StepFunction:
    """Return when the values are `least` or more, as 1 and 0, a step per change."""
    high = (steps.values >= least).astype(float)
    change = np.flatnonzero(np.diff(high, prepend=0.0))
    return StepFunction(steps.times[change], high[change])


def integrals(steps: StepFunction, edges: Numbers) -> Numbers:
    """Return the integral between each two neighbouring edges [value x seconds]."""
    return np.diff(up_to(steps, edges))


def up_to(steps: StepFunction, times: Numbers) -> Numbers:
    """Return the integral from the first step to each time."""
    if not len(steps.times):
        return np.zeros(len(times))
    before = np.concatenate([[0.0], np.cumsum(np.diff(steps.times) * steps.values[:-1])])
    place = np.searchsorted(steps.times, times, side="right") - 1
    inside = np.maximum(place, 0)
    found = before[inside] + (times - steps.times[inside]) * steps.values[inside]
    return np.where(place < 0, 0.0, found)


def together(several: Sequence[StepFunction]) -> tuple[Numbers, list[Numbers]]:
    """Return all times, and the values of each of the steps at them."""
    times = np.unique(np.concatenate([steps.times for steps in several]))
    return times, [at(steps, times) for steps in several]
