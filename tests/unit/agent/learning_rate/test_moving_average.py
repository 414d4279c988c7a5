"""A moving average of weights under a growing batch ends where plain training's does, at the batch of M0.

The oracle: plain torch, with an update for each step of M0 examples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from pollux import attach
from pollux.goodput import BatchChoice, NoiseScale
from pollux.integrations.lightning_state import LoopState
from pollux.integrations.trainer_state import TrainerState
from pollux.learning_rate.moving_average import follow_gain

DECAY = 0.95


class OwnEma:
    """As the classes of timm, torch_ema and most scripts: a decay, and a method that updates."""

    def __init__(self, model: nn.Module, decay: float = DECAY) -> None:
        self.module, self.decay = copy.deepcopy(model), decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mean, p in zip(self.module.parameters(), model.parameters(), strict=True):
            mean.copy_(self.decay * mean + (1 - self.decay) * p)

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "decay": self.decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])


class StepEma(OwnEma):
    """As that of diffusers."""

    def step(self, model: nn.Module) -> None:
        OwnEma.update(self, model)

    update = None  # type: ignore[assignment]


AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    "torch, many": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
    "torch, one": lambda model: AveragedModel(model, avg_fn=get_ema_avg_fn(DECAY)),
    "torch, a lambda": lambda model: AveragedModel(model, avg_fn=lambda a, p, n: DECAY * a + (1 - DECAY) * p),
    "own": OwnEma,
    "step": StepEma,
}


def update(average: Any, model: nn.Module) -> None:
    if isinstance(average, AveragedModel):
        average.update_parameters(model)
    elif isinstance(average, StepEma):
        average.step(model)
    else:
        average.update(model)


def weights(average: Any) -> Tensor:
    module = getattr(average, "module", average)
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 1)


def moving(model: nn.Module, updates: int) -> Iterator[int]:
    """Move the weights a little before each update."""
    for n in range(updates):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01)
        yield n


@pytest.mark.parametrize("kind", AVERAGES)
def test_one_update_of_a_large_step_is_as_many_updates_of_small_ones(kind: str) -> None:
    model, gain = network(), [1.0]
    plain, followed = AVERAGES[kind](model), AVERAGES[kind](model)
    follow_gain({"ema": followed}, lambda: gain[0])
    for average in (plain, followed):
        update(average, model)  # torch's first update copies
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    for _ in range(6):
        update(plain, model)
    gain[0] = 6.0
    update(followed, model)
    torch.testing.assert_close(weights(followed), weights(plain))
    gain[0] = 1.0
    for average in (plain, followed):
        update(average, model)
    torch.testing.assert_close(weights(followed), weights(plain))
    if kind == "own":
        assert followed.decay == followed.state_dict()["decay"] == DECAY, (
            "what the script reads and saves stays"
        )


def test_a_script_that_follows_the_gain_itself_is_left_alone() -> None:
    model, gain = network(), [4.0]
    for kind in ("own", "torch"):
        own: Any = OwnEma(model)
        if kind == "torch":
            own = AveragedModel(
                model, avg_fn=lambda a, p, n: DECAY ** gain[0] * a + (1 - DECAY ** gain[0]) * p
            )
        gain[0] = 1.0
        follow_gain(own, lambda: gain[0])
        update(own, model)
        gain[0] = 4.0
        if kind == "own":
            own.decay = DECAY ** gain[0]
        before = weights(own).clone()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        update(own, model)
        kept = DECAY**4 * before + (1 - DECAY**4) * weights(model)
        torch.testing.assert_close(weights(own), kept)


def test_equal_weights_and_other_objects_are_left_alone_and_a_warm_up_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Replay:
        beta = 0.6

        def update(self) -> float:
            return self.beta

    model, replay = network(), Replay()
    follow_gain({"swa": AveragedModel(model), "replay": replay, "best": 0.5}, lambda: 4.0)
    assert replay.update() == 0.6
    assert not caplog.text
    warming = AveragedModel(model, avg_fn=lambda a, p, n: a + (p - a) / min(float(n) + 1, 50.0))
    follow_gain(warming, lambda: 4.0)
    assert "let it decay by decay ** job.gain" in caplog.text


def test_callbacks_of_libraries_are_looked_into() -> None:
    model = network()
    callback = SimpleNamespace(_average_model=OwnEma(model), monitor="loss")
    lightning = LoopState(SimpleNamespace(callbacks=[callback]), [])
    follow_gain(lightning, lambda: 3.0)
    trainer = SimpleNamespace(
        callback_handler=SimpleNamespace(callbacks=[SimpleNamespace(ema=OwnEma(model))])
    )
    follow_gain(TrainerState(trainer), lambda: 3.0)
    for average in (callback._average_model, trainer.callback_handler.callbacks[0].ema):
        before = weights(average).clone()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        average.update(model)
        torch.testing.assert_close(weights(average), DECAY**3 * before + (1 - DECAY**3) * weights(model))


M0, STEPS = 8, 240


def data() -> TensorDataset:
    """Examples that are all alike: a gradient does not depend on the batch."""
    return TensorDataset(torch.ones(M0 * STEPS, 6), torch.full((M0 * STEPS, 1), 2.0))


def plain() -> Tensor:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.002)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for n in range(STEPS):
        x, y = data()[n * M0 : (n + 1) * M0]
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
    return weights(ema)


def grown(seen: bool) -> tuple[Tensor, int]:
    """Train by the agent at eight times the batch, most of the time; return the average and the number of steps."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.002)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    job = attach(model, optimizer, adaptive=True, state={"ema": ema} if seen else None)
    loader = job.loader(data(), M0, max_batch_size=8 * M0, per_gpu=(1, 8 * M0))
    trained, steps = job.training.models[0], 0
    noise = (NoiseScale(1e-9, 1.0),)
    trained.averages.groups = lambda: list(noise)  # type: ignore[method-assign]
    for _ in job.epochs(1, statistical=True):
        for x, y in loader:
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
            if job.sync_gradients:
                ema.update_parameters(model)
                steps += 1
                if steps == 10:
                    trained.meter.agreed = noise
                    job.training.choice = BatchChoice(8 * M0, 0)
                    job.training.widen()
    job.close()
    return weights(ema), steps


def test_a_training_whose_batch_grows_has_the_average_of_the_fixed_batch() -> None:
    wanted = plain()
    found, steps = grown(seen=True)
    assert steps < 50, "of 240"
    alone, _ = grown(seen=False)
    off, far = float((found - wanted).norm()), float((alone - wanted).norm())
    assert far > 0.02
    assert off < 0.2 * far


@pytest.mark.parametrize("asks", [False, True])
def test_an_average_inside_of_the_model_is_named_unless_the_script_asks_for_the_gain(
    asks: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("POLLUX_EXCHANGE_INTERVAL", "0")
    model = nn.ModuleDict({"student": network(), "teacher": network().requires_grad_(False)})
    job = attach(model, torch.optim.SGD(model["student"].parameters(), 0.002), adaptive=True)
    loader = job.loader(data(), M0, max_batch_size=8 * M0)
    for _, (x, y) in zip(range(24), loader, strict=False):
        job.step(lambda x=x, y=y: mse_loss(model["student"](x), y))  # type: ignore[misc]
        job.training.step.gain = 2.0  # as of a batch that has grown
        with torch.no_grad():
            for mean, p in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
                mean.lerp_(p, 1 - DECAY ** (job.gain if asks else 1.0))
    job.close()
    assert ("model (teacher.weight)" in caplog.text) is not asks
