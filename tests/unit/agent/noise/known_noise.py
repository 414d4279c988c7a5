"""Problems whose gradient noise is known, and what a plain estimate of it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pollux.noise.estimators import AccumulationEstimator
from pollux.noise.noise_scale import NoiseAverages, SampleKind
from pollux.noise.precondition import GradientNorms
from pollux.noise.samples import Squares, summed

M0 = 64
STEPS = 200


def frozen_adam(
    params: Iterable[torch.nn.Parameter], low: float, high: float
) -> tuple[torch.optim.Optimizer, Tensor]:
    """Return an Adam that holds its second moments, from `low` to `high`, and its preconditioner [parameters]."""
    adam = torch.optim.Adam(params, lr=0.0, betas=(0.9, 1 - 1e-7))
    weights = []
    for p in adam.param_groups[0]["params"]:
        moment = torch.linspace(low, high, p.numel()).reshape(p.shape)
        adam.state[p] = {"step": torch.tensor(1e9), "exp_avg": torch.zeros_like(p), "exp_avg_sq": moment}
        weights.append(1.0 / (moment.flatten().double().sqrt() + 1e-8))
    return adam, torch.cat(weights)


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
        adam, p_diagonal = frozen_adam(self.params, 0.3, 3.0)
        self.norms = GradientNorms(adam)
        self.norms.steps = 10**9
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
    """A perceptron on a fixed set of examples, drawn with replacement. All single examples' gradients are known."""

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


def norms_of(found: Sequence[Squares]) -> Tensor:
    """Squared norms [measurements, groups]."""
    return summed(found, 1, torch.device("cpu"))


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


def plain_averages() -> NoiseAverages:
    return NoiseAverages(1, decay=1 - 1e-9)
