"""Weights of a step's gradients, and norms corrected for them, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pollux.noise.samples import Squares, summed
from pollux.noise.uneven import StepWeights, as_equal, step_weights


def value(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def per_group(found: Squares) -> list[float]:
    (row,) = summed([found], 2, torch.device("cpu")).tolist()
    return list(row)


def test_the_weights_of_a_step() -> None:
    """Two gradients of 1 and 3 tokens: u = 1/2 and 3/2, and q = 5/4."""
    found = step_weights(value(4.0), value(10.0), 2, value(6.0))
    assert float(found.factor) == 1.5, "the losses were divided by 6 tokens and there are 4"
    assert float(found.spread) == 1.25
    assert float(step_weights(value(8.0), value(32.0), 2, value(8.0)).spread) == 1.0, "equal weights"


def test_a_step_without_any_weight_has_a_gradient_of_zero() -> None:
    found = step_weights(value(0.0), value(0.0), 2, value(6.0))
    assert (float(found.factor), float(found.spread)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("parts", "local"),
    [((False, False), [5.0, 1.0]), ((True, True), [5.0, 1.0]), ((False, True), [-7.0, -5.0])],
)
def test_the_norms_that_equal_weights_would_have(parts: tuple[bool, bool], local: list[float]) -> None:
    """n = 4 and q = 2: the ratio is 3/2, and 1 - q * 3/2 = -2.

    Where the total alone is in parts, each rank's correction is n-fold: its local norm is averaged over the n ranks.
    """
    weights = StepWeights(value(1.0), value(2.0))
    both = as_equal(torch.tensor([6.0, 2.0]), torch.tensor([2.0, 1.0]), weights, 4, parts=parts)
    assert per_group(both[0]) == pytest.approx(local, rel=1e-5)
    assert per_group(both[1]) == [2.0, 1.0]


@pytest.mark.parametrize("parts", [(False, False), (True, True), (False, True)])
def test_equal_weights_change_nothing(parts: tuple[bool, bool]) -> None:
    weights = StepWeights(value(1.0), value(1.0))
    both = as_equal(torch.tensor([5.0, 3.0]), torch.tensor([2.0, 1.0]), weights, 4, parts=parts)
    assert [per_group(part) for part in both] == [[5.0, 3.0], [2.0, 1.0]]
