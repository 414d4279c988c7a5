"""The noise scale under fully_shard equals the truth and DDP's.

The truth is planted. Plain DDP measures the same examples.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from pollux import attach
from pollux.errors import PolluxAgentError
from pollux.noise import sharded_noise
from pollux.noise.precondition import GradientNorms
from pollux.noise.samples import summed
from pollux.noise.sharded_noise import ReduceScatterEstimator, _runs, _Unit
from tests.unit.agent.loop.mistakes_page import on_the_page

pytestmark = [
    pytest.mark.usefixtures("read_at_once"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="fully_shard is supported from torch 2.13 on"),
]

M0 = 32
STEPS = 26


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(M0 * STEPS, 7, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(M0 * STEPS, 1, generator=generator))


class Network(torch.nn.Module):
    """A network with shapes that no number of ranks divides. One parameter may be left unused."""

    def __init__(self, uses_all: bool) -> None:
        super().__init__()
        self.uses_all = uses_all
        self.first = torch.nn.Linear(7, 5)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.second = torch.nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out + self.unused.mean() if self.uses_all else out


def optimizer_of(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind in ("groups", "unused"):
        first = [p for n, p in model.named_parameters() if n.startswith("first")]
        rest = [p for n, p in model.named_parameters() if not n.startswith("first")]
        return torch.optim.SGD([{"params": first}, {"params": rest}], lr=0.05)
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05)


def train(
    kind: str, per_gpu: int, sharded: bool, replicas: int = 1
) -> tuple[list[Any], list[torch.Tensor], list[torch.Tensor], int]:
    """Train one pass; return the noise per parameter group, weights, the last gradient, and the number of samples."""
    torch.manual_seed(0)
    model = Network(kind != "unused")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if sharded:
        shape = (replicas, dist.get_world_size() // replicas)
        names = ("replicas", "shards")
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names) if replicas > 1 else None
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(kind, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=kind == "amp")
    ddp = {} if sharded else {"find_unused_parameters": True}
    job = attach(
        model,
        optimizer,
        scaler=scaler,
        adaptive=False,
        measuring={"every": 1, "decay": 1 - 1e-6},
        ddp_kwargs=ddp,
    )
    grads: list[torch.Tensor] = []
    for x, y in job.loader(data(), M0, per_gpu=(1, per_gpu)):
        with job.micro_batch():
            job.backward(mse_loss(job.model(x), y))
        if job.sync_gradients:
            assert all(type(p.grad) is type(p.data) for p in model.parameters() if p.grad is not None)
            grads = [whole(p.grad) for p in model.parameters() if p.grad is not None]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    found = [tuple(n) for n in job.training.models[0].averages.groups() or ()]
    samples = job.training.models[0].averages.samples
    job.close()
    return found, [whole(p.detach()) for p in model.parameters()], grads, samples


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def both(kinds: list[tuple[str, int]], replicas: int = 1) -> list[Any]:
    return [(train(kind, size, False), train(kind, size, True, replicas)) for kind, size in kinds]


CASES = [("sgd", M0), ("groups", M0), ("adam", M0), ("adam", 4), ("amp", M0), ("unused", M0)]


@pytest.mark.parametrize(
    ("size", "replicas"),
    [(1, 1), pytest.param(3, 1, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_estimates_and_gradients_are_those_of_plain_ddp(ranks: Any, size: int, replicas: int) -> None:
    cases = {1: [("groups", 16), ("adam", 16)], 3: CASES, 4: [("sgd", M0), ("adam", M0)]}[size]
    for results in ranks(size, both, cases, replicas):
        for (kind, _), (plain, sharded) in zip(cases, results, strict=True):
            # Which parameters a reduction leaves out is known after the first: that sample is lost.
            lost = kind == "unused" and size > 1
            assert plain[3] - lost == sharded[3] > 8, kind
            np.testing.assert_allclose(sharded[0], plain[0], rtol=0.5 if lost else 2e-3, err_msg=kind)
            for a, b in zip(plain[1] + plain[2], sharded[1] + sharded[2], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def refused() -> list[str]:
    dist.init_process_group("gloo")
    messages = []
    half = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    fully_shard(half[0])
    alone = torch.nn.Linear(3, 1)
    fully_shard(alone, mesh=dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"])
    parallel = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    parallelize_module(
        parallel,
        dist.device_mesh.init_device_mesh("cpu", (4,)),
        {"0": ColwiseParallel(output_layouts=Replicate())},
    )
    both = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(both, mesh["tensor"], {"0": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(both, mesh=mesh["data"])
    for model in (half, alone, parallel, both):
        try:
            attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except PolluxAgentError as error:
            messages.append(str(error))
    return messages


def test_a_model_that_is_sharded_in_part_or_over_some_ranks_is_refused(ranks: Any) -> None:
    for messages in ranks(4, refused):
        assert "on the whole model last" in messages[0]
        assert "over all 4 ranks" in messages[1]
        assert on_the_page(messages[2])
        assert "found meshes of [2] ranks" in messages[3]
        assert all("`pollux wrap` before its launch command" in message for message in messages[1:])


def planted(
    groups: int, copies: int, monkeypatch: pytest.MonkeyPatch, chunk: int | None = None
) -> tuple[ReduceScatterEstimator, _Unit, torch.Tensor]:
    """Return an estimator, and a unit with the buffer of its gradient.

    The buffer has a row for each of two shards: two columns of one parameter and one of another.
    """
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    if chunk is not None:
        monkeypatch.setattr(sharded_noise, "CHUNK", chunk)
    model = torch.nn.ParameterList([torch.zeros(2), torch.zeros(1)])
    params = list(model)
    split: Any = [{"params": [p]} for p in params]
    norms = GradientNorms(torch.optim.SGD(split if groups == 2 else params))
    estimator = ReduceScatterEstimator(norms, model, 2 * copies)
    torch_unit: Any = SimpleNamespace(params=params, columns=[2, 1], divisor=None)
    unit = _Unit(torch_unit)
    estimator.units.append(unit)
    estimator.copies = copies
    params[0].grad, params[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([2.0])
    return estimator, unit, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


@pytest.mark.parametrize("chunk", [1 << 21, 4, 1])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    ("groups", "local", "total"), [(1, [91.0], [29.0]), (2, [1.0 + 4 + 16 + 25, 9.0 + 36], [25.0, 4.0])]
)
def test_a_rank_s_parts_of_both_norms(
    groups: int,
    local: list[float],
    total: list[float],
    copies: int,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its gradient counts as one of K; each of the copies holds its shards."""
    estimator, unit, gradient = planted(groups, copies, monkeypatch, chunk)
    group: Any = None
    estimator.begin(measuring=True)
    estimator.see(unit, gradient, group, dist.ReduceOp.AVG)
    found = estimator.end()
    assert found is not None
    rows = summed(found, groups, torch.device("cpu")).tolist()
    assert rows[0] == pytest.approx([norm / (2 * copies) for norm in local])
    assert rows[1] == pytest.approx([norm / copies for norm in total])
    assert estimator.end() is None, "measured once"


