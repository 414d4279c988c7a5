"""Replicas of several ranks, by tensor parallelism beside fully_shard.

Training, noise scale and samples are those of plain training with as many ranks as replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset, TensorDataset

from pollux import attach
from pollux.errors import DataError, PolluxAgentError
from pollux.resize.capability import obstacle_in_place
from tests.unit.agent.loop.mistakes_page import on_the_page

pytestmark = [
    pytest.mark.usefixtures("read_at_once"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="fully_shard is supported from torch 2.13 on"),
]

M0 = 32
STEPS = 20
WIDTH = 32


class Network(torch.nn.Module):
    """Two layers that are divided between ranks, and a norm that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.first = torch.nn.Linear(WIDTH, 64)
        self.second = torch.nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(self.norm(x))))
        return out


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(M0 * STEPS - 3, WIDTH, generator=generator)
    noise = torch.randn(len(x), WIDTH, generator=generator)
    return TensorDataset(torch.arange(len(x)), x, x.roll(1, 1) + noise)


def model_on(replica: int, hybrid: bool = False) -> Network:
    """Return the network, divided between the `replica` ranks of each replica.

    `hybrid`: `fully_shard` makes two copies of the shards, on a mesh of three dimensions.
    """
    torch.manual_seed(0)
    model = Network()
    if replica > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        replicas = dist.get_world_size() // replica
        shape = (2, replicas // 2, replica) if hybrid else (replicas, replica)
        names = ("copy", "data", "tensor")[-len(shape) :]
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh[names[:-1]] if hybrid else mesh["data"])
    return model


def optimizer_of(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    return torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(x), y)


def train(
    kind: str, replica: int, per_gpu: int, passes: int = 1, folder: Path | None = None, hybrid: bool = False
) -> tuple[Any, list[torch.Tensor], list[int], float, Any]:
    """Train, and tell what ranks are compared by.

    Return noise, weights, samples of this rank, its next random number, and what hinders a resize in place.
    """
    model = model_on(replica, hybrid)
    job = attach(
        model,
        optimizer_of(kind, model),
        adaptive=False,
        measuring={"every": 1, "decay": 1 - 1e-6},
        checkpoint_dir=folder,
    )
    loader = job.loader(data(), M0, per_gpu=(1, per_gpu))
    ids: list[int] = []
    for _ in job.epochs(passes):
        for i, x, y in loader:
            ids += i.tolist() if loader.data.local_samples else []
            job.step(partial(loss_of, job.model, x, y), clip=0.1)
    noise = job.training.models[0].averages
    obstacle = obstacle_in_place(job.training)
    found = [tuple(each) for each in noise.groups() or ()], noise.samples
    drawn = float(torch.rand(1))
    job.close()
    return found, [whole(p) for p in model.parameters()], ids, drawn, obstacle


@pytest.mark.parametrize(
    ("kind", "world", "per_gpu", "hybrid"),
    [("sgd", 4, M0, False), ("adam", 4, 4, False), ("adam", 2, 4, False), ("adam", 8, 4, True)],
)
def test_replicas_train_as_ranks_of_plain_training_do(
    ranks: Any, kind: str, world: int, per_gpu: int, hybrid: bool
) -> None:
    divided = ranks(world, train, kind, 2, per_gpu, 1, None, hybrid)
    plain = ranks(world // 2, train, kind, 1, 2 * per_gpu)
    for rank, (noise, weights, ids, drawn, obstacle) in enumerate(divided):
        (wanted, samples), plain_weights, plain_ids, plain_drawn, _ = plain[rank // 2]
        assert ids == plain_ids
        assert drawn == plain_drawn, "the ranks of a replica draw the same dropout masks"
        assert noise[1] == samples > 8
        np.testing.assert_allclose(noise[0], wanted, rtol=2e-3)
        for a, b in zip(weights, plain_weights, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert "tensor parallelism" in obstacle or "sbatch" in obstacle


@pytest.mark.parametrize(("before", "after", "hybrid"), [(4, 2, False), (8, 4, True)])
def test_a_checkpoint_goes_on_on_fewer_replicas(
    ranks: Any, tmp_path: Path, before: int, after: int, hybrid: bool
) -> None:
    ranks(before, train, "adam", 2, M0, 1, tmp_path, hybrid)
    assert list(tmp_path.glob("checkpoint-*/index-*.json"))
    again = ranks(after, train, "adam", 2, M0, 2, tmp_path, hybrid)
    alone = ranks(1, train, "adam", 1, M0, 2)
    used = [i for rank in again[::2] for i in rank[2]]
    assert sorted(used) == list(range(M0 * STEPS - 3)), "the second pass, and no sample of the first"
    for _, weights, *_ in again:
        for a, b in zip(weights, alone[0][1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(80, 2))


def refused() -> list[str]:
    dist.init_process_group("gloo")
    found = []
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "data"))
    model = Network()
    parallelize_module(model, mesh["tensor"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    try:
        attach(model, optimizer_of("sgd", model))
    except PolluxAgentError as error:
        found.append(str(error))
    model = model_on(2)
    job = attach(model, optimizer_of("sgd", model))
    try:
        job.loader(Stream(), 8, length=80, divided=True)
    except DataError as error:
        found.append(str(error))
    try:
        job.add_model(
            "critic", torch.nn.Linear(2, 2), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
        )
    except PolluxAgentError as error:
        found.append(str(error))
    return found


def test_what_replicas_of_several_ranks_cannot_do_is_refused(ranks: Any) -> None:
    found = ranks(4, refused)
    assert on_the_page(found[0][0])
    for messages in found:
        assert "make the mesh with that dimension first" in messages[0]
        assert "expected no divided: give every rank the whole stream" in messages[1]
        assert "expected 'critic' to have 2 ranks to a replica" in messages[2]
