"""The fake's traps and faults.

The integration tests hold the fake to the real Slurm.
"""

from __future__ import annotations

import pytest

from polluxd.errors import SlurmUnavailable
from polluxd.model import JobSpec, JobState, Node
from polluxd.slurm.fake import CRED_EXPIRE_S
from polluxd.slurm.protocol import Geometry
from tests.troubled_slurm import TroubledSlurm


@pytest.fixture
def slurm() -> TroubledSlurm:
    return TroubledSlurm([Node("n1", gpus=4), Node("n2", gpus=4)], now=1000.2)


def state(slurm: TroubledSlurm, job_id: int) -> JobState:
    return slurm.jobs([job_id])[job_id].state


def running(slurm: TroubledSlurm, nodes: tuple[str, ...] = ("n1",), gpus: int = 2) -> int:
    job_id = slurm.submit(JobSpec())
    slurm.configure(job_id, Geometry(nodes, gpus, gpus), start=True)
    slurm.advance(1.0)
    assert state(slurm, job_id) is JobState.RUNNING
    return job_id


def test_an_unrenewed_lease_lapses(slurm: TroubledSlurm) -> None:
    job_id = slurm.submit(JobSpec(), lease=10)
    slurm.advance(9)
    assert state(slurm, job_id) is JobState.PENDING
    slurm.advance(2)
    assert state(slurm, job_id) is JobState.RUNNING


def test_a_requeued_job_restarts_by_itself_after_the_credential_has_expired(slurm: TroubledSlurm) -> None:
    job_id = running(slurm)
    slurm.requeue(job_id)
    slurm.advance(CRED_EXPIRE_S)
    assert state(slurm, job_id) is JobState.PENDING
    slurm.advance(3)
    assert state(slurm, job_id) is JobState.RUNNING


def test_restarting_in_the_second_of_the_requeue_on_the_same_node_fails(slurm: TroubledSlurm) -> None:
    for nodes, fate in ((("n1",), JobState.FAILED), (("n2",), JobState.RUNNING)):
        job_id = running(slurm, gpus=1)
        slurm.requeue(job_id)
        slurm.advance(0.2)
        slurm.configure(job_id, Geometry(nodes, 1, 1), start=True)
        slurm.advance(1.0)
        assert state(slurm, job_id) is fate
        slurm.finish(job_id)
        slurm.advance(1.0 - (slurm.clock() % 1.0) + 0.2)


def test_freed_gpus_can_be_stolen(slurm: TroubledSlurm) -> None:
    job_id = running(slurm, ("n1", "n2"), 4)
    thief = slurm.submit(None, gpus_per_node=4)
    slurm.requeue(job_id)
    slurm.advance(2)
    assert state(slurm, thief) is JobState.RUNNING
    slurm.configure(job_id, Geometry(("n1", "n2"), 4, 4), start=True)
    slurm.advance(5)
    assert state(slurm, job_id) is JobState.PENDING
    assert [n.foreign_gpus for n in slurm.observe().nodes] == [4, 0]


def test_a_drained_node_gets_nothing_new(slurm: TroubledSlurm) -> None:
    job_id = slurm.submit(JobSpec())
    slurm.set_schedulable("n1", False)
    slurm.configure(job_id, Geometry(("n1",), 1, 1), start=True)
    slurm.advance(5)
    assert state(slurm, job_id) is JobState.PENDING
    slurm.set_schedulable("n1", True)
    slurm.advance(1)
    assert state(slurm, job_id) is JobState.RUNNING


def test_faults_before_and_after_the_deed(slurm: TroubledSlurm) -> None:
    job_id = running(slurm)
    slurm.fail("requeue", SlurmUnavailable("down"))
    with pytest.raises(SlurmUnavailable):
        slurm.requeue(job_id)
    assert state(slurm, job_id) is JobState.RUNNING
    slurm.fail("requeue", SlurmUnavailable("applied but timed out"), applied=True)
    with pytest.raises(SlurmUnavailable):
        slurm.requeue(job_id)
    assert state(slurm, job_id) is JobState.COMPLETING
    slurm.fail("observe", SlurmUnavailable("down"), times=2)
    for _ in range(2):
        with pytest.raises(SlurmUnavailable):
            slurm.observe()
    assert len(slurm.observe().jobs) == 1
    assert [call for call in slurm.calls if call[0] == "requeue"] == [("requeue", job_id)] * 2


def test_a_cancelled_waiting_job_never_runs(slurm: TroubledSlurm) -> None:
    job_id = slurm.submit(JobSpec(), lease=1)
    slurm.finish(job_id, JobState.CANCELLED)
    slurm.advance(5)
    assert state(slurm, job_id) is JobState.CANCELLED


def test_an_ended_job_is_shown_for_a_while(slurm: TroubledSlurm) -> None:
    slurm = TroubledSlurm([Node("n1", gpus=4)], forgets_s=300.0)
    job_id = running(slurm)
    slurm.finish(job_id)
    slurm.advance(299.0)
    assert state(slurm, job_id) is JobState.COMPLETED
    slurm.advance(2.0)
    assert slurm.jobs([job_id]) == {}
    assert slurm.submit(JobSpec()) == job_id + 1
