"""Attacks by text: names and scripts that pass for something else, that are long, or that a terminal obeys."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path

from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site
from contrib.devcluster.polluxd import BIN
from polluxd.slurm.queue import jobs_query


def _submitted(site: Site, name: str, *head: str, gpus: int = 0) -> tuple[int, str]:
    """Submit Mallory's job of this name, unseen by the hook.

    Return the job's id, and what the hook says of the same job.
    """
    script = site.script("plain.sh", *head)
    options = (f"--job-name={name}", "--ntasks=1", *([f"--gres=gpu:{gpus}"] if gpus else []))
    refused, said = site.sbatch("mallory", script, *options)
    if refused is not None:
        raise AssertionError(f"the hook let {name!r} pass")
    return site.submit_unseen(script, *options), said


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
    return Outcome(
        job.uid == 5 or job.account == "vip" or job.qos == "high",
        f"uid {job.uid}, account {job.account!r}, QOS {job.qos!r}; the hook: {said}",
    )


@attack("mallory", "row 5: a companion that names alice's job")
def companion_of_another(site: Site) -> Outcome:
    parent = site.submit("alice", site.script("hers.sh", "#POLLUX min-gpus=1"), "--gres=gpu:1")
    uid = site.job(parent).uid
    line = f"#POLLUX companion-of={parent} attempt=0 move=1 nonce={'0' * 32}"
    name = f"x UserId=pollux-alice({uid}) GroupId=b TimeLimit=UNLIMITED"
    job_id, said = _submitted(site, name, line, gpus=1)
    job = site.job(job_id)
    return Outcome(job.uid == uid, f"the companion is uid {job.uid}'s, its parent {uid}'s; the hook: {said}")


@attack("mallory", "row 6: a token for a plain job by a name that looks like AdminComment")
def token_for_a_plain_job(site: Site) -> Outcome:
    job_id, said = _submitted(site, "x AdminComment=pollux:v1 ", gpus=1)
    site.until(lambda: site.held(job_id), "its start")
    seen = site.query("SELECT 1 FROM pollux.job WHERE job_id = %s", job_id)
    (answer,) = site.ask("mallory", payload=site.payload(job_id))
    return Outcome(
        bool(seen) or answer.ok, f"polluxd knows the job: {bool(seen)}; {answer.text}; the hook: {said}"
    )


@attack("mallory", "geometry, partition, name and others changed after submission")
def changed_after_submission(site: Site) -> Outcome:
    script = site.script("mine.sh", "#POLLUX min-gpus=1")
    job_id = site.submit("mallory", script, "--gres=gpu:1", "--begin=now+600")
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


# --- long ones ---


def _holds_up(site: Site, *texts: str) -> Outcome:
    """Submit scripts with these texts. The comments at the head of a script count."""

    def seconds(*lines: str) -> tuple[float, str]:
        script, began = site.script("long.sh", *lines), time.monotonic()
        _, trouble = site.sbatch("mallory", script, "--ntasks=1", "--gres=gpu:1", "--open-mode=append")
        return time.monotonic() - began, trouble

    won, evidence = False, []
    for text in texts:
        # The hook stops at the first command: this is what the transfer of such a script takes by itself.
        usual, _ = min(seconds("true", text) for _ in range(3))
        took, trouble = min(seconds(text) for _ in range(3))
        won |= took > 3 * usual
        evidence.append(f"sbatch took {took:.2f} s, {usual:.2f} s where a command comes first; {trouble}")
    return Outcome(won, "; ".join(evidence))


@attack("mallory", "row 22: scripts of 340,000 comments, or 200,000 lines of #POLLUX, hold slurmctld up")
def endless_script(site: Site) -> Outcome:
    return _holds_up(site, "# POLLUX x\n" * 340_000, "#POLLUX \n" * 200_000)


@attack("mallory", "row 23: a comment of 3.5 MB holds slurmctld up")
def endless_comment(site: Site) -> Outcome:
    return _holds_up(site, "#SBATCH --comment=" + "=" * 3_500_000)


_LONG_COMMENT = """
local submit = slurm_job_submit
slurm_job_submit = function(job, ...)
  local answer, types = submit(job, ...), string.match(job.script, "# types=(%S+)")
  if types then
    job.admin_comment = job.admin_comment .. " gpu-types=" .. types
  end
  return answer
end
"""
"""An administrator may write any AdminComment."""
_LARGE = 1_000_000
"""Bytes of a snapshot; the site's own has some kilobytes."""
_LONG = 2000
"""Bytes of squeue for each job; usual are some hundred."""


