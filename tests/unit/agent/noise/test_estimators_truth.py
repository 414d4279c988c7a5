"""Test every noise estimator against the exact mean and covariance.

The gradients belong to frozen parameters, so both are known.

Two problems: a quadratic with a planted covariance, where the truth is a formula, and a network, where it is the mean
and the covariance of every example's own gradient. Ranks are simulated: their hooks are called in turn, and what they
reduce is added up here. (Real ranks: test_noise_scale.py.) All gradients are raw or preconditioned by a second moment
that is held still.

The standard errors are those of n Gaussian gradients of covariance C = Sigma / b, averaged over T samples:
Var[sqr] = (4 g'Cg / n + 2 tr(C^2) / (n (n - 1))) / T and Var[tr C] = 2 tr(C^2) / (n - 1) / T.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pollux.noise import estimators
from pollux.noise.estimators import AccumulationEstimator, DifferencedEstimator, HookEstimator
from pollux.noise.noise_scale import DECAY, NoiseAverages, SampleKind
from pollux.noise.precondition import GradientNorms
from tests.unit.agent.noise.bucket import Bucket
from tests.unit.agent.noise.known_noise import (
    M0,
    STEPS,
    Network,
    Problem,
    Quadratic,
    accumulated,
    norms_of,
    plain_averages,
)


class Work:
    """A reduction under way."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self.future


class Wire:
    """Stand in for torch.distributed with ranks that run in turn.

    An all-reduce completes when the last rank has called it.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.waiting: list[tuple[Tensor, Work]] = []

    def all_reduce(self, buffer: Tensor, *, group: Any, async_op: bool) -> Work:
        assert async_op
        work = Work()
        self.waiting.append((buffer, work))
        if len(self.waiting) == self.ranks:
            total = torch.stack([b for b, _ in self.waiting]).sum(0)
            for b, one in self.waiting:
                b.copy_(total)
                one.future.set_result([b])
            self.waiting.clear()
        return work


def hooked(
    problem: Problem, ranks: int, averages: NoiseAverages, monkeypatch: pytest.MonkeyPatch
) -> SampleKind:
    """Simulated ranks, each with its hook, and a bucket per parameter."""
    wire = Wire(ranks)
    monkeypatch.setattr(estimators.dist, "all_reduce", wire.all_reduce)
    hooks = [HookEstimator(problem.norms, ranks, on_ready=lambda: None) for _ in range(ranks)]
    kind = SampleKind(ranks, M0 // ranks, 1.0)
    for _ in range(STEPS):
        buckets = []
        for hook in hooks:
            problem.norms.optimizer.zero_grad()
            problem.backward(M0 // ranks)
            hook.begin(measuring=True)
            buckets.append([Bucket([p], last=p is problem.params[-1]) for p in problem.params])
        for column in zip(*buckets, strict=True):
            answers = [hook.hook(None, bucket) for hook, bucket in zip(hooks, column, strict=True)]
            assert all(torch.equal(answer.value(), answers[0].value()) for answer in answers)
        found = [hook.end() for hook in hooks]
        local = norms_of([pair[0] for pair in found if pair is not None]).mean(0)
        totals = norms_of([pair[1] for pair in found if pair is not None])
        assert len(totals) == ranks
        assert bool((totals == totals[0]).all())
        averages.add(kind, local.double().numpy(), totals[0].double().numpy(), M0)
    return kind


def move(problem: Problem, drift: Sequence[Tensor], times: float) -> None:
    for p, step in zip(problem.params, drift, strict=False):
        p.data.add_(step, alpha=times)


def differenced(problem: Problem, averages: NoiseAverages, drift: Sequence[Tensor] = ()) -> SampleKind:
    """Pairs of successive steps, between which the parameters move by `drift`."""
    estimator = DifferencedEstimator(problem.norms, problem.params)
    kind = SampleKind(2, M0, 1.0)
    for _ in range(STEPS):
        problem.norms.optimizer.zero_grad()
        problem.backward(M0)
        estimator.keep(None)
        move(problem, drift, 1.0)
        problem.norms.optimizer.zero_grad()
        problem.backward(M0)
        pair = estimator.compare(None)
        move(problem, drift, -1.0)
        assert pair is not None
        averages.add(kind, *(norms_of([part])[0].double().numpy() for part in pair), M0)
    return kind


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("ranks", "problem"), [(2, Quadratic), (3, Quadratic), (4, Quadratic), (8, Quadratic), (4, Network)]
)
def test_hook(ranks: int, problem: Any, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at, averages = problem(optimizer), plain_averages()
    at.check(averages, hooked(at, ranks, averages, monkeypatch), STEPS)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("passes", "problem"), [(2, Quadratic), (4, Quadratic), (8, Quadratic), (4, Network)]
)
def test_accumulation_and_split_batch(passes: int, problem: Any, optimizer: str) -> None:
    at, averages = problem(optimizer), plain_averages()
    at.check(averages, accumulated(at, passes, averages), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("problem", [Quadratic, Network])
def test_differenced(problem: Any, optimizer: str) -> None:
    at, averages = problem(optimizer), plain_averages()
    at.check(averages, differenced(at, averages), STEPS)


def test_drift_makes_the_differenced_variance_too_large_by_half_its_square() -> None:
    """Drift also makes sqr too small by a quarter of its square.

    The reference is the gradient half-way through the drift (estimators.py).
    """
    at, averages = Quadratic("sgd"), plain_averages()
    u = torch.full((at.D,), 0.12)
    drift = at.a @ u.double()
    kind = differenced(at, averages, [u[:20], u[20:]])
    (found,), (sqr_error, var_error) = averages.groups() or [None], at.errors(kind, STEPS)
    assert found is not None
    var, squared = float(at.covariance.trace()) / M0, float(drift @ drift)
    assert squared / 2 > 10 * var_error, "a drift too small to be seen"
    assert abs(found.var - var - squared / 2) < 4 * var_error
    middle = at.mean + drift / 2
    assert abs(found.sqr - (float(middle @ middle) - squared / 4)) < 4 * sqr_error


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [8.0, 80.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_within_a_tenth_after_200_steps(
    optimizer: str, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight gradients of b = 8 examples, averaged as in a training.

    The noise scale is b or 10 b.
    """
    monkeypatch.setattr(Quadratic, "ratio", ratio)
    at, averages = Quadratic(optimizer), NoiseAverages(1, decay=DECAY)
    kind = hooked(at, 8, averages, monkeypatch)
    (found,) = averages.groups() or [None]
    assert found is not None
    true = float(at.covariance.trace()) / float(at.mean @ at.mean)
    assert true / kind.examples < 14, "Adam's scale is its own"
    assert M0 * found.var / found.sqr == pytest.approx(true, rel=0.1)


def test_gradients_that_a_script_zeroes_in_a_pass_do_not_come_back() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    estimator = AccumulationEstimator(GradientNorms(torch.optim.SGD([param])), [param])
    estimator.begin_group()
    param.grad = torch.tensor([5.0, 5.0])
    estimator.before_backward()
    estimator.zeroed()
    (3.0 * param).sum().backward()
    estimator.after_backward(1.0)
    assert param.grad.tolist() == [3.0, 3.0]
