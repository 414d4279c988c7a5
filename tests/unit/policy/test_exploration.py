"""The number of GPUs that a job's measurements justify.

The job's own measurements count, and those of earlier runs.
"""

from __future__ import annotations

import pytest

from polluxd.model import JobSpec
from polluxd.policy import decide
from polluxd.policy.domains import split
from polluxd.policy.exploration import Caps
from polluxd.settings import PolicySettings
from tests.unit.policy.scenarios import job, nodes, report, snapshot


@pytest.mark.parametrize(
    ("explored", "prior", "unseen", "least", "most"),
    [
        (0, 0, None, 1, 1),
        (2, 0, None, 1, 4),
        (1, 4, None, 1, 8),
        (4, 1, None, 1, 8),
        (0, 2, None, 6, 6),
        (4, 0, 5, 1, 5),
        (2, 0, 5, 1, 4),
        (4, 0, 5, 6, 6),
    ],
)
def test_twice_what_was_measured_by_this_run_or_an_earlier_one(
    explored: int, prior: int, unseen: int | None, least: int, most: int
) -> None:
    told = report(explored=explored, prior_gpus=prior, most_gpus=unseen)
    measured = job(1, JobSpec(min_gpus=least), report=told)
    (domain,) = split(snapshot(nodes(4), [measured]))
    assert Caps(domain, PolicySettings(start_gpus=1)).of(measured) == most


def test_a_run_that_knows_of_an_earlier_one_is_not_led_there_step_by_step() -> None:
    new, known = (
        decide(snapshot(nodes(4), [job(1, report=report(explored=1, prior_gpus=prior))])).of(1)
        for prior in (0, 8)
    )
    assert new is not None
    assert known is not None
    assert (new.placement.gpus, known.placement.gpus) == (2, 16)
