"""The family of each optimizer, and its preconditioner.

The preconditioner is tested against the steps that the optimizer makes.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from pollux import attach
from pollux.errors import PolluxAgentError
from pollux.goodput import NoiseScale
from pollux.learning_rate.scaling import automatic, factors
from pollux.noise.precondition import GradientNorms
from pollux.optimizers import families, register
from pollux.optimizers.families import recognise

Make = Callable[[list[nn.Parameter]], Optimizer]


def library(name: str, optimizer: str, **options: Any) -> Make:
    """An optimizer of a package that is not installed everywhere."""

    def make(params: list[nn.Parameter]) -> Optimizer:
        module = pytest.importorskip(name)
        if not hasattr(module, optimizer):
            pytest.skip(f"this {name} has no {optimizer}")
        found: Optimizer = getattr(module, optimizer)(params, **options)
        if hasattr(found, "train"):
            found.train()
        return found

    return make


class Lion(Optimizer):
    """Chen et al., 2023, as most implementations have it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                b1, b2 = group["betas"]
                p.sub_(torch.sign(b1 * mean + (1 - b1) * p.grad), alpha=group["lr"])
                mean.lerp_(p.grad, 1 - b2)


class Unheard(Optimizer):
    """Steps by the cube of its momentum: nothing that the agent knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.1)
                p.sub_(mean**3, alpha=group["lr"])


FAMILIES = [
    (torch.optim.SGD, "SGD"),
    (lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True), "SGD"),
    (torch.optim.ASGD, "SGD"),
    (torch.optim.Adam, "Adam"),
    (lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True), "Adam"),
    (torch.optim.NAdam, "Adam"),
    (torch.optim.RAdam, "unknown"),
    (torch.optim.Adamax, "Adamax"),
    (torch.optim.RMSprop, "RMSprop"),
    (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9), "RMSprop"),
    (torch.optim.Adagrad, "Adagrad"),
    (torch.optim.Adadelta, "Adadelta"),
    (torch.optim.Adafactor, "Adafactor"),
    (torch.optim.Rprop, "unknown"),
    (Lion, "unknown"),
    (Unheard, "unknown"),
    *[
        (library("bitsandbytes.optim", name), family)
        for name, family in {
            "AdamW8bit": "Adam",
            "PagedAdamW8bit": "Adam",
            "AdamW": "Adam",
            "Lion8bit": "unknown",
            "RMSprop8bit": "unknown",
            "LAMB8bit": "unknown",
        }.items()
    ],
    (library("bitsandbytes.optim", "SGD8bit", lr=0.1, momentum=0.9), "unknown"),
    (library("torchao.optim", "AdamW8bit"), "Adam"),
    (library("torchao.optim", "AdamW4bit"), "Adam"),
    (library("schedulefree", "AdamWScheduleFree"), "Adam"),
    (library("schedulefree", "SGDScheduleFree", lr=0.1), "SGD"),
    (library("transformers.optimization", "Adafactor", relative_step=False, lr=1e-3), "unknown"),
    (library("transformers.optimization", "Adafactor"), "unknown"),  # it sets its learning rate itself
    *[
        (library("pytorch_optimizer", name), family)
        for name, family in {
            "Lion": "unknown",
            "Lamb": "unknown",
            "LARS": "unknown",
            "Shampoo": "unknown",
            "SOAP": "unknown",
            "AdaBelief": "unknown",
            "AdEMAMix": "unknown",
            "Prodigy": "unknown",
            "ScheduleFreeAdamW": "Adam",
            "SignSGD": "unknown",
            "ScalableShampoo": "unknown",
            "CAME": "unknown",
            "Adai": "unknown",
            "SM3": "unknown",
            "MADGRAD": "unknown",
        }.items()
    ],
]


SHAPES: tuple[tuple[int, ...], ...] = ((48, 96), (16,))


def stepped(make: Make, steps: int = 3, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> Any:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape) * 0.1) for shape in shapes]
    optimizer = make(params)
    for _ in range(steps):
        for p in params:
            # Rows and columns of unlike size, and correlated, so that a preconditioner has something to do.
            p.grad = torch.randn_like(p) * torch.linspace(0.5, 3.0, p.shape[-1])
            if p.dim() > 1:
                p.grad *= torch.linspace(0.7, 1.5, p.shape[0])[:, None]
                p.grad += 0.5 * p.grad.roll(1, 0)
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps
            optimizer.step()
    return params, optimizer


def fitted(make: Make, steps: int = 3, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> Any:
    """Return parameters, their optimizer after so many steps, and the norms of its gradients."""
    params, optimizer = stepped(make, steps, shapes)
    norms = GradientNorms(optimizer)
    norms.steps = steps
    return params, optimizer, norms


@pytest.mark.parametrize(("make", "family"), FAMILIES, ids=lambda v: v if isinstance(v, str) else None)
def test_the_state_tells_the_family(make: Make, family: str) -> None:
    _, optimizer = stepped(make)
    found = recognise(optimizer, stepped=True)
    assert found is not None
    assert {one.name for one in found} == {family}


def test_the_state_of_momentum_alone_is_no_sgd() -> None:
    _, optimizer = stepped(library("torch.optim", "Muon"), shapes=((48, 96),))
    found = recognise(optimizer, stepped=True)
    assert found is not None
    assert found[0].rule == "sqrt-adascale"
    assert found[0].name == "Muon"


def test_no_state_tells_nothing_until_a_step_was_made() -> None:
    class Mine(torch.optim.SGD):
        pass

    optimizer = Mine([nn.Parameter(torch.zeros(2))], lr=0.1)
    assert recognise(optimizer, stepped=False) is None
    found = recognise(optimizer, stepped=True)
    assert found is not None
    assert found[0].name == "SGD"
    adam = recognise(torch.optim.Adam([nn.Parameter(torch.zeros(2))]), stepped=False)
    assert adam is None, "an Adam without a state is not measured as SGD"


def test_groups_of_one_optimizer_are_told_apart() -> None:
    class Both(torch.optim.AdamW):
        """Muon for matrices and Adam for vectors, as speed runs use."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            (matrix,) = self.param_groups[0]["params"]
            self.state[matrix]["momentum_buffer"] = matrix.grad.clone()
            matrix.grad, kept = None, matrix.grad
            super().step(closure)
            matrix.grad = kept

    def make(params: list[nn.Parameter]) -> Optimizer:
        return Both([{"params": params[:1], "ns_steps": 5}, {"params": params[1:]}], lr=1e-3)

    _, optimizer = stepped(make)
    found = recognise(optimizer, stepped=True)
    assert found is not None
    assert [family.name for family in found] == ["Muon", "Adam"]


