"""Learning-rate rules, their factors and the user's schedule.

A factor reaches one step only. The schedule counts in scale-invariant steps.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import TensorDataset

from pollux import attach
from pollux.errors import PolluxAgentError
from pollux.goodput import BatchChoice, NoiseScale
from pollux.learning_rate.scaling import (
    LearningRateScaler,
    adascale,
    automatic,
    factors,
    follow,
    rule_for,
    square_root_adascale,
)
from pollux.learning_rate.schedule import ScaledSchedule
from pollux.optimizers.families import ADAM, SGD_LIKE


def test_adascale_gain_is_the_papers() -> None:
    # var = 3, sqr = 1 at M0; four times the batch: (3 + 1) / (3/4 + 1)
    assert adascale(4.0, NoiseScale(sqr=1.0, var=3.0)) == pytest.approx(16 / 7)
    assert square_root_adascale(4.0, NoiseScale(sqr=1.0, var=3.0)) == pytest.approx(math.sqrt(16 / 7))


def test_adascale_runs_from_no_gain_to_linear() -> None:
    assert adascale(8.0, NoiseScale(sqr=1.0, var=0.0)) == pytest.approx(1.0)
    assert adascale(8.0, NoiseScale(sqr=0.0, var=1.0)) == pytest.approx(8.0)
    assert adascale(8.0, None) == 1.0
    assert adascale(0.5, NoiseScale(sqr=1.0, var=1.0)) == 1.0, "a short step is taken at the user's own rate"


def test_rules_by_name_and_by_function() -> None:
    assert rule_for("none")(9.0, None) == 1.0
    assert rule_for(lambda scale, noise: scale / 2)(6.0, None) == 3.0
    with pytest.raises(PolluxAgentError, match="adascale"):
        rule_for("cubic")


@pytest.mark.parametrize("factor", [math.nan, math.inf, -1.0, "two", None])
def test_a_users_rule_that_gives_no_factor_is_refused(factor: object) -> None:
    rule = rule_for(lambda scale, noise: factor)  # type: ignore[arg-type,return-value]
    with pytest.raises(PolluxAgentError, match="finite factor"):
        rule(2.0, None)


def test_a_users_rule_may_follow_the_training() -> None:
    class Mine:
        def follow(self, steps: object) -> None:
            self.steps = steps

        def __call__(self, scale: float, noise: NoiseScale | None) -> float:
            return 1.0 + float(self.steps())  # type: ignore[operator]

    rule = rule_for(Mine())
    follow(rule, lambda: 5.0)
    assert rule(2.0, None) == 6.0


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_factor_lasts_one_step(as_tensor: bool) -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    rate = torch.tensor(0.5) if as_tensor else 0.5
    optimizer = SGD(
        [{"params": [first], "lr": rate}, {"params": [second], "lr": 0.25}], lr=1.0, foreach=False
    )
    steps: list[int] = []
    scaler = LearningRateScaler(optimizer, on_step=lambda: steps.append(1))
    scaler.factors = [3.0, 2.0]
    first.grad, second.grad = torch.ones(1), torch.ones(1)
    optimizer.step()
    assert (first.item(), second.item()) == (-1.5, -0.5)
    assert (float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[1]["lr"]) == (0.5, 0.25)
    assert steps == [1]
    scaler.remove()
    optimizer.step()
    assert (first.item(), second.item()) == (-2.0, -0.75)
    assert steps == [1]


def test_a_step_that_raises_leaves_the_rate_as_it_was() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = SGD([parameter], lr=0.5)
    scaler = LearningRateScaler(optimizer, on_step=lambda: None)
    scaler.factors = [4.0]

    def closure() -> float:
        raise RuntimeError("user's own")

    with pytest.raises(RuntimeError, match="user's own"):
        optimizer.step(closure)
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert parameter.item() == -2.0
    assert optimizer.param_groups[0]["lr"] == 0.5


def scheduled() -> tuple[SGD, LambdaLR]:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    return optimizer, LambdaLR(optimizer, lambda n: 0.9**n)


def run_schedule(gains: list[float]) -> int:
    optimizer, scheduler = scheduled()
    scaled = ScaledSchedule(scheduler)
    for gain in gains:
        scaled.begin()
        optimizer.step()
        scheduler.step()
        scaled.end(gain)
    return scheduler.last_epoch


def test_a_schedule_advances_by_what_steps_were_worth() -> None:
    assert run_schedule([1.0] * 7) == 7
    assert run_schedule([2.5] * 8) == 20
    # 12 whole steps and a short one, three times over: as many calls as plain training makes
    assert run_schedule(([1.0] * 12 + [0.4]) * 3) == 39


def test_a_schedule_called_between_epochs_is_left_alone() -> None:
    optimizer, scheduler = scheduled()
    scaled = ScaledSchedule(scheduler)
    for _ in range(3):
        for _ in range(4):
            scaled.begin()
            optimizer.step()
            scaled.end(5.0)
        scheduler.step()
    assert scheduler.last_epoch == 3


def test_a_schedule_of_fixed_length_is_never_stepped_beyond_its_end() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = OneCycleLR(optimizer, max_lr=1.0, total_steps=5)
    scaled = ScaledSchedule(scheduler)
    scaled.begin()
    optimizer.step()
    scaled.step()
    assert scheduler.last_epoch == 1
    scaled.end(2.0)
    assert scheduler.last_epoch == 2
    scaled.begin()
    optimizer.step()
    scaled.step()
    scaled.end(50.0)
    assert scheduler.last_epoch == 5
    scaled.step()
    assert scheduler.last_epoch == 5


def test_a_restart_keeps_what_the_schedule_is_still_owed() -> None:
    optimizer, scheduler = scheduled()
    before, after = ScaledSchedule(scheduler), ScaledSchedule(scheduler)
    for scaled in (before, after):
        after.load_state_dict(before.state_dict())
        scaled.begin()
        optimizer.step()
        scaled.step()
        scaled.end(1.5)
    assert scheduler.last_epoch == 3


def test_a_plateau_is_the_users_affair() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = ReduceLROnPlateau(optimizer, patience=100)
    scaled = ScaledSchedule(scheduler)
    scaled.begin()
    optimizer.step()
    scheduler.step(1.0)
    scaled.end(50.0)
    scaled.step()
    assert scheduler.last_epoch == 1


def test_each_parameter_group_has_its_own_factor_and_all_is_observable() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = SGD(
        [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.02}], lr=0.01
    )
    rates: list[list[float]] = []
    job = attach(model, optimizer, adaptive=True)
    # Registered after the agent's own, so it sees the rates that the step is taken with.
    optimizer.register_step_pre_hook(lambda *_: rates.append([g["lr"] for g in optimizer.param_groups]))
    x = torch.randn(64, 4)
    loader = job.loader(TensorDataset(x, x.sum(1, keepdim=True)), 8, max_batch_size=32, per_gpu=(1, 16))
    job.training.choice = BatchChoice(16, 1)
    calm, noisy = NoiseScale(sqr=1.0, var=0.0), NoiseScale(sqr=0.0, var=1.0)
    job.training.models[0].meter.agreed = (calm, noisy)
    for _ in job.epochs(1, statistical=True):
        for inputs, targets in loader:
            with job.micro_batch():
                job.backward(mse_loss(job.model(inputs), targets))
            if job.sync_gradients:
                assert job.lr_factors == pytest.approx((1.0, 4.0))
                optimizer.step()
                optimizer.zero_grad()
                break
        break
    assert rates[0] == pytest.approx([0.01, 0.08])
    assert [g["lr"] for g in optimizer.param_groups] == [0.01, 0.02]
    # (1 + 1) / (1 / 4 + 1) steps of M0 for a step of four times M0
    assert job.gain == job.progress.steps == pytest.approx(1.6)
    job.close()


def test_each_group_follows_its_own_family_and_more_groups_the_last() -> None:
    noise = [NoiseScale(sqr=0.0, var=1.0)] * 3
    assert factors(automatic, [SGD_LIKE, ADAM], 4.0, noise) == pytest.approx([4.0, 2.0, 2.0])
