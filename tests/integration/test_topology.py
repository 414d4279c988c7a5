"""Racks from a real Slurm with topology/tree, up to the placement."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster, SiteLines
from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from polluxd.apply.companions import gather
from polluxd.apply.paths import MoveRules
from polluxd.cycle.snapshot import ClusterFacts, build_snapshot
from polluxd.cycle.trusted_reports import Judged
from polluxd.model import JobSpec, Report
from polluxd.policy import decide
from polluxd.slurm.fake import FakeSlurm
from polluxd.slurm.protocol import ClusterState
from polluxd.slurm.scontrol import ScontrolClient
from polluxd.store import CycleRecords

pytestmark = pytest.mark.slurm

TOPOLOGY = "SwitchName=left Nodes=n[1,4]\nSwitchName=right Nodes=n[2-3]\nSwitchName=top Switches=left,right\n"


@pytest.fixture
def racked(scratch: Path) -> Iterator[DevCluster]:
    site = SiteLines(lines=("TopologyPlugin=topology/tree",), files={"topology.conf": TOPOLOGY})
    with DevCluster(scratch / "racked", postgres=False, lease_s=60, site=site) as cluster:
        yield cluster


def test_a_job_of_two_nodes_is_placed_in_one_rack_of_slurms(racked: DevCluster) -> None:
    seen = ScontrolClient(conf=racked.slurm_conf).observe()
    assert {n.name: n.rack for n in seen.nodes} == {"n1": "left", "n2": "right", "n3": "right", "n4": "left"}

    waiting = FakeSlurm(seen.nodes, now=seen.taken_at)
    job = waiting.submit(JobSpec(min_gpus=8, max_gpus=8), lease=600.0)
    theta = ThroughputParams(0.05, 0.002, 0.005, 0.0005, 0.01, 0.001, 2.0, 5.0, 0.1)
    report = Report(0, 0.0, BatchLimits(64, 16384, 16, 512), theta, NoiseScale(1.0, 30.0), explored_gpus=8)
    snapshot = build_snapshot(
        ClusterFacts(racked.cluster_name),
        gather(ClusterState(seen.taken_at, seen.nodes, waiting.observe().jobs), {}),
        CycleRecords(reports={job: report}),
        MoveRules(),
        Judged({}, {}, {}),
    )
    plan = decide(snapshot)
    assert set(plan.of(job).placement.nodes) in ({"n1", "n4"}, {"n2", "n3"})
    assert "; in rack " in plan.of(job).reason