STEPS: list[tuple[str, Make]] = [
    ("Adam", lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.0, 0.999))),
    ("AMSGrad", lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.0, 0.999), amsgrad=True)),
    ("Adamax", lambda p: torch.optim.Adamax(p, lr=1e-3, betas=(0.0, 0.999))),
    ("RMSprop", lambda p: torch.optim.RMSprop(p, lr=1e-3, alpha=0.999)),
    ("RMSprop, centered", lambda p: torch.optim.RMSprop(p, lr=1e-3, alpha=0.999, centered=True)),
    ("Adagrad", lambda p: torch.optim.Adagrad(p, lr=1e-3)),
    ("Adadelta", lambda p: torch.optim.Adadelta(p, lr=1e-3, rho=0.999)),
    ("Adafactor", lambda p: torch.optim.Adafactor(p, lr=1e-3, beta2_decay=-1.0)),
    ("8 bits, bitsandbytes", library("bitsandbytes.optim", "Adam8bit", lr=1e-3, betas=(0.0, 0.999))),
    ("32 bits, bitsandbytes", library("bitsandbytes.optim", "Adam", lr=1e-3, betas=(0.0, 0.999))),
    ("8 bits, torchao", library("torchao.optim", "Adam8bit", lr=1e-3, betas=(0.0, 0.999))),
]


def settle(optimizer: Optimizer) -> int:
    """Set the step count so high that moments which start at zero need no correction. Return the count."""
    for counted in (*optimizer.state.values(), *optimizer.param_groups):
        if "step" in counted:
            counted["step"] = (
                torch.full_like(counted["step"], 1e6) if isinstance(counted["step"], Tensor) else 10**6
            )
    return 10**6


