"""Measurements on GPU types and over racks reach the integer program.

Agents report through Postgres, polluxd decides, and the decision is replayed from Postgres.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from polluxd.apply.companions import gather
from polluxd.apply.paths import MoveRules
from polluxd.cycle.snapshot import ClusterFacts, build_snapshot
from polluxd.cycle.trusted_reports import Judged
from polluxd.model import JobSpec, Node
from polluxd.model.snapshot_json import decode_snapshot, encode
from polluxd.policy import decide
from polluxd.slurm.fake import FakeSlurm
from polluxd.store import JobTimes

pytestmark = pytest.mark.slurm

NODES = [
    *(Node(f"o{n}", 4, "t4", rack="left" if n < 2 else "right") for n in range(4)),
    Node("w0", 4, "a100", rack="right"),
]
SLOW = {
    "alpha_grad": 0.05, "beta_grad": 0.002, "alpha_local": 0.005, "beta_local": 0.0005, "alpha_node": 0.01,
    "beta_node": 0.001, "gamma": 2.0,
}  # fmt: skip
QUICK = SLOW | {"alpha_grad": 0.01, "beta_grad": 0.0004}
OVER_RACKS = {"alpha_rack": 2.0, "beta_rack": 0.1}


@pytest.fixture
def measure(agent, report):
    """Introduce a job's training on a GPU type and publish its fit there."""

    def measure(job_id, kind, params, *, fingerprint, attempt=0):
        agent(job_id, attempt=attempt).prior(fingerprint, kind)
        agent(job_id, attempt=attempt).publish(
            report(
                params=params,
                gpu_type=kind,
                explored_gpus=8,
                explored_nodes=2,
                limits={"initial": 64, "maximum": 16384, "local_min": 16, "local_max": 512},
                noise={"sqr": 1.0, "var": 30.0},
            )
        )

    return measure


def test_each_job_is_placed_on_the_type_and_in_the_rack_that_its_reports_speak_for(store, measure):
    slurm = FakeSlurm(NODES)
    fond, indifferent, wide = (
        slurm.submit(JobSpec(max_gpus=4), lease=600.0),
        slurm.submit(JobSpec(max_gpus=4), lease=600.0),
        slurm.submit(JobSpec(min_gpus=8, max_gpus=8), lease=600.0),
    )
    # An earlier run of the first one's training was five times as quick on the other type; the second one's was not.
    measure(901, "a100", QUICK, fingerprint="a" * 16)
    measure(902, "a100", SLOW, fingerprint="b" * 16)
    measure(fond, "t4", SLOW, fingerprint="a" * 16)
    measure(indifferent, "t4", SLOW, fingerprint="b" * 16)
    measure(wide, "t4", SLOW | OVER_RACKS, fingerprint="c" * 16)
    state = slurm.observe()
    snapshot = build_snapshot(
        ClusterFacts("any"),
        gather(state, {}),
        # Two hours old, or having to start again would count for more than where.
        replace(
            store.records(),
            times={job: JobTimes(state.taken_at - 7200.0) for job in (fond, indifferent, wide)},
        ),
        MoveRules(),
        Judged({}, {}, {}),
    )
    plan = decide(snapshot)
    assert plan.solver == "integer program"
    assert plan.of(fond).placement.nodes == ("w0",)
    assert plan.of(indifferent).placement.nodes[0].startswith("o")
    rack = {n.name: n.rack for n in NODES}
    held = plan.of(wide).placement
    assert held.gpus == 8
    assert len({rack[name] for name in held.nodes}) == 1
    assert "; in rack " in plan.of(wide).reason

    assert store.lead() is not None
    cycle = store.record_cycle(
        plan,
        mode="observe",
        durations={},
        started_at=time.time(),
        snapshot_json=lambda: json.dumps(encode(snapshot)),
    )
    assert decide(decode_snapshot(store.cycle_snapshot(cycle))) == plan
