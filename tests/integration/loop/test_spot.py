"""A provider takes a node back, with grace: the training repeats no step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .conftest import Loop
from .elastic import Elastic

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

GRACE_S = 60.0
"""Between the notice and the end of a node: AWS gives two minutes."""


@pytest.fixture
def taken(elastic_loop: Loop) -> Iterator[list[str]]:
    """Nodes that the test takes away; they come back after it."""
    names: list[str] = []
    yield names
    for name in names:
        elastic_loop.cluster.command("scontrol", "update", f"NodeName={name}", "State=RESUME")


@pytest.mark.parametrize("lent", [False, True])
def test_a_training_leaves_a_node_that_the_notice_drains(
    lent: bool, elastic_loop: Loop, taken: list[str]
) -> None:
    loop = elastic_loop
    job = Elastic(loop, "drained", f"#POLLUX min-gpus={1 if lent else 2} max-gpus=2 prior=no")
    job.begin(pinned=False)
    job.steps_among(2)
    assert bool(job.companions()) is lent

    def nodes() -> set[str]:
        return {*job.slurm.nodes, *(name for companion in job.companions() for name in companion.nodes)}

    (second,) = nodes() - {job.nodes[0]}
    taken.append(second)
    loop.cluster.command("scontrol", "update", f"NodeName={second}", "State=DRAIN", "Reason=spot")
    loop.until(lambda: nodes() and second not in nodes(), GRACE_S, why="the job off the node")
    job.steps_among(2)
    assert job.end().repeated == 0
