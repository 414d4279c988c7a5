"""Test every noise estimator against the exact mean and covariance.

The gradients belong to frozen parameters, so both are known.

Two problems: a quadratic with a planted covariance, where the truth is a formula, and a network, where it is the mean
and the covariance of every example's own gradient. Ranks are simulated: their backward passes run in turn, and what
they reduce is added up here. (Real ranks: test_noise_scale.py.) All gradients are raw or preconditioned by a
second moment that is held still.

The standard errors are those of n Gaussian gradients of covariance C = Sigma / b, averaged over T samples:
Var[sqr] = (4 g'Cg / n + 2 tr(C^2) / (n (n - 1))) / T and Var[tr C] = 2 tr(C^2) / (n - 1) / T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Variable

from pollux.noise.estimators import AccumulationEstimator, DifferencedEstimator
from pollux.noise.noise_scale import DECAY, NoiseAverages, SampleKind
from pollux.noise.precondition import GradientNorms
from pollux.noise.reduction import ReductionEstimator
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

Estimate = Callable[[Problem, int, NoiseAverages], SampleKind]


class Reducer:
    """Stand in for DDP's reducer: after all gradients of a backward pass have arrived, `mean` replaces them."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.params = params
        self.mean: list[Tensor] = []
        self.seen = 0
        # Kept, or the nodes would go with their hooks.
        self.nodes: list[Any] = [p.expand_as(p).grad_fn.next_functions[0][0] for p in params]  # type: ignore[union-attr]
        for node in self.nodes:
            node.register_hook(self.arrived)

    def arrived(self, *_: Any) -> None:
        self.seen += 1
        if self.seen % len(self.params) == 0:
            Variable._execution_engine.queue_callback(self.reduced)

    def reduced(self) -> None:
        for p, mean in zip(self.params, self.mean, strict=True):
            p.grad = mean.clone()


def reduced(problem: Problem, ranks: int, averages: NoiseAverages) -> SampleKind:
    params, kind = problem.params, SampleKind(ranks, M0 // ranks, 1.0)
    estimators = [
        ReductionEstimator(
            problem.norms, params, rank=rank, ranks=ranks, reduces=lambda: True, on_ready=lambda: None
        )
        for rank in range(ranks)
    ]
    drawn = []
    for _ in range(ranks * STEPS):
        problem.norms.optimizer.zero_grad()
        problem.backward(M0 // ranks)
        drawn.append([p.grad for p in params if p.grad is not None])
    reducer = Reducer(params)
    for step in range(STEPS):
        gradients = drawn[step * ranks : (step + 1) * ranks]
        reducer.mean = [torch.stack(column).mean(0) for column in zip(*gradients, strict=True)]
        found = []
        for estimator, own in zip(estimators, gradients, strict=True):
            problem.norms.optimizer.zero_grad()
            estimator.begin(True)
            torch.stack([(p * g).sum() for p, g in zip(params, own, strict=True)]).sum().backward()
            estimator.passed()
            pair = estimator.end()
            assert pair is not None
            found.append(pair)
        local = norms_of([pair[0] for pair in found]).mean(0)
        total = norms_of([pair[1] for pair in found]).sum(0)
        averages.add(kind, local.double().numpy(), total.double().numpy(), M0)
    for estimator in estimators:
        estimator.close()
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
        assert estimator.end(None) is None
        move(problem, drift, 1.0)
        problem.norms.optimizer.zero_grad()
        problem.backward(M0)
        pair = estimator.end(None)
        move(problem, drift, -1.0)
        assert pair is not None
        averages.add(kind, *(norms_of([part])[0].double().numpy() for part in pair), M0)
    return kind


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("gradients", "problem"), [(2, Quadratic), (3, Quadratic), (4, Quadratic), (8, Quadratic), (4, Network)]
)
@pytest.mark.parametrize("estimate", [reduced, accumulated])
def test_within_three_standard_errors(
    estimate: Estimate, gradients: int, problem: Any, optimizer: str
) -> None:
    at, averages = problem(optimizer), plain_averages()
    at.check(averages, estimate(at, gradients, averages), STEPS)


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


@pytest.mark.parametrize("ratio", [8.0, 80.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("estimate", [reduced, accumulated])
def test_within_a_tenth_after_200_steps(
    estimate: Estimate, optimizer: str, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight gradients of b = 8 examples, averaged as in a training. The noise scale is b or 10 b."""
    monkeypatch.setattr(Quadratic, "ratio", ratio)
    at, averages = Quadratic(optimizer), NoiseAverages(1, decay=DECAY)
    kind = estimate(at, 8, averages)
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


def of_one_rank(
    model: torch.nn.Module,
    reduces: Callable[[], bool] = lambda: True,
    on_ready: Callable[[], None] = lambda: None,
) -> ReductionEstimator:
    params = list(model.parameters())
    norms = GradientNorms(torch.optim.SGD(params))
    return ReductionEstimator(norms, params, rank=0, ranks=1, reduces=reduces, on_ready=on_ready)


@pytest.mark.parametrize(
    ("measuring", "reduces", "found"),
    [(True, True, 1), (True, False, 0), (False, True, 0), (False, False, 0)],
)
def test_a_pass_is_measured_once_where_it_is_due_and_ends_in_a_reduction(
    measuring: bool, reduces: bool, found: int
) -> None:
    model = torch.nn.Linear(3, 1)
    estimator = of_one_rank(model, reduces=lambda: reduces)
    for _ in range(2):
        estimator.begin(measuring)
        model(torch.ones(2, 3)).sum().backward()
        assert estimator.reductions == found
        estimator.passed()
        assert (estimator.end() is not None) == found
    estimator.close()


def test_a_closed_estimator_no_longer_sees_gradients() -> None:
    model, ready = torch.nn.Linear(3, 1), list[str]()
    estimator = of_one_rank(model, on_ready=lambda: ready.append("gradient"))
    estimator.begin(measuring=False)
    model(torch.ones(2, 3)).sum().backward()
    assert ready == ["gradient"] * 2, "of the weight and of the bias"
    estimator.close()
    model(torch.ones(2, 3)).sum().backward()
    assert ready == ["gradient"] * 2
