"""Figures by class of jobs: rigid jobs and jobs of replicas of a trace."""

from __future__ import annotations

from polluxd.sim.cluster import Scenario
from polluxd.sim.comparison import played
from polluxd.sim.generator import Trace, generate, stiffened
from polluxd.sim.measures import measure
from polluxd.sim.policies.pollux import Pollux


def test_rigid_jobs_and_replicas_are_classes_and_classes_add_up_to_the_whole(apps):
    jobs = generate(apps, 14, 0.6, cluster_gpus=16, seed=2)
    trace = Trace(rigid_share=0.25, rigid_gpus=8, replica_share=0.4, replica_gpus=8)
    mixed = stiffened(jobs, apps, trace, 2)
    rigid = [job for job in mixed if job.rigid]
    replicas = [job for job in mixed if job.gpu_counts == "multiples-of-8"]
    assert len(rigid) >= 2
    assert 2 <= len(replicas) <= len(jobs) - len(rigid) - 2
    assert {job.gpus for job in rigid} == {8}
    assert all(job.gpus % 8 == 0 for job in replicas)
    assert stiffened(jobs, apps, Trace(), 2) == jobs
    scenario = Scenario(nodes=4, users=3)
    found = measure(played(mixed, apps, Pollux(scenario), scenario), scenario)
    size = found["classes"]["size"]
    assert (size["rigid"]["jobs"], size["replicas"]["jobs"]) == (len(rigid), len(replicas))
    worst = found["finish_time_fairness"]["worst"]
    assert max(one["fairness_worst"] for one in size.values()) == worst
    for kind in found["classes"].values():
        assert sum(one["jobs"] for one in kind.values()) == len(jobs)
        mean = sum(one["jobs"] * one["avg_jct_s"] for one in kind.values()) / len(jobs)
        assert abs(mean - found["avg_jct_s"]) < 1e-6
