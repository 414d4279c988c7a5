"""The factor of Muon, against steps along torch's own momentum."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from pollux import attach
from pollux.goodput import BatchChoice, NoiseScale
from pollux.learning_rate.averaged_direction import correction
from pollux.optimizers.families import MUON, momentum_share, recognise

SIGNAL, NOISE = 0.3, 1.0
"""Of each element's gradient: its mean, and its deviation at M0."""

muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")

AT = NoiseScale(sqr=SIGNAL**2, var=NOISE**2)


def directions(scale: float, *, nesterov: bool) -> Iterator[Tensor]:
    """Yield what torch's Muon makes orthogonal, with settled momentum."""
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.zeros(100, 200))
    optimizer = torch.optim.Muon([param], lr=0.0, momentum=0.9, nesterov=nesterov, ns_steps=1)
    for step in range(120):
        param.grad = SIGNAL + NOISE / math.sqrt(scale) * torch.randn(param.shape, generator=generator)
        optimizer.step()
        momentum = optimizer.state[param]["momentum_buffer"]
        if step >= 100:
            yield param.grad.lerp(momentum, 0.9) if nesterov else momentum.clone()
    assert recognise(optimizer, stepped=True) == (MUON,)


@muon
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", [2.0, 8.0])
def test_a_step_of_fixed_size_makes_the_progress_of_r_steps(scale: float, nesterov: bool) -> None:
    """Only the direction counts: progress is the part along the signal."""

    def progress(scale: float) -> float:
        parts = [float(d.mean() / d.square().mean().sqrt()) for d in directions(scale, nesterov=nesterov)]
        return sum(parts) / len(parts)

    r = (AT.var + AT.sqr) / (AT.var / scale + AT.sqr)
    factor = math.sqrt(r) * correction(scale, AT, momentum_share(0.9, nesterov=nesterov))
    assert factor * progress(scale) / progress(1.0) == pytest.approx(r, rel=0.02)
    assert math.sqrt(r) < factor < r


def test_between_the_square_root_and_sgd_s_rule() -> None:
    r = (AT.var + AT.sqr) / (AT.var / 8 + AT.sqr)
    assert correction(8.0, AT, 1.0) == pytest.approx(1.0)
    assert correction(8.0, AT, 0.0) == pytest.approx(math.sqrt(r))
    assert correction(0.5, AT, 0.03) == correction(8.0, None, 0.03) == 1.0


@muon
@pytest.mark.parametrize(("scaling", "factor"), [("auto", 1.582), ("adascale", 1.6)])
def test_a_training_by_muon_steps_with_it(scaling: str, factor: float) -> None:
    model = torch.nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.Muon(model.parameters())
    job = attach(model, optimizer, adaptive=True, scaling=scaling, measuring={"every": 10**6})
    x = torch.randn(512, 4)
    loader = job.loader(TensorDataset(x, x[:, :3]), 8, max_batch_size=32, per_gpu=(1, 16))
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"] / 1e-3))
    for inputs, targets in loader:
        job.step(lambda i=inputs, t=targets: mse_loss(job.model(i), t))  # type: ignore[misc]
        job.training.choice = BatchChoice(16, 1)
        job.training.models[0].meter.agreed = (NoiseScale(sqr=1.0, var=1.0),)
        if len(rates) == 4:
            break
    job.close()
    assert rates[0] == 1.0
    assert rates[2:] == pytest.approx([factor] * 2, abs=2e-3)
