"""What rented nodes cost, counted from the states in which Slurm shows them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.config.settings import PolicySettings
from polluxd.cycle.spending import LONGEST_GAP_S, Spending
from polluxd.model import JobSpec, Move, Node, Placement, Step
from polluxd.slurm.protocol import ClusterState, SlurmJob
from tests.build import slurm_job
from tests.unit.cycle.two_gpu_types import Cycle

START = 1_800_000_000.0
PRICED = PolicySettings(cloud_prices={"big": 3.6}, cloud_return_s=0.0)
OFF, BOOTS, ON = (Node("c1", 4, features=frozenset({"big"}), power=p) for p in ("off", "booting", "on"))


def counted(*looks: tuple[float, tuple[Node, ...], tuple[SlurmJob, ...]], spending: Spending | None = None):
    spending = spending or Spending()
    for at, nodes, jobs in looks:
        spending.observe(ClusterState(START + at, nodes, jobs), PRICED)
    rows = spending.rows(None)
    spending.written()
    return {(r["type"], r["account"], r["job_id"]): (r["node_seconds"], r["cost"]) for r in rows if r["type"]}


def test_a_node_costs_from_its_boot_to_its_end_whoever_is_on_it() -> None:
    job = slurm_job(7, at=Placement(("c1",), 4))
    looks = [
        (0, OFF, ()),
        (10, BOOTS, (job,)),
        (40, ON, (job,)),
        (100, ON, ()),
        (130, OFF, ()),
        (200, OFF, ()),
    ]
    found = counted(*((at, (node,), jobs) for at, node, jobs in looks))
    assert found == {
        ("big", "lab", 7): (90.0, pytest.approx(0.09)),
        ("big", "", 0): (30.0, pytest.approx(0.03)),
    }


def test_jobs_share_a_node_by_their_gpus_and_plain_jobs_pay_too() -> None:
    ours = slurm_job(1, at=Placement(("c1",), 3))
    plain = slurm_job(2, at=Placement(("c1",), 1), account="other", spec=None)
    found = counted((0, (ON,), (ours, plain)), (100, (ON,), (ours, plain)))
    assert {job: cost for (_, _, job), (_, cost) in found.items()} == {
        1: pytest.approx(0.075),
        2: pytest.approx(0.025),
    }
    no_gpus = [slurm_job(n, spec=None, nodes=("c1",)) for n in (3, 4)]
    found = counted((0, (ON,), tuple(no_gpus)), (100, (ON,), tuple(no_gpus)))
    assert [cost for _, cost in found.values()] == [pytest.approx(0.05)] * 2


def test_own_nodes_cost_nothing() -> None:
    assert counted((0, (Node("n1", 4),), ()), (100, (Node("n1", 4),), ())) == {}


@pytest.mark.parametrize(("away", "cost"), [(600.0, 0.6), (LONGEST_GAP_S + 1, 0.0)])
def test_the_time_for_which_no_polluxd_looked_counts_up_to_an_hour(away: float, cost: float) -> None:
    spending = Spending()
    spending.observe(ClusterState(START, (ON,), ()), PRICED)
    assert sum(row["cost"] for row in spending.rows(START - away)) == pytest.approx(cost)
    spending.written()
    spending.observe(ClusterState(START + 10.0, (ON,), ()), PRICED)
    assert sum(row["cost"] for row in spending.rows(START)) == pytest.approx(0.01)


def test_what_another_leader_has_counted_is_not_counted_again() -> None:
    spending = Spending()
    assert counted((0, (ON,), ()), (10, (ON,), ()), spending=spending)
    spending.observe(ClusterState(START + 500.0, (ON,), ()), PRICED)
    assert sum(row["cost"] for row in spending.rows(START + 490.0)) == pytest.approx(0.01)


def test_each_decision_writes_what_was_counted_and_knows_what_was_spent() -> None:
    cycle = Cycle()
    cycle.rows.settings = {"cloud_prices": {cycle.slurm.observe().nodes[0].gpu_type: 3.6}}
    cycle.slurm.submit(JobSpec(max_gpus=4), lease=1e6)
    for _ in range(3):
        snapshot, _ = cycle.step()
    assert sum(row["cost"] for row in cycle.rows.rentals) > 0
    assert sum(snapshot.spent.month.values()) == pytest.approx(sum(row["cost"] for row in cycle.rows.rentals))
    before = len(cycle.rows.rentals)
    cycle.rows.settings = {}
    snapshot, _ = cycle.step()
    assert (len(cycle.rows.rentals), snapshot.spent) == (before, None)


def test_the_return_of_a_node_is_on_the_bill_of_those_who_were_last_on_it() -> None:
    job, spending, cost = slurm_job(7, at=Placement(("c1",), 4)), Spending(), {}
    settings = replace(PRICED, cloud_return_s=60.0)
    for at, jobs in ((0, (job,)), (10, ()), (40, ()), (70, ()), (100, ())):
        spending.observe(ClusterState(START + at, (ON,), jobs), settings)
    cost = {row["job_id"]: row["cost"] for row in spending.rows(None)}
    assert cost == {7: pytest.approx(0.07), 0: pytest.approx(0.03)}


def test_a_node_is_on_the_bill_of_the_job_that_got_it_and_was_never_seen_there() -> None:
    """Its user cancels it once its node boots. The node may be on since another job's time."""
    job, spending, settings = slurm_job(7), Spending(), replace(PRICED, cloud_return_s=60.0)
    move = Move(1, 7, 0, "start", Placement(), Placement(("c1", "n1"), 4), "", Step.PLANNED, {})
    spending.observe(ClusterState(START, (OFF,), (job,)), settings)
    spending.give([move], [job])
    for at, node in ((5, OFF), (10, BOOTS), (30, ON), (70, ON), (80, ON), (90, OFF), (100, ON), (110, ON)):
        spending.observe(ClusterState(START + at, (node,), ()), settings)
    cost = {row["job_id"]: row["cost"] for row in spending.rows(None)}
    assert cost == {7: pytest.approx(0.06), 0: pytest.approx(0.03)}, "once, with its return"
    spending.written()
    spending.give([move], [job])
    for at in (120, 130):
        spending.observe(ClusterState(START + at, (ON,), ()), settings)
    assert {row["job_id"]: row["cost"] for row in spending.rows(None)} == {7: 0.01, 0: pytest.approx(0.01)}


def test_the_time_that_jobs_save_counts_wherever_they_are() -> None:
    spending = Spending()
    spending.sooner = {7: 0.5, 8: -0.25}
    jobs = slurm_job(7, at=Placement(("c1",), 4)), slurm_job(8, at=Placement(("n1",), 4))
    for at in (0, 100):
        spending.observe(ClusterState(START + at, (ON, Node("n1", 4)), jobs), PRICED)
    saved = {(row["type"], row["job_id"]): row["saved_seconds"] for row in spending.rows(None)}
    assert saved == {("big", 7): 50.0, ("", 8): -25.0, ("", 0): 0.0}
