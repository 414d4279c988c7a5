"""What `polluxctl explain` tells of a job without a `#POLLUX` line: from Slurm alone, as the asking user sees it."""

from __future__ import annotations

import re

from polluxd.errors import SlurmError
from polluxd.model import JobState
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.scontrol import ScontrolClient

from .output import clock, count

# Slurm's reasons by who or what can end the wait. The first that fits counts.
_CLASSES = (
    (
        r"JobHeld|Dependency|BeginTime|JobArrayTaskLimit|Deadline",
        "it waits by its own options",
        "`scontrol release {job}` ends a user's hold. `scontrol show job {job}` shows its dependency, begin time and "
        "array limit, and `scontrol update` changes them.",
    ),
    (
        r"Assoc|QOS|Max|Grp|Account|InvalidQOS|PartitionTimeLimit|PartitionNodeLimit|Licenses|Cleaning",
        "a limit of its account, QOS or partition, or licences in use, keep it out",
        "It starts when jobs under the same limit end. Ask for less (GPUs, nodes, --time), or ask an administrator to "
        "raise the limit.",
    ),
    (
        r"BadConstraints|NodeDown|ReqNodeNotAvail|Reserv|Partition(Down|Inactive)|FrontEnd|launch failed",
        "nodes that it asks for are down, drained, reserved, or do not exist",
        "`sinfo -R` shows why nodes are out of service. Drop --nodelist or --constraint, or name another partition.",
    ),
    (r"Resources", "it is next, and waits for GPUs, cores or memory to become free", ""),
    (r"Priority", "jobs of higher priority come before it", ""),
)


_IN_TURN = ("Priority", "Resources")
"""Reasons of jobs that wait only for the jobs before them."""


def told(job_id: int) -> list[str]:
    """Return what Slurm tells of a plain job; empty for a Pollux job, and where Slurm knows no such job."""
    slurm = ScontrolClient()
    try:
        job = slurm.jobs([job_id]).get(job_id)
        if job is not None and (job.spec is not None or job.left_alone or job.companion is not None):
            return []
        if job is None or job.state not in (JobState.PENDING, JobState.RUNNING):
            return _ended(job_id, slurm)
        return _pending(job, slurm) if job.state is JobState.PENDING else [_running(job)]
    except SlurmError:
        return []


def _pending(job: SlurmJob, slurm: ScontrolClient) -> list[str]:
    what, owner = next(
        ((what, owner) for pattern, what, owner in _CLASSES if re.match(pattern, job.reason)),
        ("Slurm has not considered it yet" if job.reason == "None" else "Slurm keeps it waiting", ""),
    )
    said = [f"Job {job.job_id}, a plain Slurm job, is pending: {what} ({job.reason})."]
    if owner:
        said.append(owner.format(job=job.job_id))
    if job.reason in _IN_TURN:
        waiting = ("--noheader", "--array", "--states=PENDING", f"--partition={job.partition}")
        lines = slurm.ask("squeue", *waiting, "--format=%Q %r").splitlines()
        queue = [line.split() for line in lines]
        before = sum(int(priority) > job.priority for priority, *why in queue if why[0] in _IN_TURN)
        said.append(
            f"{count(before, 'waiting job')} of partition {job.partition} that you may see: higher priority."
        )
    starts = slurm.ask("squeue", "--start", "--noheader", f"--jobs={job.job_id}", "--format=%S").strip()
    if starts.isdecimal():
        said.append(
            f"Slurm expects it to start at {clock(int(starts))}. Jobs that end earlier or come before change that."
        )
    return said


def _running(job: SlurmJob) -> str:
    gpus = sum(job.gpus_per_node_held.values())
    return (
        f"Job {job.job_id}, a plain Slurm job, is running with {count(gpus, 'GPU') if gpus else 'no GPUs'} on "
        f"{','.join(job.nodes)}. It keeps them until it ends: polluxd moves only jobs with a #POLLUX line."
    )


def _ended(job_id: int, slurm: ScontrolClient) -> list[str]:
    columns = "State,ExitCode,End,AdminComment"
    for line in slurm.ask("sacct", "-nXP", f"--jobs={job_id}", f"--format={columns}").splitlines()[-1:]:
        state, ending, end, comment = line.split("|", 3)
        if comment.startswith("pollux:"):
            return []
        code, _, signal = ending.partition(":")
        how = f"signal {signal}" if signal not in ("", "0") else f"exit status {code}"
        at = f" at {clock(int(end))}" if end.isdecimal() else ""
        return [f"Job {job_id}, a plain Slurm job, ended{at}: {state}, {how}. Its output says why."]
    return []
