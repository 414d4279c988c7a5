"""Gradients summed beside a user's communication hook.

The sums are measured uncompressed, in a bounded workspace.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pollux.noise import uncompressed_norms
from pollux.noise.uncompressed_norms import UncompressedSums
from tests.unit.agent.noise.bucket import Bucket, beyond_the_workspace, trained
from tests.unit.agent.workspace import assert_bounded


@pytest.fixture(autouse=True)
def two_equal_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank's gradient is this one's, half as large."""
    monkeypatch.setattr(uncompressed_norms.dist, "new_group", lambda: None)
    monkeypatch.setattr(uncompressed_norms.dist, "all_reduce", lambda tensor, group: tensor.mul_(1.5))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("chunk", [1 << 21, 30, 8])
def test_whole_and_in_pieces(kind: Any, split: bool, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params, norms = trained(kind, split)
    bucket = Bucket(params)
    wanted, before = norms.of(params, bucket.gradients()), bucket.buffer().clone()
    monkeypatch.setattr(uncompressed_norms, "CHUNK", chunk)
    local, total = UncompressedSums(norms, 2).measure(bucket)
    assert torch.allclose(local, wanted, rtol=1e-5)
    assert torch.allclose(total, 0.75**2 * wanted, rtol=1e-5)
    assert torch.equal(bucket.buffer(), before), "the user's hook comes after"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_workspace_stays_below_32_mib(kind: Any) -> None:
    params, norms = beyond_the_workspace(kind, (5000, 1000))
    bucket, beside = Bucket(params), UncompressedSums(norms, 2)
    assert_bounded(lambda: beside.measure(bucket))
