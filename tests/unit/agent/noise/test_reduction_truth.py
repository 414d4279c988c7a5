"""The default estimator of several ranks against the truth.

Up to eight ranks are tested.

The ranks are simulated: their backward passes run in turn. `Reducer` replaces DistributedDataParallel: like DDP's
hooks, it puts the mean into `.grad` at the end of each backward pass. (Real ranks: test_noise_scale.py.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Variable

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


class Reducer:
    """Stand in for DDP's reducer.

    After all gradients of a backward pass have arrived, `mean` replaces them.
    """

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


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("ranks", "problem"), [(2, Quadratic), (3, Quadratic), (4, Quadratic), (8, Quadratic), (4, Network)]
)
def test_within_three_standard_errors(ranks: int, problem: Any, optimizer: str) -> None:
    at, averages = problem(optimizer), plain_averages()
    at.check(averages, reduced(at, ranks, averages), STEPS)


@pytest.mark.parametrize("ratio", [8.0, 80.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("estimate", [reduced, accumulated])
def test_within_a_tenth_after_200_steps(
    estimate: Any, optimizer: str, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight gradients of b = 8 examples, averaged as in a training.

    The noise scale is b or 10 b.
    """
    monkeypatch.setattr(Quadratic, "ratio", ratio)
    at, averages = Quadratic(optimizer), NoiseAverages(1, decay=DECAY)
    kind = estimate(at, 8, averages)
    (found,) = averages.groups() or [None]
    assert found is not None
    true = float(at.covariance.trace()) / float(at.mean @ at.mean)
    assert true / kind.examples < 14, "Adam's scale is its own"
    assert M0 * found.var / found.sqr == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize(
    ("measuring", "reduces", "found"),
    [(True, True, 1), (True, False, 0), (False, True, 0), (False, False, 0)],
)
def test_a_pass_is_measured_once_where_it_is_due_and_ends_in_a_reduction(
    measuring: bool, reduces: bool, found: int
) -> None:
    model = torch.nn.Linear(3, 1)
    params = list(model.parameters())
    estimator = ReductionEstimator(
        GradientNorms(torch.optim.SGD(params)),
        params,
        rank=0,
        ranks=1,
        reduces=lambda: reduces,
        on_ready=lambda: None,
    )
    for _ in range(2):
        estimator.begin(measuring)
        model(torch.ones(2, 3)).sum().backward()
        assert estimator.reductions == found
        estimator.passed()
        assert (estimator.end() is not None) == found
    estimator.close()


def test_a_closed_estimator_no_longer_sees_gradients() -> None:
    model, ready = torch.nn.Linear(3, 1), list[str]()
    estimator = ReductionEstimator(
        GradientNorms(torch.optim.SGD(model.parameters())),
        list(model.parameters()),
        rank=0,
        ranks=1,
        reduces=lambda: True,
        on_ready=lambda: ready.append("gradient"),
    )
    estimator.begin(measuring=False)
    model(torch.ones(2, 3)).sum().backward()
    assert ready == ["gradient"] * 2, "of the weight and of the bias"
    estimator.close()
    model(torch.ones(2, 3)).sum().backward()
    assert ready == ["gradient"] * 2
