"""Nodes of the fake Slurm boot for a job, and go off without one."""

from __future__ import annotations

import pytest

from polluxd.model import JobState, Node
from polluxd.slurm.fake import FakeSlurm
from polluxd.slurm.fake.fake_power import PowerSaving

BOOT_S, IDLE_S = 60.0, 300.0


@pytest.fixture
def slurm():
    nodes = [Node("n1", gpus=4), *(Node(name, gpus=4, power="off") for name in ("n2", "n3"))]
    return FakeSlurm(nodes, now=0.0, saving=PowerSaving(BOOT_S, IDLE_S))


def power(slurm):
    return [node.power for node in slurm.observe().nodes]


def test_a_job_is_configuring_until_all_its_nodes_are_up(slurm):
    wide = slurm.submit(nodes=2, gpus_per_node=4, runtime=100.0)
    slurm.advance(2.0)
    shown = slurm.truth(wide)
    assert (shown.state, shown.raw_state, shown.nodes) == (JobState.RUNNING, "CONFIGURING", ("n1", "n2"))
    assert power(slurm) == ["on", "booting", "off"]
    slurm.advance(BOOT_S)
    shown = slurm.truth(wide)
    assert shown.raw_state == "RUNNING"
    assert shown.start_time == pytest.approx(BOOT_S, abs=1.0), (
        "Slurm sets the start time when the nodes are up"
    )
    slurm.advance(97.0)
    assert slurm.truth(wide).state is JobState.RUNNING, "the time of the boot is not the job's"
    slurm.advance(4.0)
    assert slurm.truth(wide).state is JobState.COMPLETED


def test_a_node_is_off_after_its_idle_time_and_the_own_node_stays(slurm):
    job = slurm.submit(nodes=2, gpus_per_node=4, runtime=10.0)
    slurm.advance(BOOT_S + 12.0)
    assert slurm.truth(job).state is JobState.COMPLETED
    slurm.advance(IDLE_S - 10.0)
    assert power(slurm) == ["on", "on", "off"]
    again = slurm.submit(nodes=2, gpus_per_node=4, runtime=10.0)
    slurm.advance(2.0)
    assert slurm.truth(again).raw_state == "RUNNING", "the node is still on"
    slurm.advance(IDLE_S + 12.0)
    assert power(slurm) == ["on", "off", "off"]


def test_a_job_that_leaves_during_the_boot_does_not_keep_the_node_on(slurm):
    job = slurm.submit(nodes=2, gpus_per_node=4)
    slurm.advance(2.0)
    slurm.finish(job, JobState.CANCELLED)
    slurm.advance(BOOT_S)
    assert power(slurm) == ["on", "on", "off"]
    slurm.advance(IDLE_S)
    assert power(slurm) == ["on", "off", "off"]


def test_time_is_counted_for_nodes_that_are_on_or_boot():
    saving = PowerSaving(BOOT_S, IDLE_S)
    slurm = FakeSlurm([Node("n1", gpus=4), Node("n2", gpus=4, power="off")], now=0.0, saving=saving)
    slurm.submit(nodes=2, gpus_per_node=4, runtime=40.0)
    slurm.advance(1000.0)
    assert saving.node_seconds == pytest.approx(1000.0 + BOOT_S + 40.0 + IDLE_S, abs=2.0)
