"""The correction for a lagging second moment, against torch's own Adam."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from pollux import attach
from pollux.goodput import BatchChoice, NoiseScale
from pollux.learning_rate.moment_lag import MomentLag
from pollux.optimizers.families import ADAFACTOR, ADAM, recognise

SIGNAL, NOISE = 0.3, 1.0
"""Of each element's gradient: its mean, and its deviation at M0."""

AT = NoiseScale(sqr=SIGNAL**2, var=NOISE**2)


@pytest.mark.parametrize(
    "phases",
    [[(1, 60), (8, 1)], [(1, 60), (8, 40)], [(8, 60), (2, 5)], [(1, 20), (4, 20), (16, 20)], [(8, 60)]],
)
@pytest.mark.parametrize("beta2", [0.9, 0.99, 0.999])
def test_the_correction_is_how_far_adam_s_second_moment_is_off(
    phases: list[tuple[int, int]], beta2: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = torch.optim.Adam([param], lr=0.0, betas=(0.9, beta2))
    lag, scale = MomentLag(), 1
    for scale, steps in phases:
        for _ in range(steps):
            noise = torch.randn(param.shape, generator=generator)
            param.grad = SIGNAL + NOISE / math.sqrt(scale) * noise
            optimizer.step()
            lag.stepped(scale, [1.0 - beta2])
    assert recognise(optimizer, stepped=True) == (ADAM,)
    state = optimizer.state[param]
    held = float(state["exp_avg_sq"].mean()) / (1.0 - beta2 ** float(state["step"]))
    settled = SIGNAL**2 + NOISE**2 / scale
    assert lag.correction(0, float(scale), AT) == pytest.approx(math.sqrt(held / settled), rel=0.02)


@pytest.mark.parametrize(
    "phases", [[(1, 40), (8, 1)], [(1, 40), (8, 20)], [(8, 40), (2, 4)], [(1, 20), (4, 20), (16, 20)]]
)
@pytest.mark.parametrize("clip", [1.0, 1.2, 50.0])
def test_the_correction_is_how_far_adafactor_s_clipped_steps_are_off(
    phases: list[tuple[int, int]], clip: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.ones(150, 200, dtype=torch.float64))
    optimizer = torch.optim.Adafactor([param], lr=1e-6, d=clip, weight_decay=0.0)
    lag, scale, steps_made, before = MomentLag(), 1, 0, param.detach().clone()
    for scale, steps in phases:
        for _ in range(steps):
            noise = torch.randn(param.shape, generator=generator)
            param.grad = (SIGNAL + NOISE / math.sqrt(scale) * noise).double()
            before.copy_(param.detach())
            optimizer.step()
            steps_made += 1
            rule = ADAFACTOR.step_rule(optimizer.param_groups[0], steps_made)
            lag.stepped(scale, [rule.newest])
    assert recognise(optimizer, stepped=True) == (ADAFACTOR,)
    made = float((param.detach() - before).square().mean().sqrt()) / 1e-6
    found = lag.correction(0, float(scale), AT, ADAFACTOR.clip(optimizer.param_groups[0]))
    assert found == pytest.approx(1.0 / made, rel=0.02)


def test_a_fresh_settled_or_unmeasured_moment_needs_no_correction() -> None:
    lag = MomentLag()
    assert lag.correction(0, 8.0, AT) == 1.0
    for _ in range(50):
        lag.stepped(8.0, [1e-3])
    assert lag.correction(0, 8.0, AT) == 1.0
    assert lag.correction(0, 2.0, None) == 1.0
    assert lag.correction(1, 2.0, AT) == 1.0, "a group that came later"


def test_a_frozen_moment_leaves_adascale_s_own_factor_and_short_batches_count_as_m0() -> None:
    """The square root times the correction is the gain r: SGD's rule."""
    lag = MomentLag()
    for _ in range(10):
        lag.stepped(0.25, [1e-3])
    r = (AT.var + AT.sqr) / (AT.var / 8 + AT.sqr)
    assert math.sqrt(r) * lag.correction(0, 8.0, AT) == pytest.approx(r)
    assert lag.correction(0, 0.25, AT) == 1.0


def test_a_restart_keeps_the_lag() -> None:
    lag, again = MomentLag(), MomentLag()
    lag.stepped(1.0, [1e-3, 0.1])
    lag.stepped(8.0, [1e-3, 0.1])
    again.load_state_dict(lag.state_dict())
    assert again.correction(1, 8.0, AT) == lag.correction(1, 8.0, AT) > 1.0


@pytest.mark.parametrize(
    ("scaling", "grown", "shrunk"), [("auto", 1.6, 0.935), ("sqrt-adascale", 1.6, 0.935)]
)
def test_a_training_steps_with_it_when_its_batch_grows_and_shrinks(
    scaling: str, grown: float, shrunk: float
) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    job = attach(model, optimizer, adaptive=True, scaling=scaling, measuring={"every": 10**6})
    x = torch.randn(512, 4)
    loader = job.loader(TensorDataset(x, x.sum(1, keepdim=True)), 8, max_batch_size=32, per_gpu=(1, 16))
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"] / 1e-3))
    for inputs, targets in loader:
        job.step(lambda i=inputs, t=targets: mse_loss(job.model(i), t))  # type: ignore[misc]
        job.training.choice = BatchChoice(16, 1) if 10 <= len(rates) < 15 else BatchChoice(8, 0)
        job.training.models[0].meter.agreed = (NoiseScale(sqr=1.0, var=1.0),)
        if len(rates) == 16:
            break
    job.close()
    assert rates[:10] == pytest.approx([1.0] * 10)
    assert rates[10] == pytest.approx(grown)
    # 5 of 15 steps had a quarter of M0's noise: v stands at 1 + 11.25 / 15, not at 2.
    assert rates[15] == pytest.approx(shrunk, abs=1e-3)
