"""Free GPUs go to the jobs that gain by them within a cycle."""

from __future__ import annotations

from polluxd.policy import decide
from polluxd.sim.cluster import Scenario
from polluxd.sim.daemon_engine import simulate_daemon
from polluxd.sim.workload import Submission


class Watched:
    """The daemon's policy; it notes for how long jobs are kept from GPUs."""

    def __init__(self):
        self.since, self.longest = {}, 0.0

    def decide(self, snapshot, *, cache):
        plan = decide(snapshot, cache=cache)
        free = sum(node.capacity for node in snapshot.nodes) - sum(a.placement.gpus for a in plan.allocations)
        kept = set()
        for a in plan.allocations:
            told = a.explanation
            needed = (told.next_gpus or 10**6) - a.placement.gpus
            # A larger placement on nodes that are free: nothing but its last move may keep the job from it.
            if needed <= free and told.limit in ("contention", "fragmentation", "stays"):
                kept.add(a.job_id)
        self.since = {j: self.since.get(j, snapshot.taken_at) for j in kept}
        self.longest = max([self.longest, *(snapshot.taken_at - at for at in self.since.values())])
        return plan


def test_no_gpu_stays_idle_for_more_than_a_cycle_while_a_job_could_use_it(apps):
    jobs = [
        Submission(f"job-{i}", 300.0 * i, ("vision-small", "speech")[i % 2], 1, (128, 20)[i % 2])
        for i in range(6)
    ]
    scenario = Scenario(nodes=3)
    watched = Watched()
    run = simulate_daemon(jobs, apps, scenario, decide=watched.decide)
    assert all(job.ended_at is not None for job in run.jobs)
    assert run.idle_seconds == 0.0, (
        "polluxd's own watch found idle GPUs beside a waiting job, without a reason"
    )
    # A move, its cooldown of no longer than the move, and the decision after.
    assert watched.longest <= 2 * scenario.restart_seconds + scenario.interval
