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
from pollux.noise.samples import Squares, summed

M0 = 64
STEPS = 200


class Problem:
    """A frozen model, an optimizer, and where its gradients come from."""

    params: list[torch.nn.Parameter]
    mean: Tensor
    """The true gradient [parameters], preconditioned."""
    covariance: Tensor
    """Of one example's gradient [parameters, parameters], preconditioned."""

    def __init__(self, optimizer: str) -> None:
        self.generator = torch.Generator().manual_seed(11)
        self.setup()
        if optimizer == "sgd":
            self.norms = GradientNorms(torch.optim.SGD(self.params, lr=0.0))
            return
        adam = torch.optim.Adam(self.params, lr=0.0, betas=(0.9, 1 - 1e-7))
        weights = []
        for p in self.params:
            moment = torch.linspace(0.3, 3.0, p.numel()).reshape(p.shape)
            adam.state[p] = {
                "step": torch.tensor(1e9),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": moment,
            }
            weights.append(1.0 / (moment.flatten().double().sqrt() + 1e-8))
        self.norms = GradientNorms(adam)
        self.norms.steps = 10**9
        p_diagonal = torch.cat(weights)
        self.mean = self.mean * p_diagonal
        self.covariance = self.covariance * p_diagonal[:, None] * p_diagonal

    def setup(self) -> None:
        raise NotImplementedError

    def backward(self, examples: int) -> None:
        raise NotImplementedError

    def errors(self, kind: SampleKind, samples: int) -> tuple[float, float]:
        """Standard errors of (sqr, var over M0 examples)."""
        n, c = kind.gradients, self.covariance / kind.examples
        spread = 2 * float(c.square().sum())
        sqr = (4 * float(self.mean @ c @ self.mean) / n + spread / (n * (n - 1))) / samples
        var = spread / (n - 1) / samples * (kind.examples / M0) ** 2
        return sqr**0.5, var**0.5

    def check(self, averages: NoiseAverages, kind: SampleKind, samples: int) -> None:
        assert averages.samples == samples
        (found,) = averages.groups() or [None]
        assert found is not None
        sqr_error, var_error = self.errors(kind, samples)
        sqr, var = float(self.mean @ self.mean), float(self.covariance.trace()) / M0
        assert abs(found.sqr - sqr) < 3 * sqr_error
        assert abs(found.var - var) < 3 * var_error
        assert 3 * var_error < 0.25 * var, "a test that anything passes"
        assert 3 * sqr_error < 0.8 * sqr, "a test that anything passes"


class Quadratic(Problem):
    """A quadratic loss whose gradient and covariance are known.

    loss(w, x) = (w - x)' A (w - x) / 2 has the gradient A (w - x). x has mean 0 and a diagonal covariance.
    """

    D = 60
    ratio = 20.0
    """tr(Sigma) / |g|^2: the noise scale in examples."""

    def setup(self) -> None:
        d = self.D
        root = torch.randn(d, d, generator=self.generator) / d**0.5
        self.a = (root @ root.T + torch.eye(d)).double()
        self.deviation = torch.linspace(0.5, 1.5, d).double()
        covariance = self.a @ torch.diag(self.deviation**2) @ self.a
        direction = self.a @ torch.randn(d, generator=self.generator).double()
        size = (covariance.trace() / self.ratio / direction.square().sum()).sqrt()
        self.mean, self.covariance = direction * size, covariance
        w = torch.linalg.solve(self.a, self.mean)
        self.params = [torch.nn.Parameter(part.float()) for part in (w[:20], w[20:])]

    def backward(self, examples: int) -> None:
        """Compute the gradient by its formula: the mean of Gaussian x is Gaussian."""
        x = torch.randn(self.D, generator=self.generator).double() * self.deviation / examples**0.5
        gradient = self.a @ (torch.cat([p.detach().double() for p in self.params]) - x)
        for p, part in zip(self.params, gradient.float().split([len(p) for p in self.params]), strict=True):
            p.grad = part if p.grad is None else p.grad + part


class Network(Problem):
    """A perceptron on a fixed set of examples, drawn with replacement.

    The gradients of all single examples give the truth.
    """

    EXAMPLES = 2000

    def setup(self) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))
        self.params = list(self.model.parameters())
        self.x = torch.randn(self.EXAMPLES, 5)
        self.y = (self.x @ torch.randn(5, 3)).argmax(1)
        self.loss = torch.nn.CrossEntropyLoss()
        one = torch.func.grad(
            lambda p, a, b: self.loss(torch.func.functional_call(self.model, p, (a[None],)), b[None])
        )
        each = torch.func.vmap(one, in_dims=(None, 0, 0))(dict(self.model.named_parameters()), self.x, self.y)
        flat = torch.cat([g.detach().reshape(self.EXAMPLES, -1) for g in each.values()], 1).double()
        self.mean, self.covariance = flat.mean(0), flat.T.cov()

    def backward(self, examples: int) -> None:
        rows = torch.randint(self.EXAMPLES, (examples,), generator=self.generator)
        self.loss(self.model(self.x[rows]), self.y[rows]).backward()


class Bucket:
    """What DDP hands to a communication hook."""

    def __init__(self, params: Sequence[Tensor], last: bool) -> None:
        self._params = list(params)
        self._buffer = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
        self._last = last

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return self._params

    def gradients(self) -> list[Tensor]:
        sizes = [p.numel() for p in self._params]
        return [g.view(p.shape) for g, p in zip(self._buffer.split(sizes), self._params, strict=True)]

    def is_last(self) -> bool:
        return self._last


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


def norms_of(found: Sequence[Squares]) -> Tensor:
    """Squared norms [measurements, groups]."""
    return summed(found, 1, torch.device("cpu"))


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
            buckets.append([Bucket([p], p is problem.params[-1]) for p in problem.params])
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


def accumulated(problem: Problem, passes: int, averages: NoiseAverages) -> SampleKind:
    """One rank; with two passes this is the split batch."""
    estimator = AccumulationEstimator(problem.norms, problem.params)
    kind = SampleKind(passes, M0 // passes, 1.0)
    for _ in range(STEPS):
        problem.norms.optimizer.zero_grad()
        estimator.begin_group()
        for _ in range(passes):
            estimator.before_backward()
            problem.backward(M0 // passes)
            for p in problem.params:
                assert p.grad is not None
                p.grad /= passes  # the session's share of the loss
            estimator.after_backward(1.0 / passes)
        pair = estimator.end()
        assert pair is not None
        averages.add(kind, *(norms_of([part])[0].double().numpy() for part in pair), M0)
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


def plain_averages() -> NoiseAverages:
    return NoiseAverages(1, decay=1 - 1e-9)


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
