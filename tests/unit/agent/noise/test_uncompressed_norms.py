"""Gradients summed beside a user's communication hook.

The sums are measured uncompressed, in a bounded workspace.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pollux.noise import uncompressed_norms
from pollux.noise.precondition import GradientNorms
from pollux.noise.uncompressed_norms import UncompressedSums
from tests.unit.agent.noise.bucket import bucket, stepped
from tests.unit.agent.workspace import assert_bounded


class Bucket:
    """What DDP hands to a communication hook."""

    def __init__(self, params: list[Any], buffer: torch.Tensor, grads: list[torch.Tensor]) -> None:
        self.parameters, self.buffer, self.gradients = lambda: params, lambda: buffer, lambda: grads


@pytest.fixture(autouse=True)
def two_equal_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank's gradient is this one's, half as large."""
    monkeypatch.setattr(uncompressed_norms.dist, "new_group", lambda: None)
    monkeypatch.setattr(uncompressed_norms.dist, "all_reduce", lambda tensor, group: tensor.mul_(1.5))


def sums(kind: Any, params: list[Any], split: bool = False) -> tuple[GradientNorms, UncompressedSums]:
    groups: Any = [{"params": params[3:]}, {"params": params[:3], "lr": 0.2}] if split else params
    norms = GradientNorms(stepped(kind, groups))
    norms.steps = 6
    return norms, UncompressedSums(norms, 2)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("chunk", [1 << 21, 30, 8])
def test_whole_and_in_pieces(kind: Any, split: bool, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params, buffer, grads = bucket()
    norms, beside = sums(kind, params, split)
    wanted, before = norms.of(params, grads), buffer.clone()
    monkeypatch.setattr(uncompressed_norms, "CHUNK", chunk)
    local, total = beside.measure(Bucket(params, buffer, grads))
    assert torch.allclose(local, wanted, rtol=1e-5)
    assert torch.allclose(total, 0.75**2 * wanted, rtol=1e-5)
    assert torch.equal(buffer, before), "the user's hook comes after"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_workspace_stays_below_32_mib(kind: Any) -> None:
    shapes = [(1000, 1000)] * 6 + [(5000, 1000), (300,)]
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    buffer = torch.ones(sum(p.numel() for p in params))
    assert buffer.numel() * 4 > 1.3 * (32 << 20)
    grads = [
        part.view(p.shape) for part, p in zip(buffer.split([p.numel() for p in params]), params, strict=True)
    ]
    optimizer = kind(params, lr=0.1)
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    optimizer.step()
    norms = GradientNorms(optimizer)
    norms.steps = 6
    beside = UncompressedSums(norms, 2)
    assert_bounded(lambda: beside.measure(Bucket(params, buffer, grads)))
