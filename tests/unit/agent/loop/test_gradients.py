"""Gradients under the agent, on real ranks.

They equal those of plain DistributedDataParallel and of the batch as a whole.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from pollux import attach
from tests.unit.agent.regression import EXAMPLES, attached, data, network


def gradients_with_pollux(per_gpu: tuple[int, int]) -> list[Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = attach(model, optimizer, adaptive=False, measuring={"every": 2})
    loader = job.loader(data(), 24, per_gpu=per_gpu, shuffle=False)
    seen = []
    for _ in job.epochs(1):
        for x, y, _ids in loader:
            with job.micro_batch():
                job.backward(mse_loss(job.model(x), y))
            if job.sync_gradients:
                seen.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))
                optimizer.step()
                optimizer.zero_grad()
    job.close()
    return seen


def gradients_with_ddp(rank: int, size: int, m: int, passes: int) -> list[Tensor]:
    """Return the gradients of plain DistributedDataParallel.

    The examples and their order are the same. Only whole batches are used.
    """
    model: nn.Module = network()
    if size > 1:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y, _ = data().tensors
    seen = []
    for start in range(0, EXAMPLES - size * m * passes + 1, size * m * passes):
        for k in range(passes):
            first = start + k * size * m + rank * m
            rows = slice(first, first + m)
            if isinstance(model, DistributedDataParallel) and k < passes - 1:
                with model.no_sync():
                    (mse_loss(model(x[rows]), y[rows]) * (1 / passes)).backward()
            else:
                (mse_loss(model(x[rows]), y[rows]) * (1 / passes)).backward()
        seen.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def both(m: int, passes: int) -> tuple[list[Tensor], list[Tensor]]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plain = gradients_with_ddp(rank, size, m, passes)
    return plain, gradients_with_pollux((1, m))


@pytest.mark.parametrize(("size", "m", "passes"), [(3, 8, 1), (2, 4, 3)])
def test_gradients_are_bit_for_bit_those_of_plain_ddp(ranks: Any, size: int, m: int, passes: int) -> None:
    for plain, ours in ranks(size, both, m, passes):
        assert len(ours) == 9  # 8 whole steps of 24, and a tail of 11
        for a, b in zip(plain, ours, strict=False):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("m", "passes"), [(24, 1), (8, 3)])
def test_gradients_on_one_rank_are_those_of_plain_accumulation(m: int, passes: int) -> None:
    plain, ours = gradients_with_ddp(0, 1, m, passes), gradients_with_pollux((m, m))
    for a, b in zip(plain, ours, strict=False):
        assert torch.equal(a, b)


def full_batch_gradient(rows: slice) -> Tensor:
    model = network()
    x, y, _ = data().tensors
    mse_loss(model(x[rows]), y[rows]).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def first_gradient(length: int, m0: int, per_gpu: tuple[int, int]) -> Tensor:
    job = attached(0.1)
    loader = job.loader(data(EXAMPLES), m0, per_gpu=per_gpu, shuffle=False)
    loader.data.load_state_dict({**loader.data.state_dict(), "position": EXAMPLES - length})
    for x, y, _ids in loader:
        with job.micro_batch():
            job.backward(mse_loss(job.model(x), y))
        if job.sync_gradients:
            return torch.cat([p.grad.flatten() for p in job.module.parameters()])
    raise AssertionError("no step")


@pytest.mark.parametrize("length", [1, 2, 10, 17])
def test_a_short_step_at_the_end_weighs_every_example_alike(ranks: Any, length: int) -> None:
    gradients = ranks(3, first_gradient, length, 36, (1, 4))
    expected = full_batch_gradient(slice(EXAMPLES - length, EXAMPLES))
    for found in gradients:
        torch.testing.assert_close(found, expected)