@attack("mallory", "row 24: GPU types of 60 kB in each decision")
def endless_types(site: Site) -> Outcome:
    types = ",".join(f"{letter}{'x' * 4000}" for letter in "abcdefghijklmno")
    script = site.script("types.sh", f"#POLLUX gpu-types={types}")
    job_id, refused = site.sbatch("mallory", script, "--gres=gpu:1")
    if job_id is not None:
        return Outcome(True, "the hook let the types pass")
    script = site.script("types.sh", "#POLLUX max-gpus=1", f"# types={types}")
    with site.hook(_LONG_COMMENT):
        since = site.cycles()
        site.submit("mallory", script, "--gres=gpu:1", "--array=0-29")
        site.until(lambda: site.cycles() >= since + 3, "three cycles of polluxd")
        ((size,),) = site.query("SELECT max(length(snapshot::text)) FROM pollux.cycle WHERE id > %s", since)
    return Outcome((size or 0) > _LARGE, f"the largest snapshot has {size} bytes; the hook: {refused}")


@attack("mallory", "row 25: lists of dependencies in each look at the queue")
def endless_dependencies(site: Site) -> Outcome:
    script, plain = site.script("waits.sh"), ("--ntasks=1", "--hold", "--array=0-199")
    arrays: list[int] = []
    for _ in range(4):
        waits = [f"--dependency=afterok:{':'.join(f'{arrays[0]}_{i}' for i in range(200))}"] if arrays else []
        arrays.append(site.submit("mallory", script, *plain, *waits))
    query = jobs_query()
    words = (
        f"squeue --local --all --noheader --states=all --array --jobs={','.join(map(str, arrays))}".split()
    )
    answer = site.run("alice", *words, SQUEUE_FORMAT2=query.format).stdout
    jobs = answer.count(query.end)
    assert jobs == 800, answer[:400]
    waiting = [j.dependent for j in site.slurm.observe().jobs if j.array and j.array[0] == arrays[-1]]
    assert waiting, "the last array is not in the queue"
    assert all(waiting), "polluxd takes a job that waits for others as one that may start"
    return Outcome(
        len(answer) > _LONG * jobs,
        f"squeue prints {len(answer)} bytes for {jobs} jobs, {len(answer) // jobs} for each",
    )


@attack("mallory", "row 26: a number that polluxd cannot read")
def endless_number(site: Site) -> Outcome:
    script = site.script("limit.sh", "#POLLUX min-gpus=1")
    words = ("--gres=gpu:1", "--hold", "--array=0-1%999999999999")
    job_id, trouble = site.sbatch("mallory", script, *words)
    # Other attacks leave records of their own.
    unreadable = {job: why for job, why in site.slurm.observe().unreadable.items() if "array-limit" in why}
    return Outcome(
        job_id is not None and bool(unreadable), f"unreadable: {unreadable or 'none'}; sbatch: {trouble}"
    )


# --- what a terminal obeys ---

ESCAPES = "x\x1b]0;owned\x07\x1b[2J"


def _known(site: Site) -> int:
    """Submit mallory's job with escapes in its name, and wait until polluxd has it."""
    words = (f"--job-name={ESCAPES}", "--gres=gpu:1", "--open-mode=append")
    job_id = site.submit_unseen(site.script("named.sh", "#POLLUX max-gpus=1"), *words)
    site.until(
        lambda: site.query("SELECT 1 FROM pollux.job WHERE job_id = %s", job_id), "polluxd to see the job"
    )
    return job_id


def _escaped(shown: str, harmful: str) -> Outcome:
    """Look for escapes in what a reader sees, which must name the job."""
    if "owned" not in shown:
        raise AssertionError(f"the job is not shown: {shown[-300:]!r}")
    return Outcome(harmful in shown, f"shown: {shown[shown.index('owned') - 12 :][:40]!a}")


@attack("mallory", "row 20: terminal escapes in polluxctl top")
def escapes_in_top(site: Site) -> Outcome:
    _known(site)
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in site.polluxd.env.items() if name != "NO_COLOR"}
    words: list[str | Path] = [BIN / "polluxctl", "top", "-n", "1"]
    screen = environment | {"TERM": "xterm", "COLUMNS": "200", "LINES": "40"}
    process = subprocess.Popen(words, env=screen, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown, end = b"", time.monotonic() + 60.0
    while b"pollux-mal" not in shown and time.monotonic() < end:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                shown += os.read(ours, 1 << 16)
            except OSError:
                break
    process.kill()
    process.wait()
    os.close(ours)
    return _escaped(shown.decode(errors="replace"), "\x1b]0;owned")


@attack("mallory", "row 20: terminal escapes in polluxctl jobs and explain")
def escapes_in_explain(site: Site) -> Outcome:
    said = (("jobs",), ("explain", str(_known(site))))
    return _escaped("".join(site.polluxd.command("polluxctl", *words).stdout for words in said), "\x1b")
