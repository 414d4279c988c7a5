"""Parameters that are not finite are told of, and no device is waited for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from pollux.loop import finite
from pollux.loop.finite import FiniteCheck, all_finite
from tests.unit.agent.loop.operations import Counted


class Late:
    """Values that a device has not reached yet."""

    here = False

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def read(self) -> Tensor:
        assert Late.here, "read before it was there"
        return self.values


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_in_one_parameter_is_found(value: float) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    assert bool(all_finite(model))
    with torch.no_grad():
        model[1].bias[0] = 1e30
        assert bool(all_finite(model)), "large is finite"
        model[1].bias[0] = value
    assert not bool(all_finite(model))


def test_a_model_without_parameters_is_finite() -> None:
    assert bool(all_finite(nn.ReLU()))


def test_a_look_takes_as_many_operations_for_many_parameters_as_for_few() -> None:
    found = []
    for layers in (2, 40):
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
        with Counted() as counted:
            all_finite(model)
        found.append(counted.calls)
    assert found[0] == found[1] < 10


def test_the_result_is_told_when_it_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(finite, "Arrival", Late)
    model, check = nn.Linear(2, 1), FiniteCheck()
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    check.look(model, 12)
    check.tell()
    assert not caplog.text
    monkeypatch.setattr(Late, "here", True)
    check.tell()
    assert "not finite after optimizer step 12" in caplog.text
    check.look(model, 20)
    check.tell(waits=True)
    assert len(caplog.records) == 1, "once"
