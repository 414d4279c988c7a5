"""What `polluxctl explain` tells of a job without a `#POLLUX` line: from Slurm alone, as the asking user sees it."""

from __future__ import annotations

import re
from typing import Any

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


_ENDINGS = {
    "TIMEOUT": "It reached its time limit: submit it again with more --time.",
    "OUT_OF_MEMORY": "It used more memory than it had asked for: submit it again with more --mem.",
    "NODE_FAIL": "Its node failed: submit it again; with --requeue Slurm does so by itself.",
    "PREEMPTED": "A job that comes before it took its place: submit it again.",
    "DEADLINE": "It could not have ended before its --deadline.",
}
"""What to do about an end that Slurm itself made."""
_OUTPUT = re.compile(r"(?:^|\s)StdOut=(.*?)(?=\s+\w+=|$)", re.MULTILINE)

Facts = dict[str, Any]


def told(job_id: int) -> Facts:
    """Return what Slurm tells of a plain job; empty for a Pollux job, and where Slurm knows no such job.

    `said` has it as sentences; the other values are for programs, times as POSIX seconds, None where not known.
    """
    slurm = ScontrolClient()
    try:
        job = slurm.jobs([job_id]).get(job_id)
        if job is not None and (job.spec is not None or job.left_alone or job.companion is not None):
            return {}
        if job is None or job.state not in (JobState.PENDING, JobState.RUNNING):
            return _ended(job_id, slurm)
        return _pending(job, slurm) if job.state is JobState.PENDING else _running(job)
    except SlurmError:
        return {}


def _pending(job: SlurmJob, slurm: ScontrolClient) -> Facts:
    what, action = next(
        ((what, action) for pattern, what, action in _CLASSES if re.match(pattern, job.reason)),
        ("Slurm has not considered it yet" if job.reason == "None" else "Slurm keeps it waiting", ""),
    )
    action, before, starts = action.format(job=job.job_id), None, None
    said = [f"Job {job.job_id}, a plain Slurm job, is pending: {what} ({job.reason})."]
    if action:
        said.append(action)
    if job.reason in _IN_TURN:
        waiting = ("--noheader", "--array", "--states=PENDING", f"--partition={job.partition}")
        lines = slurm.ask("squeue", *waiting, "--format=%Q %r").splitlines()
        queue = [line.split() for line in lines]
        before = sum(int(priority) > job.priority for priority, *why in queue if why[0] in _IN_TURN)
        others = f"{count(before, 'waiting job')} of partition {job.partition} that you may see"
        said.append(f"{others} {'has' if before == 1 else 'have'} a higher priority.")
    shown = slurm.ask("squeue", "--start", "--noheader", f"--jobs={job.job_id}", "--format=%S").strip()
    if shown.isdecimal():
        starts = float(shown)
        said.append(
            f"Slurm expects it to start at {clock(starts)}. Jobs that end earlier or come before change that."
        )
    return {
        **{"job_id": job.job_id, "state": "PENDING", "reason": job.reason, "class": what, "action": action},
        **{"jobs_before": before, "expected_start": starts, "said": said},
    }


def _running(job: SlurmJob) -> Facts:
    gpus = sum(job.gpus_per_node_held.values())
    said = (
        f"Job {job.job_id}, a plain Slurm job, is running with {count(gpus, 'GPU') if gpus else 'no GPUs'} on "
        f"{','.join(job.nodes)}. It keeps them until it ends: polluxd moves only jobs with a #POLLUX line."
    )
    held = {"gpus": gpus, "nodes": list(job.nodes), "started_at": job.start_time}
    return {"job_id": job.job_id, "state": "RUNNING", **held, "said": [said]}


def _ended(job_id: int, slurm: ScontrolClient) -> Facts:
    columns = "State,ExitCode,End,AdminComment"
    for line in slurm.ask("sacct", "-nXP", f"--jobs={job_id}", f"--format={columns}").splitlines()[-1:]:
        state, ending, end, comment = line.split("|", 3)
        if comment.startswith("pollux:") or not end.isdecimal():  # not ended: hidden by PrivateData
            return {}
        code, signal = (int(part or 0) for part in re.sub(r"[^0-9:]", "", ending + ":").split(":")[:2])
        how = f"signal {signal}" if signal else f"exit status {code}"
        output = _output(job_id, slurm)
        action = _ENDINGS.get(state.split(" ", 1)[0], "")
        ended = f"Job {job_id}, a plain Slurm job, ended at {clock(int(end))}: {state}, {how}."
        said = [ended, *filter(None, [action])]
        said.append(f"Its output is in {output}." if output else "Its output says why.")
        return {
            **{"job_id": job_id, "state": state, "exit_status": code, "signal": signal, "action": action},
            **{"ended_at": int(end), "output": output, "said": said},
        }
    return {}


def _output(job_id: int, slurm: ScontrolClient) -> str | None:
    """Return where the job's output is, as long as slurmctld knows the job."""
    try:
        found = _OUTPUT.search(slurm.ask("scontrol", "-o", "show", "job", str(job_id)))
    except SlurmError:
        return None
    return found[1] if found else None
