"""An element with a late first gradient does not drown the noise scale.

The noise scale of all other elements stays visible.
"""

from __future__ import annotations

import pytest
import torch

from pollux.noise.precondition import GradientNorms


def warm_optimizer(make, awake):
    """Return a parameter and its norms after 20 steps, with gradients of 1 in the elements that `awake` names."""
    param = torch.nn.Parameter(torch.zeros(8))
    optimizer = make([param])
    for _ in range(20):
        param.grad = awake.clone()
        optimizer.step()
    norms = GradientNorms(optimizer)
    norms.count_from_state()
    return param, norms


OPTIMIZERS = [
    pytest.param(lambda p: torch.optim.Adam(p, lr=0.0), 0.001, id="Adam"),
    pytest.param(lambda p: torch.optim.AdamW(p, lr=0.0), 0.001, id="AdamW"),
    pytest.param(lambda p: torch.optim.RMSprop(p, lr=0.0, alpha=0.9), 0.1, id="RMSprop"),
]


@pytest.mark.parametrize(("make", "newest"), OPTIMIZERS)
def test_a_sleeping_element_weighs_no_more_than_the_optimizer_lets_it_step(make, newest):
    awake = torch.ones(8)
    awake[0] = 0.0
    param, norms = warm_optimizer(make, awake)
    gradient = torch.zeros(8)
    gradient[0] = 1.0
    (seen,) = norms.of([param], [gradient])
    # P is at most 1 / (sqrt(newest) x the typical root of the moment): 7/8 of its elements are awake.
    assert 0 < float(seen) <= 1.5 / newest


@pytest.mark.parametrize(("make", "newest"), OPTIMIZERS)
def test_elements_of_like_size_are_seen_as_before(make, newest):
    param, norms = warm_optimizer(make, torch.ones(8))
    (seen,) = norms.of([param], [torch.full((8,), 2.0)])
    moment = norms.second_moment(param)
    v_hat = moment / (1 - 0.999**20) if "betas" in norms.optimizer.param_groups[0] else moment
    assert float(seen) == pytest.approx(float((4.0 / v_hat).sum()), rel=1e-3)


@pytest.mark.parametrize(("make", "newest"), OPTIMIZERS)
def test_a_tensor_that_never_had_a_gradient_has_no_say(make, newest):
    param, norms = warm_optimizer(make, torch.zeros(8))
    (seen,) = norms.of([param], [torch.ones(8)])
    assert float(seen) == 0.0
