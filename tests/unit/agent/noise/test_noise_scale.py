"""Noise-scale estimators against a planted truth.

The gradients' mean and covariance are known exactly.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils.data import TensorDataset

from pollux import attach
from pollux.noise import measuring
from pollux.noise.noise_scale import NoiseAverages, SampleKind, unbiased
from tests.unit.agent.conftest import skip_unless_gloo_sums
from tests.unit.agent.noise.known_noise import Network, frozen_adam
from tests.unit.agent.regression import logged

pytestmark = pytest.mark.usefixtures("read_at_once")

D = 24
M0 = 32
SIGMA = 0.5
STEPS = 120
EXAMPLES = STEPS * M0


def planted() -> TensorDataset:
    """Return examples x_i of mean mu and covariance sigma^2 I, which are the gradients of the loss mean(w x)."""
    generator = torch.Generator().manual_seed(5)
    mean = torch.full((D,), 0.1)
    x = mean + SIGMA * torch.randn(EXAMPLES, D, generator=generator)
    return TensorDataset(x)


class Matrix(torch.nn.Module):
    """The planted problem in a matrix of full rank; `unused` adds a parameter that no output depends on."""

    def __init__(self, *, unused: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, D // 8))
        if unused:
            self.unused = torch.nn.Parameter(torch.ones(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight.reshape(-1)).sum(1)


DDP_OPTIONS = {"sgd unused": {"find_unused_parameters": True}, "sgd static": {"static_graph": True}}


BLIND = {"in place": {"gradient_as_bucket_view": True}}


def hook_of(name: str) -> Any:
    """The user's own communication hook."""
    match name:
        case "fp16":
            return None, fp16_compress_hook
        case "PowerSGD":
            state = PowerSGDState(
                None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1.5
            )
            return state, powerSGD_hook
    return None


def measure(name: str, per_gpu: tuple[int, int], adaptive: bool = False) -> tuple[float, float, int]:
    """Run one pass with frozen parameters; return (sqr, var, samples). `adaptive`: the agent may cut a batch in two."""
    model: torch.nn.Module = torch.nn.Linear(D, 1, bias=False)
    if name == "sgd unused":
        model = Matrix(unused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=name in ("sgd with AMP", "sgd clipped"))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    if name == "adam":
        optimizer, _ = frozen_adam(model.parameters(), 0.5, 4.0)
    job = attach(
        model,
        optimizer,
        scaler=scaler,
        adaptive=adaptive,
        measuring={"every": 1, "decay": 1 - 1e-9},
        ddp_kwargs=DDP_OPTIONS.get(name, {}),
    )
    loader = job.loader(planted(), M0, max_batch_size=M0, per_gpu=per_gpu)
    for _ in job.epochs(1, statistical=True):
        for (x,) in loader:
            with job.micro_batch():
                with torch.autocast("cpu", torch.bfloat16, enabled=name == "sgd autocast"):
                    loss = job.model(x).float().mean()
                job.backward(loss)
            if job.sync_gradients:
                if name == "sgd clipped":
                    scaler.unscale_(optimizer)
                    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3) > 0.1
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    noise, samples = job.noise_scale, job.training.models[0].averages.samples
    job.close()
    assert noise is not None
    return noise.sqr, noise.var, samples


def truth(name: str) -> tuple[float, float, np.ndarray, np.ndarray]:
    x = planted().tensors[0].double().numpy()
    p = 1.0 / (np.sqrt(np.linspace(0.5, 4.0, D)) + 1e-8) if name == "adam" else np.ones(D)
    mean, deviation = p * x.mean(0), p * SIGMA
    return float((mean**2).sum()), float((deviation**2).sum() / M0), mean, deviation


def check(name: str, n: int, results: list[tuple[float, float, int]]) -> None:
    """Assert that results lie within 3 standard errors of T samples of n Gaussian gradients of b examples each."""
    sqr, var, mean, deviation = truth(name)
    b = M0 / n
    for found_sqr, found_var, samples in results:
        assert (found_sqr, found_var, samples) == results[0], "ranks disagree"
        assert samples >= STEPS - 30
        spread = 2 * (deviation**4).sum()
        var_error = math.sqrt(spread / (n - 1)) / M0 / math.sqrt(samples)
        sqr_error = math.sqrt(
            (4 * (mean**2 * deviation**2).sum() / M0 + spread / M0**2 + spread / (n - 1) / (n * b) ** 2)
            / samples
        )
        assert abs(found_var - var) < 3 * var_error
        assert abs(found_sqr - sqr) < 3 * sqr_error
        assert abs(found_var - var) < 0.1 * var


EIGHT = pytest.param(
    8, marks=pytest.mark.skipif(not os.environ.get("POLLUX_BENCH"), reason="8 processes: set POLLUX_BENCH=1")
)


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("size", [2, 4, EIGHT])
def test_hook_finds_the_planted_noise(ranks: Any, size: int, name: str) -> None:
    check(name, size, ranks(size, measure, name, (1, M0)))


