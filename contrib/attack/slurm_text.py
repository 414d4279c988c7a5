"""Attacks by text: names and scripts that pass for something else."""

from __future__ import annotations

import time
from pathlib import Path

from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site


def _submitted(site: Site, name: str, *head: str, gpus: int = 0) -> tuple[int, str]:
    """Submit Mallory's job of this name, unseen by the hook.

    Return the job's id, and what the hook says of the same job.
    """
    script = site.script("plain.sh", *head)
    options = (f"--job-name={name}", "--ntasks=1", *([f"--gres=gpu:{gpus}"] if gpus else []))
    refused, said = site.sbatch("mallory", script, *options)
    if refused is not None:
        raise AssertionError(f"the hook let {name!r} pass")
    with site.names_unseen():
        job_id, trouble = site.sbatch("mallory", script, *options)
    assert job_id is not None, trouble
    return job_id, said


@attack("mallory", "rows 1 and 4: names that stop polluxd for everybody, or invent a job")
def names_that_stop_polluxd(site: Site) -> Outcome:
    ghost = "JobId=777777 JobName=y UserId=root(0) GroupId=root(0) TimeLimit=UNLIMITED AdminComment=pollux:v1"
    of = "UserId=a(1) GroupId=b TimeLimit="
    names = (f"x {of}zz", "x\nfoo", f"x {of}UNLIMITED\n{ghost}")
    jobs, said = zip(*(_submitted(site, name) for name in names), strict=True)
    state = site.slurm.observe()
    seen = {job.job_id for job in state.jobs}
    before = site.cycles()
    site.until(lambda: site.cycles() >= before + 2, "two cycles of polluxd")
    return Outcome(
        not seen.issuperset(jobs) or 777777 in seen or bool(state.unreadable),
        f"polluxd read {sorted(seen)}, nothing senseless, and made two more cycles; the hook: {said}",
    )


@attack("mallory", "row 2: GPUs claimed by a name")
def capacity_claimed(site: Site) -> Outcome:
    claim = "x UserId=a(1) GroupId=b TimeLimit=UNLIMITED Nodes=n[1-4] CPU_IDs=0-7 Mem=0 GRES=gpu:4 Y="
    _, said = _submitted(site, claim)
    foreign = {node.name: node.foreign_gpus for node in site.slurm.observe().nodes}
    return Outcome(any(foreign.values()), f"foreign GPUs {foreign}; the hook: {said}")


@attack("mallory", "row 3: another user's identity, account and QOS by a name")
def identity_forged(site: Site) -> Outcome:
    name = "x UserId=pollux-alice(5) GroupId=b Account=vip QOS=high TimeLimit=UNLIMITED"
    job_id, said = _submitted(site, name, "#POLLUX min-gpus=1", gpus=1)
    job = site.job(job_id)
    assert job is not None
    return Outcome(
        job.uid == 5 or job.account == "vip" or job.qos == "high",
        f"uid {job.uid}, account {job.account!r}, QOS {job.qos!r}; the hook: {said}",
    )


@attack("mallory", "row 5: a companion that names alice's job")
def companion_of_another(site: Site) -> Outcome:
    parent, trouble = site.sbatch("alice", site.script("hers.sh", "#POLLUX min-gpus=1"), "--gres=gpu:1")
    assert parent is not None, trouble
    uid = next(job.uid for job in site.slurm.observe().jobs if job.job_id == parent)
    line = f"#POLLUX companion-of={parent} attempt=0 move=1 nonce={'0' * 32}"
    name = f"x UserId=pollux-alice({uid}) GroupId=b TimeLimit=UNLIMITED"
    job_id, said = _submitted(site, name, line, gpus=1)
    job = site.job(job_id)
    assert job is not None
    return Outcome(job.uid == uid, f"the companion is uid {job.uid}'s, its parent {uid}'s; the hook: {said}")


@attack("mallory", "row 6: a token for a plain job by a name that looks like AdminComment")
def token_for_a_plain_job(site: Site) -> Outcome:
    job_id, said = _submitted(site, "x AdminComment=pollux:v1 ", gpus=1)
    site.until(
        lambda: (found := site.job(job_id)) is not None and bool(found.gpus_per_node_held), "its start"
    )
    seen = site.query("SELECT 1 FROM pollux.job WHERE job_id = %s", job_id)
    (answer,) = site.ask("mallory", payload=site.payload(job_id))
    return Outcome(
        bool(seen) or answer.ok, f"polluxd knows the job: {bool(seen)}; {answer.text}; the hook: {said}"
    )


@attack("mallory", "row 22: scripts of 340,000 comments, or 200,000 lines of #POLLUX, hold slurmctld up")
def endless_script(site: Site) -> Outcome:
    def seconds(script: Path) -> float:
        began = time.monotonic()
        site.sbatch("mallory", script, "--gres=gpu:1", "--open-mode=append")
        return time.monotonic() - began

    won, evidence = False, []
    for line in ("# POLLUX x\n" * 340_000, "#POLLUX \n" * 200_000):
        long, command_first = site.script("long.sh", line), site.script("first.sh", "true", line)
        # The hook stops at the first command: this is what the transfer of such a script takes by itself.
        usual = min(seconds(command_first) for _ in range(3))
        took = min(seconds(long) for _ in range(3))
        won |= took > 3 * usual
        evidence.append(f"sbatch took {took:.2f} s, {usual:.2f} s where a command comes first")
    return Outcome(won, "; ".join(evidence))


@attack("mallory", "geometry, partition, name and others changed after submission")
def changed_after_submission(site: Site) -> Outcome:
    script = site.script("mine.sh", "#POLLUX min-gpus=1")
    job_id, trouble = site.sbatch("mallory", script, "--gres=gpu:1", "--begin=now+600")
    assert job_id is not None, trouble
    updates = (
        "NumCPUs=2 MinCPUsNode=2 MinMemoryNode=7 Partition=pollux TimeMin=1 QOS=normal Account=root JobName=y "
        "NumNodes=2-2 StartTime=now+700 CPUsPerTask=2 Comment=x"
    )
    done = [
        word
        for word in updates.split()
        if site.run("mallory", "scontrol", "update", f"JobId={job_id}", word).returncode == 0
    ]
    return Outcome(done != ["Comment=x"], f"of {updates}, these were changed: {done}")