def test_a_shard_is_measured_in_pieces_that_hold_a_chunk_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    estimator, unit, gradient = planted(2, 1, monkeypatch, 2)
    layout = unit.layout(3)
    assert layout is not None
    runs = list(_runs(layout, 1))
    assert [(one.start, one.stop) for run in runs for one in run] == [(0, 1), (1, 2), (0, 1)]
    group: Any = None
    estimator.begin(measuring=True)
    estimator.see(unit, gradient, group, dist.ReduceOp.AVG)
    found = estimator.end()
    assert found is not None
    assert summed(found, 2, torch.device("cpu"))[0].tolist() == pytest.approx([23.0, 22.5])


@pytest.mark.parametrize("groups", [1, 2])
def test_a_pass_that_is_not_to_be_measured_or_reduces_otherwise_is_none(
    groups: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    estimator, unit, gradient = planted(groups, 1, monkeypatch)
    group: Any = None
    estimator.begin(measuring=False)
    estimator.see(unit, gradient, group, dist.ReduceOp.SUM)
    assert estimator.end() is None
    assert caplog.text == ""
    for _ in range(2):
        estimator.begin(measuring=True)
        estimator.see(unit, gradient, group, dist.ReduceOp.SUM)
        assert estimator.end() is None
    assert caplog.text.count("the noise scale is not measured") == 1