def test_samples_that_wait_for_each_other_are_read_before_there_is_no_room(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLLUX_EXCHANGES_PER_READING", "1e6")
    monkeypatch.setattr(measuring, "ROWS", 16)
    _, _, samples = ranks(2, measure, "sgd", (1, M0))[0]
    assert samples >= STEPS - 2 * 16


@pytest.mark.parametrize("name", ["sgd with AMP", "sgd autocast", "sgd clipped", "adam"])
def test_hook_under_accumulation(ranks: Any, name: str) -> None:
    check(name, 2, ranks(2, measure, name, (1, M0 // 4)))


def measure_bare(name: str) -> tuple[float, float, int]:
    """As `measure`, by a loop without contexts, which clips gradients and now and then accumulates by itself."""
    model = torch.nn.Linear(D, 1, bias=False)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if name == "adam":
        optimizer, _ = frozen_adam(model.parameters(), 0.5, 4.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    job = attach(model, optimizer, scaler=scaler, adaptive=False, measuring={"every": 1, "decay": 1 - 1e-9})
    for n, (x,) in enumerate(job.loader(planted(), M0)):
        if n % 10 == 7:
            with job.model.no_sync():
                scaler.scale(job.model(x).mean()).backward()
            continue
        scaler.scale(job.model(x).mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    noise, samples = job.noise_scale, job.training.models[0].averages.samples
    job.close()
    assert noise is not None
    return noise.sqr, noise.var, samples


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_loop_without_contexts_is_measured_between_ranks(ranks: Any, name: str) -> None:
    check(name, 2, ranks(2, measure_bare, name))


def what_arrives(name: str) -> tuple[float, int, bool]:
    """Return the largest error of `.grad`, relative to the mean gradient, and the number of samples of the noise.

    Also return whether rank 0 says that it does not measure.
    """
    lines = logged()
    model = Matrix(unused=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    job = attach(
        model,
        optimizer,
        adaptive=False,
        measuring={"every": 2},
        ddp_kwargs=BLIND.get(name) or {"comm_hook": hook_of(name)},
    )
    rows = planted().tensors[0]
    off = 0.0
    for n, (x,) in enumerate(job.loader(planted(), M0, shuffle=False)):
        with job.micro_batch():
            job.backward(job.model(x).mean())
        mean = rows[n * M0 : (n + 1) * M0].mean(0).reshape(8, -1)
        grad = model.weight.grad
        assert grad is not None
        off = max(off, float((grad - mean).norm() / mean.norm()))
        optimizer.step()
        optimizer.zero_grad()
        if n == 5:
            break
    job.close()
    told = any("the noise scale is not measured, and the batch size stays" in line for line in lines)
    return off, job.training.models[0].averages.samples, told or job.rank > 0


def test_a_hook_of_the_script_or_a_reduction_in_place_works_and_is_not_measured(ranks: Any) -> None:
    for name, least, most in (("PowerSGD", 0.05, 1.0), ("in place", 0.0, 1e-5)):
        for off, samples, told in ranks(2, what_arrives, name):
            assert least <= off <= most, name
            assert samples == 0, name
            assert told, name
    skip_unless_gloo_sums(torch.float16)
    assert max(off for off, *_ in ranks(2, what_arrives, "fp16")) < 1e-2


def test_unused_parameters_and_a_static_graph(ranks: Any) -> None:
    check("sgd unused", 2, ranks(2, measure, "sgd unused", (1, M0)))
    check("sgd static", 2, ranks(2, measure, "sgd static", (1, M0)))


@pytest.mark.parametrize("name", ["sgd", "sgd with AMP", "sgd autocast", "sgd clipped", "sgd unused", "adam"])
def test_accumulation_on_one_rank(name: str) -> None:
    check(name, 4, [measure(name, (1, M0 // 4))])


def test_split_batch_on_one_rank() -> None:
    check("sgd", 2, [measure("sgd", (1, M0), adaptive=True)])


def test_differenced_on_one_rank_when_nothing_else_is_possible() -> None:
    sqr, var, samples = measure("sgd clipped", (M0, M0))
    true_sqr, true_var, _, _ = truth("sgd")
    assert samples >= STEPS // 2 - 25
    assert var == pytest.approx(true_var, rel=0.1)  # parameters are frozen: no drift that would bias it
    assert sqr == pytest.approx(true_sqr, rel=0.5)


def test_estimates_are_unbiased_for_any_count() -> None:
    rng = np.random.default_rng(1)
    for n in (2, 3, 8):
        g = 0.3 + rng.normal(size=(4000, n, 5)) / math.sqrt(4)  # b = 4 examples of unit variance
        local = (g**2).sum(-1).mean(1)
        total = (g.mean(1) ** 2).sum(-1)
        sqr, var = unbiased(SampleKind(n, 4, 1.0), local, total, 16)
        assert sqr.mean() == pytest.approx(5 * 0.09, rel=0.05)
        assert var.mean() == pytest.approx(5 / 16, rel=0.05)


def test_one_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="two gradients"):
        unbiased(SampleKind(1, 4, 1.0), np.ones(1), np.ones(1), 16)


def test_averages_correct_the_bias_and_skip_what_is_not_finite() -> None:
    averages = NoiseAverages(2, decay=0.9)
    kind = SampleKind(2, 8, 1.0)
    assert averages.groups() is None
    for _ in range(10):
        averages.add(kind, np.array([3.0, 5.0]), np.array([2.0, 4.0]), 16.0)
    averages.add(kind, np.array([np.inf, 5.0]), np.array([2.0, 4.0]), 16.0)
    assert averages.skipped == 1
    groups = averages.groups()
    assert groups is not None
    # sqr = 2 total - local = (1, 3); var = 2 (local - total) * 8/16 = (1, 1): constant samples are their own average
    assert [group.sqr for group in groups] == pytest.approx([1.0, 3.0])
    assert [group.var for group in groups] == pytest.approx([1.0, 1.0])
    together = NoiseAverages(2, decay=0.9)
    drift = [np.array([3.0 + i, 5.0]) for i in range(5)]
    apart = NoiseAverages(2, decay=0.9)
    for local in drift:
        apart.add(kind, local, np.array([2.0, 4.0]), 16.0)
    together.add(kind, np.array([*drift, [np.nan, 1.0]]), np.tile([2.0, 4.0], (6, 1)), 16.0)
    assert (together.samples, together.skipped) == (5, 1)
    assert together.sqr == pytest.approx(apart.sqr)
    assert together.var == pytest.approx(apart.var)
    assert together.weight == pytest.approx(apart.weight)
    again = NoiseAverages(2)
    again.load_state_dict(averages.state_dict())
    assert again.groups() == averages.groups()
    other = NoiseAverages(3)
    other.load_state_dict(averages.state_dict())
    assert other.groups() is None


class TwoParts(torch.nn.Module):
    """The planted problem with its parameters in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 1, bias=False)
        self.second = torch.nn.Linear(D - 8, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x[:, :8]) + 3.0 * self.second(x[:, 8:])
        return out


def measure_groups() -> list[tuple[float, float]]:
    model = TwoParts()
    groups = [{"params": model.first.parameters()}, {"params": model.second.parameters(), "lr": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.0)
    # A bucket per parameter: their halves of the estimate come from two calls of the hook.
    ddp = {"bucket_cap_mb": 1e-5}
    job = attach(model, optimizer, adaptive=False, measuring={"every": 1, "decay": 1 - 1e-9}, ddp_kwargs=ddp)
    for (x,) in job.loader(planted(), M0):
        job.step(lambda x=x: job.model(x).mean())
    found = job.training.models[0].averages.groups()
    job.close()
    assert found is not None
    return [tuple(n) for n in found]


def test_parameter_groups_are_told_apart(ranks: Any) -> None:
    for (sqr, var), (other_sqr, other_var) in ranks(2, measure_groups):
        assert sqr == pytest.approx(8 * 0.01, rel=0.2)
        assert var == pytest.approx(8 * SIGMA**2 / M0, rel=0.15)
        assert other_sqr == pytest.approx(9 * 16 * 0.01, rel=0.2)
        assert other_var == pytest.approx(9 * 16 * SIGMA**2 / M0, rel=0.15)


@pytest.mark.parametrize(("n", "per_gpu"), [(8, 8), (2, 64)], ids=["8 micro-batches", "2 halves"])
def test_a_real_network_against_every_examples_own_gradient(
    n: int, per_gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Network, "EXAMPLES", 6400)
    at = Network("sgd")
    job = attach(at.model, at.norms.optimizer, adaptive=True, measuring={"every": 1, "decay": 1 - 1e-9})
    for x, y in job.loader(TensorDataset(at.x, at.y), 64, max_batch_size=64, per_gpu=(1, per_gpu)):
        job.step(lambda x=x, y=y: at.loss(job.model(x), y))
    job.close()
    averages = job.training.models[0].averages
    assert averages.samples > 90
    at.check(averages, SampleKind(n, 64 / n, 1.0), averages.samples)


def test_a_model_in_double_precision_is_measured() -> None:
    at = Network("sgd")
    job = attach(at.model.double(), at.norms.optimizer, adaptive=False, measuring={"every": 1})
    for x, y in job.loader(TensorDataset(at.x.double(), at.y), 64):
        job.step(lambda x=x, y=y: at.loss(job.model(x), y))
    job.close()
    assert job.training.models[0].averages.samples > 5


def test_only_steps_that_are_due_are_measured() -> None:
    model = torch.nn.Linear(D, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    job = attach(model, optimizer, adaptive=False, measuring={"every": 5})
    for (x,) in job.loader(planted(), M0, per_gpu=(M0 // 4, M0 // 4)):
        job.step(lambda x=x: job.model(x).mean())
    samples = job.training.models[0].averages.samples
    job.close()
    assert samples == STEPS // 5
