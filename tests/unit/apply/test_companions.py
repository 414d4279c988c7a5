"""Companions count for their parent, as pending, or as orphans.

A companion's own word decides nothing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.apply.companions import gather, named_moves
from polluxd.model import JobState, Placement, Step
from polluxd.slurm.protocol import ClusterState, Companion, SlurmJob
from tests.build import move, slurm_job

ONE, BOTH = Placement(("n1",), 4), Placement(("n1", "n3"), 4)
NONCE = "0123456789abcdef" * 2
MOVE = move("resize", ONE, BOTH, Step.TRAINING, {Step.PLANNED: 1.0}, id=12, attempt=2, nonce=NONCE)
PARENT = slurm_job(at=ONE, restart_count=2, nodes=("n1",), cpus_per_node_held={"n1": 8})
COMPANION = replace(
    PARENT,
    job_id=9,
    restart_count=0,
    nodes=("n3",),
    gpus_per_node_held={"n3": 4},
    cpus_per_node_held={"n3": 8},
    companion=Companion(7, 2, 12, NONCE),
)


def gathered(*jobs: SlurmJob, **of_move: object):
    move = replace(MOVE, **of_move)
    return gather(ClusterState(1.0, (), jobs), {move.id: move})


def test_one_that_has_joined_is_part_of_its_parent() -> None:
    seen = gathered(COMPANION, PARENT)
    (job,) = seen.state.jobs
    assert (job.job_id, job.nodes, job.gpus_per_node_held) == (7, ("n1", "n3"), {"n1": 4, "n3": 4})
    assert (job.cpus_per_node_held, job.base) == ({"n1": 8, "n3": 8}, ("n1",))
    assert [c.job_id for c in job.companions] == [9]
    assert (seen.pending_companions, seen.orphans) == ({}, ())
    assert named_moves(ClusterState(1.0, (), (PARENT, COMPANION))) == [12]


@pytest.mark.parametrize("step", [Step.RECRUITING, Step.CONFIGURED, Step.STARTED])
def test_one_on_its_way_in_is_nobodys_yet(step: Step) -> None:
    seen = gathered(PARENT, COMPANION, replace(COMPANION, job_id=10), step=step)
    assert [job.job_id for job in seen.state.jobs] == [7]
    assert seen.state.jobs[0].companions == ()
    assert {number: job.job_id for number, job in seen.pending_companions.items()} == {12: 9}
    assert [job.job_id for job in seen.orphans] == [10], "a second one was not asked for"


@pytest.mark.parametrize(
    "parent",
    [
        {"uid": 1001},
        {"account": "other"},
        {"restart_count": 3},
        {"state": JobState.COMPLETING},
        {"state": JobState.COMPLETED},
        {"state": JobState.PENDING},
        {"spec": None},
        {"job_id": 8},
        {"companion": Companion(6, 0, 11)},
    ],
)
def test_one_whose_parent_is_not_what_it_says_goes_astray(parent: dict[str, object]) -> None:
    seen = gathered(replace(PARENT, **parent), COMPANION)
    assert 9 in [job.job_id for job in seen.orphans]
    assert all(not job.companions for job in seen.state.jobs)


@pytest.mark.parametrize(
    "move",
    [
        {"job_id": 8},
        {"attempt": 1},
        {"path": "requeue"},
        {"source": BOTH, "target": ONE},
        {"id": 13},
        {"step": Step.FAILED},
        {"nonce": "f" * 32},
        {"nonce": ""},
    ],
)
def test_one_that_no_move_asked_for_goes_astray(move: dict[str, object]) -> None:
    seen = gathered(PARENT, COMPANION, **move)
    assert [job.job_id for job in seen.orphans] == [9]


@pytest.mark.parametrize(
    "changes",
    [
        {"gpus_per_node_held": {"n2": 4}},
        {"gpus_per_node_held": {"n3": 2}},
        {"state": JobState.COMPLETING},
        {"state": JobState.PENDING, "gpus_per_node_held": {}},
    ],
)
def test_one_that_is_elsewhere_or_leaving_is_not_its_parents(changes: dict[str, object]) -> None:
    seen = gathered(PARENT, replace(COMPANION, **changes))
    assert [job.job_id for job in seen.orphans] == [9]


def test_one_that_has_ended_is_forgotten() -> None:
    seen = gathered(PARENT, replace(COMPANION, state=JobState.CANCELLED, gpus_per_node_held={}))
    assert (seen.state.jobs, seen.pending_companions, seen.orphans) == ((PARENT,), {}, ())
