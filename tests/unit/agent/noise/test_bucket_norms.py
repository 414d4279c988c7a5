"""A bucket's norms equal the norms of its gradients one by one.

`BucketNorms` computes them in a few kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pollux.noise import bucket_norms
from pollux.noise.bucket_norms import BucketNorms
from pollux.noise.precondition import GradientNorms
from tests.unit.agent.noise.bucket import bucket, stepped

CASES = [
    (torch.optim.SGD, {}, False),
    (torch.optim.SGD, {}, True),
    (torch.optim.Adam, {}, False),
    (torch.optim.Adam, {"amsgrad": True}, True),
    (torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-3}, True),
    (torch.optim.RMSprop, {}, False),
]


@pytest.mark.parametrize(("kind", "options", "split"), CASES)
def test_a_bucket_measures_as_its_gradients_do(kind: Any, options: dict[str, Any], split: bool) -> None:
    params, buffer, grads = bucket()
    groups = [{"params": params[:2]}, {"params": params[2:]}] if split else params
    norms = GradientNorms(stepped(kind, groups, **options))
    norms.steps = 6
    measure = BucketNorms(norms).measure(buffer, params, grads)
    assert torch.allclose(measure(buffer), norms.of(params, grads), rtol=1e-5)
    mean = buffer * 0.5
    assert torch.allclose(measure(mean), 0.25 * norms.of(params, grads), rtol=1e-5)
    buffer.zero_()  # what is reduced in place is measured as it is then
    assert measure(buffer).count_nonzero() == 0


def test_beyond_the_workspace_it_goes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    params, buffer, grads = bucket()
    norms = GradientNorms(stepped(torch.optim.Adam, params))
    norms.steps = 6
    buckets = BucketNorms(norms)
    monkeypatch.setattr(bucket_norms, "KEPT", 2 * buffer.numel())
    wanted, counts = norms.of(params, grads), []
    for _ in range(4):
        chunked = []
        monkeypatch.setattr(norms, "of", lambda p, g, seen=chunked: seen.append(1) or wanted)
        assert torch.allclose(buckets.measure(buffer, params, grads)(buffer), wanted, rtol=1e-5)
        counts.append(len(chunked))
    assert counts == [0, 0, 1, 1]
    buckets.begin()  # the new step's workspace is free again
    buckets.measure(buffer, params, grads)(buffer)
    assert len(chunked) == 1, "only what the last round counted"


def test_parameters_of_other_optimizers_and_unlike_groups() -> None:
    params, buffer, grads = bucket()
    one = GradientNorms(stepped(torch.optim.Adam, params[:3]))
    one.steps = 6
    measure = BucketNorms(one).measure(buffer, params, grads)
    assert torch.allclose(measure(buffer), one.of(params[:3], grads[:3]), rtol=1e-5)
    groups = [{"params": params[:2], "eps": 0.1}, {"params": params[2:]}]
    two = GradientNorms(stepped(torch.optim.Adam, groups))
    two.steps = 6
    assert torch.allclose(
        BucketNorms(two).measure(buffer, params, grads)(buffer), two.of(params, grads), rtol=1e-5
    )
    fresh = GradientNorms(torch.optim.Adam(params))
    assert BucketNorms(fresh).measure(buffer, params, grads)(buffer).count_nonzero() == 0
