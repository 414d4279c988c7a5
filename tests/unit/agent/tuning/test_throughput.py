"""A script's own equation of step times decides the batch size.

theta follows the equation for the scheduler.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pollux import attach
from pollux.goodput import (
    BatchChoice,
    BatchLimits,
    Goodput,
    NoiseScale,
    ThroughputParams,
    accumulation_time,
    step_time,
)
from pollux.tuning.batch_choice import Advisor, choose
from pollux.tuning.measurements import Configuration
from pollux.tuning.profile import StepProfile
from pollux.tuning.throughput import OwnGoodput, SampledParams, goodput_of, sampled

LIMITS = BatchLimits(32, 2048, 4, 256)
NOISE = NoiseScale(sqr=1.0, var=40.0)
THETA = ThroughputParams(0.05, 0.001, 0.02, 0.003, 0.06, 0.005, 2.0)


class Tiled:
    """A kernel that works in tiles of `tile` examples.

    33 examples take as long as 64. No theta expresses that.
    """

    def __init__(self, tile: int = 64) -> None:
        self.tile, self.seconds, self.fits = tile, 0.0, 0

    def fit(self, rows: Any) -> None:
        self.fits += 1
        self.seconds = float(np.mean(rows.final / np.ceil(rows.local_batch / self.tile)))

    def step_time(self, nodes: Any, gpus: Any, local_batch: Any, accumulation: Any) -> Any:
        return self.seconds * np.ceil(local_batch / self.tile) * (accumulation + 1.0)


class Same:
    """Pollux' own equation, written as a user's."""

    def fit(self, rows: Any) -> None:
        pass

    def step_time(self, nodes: Any, gpus: Any, local_batch: Any, accumulation: Any) -> Any:
        return step_time(THETA, nodes, gpus, local_batch, accumulation)


def measured(*places: tuple[int, int, int], of: ThroughputParams = THETA) -> StepProfile:
    profile = StepProfile()
    for nodes, gpus, m in places:
        local, final = float(accumulation_time(of, m)), float(step_time(of, nodes, gpus, m))
        profile.add(Configuration(nodes, gpus, m), local=[local] * 4, final=[final] * 4)
    return profile


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_the_same_equation_gives_the_same_choice(gpus: int) -> None:
    params = sampled(Same(), measured((1, 1, 32), (1, gpus, 64), (2, 8, 64)).rows())
    assert params is not None
    plain, own = Goodput(THETA, NOISE, LIMITS), goodput_of(params, NOISE, LIMITS)
    assert isinstance(own, OwnGoodput)
    assert tuple(map(float, own.optimize(1, gpus))) == pytest.approx(
        tuple(map(float, plain.optimize(1, gpus)))
    )
    assert float(own.evaluate(1, gpus, 50, 2)) == pytest.approx(float(plain.evaluate(1, gpus, 50, 2)))


def test_the_scheduler_is_given_theta_fitted_to_what_the_equation_predicts() -> None:
    params = sampled(Same(), measured((1, 1, 32), (1, 4, 64), (2, 8, 64)).rows())
    assert params is not None
    for nodes, gpus, m in ((1, 1, 64), (1, 4, 32), (2, 8, 100), (4, 16, 64)):
        found, true = (float(step_time(p, nodes, gpus, m)) for p in (params, THETA))
        assert found == pytest.approx(true, rel=0.05)
    assert params._asdict().keys() == THETA._asdict().keys()


def test_the_agent_tunes_by_the_equation_itself() -> None:
    profile = measured((1, 2, 32))
    profile.model = Tiled()
    choice, sizes = BatchChoice(16, 0), []
    advisor = Advisor(profile, LIMITS, 1, 2, lambda: (NOISE, choice), adaptive=True)
    for _ in range(8):
        assert advisor.advise()
        if advisor.proposal is None:
            break
        choice, advisor.proposal = advisor.proposal, None
        sizes.append(choice.local_batch)
    assert isinstance(advisor.params, SampledParams)
    # Just below a whole number of tiles, where a smooth equation has no reason to stop.
    assert choice.local_batch % 64 == 0 or choice.local_batch % 64 > 56
    assert sizes == sorted(sizes)
    assert choose(ThroughputParams(*advisor.params), NOISE, LIMITS, 1, 2, BatchChoice(16, 0)) is not None


class Faulty:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def fit(self, rows: Any) -> None:
        if self.answer is None:
            raise ZeroDivisionError

    def step_time(self, nodes: Any, gpus: Any, local_batch: Any, accumulation: Any) -> Any:
        return self.answer


@pytest.mark.parametrize("answer", [None, 1.0, np.nan, -1.0, "slow"])
def test_an_equation_that_fails_gives_way_to_pollux_own(answer: Any, caplog: Any) -> None:
    profile = measured((1, 1, 32), (1, 1, 64))
    profile.model = Faulty(answer)
    params = profile.fit()
    assert params is not None
    assert not isinstance(params, SampledParams)
    assert params.alpha_grad == pytest.approx(THETA.alpha_grad, rel=0.05)
    assert "throughput model failed" in caplog.text


def test_attach_takes_it() -> None:
    model, own = torch.nn.Linear(2, 1), Tiled()
    job = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), measuring={"step_time": own})
    job.profile.add(Configuration(1, 1, 8), final=[0.1])
    job.profile.add(Configuration(1, 1, 16), final=[0.1])
    params = job.profile.fit()
    assert isinstance(params, SampledParams)
    assert (params.model, own.fits) == (own, 1)
    job.close()
