"""Whether Slurm would start a job: partitions, reservations, refusals."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from polluxd.apply.startable import Eligibility, combined, eligibility, forbids, refused
from polluxd.model import JobState, Move, Placement, Step
from polluxd.slurm.demands import Demands
from polluxd.slurm.protocol import ClusterState, SlurmJob
from polluxd.slurm.rules import Partition, Reservation, Rules
from tests.build import move as build_move
from tests.unit.apply.four_nodes import ALL, HOUR, MAIN, NODES, NOW, job

MAINTENANCE = Reservation("maint", NOW + HOUR / 2, NOW + 2 * HOUR, ALL)


def cluster(rules: Rules, *jobs: SlurmJob) -> ClusterState:
    return ClusterState(NOW, NODES, jobs, rules=rules)


def move(path: str, source: Placement, target: Placement, step: Step = Step.PLANNED) -> Move:
    return build_move(path, source, target, step, {Step.PLANNED: NOW}, id=5, job_id=1)


HERE, THERE = Placement(("n1",), 4), Placement(("n2",), 4)


def test_without_a_rule_every_job_may_start_anywhere() -> None:
    assert eligibility(cluster(Rules(MAIN), job(), job(2, JobState.PENDING))) == {}
    assert eligibility(cluster(Rules(), job())) == {}, "partitions are not known: as before"


@pytest.mark.parametrize("state", ["DOWN", "INACTIVE", "not understood"])
def test_a_closed_partition_starts_no_job(state: str) -> None:
    rules = Rules({"main": replace(MAIN["main"], state=state)})
    found = eligibility(cluster(rules, job(), job(2, JobState.PENDING)))
    assert {i: s.nodes for i, s in found.items()} == {1: frozenset(), 2: frozenset()}
    assert f"partition main is {state}" in found[1].rule
    others = job(3, spec=None), job(4, JobState.COMPLETED)
    assert set(eligibility(cluster(rules, *others, job()))) == {1}, (
        "jobs of others are none of polluxd's business"
    )
    assert eligibility(cluster(Rules({"main": replace(MAIN["main"], state="DRAIN")}), job())) == {}


def test_a_job_of_two_partitions_starts_in_the_one_that_is_up() -> None:
    debug = Partition("debug", "UP", frozenset({"n4"}))
    rules = Rules({"main": replace(MAIN["main"], state="DOWN"), "debug": debug})
    assert eligibility(cluster(rules, job(partition="main,debug")))[1].nodes == {"n4"}


def test_a_reservation_forbids_jobs_that_would_run_into_it() -> None:
    rules = Rules(MAIN, (MAINTENANCE,))
    short, long = job(2, JobState.PENDING, limit=600.0), job(3, JobState.PENDING)
    endless = job(4, JobState.PENDING, limit=None)
    found = eligibility(cluster(rules, job(), short, long, endless))
    assert set(found) == {1, 3, 4}
    assert not found[1].nodes
    assert "reservation maint begins on 2027-01-15 at 08:30 UTC" in found[1].rule
    half = Rules(MAIN, (replace(MAINTENANCE, nodes=frozenset({"n1", "n2"})),))
    assert eligibility(cluster(half, long))[3].nodes == {"n3", "n4"}
    # It has run for 115 of 120 minutes: the remaining 5 count.
    almost_done = job(start_time=NOW - 115 * 60)
    assert eligibility(cluster(rules, almost_done)) == {}


def test_a_reservation_elsewhere_or_over_forbids_nothing() -> None:
    other = replace(MAINTENANCE, nodes=frozenset({"elsewhere"}))
    past = replace(MAINTENANCE, start=NOW - HOUR, end=NOW - 60)
    assert eligibility(cluster(Rules(MAIN, (other, past)), job())) == {}
    senseless = Reservation("?", 0.0, inf, None)
    assert not eligibility(cluster(Rules(MAIN, (senseless,)), job()))[1].nodes


def test_a_recurring_reservation_comes_again() -> None:
    daily = Reservation("daily", NOW - 3 * HOUR, NOW - 2 * HOUR, ALL, 24 * HOUR)
    assert daily.meets(NOW, NOW + 22 * HOUR)
    assert not daily.meets(NOW, NOW + 20 * HOUR)
    assert not daily.meets(NOW - 2 * HOUR, NOW)
    assert daily.meets(NOW + 21.5 * HOUR, NOW + 21.6 * HOUR)
    assert daily.meets(NOW, inf)


def test_which_moves_a_rule_forbids() -> None:
    eligible = eligibility(cluster(Rules(MAIN, (replace(MAINTENANCE, nodes=frozenset({"n2"})),)), job()))[1]
    assert forbids(eligible, move("requeue", HERE, THERE)) == eligible.rule
    assert forbids(eligible, move("requeue", THERE, HERE)) == ""
    assert forbids(eligible, move("park", HERE, Placement())) == "", "it can start elsewhere"
    assert forbids(None, move("requeue", HERE, THERE)) == ""
    both = Placement(("n1", "n2"), 4)
    assert forbids(eligible, move("resize", HERE, both)) == eligible.rule
    assert forbids(eligible, move("resize", both, HERE)) == ""
    down = eligibility(cluster(Rules({"main": replace(MAIN["main"], state="DOWN")}), job()))[1]
    assert forbids(down, move("park", HERE, Placement())) == down.rule


@pytest.mark.parametrize(
    ("reason", "is_one"),
    [
        ("PartitionDown", True),
        ("PartitionInactive", True),
        ("ReqNodeNotAvail,_Reserved_for_maintenance", True),
        ("AssocGrpGRES", True),
        ("AssocMaxJobsLimit", True),
        ("QOSMaxGRESPerUser", True),
        ("MaxGRESPerAccount", True),
        ("Licenses", True),
        ("Reservation", True),
        ("Resources", False),
        ("Priority", False),
        ("BeginTime", False),
        ("ReqNodeNotAvail", False),
        ("None", False),
    ],
)
def test_reasons(reason: str, is_one: bool) -> None:
    assert refused(reason, free=False) is is_one


def place(**demands: object) -> Eligibility | None:
    """Where a waiting job with these demands may start."""
    nodes = (
        replace(NODES[0], features=frozenset({"ib"}), rack="r1"),
        replace(NODES[1], rack="r1"),
        replace(NODES[2], rack="r2", foreign_cpus=2),
        replace(NODES[3], rack="r3", gpu_type="h100"),
    )
    shown = job(1, JobState.PENDING, limit=600.0, demands=Demands(**demands))
    course = Reservation("course", NOW - 60, NOW + HOUR, frozenset({"n2"}), users=frozenset({"-bea"}))
    closed = replace(course, name="closed", nodes=frozenset(), users=frozenset({"bea"}))
    rules = Rules(MAIN, (course, closed))
    return eligibility(ClusterState(NOW, nodes, (shown,), rules=rules)).get(1)


@pytest.mark.parametrize(
    ("demands", "nodes", "rule"),
    [
        ({"constraint": "ib"}, {"n1"}, "--constraint=ib of the job leaves nodes out"),
        ({"nodelist": frozenset({"n1", "n2"})}, {"n1"}, "--nodelist"),
        ({"exclude": frozenset({"n1"})}, {"n3", "n4"}, "--exclude"),
        ({"exclusive": True}, {"n1", "n4"}, "--exclusive"),
        ({"gpu_types": frozenset({"h100"})}, {"n4"}, "gpu-types=h100"),
        ({"reservation": "course"}, {"n2"}, "--reservation=course"),
        ({"reservation": "closed"}, set(), "closed, which the job asks for, is not active for its user"),
        ({"reservation": "gone"}, set(), "reservation gone, which the job asks for, is not active"),
        ({"switches": 1}, {"n4"}, "--switches=1 of the job keeps it to r3"),
    ],
)
def test_options_of_a_job_leave_nodes_out(demands: dict[str, object], nodes: set[str], rule: str) -> None:
    eligible = place(**demands)
    assert eligible.nodes == nodes
    assert rule in eligible.rule


def test_options_offer_no_node_outside_of_the_partition() -> None:
    shown = job(1, JobState.PENDING, partition="small", demands=Demands(exclude=frozenset({"n2"})))
    rules = Rules({"small": Partition("small", "UP", frozenset({"n1", "n2"}))})
    eligible = eligibility(ClusterState(NOW, NODES, (shown,), rules=rules))[1]
    assert eligible.nodes == {"n1"}


def test_a_job_without_a_reservation_stays_out_of_it() -> None:
    eligible = place()
    assert eligible.nodes == {"n1", "n3", "n4"}
    assert hash(eligible), "snapshots tell eligibility apart by their hash"


def test_a_node_must_be_allowed_by_every_rule_that_limits_the_job() -> None:
    reserved = {1: Eligibility(frozenset({"n1", "n2"}), "reservation maint begins")}
    limited = {1: Eligibility(frozenset({"n2", "n3"}), "--exclude"), 2: Eligibility(frozenset(), "QOS night")}
    refused = {2: Eligibility(frozenset(ALL), "tried again in 5 s")}

    assert combined(reserved, limited, refused) == {
        1: Eligibility(frozenset({"n2"}), "reservation maint begins; --exclude"),
        2: Eligibility(frozenset(), "QOS night; tried again in 5 s"),
    }
    assert combined() == {}


def test_a_rule_repeats_no_more_than_200_characters() -> None:
    short, long = Eligibility(frozenset(), "r" * 200), Eligibility(frozenset(), "r" * 201)
    assert short.rule == "r" * 200
    assert long.rule == "r" * 197 + "..."
    assert len(combined({1: short}, {1: long})[1].rule) == 200
