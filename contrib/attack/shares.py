"""Attacks on the shares of others: priorities and waiting times."""

from __future__ import annotations

import time
from dataclasses import replace

from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site
from pollux.parameters import BatchLimits
from polluxd.apply.refused.refusals import Refusals
from polluxd.cycle.snapshot import WaitingTimes
from polluxd.model import NO_PLACEMENT, Move, Node, Placement, Report, Snapshot, SnapshotJob, Step
from polluxd.policy.owners import divided
from polluxd.slurm.priority import priority_weights
from polluxd.store import JobTimes


def _later(site: Site, user: str, *options: str) -> int:
    script = site.script(f"later-{user}.sh", "#POLLUX min-gpus=1")
    return site.submit(user, script, "--gres=gpu:1", *options)


@attack("mallory", "further: many jobs of low priority, which make his others count as much as alice's")
def shifted_median(site: Site) -> Outcome:
    """Fair share gave alice ten times his priority; users may lower their own."""
    hers, his = (_later(site, user, "--begin=now+600") for user in ("alice", "mallory"))
    for job_id, priority in ((hers, 10_000), (his, 1_000)):
        site.cluster.command("scontrol", "update", f"JobId={job_id}", f"Priority={priority}")
    low = [_later(site, "mallory", "--begin=now+600") for _ in range(4)]
    for job_id in low:
        words = ("scontrol", "update", f"JobId={job_id}", "Priority=1")
        if site.run("mallory", *words).returncode != 0:
            site.cluster.command(*words)  # as --nice does under priority/multifactor
    jobs = [job for job in site.slurm.observe().jobs if job.job_id in (hers, his, *low)]
    weights = priority_weights(jobs, 1.0)
    return Outcome(
        weights[his] >= weights[hers],
        f"priorities {sorted(job.priority for job in jobs)}; his weight {weights[his]:.2f}, hers {weights[hers]:.2f}",
    )


@attack("mallory", "further: jobs that wait on hold until they go before all others")
def waited_on_hold(site: Site) -> Outcome:
    """Who waits long counts for more; a job on hold asks for nothing."""
    job_id = _later(site, "mallory", "--hold")
    waiting = WaitingTimes()

    def waited() -> float:
        state = site.slurm.observe()
        times = {job.job_id: JobTimes(job.submit_time) for job in state.jobs}
        times = waiting.corrected(state.jobs, times, state.taken_at)
        mine = times[job_id]
        return state.taken_at - (mine.submitted_at if mine.held_at is None else mine.held_at)

    time.sleep(6.0)
    on_hold = waited()
    done = site.run("mallory", "scontrol", "release", str(job_id))
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    released = waited()
    return Outcome(
        released > 5.0, f"counted as waiting: {on_hold:.1f} s on hold, {released:.1f} s once released"
    )


@attack("mallory", "further: one refusal of his own closes a whole account to alice")
def closed_account(site: Site) -> Outcome:
    """Slurm may refuse him by his own association and speak of the account."""
    his, hers = (_later(site, user, "--begin=now+600", "--account=lab") for user in ("mallory", "alice"))
    jobs = site.slurm.jobs([his, hers])
    state = replace(site.slurm.observe(), jobs=tuple(jobs.values()))
    refusals = Refusals(time.time, time.monotonic)
    refusals.observe(state)
    start = Move(1, his, 0, "start", NO_PLACEMENT, Placement(("n1",), 1), "", Step.CONFIGURED, {})
    refusals.learn(start, jobs[his], "AssocGrpGRES")
    closed = refusals.bars(state).eligibility
    said = closed[hers].rule if hers in closed else "she may start"
    return Outcome(hers in closed, f"his job: {closed[his].rule}; alice's: {said}")


@attack("mallory", "further: one job as a search of 16 trials, which all claim to be the best")
def split_into_a_search(site: Site) -> Outcome:
    """Without the name of a search, each of the tasks weighs as much as alice's job."""
    script = site.script("split.sh", "#POLLUX min-gpus=1 search=lr")
    # A job that waits for its --begin is in no decision: the policy gets what the hook wrote of it.
    array = site.submit("mallory", script, "--gres=gpu:1", "--array=0-15", "--begin=now+600")
    hers = _later(site, "alice")
    seen = {job.job_id: job for job in site.slurm.observe().jobs if job.job_id in (array, hers)}
    claim = Report(0, 0.0, BatchLimits(64, 64, 16, 64), search_rank=1.0)
    jobs = [
        SnapshotJob(n, job.name, job.user, "lab", "main", job.spec, 0.0, 3600.0, report=claim)
        for n, job in enumerate([seen[hers], *[seen[array]] * 16])
        if job.spec is not None
    ]
    asked = divided(Snapshot("attack", 0.0, tuple(Node(f"n{n}", 4) for n in range(4)), tuple(jobs)))
    weight, *his = (job.weight for job in asked.jobs)
    return Outcome(
        sum(his) > 1.001 * weight,
        f"weights: alice's job {weight:.2f}, mallory's {len(his)} tasks {sum(his):.2f}, the heaviest {max(his):.2f}",
    )
