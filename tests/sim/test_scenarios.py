"""Clusters whose nodes are not all alike: GPU types, racks, rented nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from polluxd.errors import ConfigError
from polluxd.policy import decide
from polluxd.sim.applications import TYPICAL_SPEEDS, on_type
from polluxd.sim.cluster import Cloud, Knowledge, NodeGroup, Scenario
from polluxd.sim.comparison import played
from polluxd.sim.daemon_engine import simulate_daemon
from polluxd.sim.measures import measure
from polluxd.sim.policies import POLICIES
from polluxd.sim.profiles import load_profiles
from polluxd.sim.workload import Submission

MIXED = Scenario(groups=(NodeGroup("t4", 2, 4), NodeGroup("a100", 2, 4)))


def test_groups_say_what_the_nodes_are():
    scenario = Scenario(groups=(NodeGroup("a100", 4, 8), NodeGroup("t4", 2, 4, 0.5)))
    assert (scenario.nodes, scenario.gpus, scenario.gpus_per_node) == (6, 40, 8)
    assert Counter(scenario.types) == {"a100": 4, "t4": 2}


def test_a_type_has_its_own_times_or_a_stated_speed(apps, tmp_path):
    app = apps["language-tuning"]
    step, sync = app.times((4,), 8)
    quick = on_type(app, "a100").times((4,), 8)
    assert quick[0] < step / 3
    there, wait = on_type(app, "unheard-of", 2.0).times((4,), 8)
    assert there - wait == pytest.approx((step - sync) / 2)
    assert wait == sync
    folder = tmp_path / "toy"
    (folder / "h100").mkdir(parents=True)
    times = "placement,local_bsz,step_time,sync_time\n1,8,{},0.0\n1,16,{},0.0\n"
    spread = "num_nodes,num_replicas,local_bsz,step_time,sync_time\n"
    (folder / "placements.csv").write_text(times.format(1.0, 2.0))
    (folder / "scalability.csv").write_text(spread)
    (folder / "h100" / "placements.csv").write_text(times.format(0.1, 0.2))
    (folder / "h100" / "scalability.csv").write_text(spread)
    (folder / "validation-16.csv").write_text("progress,iteration,grad_sqr,grad_var\n10,10,2.0,2.0\n")
    toy = load_profiles(tmp_path)["toy"]
    assert on_type(toy, "h100").times((1,), 12) == pytest.approx((0.15, 0.0))
    assert toy.on("t4") is None


def test_a_calibrated_application_takes_so_much_longer_and_restarts_cost_what_is_said(apps):
    trace = [Submission("a", 0.0, "vision-small", 1, 128)]

    def lone(**known):
        scenario = Scenario(nodes=1, interval=1.0, **known)
        (job,) = played(trace, apps, POLICIES["fifo"](scenario), scenario).jobs
        return job.ended_at - job.trains_at, job.trains_at - job.started_at

    seconds, _ = lone()
    longer, own = lone(step_factors={"vision-small": 1.5}, restarts={"vision-small": 80.0})
    assert longer == pytest.approx(1.5 * seconds)
    assert own == 80.0
    assert lone(step_factors={"speech": 9.0}, restarts={"speech": 9.0}) == (seconds, 30.0)


@pytest.mark.parametrize(("told", "ratio"), [(True, TYPICAL_SPEEDS["a100"]), (False, 1.1)])
def test_polluxd_knows_a_type_before_a_job_was_measured_there(apps, told, ratio):
    seen = []

    def watched(snapshot, *, cache):
        seen.extend(
            job.report for job in snapshot.jobs if job.report is not None and job.report.params is not None
        )
        return decide(snapshot, cache=cache)

    scenario = replace(MIXED, pollux=Knowledge(gpu_speeds=told))
    simulate_daemon([Submission("a", 0.0, "vision-small", 1, 128)], apps, scenario, decide=watched)
    first = seen[0]
    (unseen,) = first.assumed_types
    here, there = first.params_by_type[first.gpu_type], first.params_by_type[unseen]
    expected = ratio if unseen == "a100" or not told else 1.0 / ratio
    assert here.beta_grad / there.beta_grad == pytest.approx(expected)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_ends_a_trace_on_several_types(name, burst, apps):
    run = played(burst, apps, POLICIES[name](MIXED), MIXED)
    found = measure(run, MIXED)
    assert all(job.ended_at is not None for job in run.jobs)
    assert found["finish_time_fairness"]["mean"] > 0


@pytest.mark.parametrize("name", ["sia", "gavel"])
def test_policies_that_know_types_keep_each_job_to_one_at_a_time(name, burst, apps):
    policy = POLICIES[name](MIXED)
    kinds = []
    decide = policy.decide

    def watched(view):
        found = decide(view)
        kinds.extend(len({MIXED.types[node] for node, _ in seats}) for seats in found.values() if seats)
        return found

    policy.decide = watched
    played(burst, apps, policy, MIXED)
    assert set(kinds) == {1}


def test_polluxd_keeps_each_job_to_one_type_at_a_time(burst, apps):
    kinds = []

    def watched(snapshot, *, cache):
        plan = decide(snapshot, cache=cache)
        types = {node.name: node.gpu_type for node in snapshot.nodes}
        kinds.extend(len({types[n] for n in a.placement.nodes}) for a in plan.allocations if a.placement)
        return plan

    simulate_daemon(burst, apps, MIXED, decide=watched)
    assert set(kinds) == {1}


def test_gavel_refuses_a_job_that_no_type_can_hold(apps):
    wide = [Submission("wide", 0.0, "vision-small", 12, 1536)]
    with pytest.raises(ConfigError, match="job wide asks for 12 GPUs, and no GPU type has more than 8"):
        played(wide, apps, POLICIES["gavel"](MIXED), MIXED)


def test_a_faster_type_shortens_the_trace(burst, apps):
    slow = Scenario(groups=(NodeGroup("t4", 4, 4),))
    means = [measure(played(burst, apps, POLICIES["gavel"](s), s), s)["avg_jct_s"] for s in (slow, MIXED)]
    assert means[1] < 0.9 * means[0]


def test_synchronising_over_racks_takes_longer(apps):
    wide = [Submission("wide", 0.0, "vision-small", 8, 1024)]
    one, two = (
        played(wide, apps, POLICIES["fifo"](s), s).jobs[0].ended_at
        for s in (Scenario(nodes=2), Scenario(nodes=2, nodes_per_rack=1, rack_slowdown=3.0))
    )
    assert two > 1.2 * one


def test_pollux_learns_of_racks(burst, apps):
    racked = Scenario(nodes=4, nodes_per_rack=2, rack_slowdown=2.0)
    run = played(burst, apps, POLICIES["pollux"](racked), racked)
    assert all(job.ended_at is not None for job in run.jobs)


def test_rented_nodes_follow_the_use_that_is_made_of_them(burst, apps):
    fixed = Scenario(nodes=8, cloud=Cloud(1, 8, price=2.0))
    ours = measure(played(burst, apps, POLICIES["pollux-paper"](fixed), fixed), fixed)
    theirs = measure(played(burst, apps, POLICIES["fifo"](fixed), fixed), fixed)
    assert ours["cost"] == pytest.approx(2.0 * ours["node_hours"])
    assert theirs["node_hours"] == pytest.approx(8 * theirs["makespan_s"] / 3600, rel=0.05)
    assert ours["node_hours"] < 0.8 * theirs["node_hours"]
    slow = replace(fixed, cloud=replace(fixed.cloud, boot_seconds=1800.0))
    later = measure(played(burst, apps, POLICIES["pollux-paper"](slow), slow), slow)
    assert later["avg_jct_s"] > ours["avg_jct_s"], "what has to boot is not there at once"


def test_the_papers_rule_may_begin_without_a_node(burst, apps):
    none = Scenario(nodes=4, cloud=Cloud(0, 4))
    run = played(burst, apps, POLICIES["pollux-paper"](none), none)
    assert all(job.started_at >= job.submission.time + 120.0 for job in run.jobs[:1])
    assert run.node_seconds < 4 * max(job.ended_at for job in run.jobs)