@pytest.mark.parametrize(("make"), [pytest.param(make, id=name) for name, make in STEPS])
def test_the_preconditioner_is_the_one_that_the_optimizer_steps_by(make: Make) -> None:
    """Test the preconditioner P by the lengths of the optimizer's steps.

    With no momentum and a gradient too small to change v, the step is lr P g. So |P g| must follow its length.

    Gradients of single rows and columns and of single elements: a P that is wrong anywhere, by more than a factor that
    is common to all of it, gives lengths that do not.
    """
    (param,), optimizer = stepped(make, steps=30, shapes=((48, 96),))
    norms = GradientNorms(optimizer)
    norms.count_from_state()
    norms.steps = max(norms.steps, 30)
    assert norms.warm
    norms.steps = settle(optimizer)
    before = param.detach().clone()
    ratios = []
    generator = torch.Generator().manual_seed(5)
    state = {k: v.clone() for k, v in optimizer.state[param].items() if type(v) is Tensor}
    for trial in range(24):
        gradient = torch.zeros_like(param)
        row, column = trial * 2 % 48, trial * 4 % 96
        rows, columns = (
            (slice(row, row + 4), slice(None)) if trial % 2 else (slice(None), slice(column, column + 4))
        )
        gradient[rows, columns] = torch.randn(gradient[rows, columns].shape, generator=generator) * 1e-3
        found = norms.of([param], [gradient])
        assert not found.requires_grad, "it would keep a graph, and stop what adds it up in place"
        (square,) = found.tolist()
        param.grad = gradient.clone()
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
        step = (param.detach() - before).double().norm().item()
        ratios.append(math.sqrt(square) / step)
        with torch.no_grad():
            param.copy_(before)
        optimizer.state[param].update({k: v.clone() for k, v in state.items()})
    typical = sorted(ratios)[len(ratios) // 2]
    assert all(0.9 * typical < ratio < 1.1 * typical for ratio in ratios), ratios


@pytest.mark.parametrize(
    ("make", "wanted"),
    [(lambda p: torch.optim.SGD(p, lr=0.1), 16 / 7), (torch.optim.Adam, math.sqrt(16 / 7)), (Unheard, 1.0)],
)
def test_the_rule_follows_the_family(make: Make, wanted: float) -> None:
    _, _, norms = fitted(make)
    found = factors(automatic, norms.families, 4.0, [NoiseScale(sqr=1.0, var=3.0)])
    assert found == pytest.approx([wanted])
    assert factors(automatic, (), 4.0, [NoiseScale(sqr=1.0, var=3.0)]) == [1.0], "not known yet"


def train(optimizer_class: Any, caplog: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    job = attach(model, optimizer_class(model.parameters()), adaptive=True, measuring={"every": 1}, **options)
    x = torch.randn(256, 4)
    loader = job.loader(TensorDataset(x, x.sum(1, keepdim=True)), 4, max_batch_size=32, per_gpu=(1, 8))
    with caplog.at_level(logging.WARNING, "pollux"):
        for _ in job.epochs(1, statistical=True):
            for inputs, targets in loader:
                job.step(lambda x=inputs, y=targets: (job.model(x) - y).square().mean())  # type: ignore[misc]
    job.close()
    return job


def test_an_optimizer_that_is_not_understood_keeps_its_batch_and_says_so_once(caplog: Any) -> None:
    job = train(Unheard, caplog)
    assert job.batch_size == 4
    assert job.noise_scale is None
    told = [record.message for record in caplog.records if "Unheard" in record.message]
    assert len(told) == 1
    assert "momentum_buffer" in told[0]
    page = (Path(__file__).parents[4] / "docs/user-guide/common-mistakes.md").read_text()
    assert " ".join(told[0].split()) in " ".join(page.split())


def test_a_rule_of_the_users_choice_makes_it_adapt(caplog: Any) -> None:
    job = train(Unheard, caplog, scaling="sqrt-adascale")
    assert job.noise_scale is not None
    assert not [record for record in caplog.records if "Unheard" in record.message]


PAGE = Path(__file__).parents[4] / "docs/user-guide/batch-size.md"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "registered", {})


def test_the_page_s_example_makes_the_agent_measure_lion(registered: None, caplog: Any) -> None:
    (block,) = re.findall(r"```python\n(import torch\n.*?)```", PAGE.read_text(), re.S)
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
    exec(block.replace("from lion_pytorch import Lion\n", ""), {"Lion": Lion})
    _, optimizer = stepped(Lion)
    assert {family.rule for family in recognise(optimizer, stepped=True) or ()} == {"sqrt-adascale"}
    params, optimizer, norms = fitted(Lion, steps=8, shapes=((20, 20), (20, 20)))
    plain = norms.of(params, [p.grad for p in params])
    with torch.no_grad():
        optimizer.state[params[0]]["exp_avg"] *= 100
        params[0].grad *= 100
    again = norms.of(params, [p.grad for p in params]).item()
    assert again == pytest.approx(plain.item(), rel=1e-4), (
        "tensors weigh alike, however large their gradients are"
    )
    job = train(Lion, caplog)
    assert job.noise_scale is not None
    assert not [record for record in caplog.records if "Lion" in record.message]


def test_a_subclass_counts_and_a_moment_is_awaited(registered: None) -> None:
    register(Unheard, "adascale")
    assert recognise(type("Mine", (Unheard,), {})([nn.Parameter(torch.zeros(2))]), stepped=False) is not None
    register(Unheard, "sqrt-adascale", lambda state, param, group: state.get("momentum_buffer"))
    assert recognise(Unheard([nn.Parameter(torch.zeros(2))]), stepped=False) is None


@pytest.mark.parametrize(
    ("optimizer", "rule", "told"),
    [
        (Unheard, "linear", "expected rule as"),
        (object, "adascale", "expected a class of"),
        (3, "adascale", "got 3"),
    ],
)
def test_what_cannot_be_registered_is_refused(registered: None, optimizer: Any, rule: str, told: str) -> None:
    with pytest.raises(PolluxAgentError, match=told):
        register(optimizer, rule)
