"""Fits on GPU types where a training was never measured.

Some tests run the cycle of a cluster with two GPU types.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from pollux.goodput import ThroughputParams
from polluxd.cycle.gpu_types import OPTIMISM, GpuTypes
from polluxd.model import NO_PLACEMENT, JobSpec, Node, Placement, Report, SnapshotJob
from polluxd.model.snapshot_json import decode_snapshot, encode
from polluxd.policy import decide
from polluxd.slurm.protocol import Geometry
from tests.unit.cycle.two_gpu_types import NODES, QUICK, REPORT, THETA, Cycle


def with_types(
    report: Report, placement: Placement, nodes: Mapping[str, Node], speeds: Mapping[str, float]
) -> Report:
    return GpuTypes(nodes.values(), speeds).known_to(report, placement)


def test_a_type_measured_on_one_gpu_takes_synchronisation_from_the_others():
    single = QUICK._replace(alpha_local=1e-8, beta_local=1e-8, alpha_node=1.1e-8, beta_node=1.1e-8)
    report = replace(REPORT, params_by_type={"a100": single})
    found = with_types(report, Placement(("n1",), 4), NODES, {}).params_by_type["a100"]
    assert found == QUICK
    # What was measured on the type itself stays: here, one node.
    within = QUICK._replace(alpha_local=0.02, beta_local=0.003, alpha_node=0.022, beta_node=0.0033)
    report = replace(REPORT, params_by_type={"a100": within})
    assert with_types(report, Placement(("n1",), 4), NODES, {}).params_by_type["a100"] == within


def test_a_type_with_a_speed_computes_as_much_faster() -> None:
    found = with_types(REPORT, NO_PLACEMENT, NODES, {"t4": 2.0, "a100": 5.0})
    assert found.params_by_type["t4"] == THETA == found.params
    there = found.params_by_type["a100"]
    assert (there.alpha_grad, there.beta_grad) == (pytest.approx(0.02), pytest.approx(0.0008))
    assert there[2:] == THETA[2:], "synchronising takes as long"
    assert found.assumed_types == {"a100"}


@pytest.mark.parametrize("speeds", [{}, {"a100": 5.0}, {"t4": 5.0}])
def test_a_type_of_unknown_speed_is_a_little_faster_than_the_best_measured(speeds: dict[str, float]) -> None:
    there = with_types(REPORT, NO_PLACEMENT, NODES, speeds).params_by_type["a100"]
    assert there.beta_grad == THETA.beta_grad / (1 + OPTIMISM)
    nodes = {**NODES, "n4": Node("n4", 4, "h100")}
    known = with_types(replace(REPORT, params_by_type={"a100": QUICK}), NO_PLACEMENT, nodes, speeds)
    assert known.params_by_type["h100"].beta_grad == QUICK.beta_grad / (1 + OPTIMISM)
    assert known.assumed_types == {"h100"}


@pytest.mark.parametrize(
    ("measured", "speeds", "slowest"),
    [
        ({}, {}, THETA.beta_grad),  # no hope that a mixture is faster than what is known
        ({"a100": QUICK}, {}, THETA.beta_grad),
        ({}, {"t4": 2.0, "a100": 1.0}, 2 * THETA.beta_grad),
    ],
)
def test_a_node_of_several_types_is_as_fast_as_the_slowest(
    measured: Mapping[str, ThroughputParams], speeds: Mapping[str, float], slowest: float
) -> None:
    nodes = {**NODES, "n4": Node("n4", 4, "a100+t4")}
    found = with_types(replace(REPORT, params_by_type=measured), NO_PLACEMENT, nodes, speeds)
    assert found.params_by_type["a100+t4"].beta_grad == pytest.approx(slowest)
    assert "a100+t4" in found.assumed_types


def test_what_earlier_runs_measured_stands() -> None:
    found = with_types(
        replace(REPORT, params_by_type={"a100": QUICK}), NO_PLACEMENT, NODES, {"t4": 1.0, "a100": 9.0}
    )
    assert found.params_by_type == {"t4": THETA, "a100": QUICK}
    assert found.assumed_types == frozenset()


def test_the_fit_belongs_to_the_type_that_the_job_holds_where_its_agent_does_not_say() -> None:
    for kind in ("", "NVIDIA A100-SXM4-40GB"):
        told = replace(REPORT, gpu_type=kind)
        assert with_types(told, Placement(("n3",), 2), NODES, {}).params_by_type["a100"] == THETA
        assert with_types(told, NO_PLACEMENT, NODES, {}) == told
        assert with_types(told, Placement(("n1", "n3"), 4), NODES, {}) == told


def test_nothing_is_assumed_of_one_type_or_of_no_fit() -> None:
    alike = {name: replace(n, gpu_type="t4") for name, n in NODES.items()}
    assert with_types(REPORT, NO_PLACEMENT, alike, {"t4": 1.0, "a100": 5.0}) == REPORT
    for params in (None, THETA._replace(beta_grad=math.nan), THETA._replace(alpha_grad=-1.0)):
        bare = replace(REPORT, params=params)
        assert with_types(bare, NO_PLACEMENT, NODES, {}) == bare


def test_the_cycle_of_two_types_is_decided_by_type() -> None:
    """The job that is quick on a100 gets the a100 node.

    Both trainings were measured on t4. One is known to be quick on a100, the other to gain nothing there. Its report
    alone cannot say that a job is quick on a type on which polluxd did not see it.
    """
    cycle = Cycle()
    first, second = (cycle.slurm.submit(JobSpec(max_gpus=4), lease=1e6) for _ in range(2))
    cycle.rows.reports[first] = replace(REPORT, params_by_type={"a100": QUICK})
    cycle.rows.reports[second] = replace(REPORT, params_by_type={"a100": THETA})
    snapshot, _ = cycle.step()
    assert [job.report.assumed_types for job in snapshot.jobs] == [frozenset({"a100"}), frozenset()]
    known = {first: QUICK, second: THETA}

    def measured(job: SnapshotJob) -> SnapshotJob:
        fits = {"t4": THETA, "a100": known[job.job_id]}
        return replace(job, report=replace(job.report, params_by_type=fits, assumed_types=frozenset()))

    snapshot = replace(snapshot, jobs=tuple(map(measured, snapshot.jobs)))
    plan = decide(snapshot)
    assert plan.solver == "integer program"
    assert plan.of(first).placement.nodes == ("n3",)
    assert set(plan.of(second).placement.nodes) <= {"n1", "n2"}
    assert "assumed" not in plan.of(first).reason
    stored = decode_snapshot(json.loads(json.dumps(encode(snapshot))))
    assert stored == snapshot
    assert decide(stored) == plan


def test_the_cycle_scales_by_the_configured_speeds_and_says_so() -> None:
    cycle = Cycle(gpu_speeds={"t4": 1.0, "a100": 5.0})
    only = cycle.slurm.submit(JobSpec(max_gpus=4), lease=1e6)
    cycle.rows.reports[only] = REPORT
    snapshot, plan = cycle.step()
    assert plan.solver == "integer program"
    assert plan.of(only).placement.nodes == ("n3",)
    assert plan.of(only).reason.split("; ")[2] == "its speed on a100 is assumed, not measured"
    assert snapshot.jobs[0].report.assumed_types == {"a100"}
    slower = Cycle(gpu_speeds={"t4": 5.0, "a100": 1.0})
    only = slower.slurm.submit(JobSpec(max_gpus=4), lease=1e6)
    slower.rows.reports[only] = REPORT
    assert set(slower.step()[1].of(only).placement.nodes) <= {"n1", "n2"}


def test_an_unknown_type_is_tried_once_and_left_when_it_disappoints() -> None:
    cycle = Cycle()
    only = cycle.slurm.submit(JobSpec(max_gpus=4), lease=1e6)
    cycle.rows.reports[only] = REPORT
    assert cycle.step()[1].of(only).placement.nodes == ("n3",)
    slow = THETA._replace(alpha_grad=0.2, beta_grad=0.01)
    cycle.rows.reports[only] = replace(
        REPORT, params=slow, gpu_type="a100", params_by_type={"t4": THETA, "a100": slow}
    )
    plan = cycle.step()[1]
    assert set(plan.of(only).placement.nodes) <= {"n1", "n2"}
    assert "its speed on t4 is assumed" in plan.of(only).reason, "polluxd saw no progress on t4"


def test_a_job_whose_measurements_are_forgotten_does_not_go_to_and_fro() -> None:
    """A job that forgets its measurements at each move moves only once.

    The agent knows no fingerprint: on either GPU type, the other type is unknown again.
    """
    cycle = Cycle()
    job = cycle.slurm.submit(JobSpec(max_gpus=4), lease=1e6)
    cycle.slurm.configure(job, Geometry(("n1",), 4, 4), start=True)
    cycle.slurm.advance(3600.0)
    trip = []
    for moves, (here, kind) in enumerate((("n1", "t4"), ("n3", "a100"))):
        cycle.rows.reports[job] = replace(REPORT, gpu_type=kind, first_step_at=1.0)
        snapshot, _ = cycle.step()
        (seen,) = snapshot.jobs
        told = GpuTypes(snapshot.nodes, {}).known_to(cycle.rows.reports[job], seen.placement, moves=moves)
        held = replace(seen, placement=Placement((here,), 4), report=told, pinned=False, pin_reason="")
        trip.append(decide(replace(snapshot, jobs=(held,))).of(job).changed)
    assert trip == [True, False]
