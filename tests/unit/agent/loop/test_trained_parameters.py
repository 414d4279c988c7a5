"""Layers that a script freezes, thaws or replaces while it trains."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from pollux import attach
from tests.unit.agent.loop.mistakes_page import on_the_page
from tests.unit.agent.regression import attached, data, logged, network, update


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def thawed(first: bool, passes: int, bare: bool) -> Tensor:
    """Train one layer alone in the first pass, then both; or reversed."""
    model = network()
    model[0].requires_grad_(first)  # type: ignore[index, union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    job = attach(model, optimizer, adaptive=False, measuring={"every": 1})
    loader = job.loader(data(192), 24, per_gpu=(1, 24 // job.world.size // passes), shuffle=False)
    for epoch in job.epochs(2):
        if epoch:
            model[0].requires_grad_(not first)  # type: ignore[index, union-attr]
        for x, y, _ in loader:
            if bare:
                mse_loss(job.model(x), y).backward()
            else:
                with job.micro_batch():
                    job.backward(mse_loss(job.model(x), y))
            update(job)
    assert len(optimizer.state) == 4
    found = parameters(model)
    job.close()
    return found


def thawed_plainly(first: bool, passes: int) -> Tensor:
    """The same by plain DDP, wrapped again by hand."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = network()
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y, _ = data(192).tensors
    m = 24 // size // passes
    for epoch in range(2):
        model[0].requires_grad_(first if epoch == 0 else not first)  # type: ignore[index, union-attr]
        wrapped = DistributedDataParallel(model)
        for start in range(0, 192, 24):
            for k in range(passes):
                rows = slice(start + k * size * m + rank * m, start + k * size * m + rank * m + m)
                wrapped.require_backward_grad_sync = k == passes - 1
                (mse_loss(wrapped(x[rows]), y[rows]) / passes).backward()
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model)


@pytest.mark.parametrize(("first", "passes", "bare"), [(False, 1, False), (False, 2, False), (True, 1, True)])
def test_layers_thawed_or_frozen_on_two_ranks_train_as_under_plain_ddp(
    ranks: Any, first: bool, passes: int, bare: bool
) -> None:
    plain = ranks(2, thawed_plainly, first, passes)
    assert torch.equal(*plain)
    for found in ranks(2, thawed, first, passes, bare):
        assert torch.equal(found, plain[0])


def replaced() -> list[str]:
    """Give the model a new layer, which no optimizer trains."""
    said = logged()
    job = attached()
    loader = job.loader(data(), 24)
    for epoch in job.epochs(2):
        if epoch:
            torch.manual_seed(1)  # the ranks draw other numbers in their loops
            job.module[2] = nn.Linear(16, 1)  # type: ignore[operator]
        for x, y, _ in loader:
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
    job.close()
    return said


def test_a_layer_that_the_script_replaces_is_named(ranks: Any) -> None:
    for size in (1, 2):
        first, *others = ranks(size, replaced)
        (named,) = [line for line in first if "(2.weight first) are in no optimizer" in line]
        assert on_the_page(named)
        assert not any("no optimizer" in line for other in others for line in other)


def evaluates_alone() -> tuple[list[str], list[bool]]:
    """Evaluate by job.model on rank 0 alone, with batch normalisation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job = attach(model, optimizer, adaptive=False)
    x, _, _ = data().tensors
    equal = []
    for k, (inputs, targets, _) in enumerate(job.loader(data(), 24)):
        job.step(lambda x=inputs, y=targets: mse_loss(job.model(x), y))
        if k % 2 == 0 and job.rank == 0:
            model.eval()
            with torch.no_grad():
                equal.append(torch.equal(job.model(x), model(x)))
            model.train()
    names = list(job.model.state_dict())
    job.close()
    return names, equal


def test_one_rank_may_evaluate_alone_and_names_are_those_of_the_model(ranks: Any) -> None:
    (alone, _), ((names, equal), (others, none)) = ranks(1, evaluates_alone)[0], ranks(2, evaluates_alone)
    assert equal
    assert all(equal)
    assert not none
    assert alone == names == others


def with_buffers_of_its_own() -> list[str]:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        job = attach(model, optimizer, ddp_kwargs={"broadcast_buffers": False})
        kept = not getattr(job.model, "broadcast_buffers", True)
        job.close()
    return [str(each.message) for each in found] + ["kept"] * kept


def test_an_option_of_all_torch_releases_takes_no_warning(ranks: Any) -> None:
    assert ranks(2, with_buffers_of_its_own) == [["kept"]] * 2
