"""A joiner compiles its model before the others wait for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pollux.ranks.rendezvous import alone
from pollux.resize.rehearsal import NewestCall, rehearse
from pollux.training.growing_model import GrowingModel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(9, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: Tensor, *, extra: dict[str, Any], scale: float | None = None) -> dict[str, Tensor]:
        y = self.out(self.drop(self.norm(self.table(ids)))) + extra["bias"][0]
        return {"y": y if scale is None else y * scale}


class Compiler:
    """Counts compilations, and runs what was captured as it is."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.compiled += 1
        return graph.forward


@pytest.fixture
def group() -> Iterator[None]:
    torch._dynamo.reset()
    alone(torch.device("cpu"))
    yield
    dist.destroy_process_group()


def one_pass(model: nn.Module) -> None:
    extra = {"bias": (torch.ones(2), "text", None, True)}
    model(torch.randint(9, (6,)), extra=extra, scale=2.0)["y"].sum().backward()


def wrapped(compiler: Compiler, *, in_place: bool) -> tuple[GrowingModel, nn.Module, Net]:
    torch.manual_seed(0)
    net = Net()
    module: Any = net
    if in_place:
        net.compile(backend=compiler)
    else:
        module = torch.compile(net, backend=compiler)
    model = GrowingModel(module)
    model.spread({})
    return model, module, net


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_joiner_that_has_rehearsed_compiles_no_more(group: None, in_place: bool, autocast: bool) -> None:
    model, module, _ = wrapped(Compiler(), in_place=in_place)
    newest = NewestCall(model, module)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        one_pass(model)
    call = json.loads(json.dumps(newest.shapes))

    torch._dynamo.reset()
    compiler = Compiler()
    joiner, _, net = wrapped(compiler, in_place=in_place)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    rehearse(joiner, call)
    assert compiler.compiled
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in net.parameters())
    found = compiler.compiled
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        one_pass(joiner)
    assert compiler.compiled == found
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_a_model_that_fails_with_zeros_compiles_later(group: None, caplog: pytest.LogCaptureFixture) -> None:
    model = GrowingModel(nn.Linear(2, 1))
    rehearse(model, None)
    tensor = {"shape": [1, 3], "kind": "float32", "cpu": True}
    wrong = {"inputs": {"list": [tensor], "tuple": False}, "options": {"dict": {}}}
    rehearse(model, wrong | {"autocast": []})
    assert "this rank compiles its model while the others wait: RuntimeError" in caplog.text


def test_only_training_passes_of_compiled_models_are_noted(group: None) -> None:
    plain = GrowingModel(nn.Linear(2, 1))
    newest = NewestCall(plain, plain.module)
    plain(torch.ones(1, 2))
    assert newest.shapes is None
    net = nn.Linear(2, 1)
    net.compile(backend=Compiler())
    model = GrowingModel(net)
    newest = NewestCall(model, net)
    with torch.no_grad():
        model(torch.ones(1, 2))
    model.eval()
    model(torch.ones(1, 2))
    assert newest.shapes is None
    model.train()
    model(torch.ones(3, 2))
    assert newest.shapes["inputs"]["list"][0]["shape"] == [3, 2]


def test_arguments_of_other_types_are_not_described(group: None) -> None:
    net = Net()
    net.compile(backend=Compiler())
    model = GrowingModel(net)
    newest = NewestCall(model, net)
    one_pass(model)
    assert newest.shapes is not None
    model(torch.zeros(6, dtype=torch.long), extra={"bias": [torch.ones(2)], "other": object()})
    assert newest.shapes is None
