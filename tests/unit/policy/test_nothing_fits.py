"""Jobs that no cluster can hold, clusters that hold none, and claims that polluxd does not believe."""

from __future__ import annotations

from dataclasses import replace

from polluxd.model import JobSpec
from polluxd.policy import decide
from tests.build import job, nodes, report, snapshot


def test_one_job_larger_than_the_cluster_takes_nothing_from_the_others():
    jobs = [job(1, JobSpec(min_gpus=1000), report=report()), job(2, report=report(explored=4))]
    plan = decide(snapshot(nodes(2), jobs))
    assert "infeasible" in plan.of(1).reason
    assert plan.of(2).placement.gpus == 8


def test_no_nodes_no_jobs_no_gpus():
    assert decide(snapshot([], [])).allocations == ()
    for members in ((), nodes(2, gpus=0)):
        plan = decide(snapshot(members, [job(1, report=report()), job(2)]))
        assert not any(a.placement for a in plan.allocations)
        assert all("infeasible" in a.reason for a in plan.allocations)
        assert plan.gap == 0


def test_claims_that_polluxd_does_not_believe_are_told_with_the_reason():
    doubted = job(1, report=report(), doubts=("faster than it trains", "too short"))
    jobs = [doubted, replace(doubted, job_id=2, doubts=()), job(3, report=report())]
    plan = decide(snapshot(nodes(3), jobs))
    words = "polluxd does not believe these claims of its report"
    assert plan.of(1).reason.endswith(f"; {words}: faster than it trains, too short")
    assert plan.of(1).explanation.doubts == doubted.doubts
    assert all(words not in plan.of(n).reason for n in (2, 3))
