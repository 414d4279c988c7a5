"""pyslurm on a real Slurm reads the same as scontrol.

A fault of slurmctld stays in pyslurm's worker. The tests run where pyslurm is installed
(`SUITE=forky make test-newer-slurm`).
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster
from contrib.devcluster.processes import wait_until
from polluxd.errors import SlurmUnavailable
from polluxd.model import JobState
from polluxd.slurm.protocol import Geometry, SlurmJob
from polluxd.slurm.pyslurm_client import PyslurmClient
from polluxd.slurm.scontrol import ScontrolClient
from tests.integration.slurm_jobs import SlurmJobs

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(
        find_spec("pyslurm") is None, reason="pyslurm is not installed: see SUITE=forky make test-newer-slurm"
    ),
]


@pytest.fixture(scope="module")
def cluster(scratch: Path) -> Iterator[DevCluster]:
    """Start a cluster for this file only, with GPUs of a type.

    These tests stop slurmctld and look at every job, so they cannot share a cluster.
    """
    with DevCluster(scratch / "pyslurm", postgres=False, lease_s=60, gpu_type="a100") as made:
        yield made


@pytest.fixture
def slurm(cluster: DevCluster, caplog: pytest.LogCaptureFixture) -> PyslurmClient:
    caplog.set_level(logging.INFO, "polluxd.slurm.pyslurm_client")
    return PyslurmClient(conf=cluster.slurm_conf, timeout=60, choice="pyslurm")


class Jobs(SlurmJobs):
    """Their script sleeps unless said otherwise."""

    def add(self, *options: str | bytes, ours: bool = False, body: str = "sleep 1000") -> int:
        return self.submit("#!/bin/sh\n" + ("#POLLUX max-gpus=16\n" if ours else "") + body, *options)


@pytest.fixture
def jobs(cluster: DevCluster, tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(cluster, tmp_path)
    yield made
    made.end()


def wait_for(true: Callable[[], object]) -> None:
    wait_until(true, 90, "pyslurm or the jobs to be ready")


def differences(found: SlurmJob, expected: SlurmJob) -> dict[str, tuple[object, object]]:
    pairs = {
        field.name: (getattr(found, field.name), getattr(expected, field.name)) for field in fields(found)
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def test_it_reads_what_scontrol_reads(
    cluster: DevCluster, slurm: PyslurmClient, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    plain = ScontrolClient(conf=cluster.slurm_conf, timeout=60)
    ended = jobs.add("--gres=gpu:1", body="exit 0")
    failed = jobs.add("--gres=gpu:1", body="exit 3")
    spread = jobs.add(
        "--gres=gpu:a100:2", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--time=1-2:03:00"
    )
    uneven = jobs.add("--gpus=3", "--job-name= x=y é", "--mem=300")
    bare = jobs.add("--no-requeue", "--partition=pollux")
    array = jobs.add("--array=1-3%1", "--gres=gpu:1")
    jobs.add("--gres=gpu:4", ours=True)
    jobs.add("--hold", "--comment=x", "--gres=gpu:1", ours=True)
    jobs.add(f"--dependency=afterany:{spread}", "--mem-per-cpu=100", "--gres=gpu:2", ours=True)
    jobs.add("--begin=now+500", "--nodes=2", "--gres=gpu:1", ours=True)
    jobs.add("--begin=now+500", "--nodelist=n[2-3]", "--nodes=2")
    moved = jobs.add("--gres=gpu:1", ours=True)
    plain.configure(moved, Geometry(("n4",), 2, 2, 500), start=True, time_limit_s=3600)
    cancelled = jobs.add("--begin=now+500")
    cluster.command("scancel", str(cancelled))
    cluster.command("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=a b")

    def settled() -> bool:
        states = {i: job.state for i, job in plain.jobs(jobs.ids).items()}
        running = {i for i in states if states[i] is JobState.RUNNING}
        return {spread, uneven, bare, moved} <= running and {ended, failed, cancelled} <= {
            i for i in states if states[i].finished
        }

    wait_for(settled)
    for _ in range(20):  # the scheduler's reasons and an array's tasks may change between two readings
        one, other, again = plain.observe(), slurm.observe(), plain.observe()
        if one.jobs == again.jobs and one.nodes == again.nodes:
            break
    cluster.command("scontrol", "update", "NodeName=n3", "State=RESUME")
    assert one.jobs == again.jobs
    assert {node.name: node for node in other.nodes} == {node.name: node for node in one.nodes}
    seen, expected = ({job.job_id: job for job in state.jobs} for state in (other, one))
    assert seen.keys() == expected.keys()
    for job_id, job in expected.items():
        # Where GPUs are not among the accounted TRES, pyslurm cannot tell none from --gpus of a job that waits.
        if not job.requested_gpus_per_node:
            assert not seen[job_id].requested_gpus_per_node
            job = replace(job, requested_gpus_per_node=seen[job_id].requested_gpus_per_node)  # noqa: PLW2901
        assert differences(seen[job_id], job) == {}
    assert {job.tasks for job in seen.values() if job.array and job.array[0] == array} == {(), (2, 3)}
    assert slurm.jobs([moved]) == plain.jobs([moved])
    assert slurm.jobs([999_999]) == {}
    assert seen[uneven].name == " x=y é"
    assert seen[moved].gpus_per_node_held == {"n4": 2}
    assert [node.schedulable for node in other.nodes if node.name == "n3"] == [False]
    assert "read through pyslurm" in caplog.text
    assert "read through scontrol" not in caplog.text


def test_a_name_that_is_not_utf_8_stops_no_reading(
    cluster: DevCluster, slurm: PyslurmClient, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = jobs.add("--gres=gpu:1", b"--job-name=\xff\xfe", ours=True)
    assert slurm.observe().jobs[-1].spec is not None
    assert slurm.jobs([job_id])[job_id].name == "\ufffd\ufffd"
    assert "read through scontrol" not in caplog.text


def test_slurmctld_frozen_gone_and_back(
    cluster: DevCluster, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "polluxd.slurm.pyslurm_client")
    hasty = PyslurmClient(conf=cluster.slurm_conf, timeout=3, choice="pyslurm")
    first = jobs.add("--gres=gpu:1", ours=True)
    wait_for(lambda: answers(hasty))
    pyslurm_serves(hasty, caplog)
    cluster.signal_slurmctld(signal.SIGSTOP)
    try:
        with pytest.raises(SlurmUnavailable):
            hasty.observe()
    finally:
        cluster.signal_slurmctld(signal.SIGCONT)
    assert "read through scontrol: pyslurm: no answer within 3 s" in caplog.text
    wait_for(lambda: answers(hasty))
    pyslurm_serves(hasty, caplog)
    cluster.stop_slurmctld()
    for _ in range(2):
        with pytest.raises(SlurmUnavailable):
            hasty.observe()
    cluster.start_slurmctld()
    wait_for(lambda: answers(hasty))
    pyslurm_serves(hasty, caplog)
    assert hasty.jobs([first])[first].spec is not None


def answers(slurm: PyslurmClient) -> bool:
    try:
        return bool(slurm.observe().nodes)
    except SlurmUnavailable:
        return False


def pyslurm_serves(slurm: PyslurmClient, caplog: pytest.LogCaptureFixture) -> None:
    """Until a worker is asked again; answers until then are right."""

    def again() -> bool:
        answers(slurm)
        return any("read through pyslurm" in record.message for record in caplog.records)

    wait_for(again)
    caplog.clear()
