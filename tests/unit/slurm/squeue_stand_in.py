"""What squeue prints for given jobs, in whatever format it is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from polluxd.slurm.queue import Queue, jobs_query, parse_jobs

RUNNING = {
    "JobID": "7",
    "ArrayJobID": "7",
    "ArrayTaskID": "N/A",
    "UserID": "1000",
    "UserName": "alice",
    "Account": "vision",
    "QOS": "normal",
    "Partition": "main",
    "State": "RUNNING",
    "Reason": "None",
    "RestartCnt": "1",
    "PriorityLong": "4294901759",
    "Dependency": "(null)",
    "SubmitTime": "1795271832",
    "EligibleTime": "1795271833",
    "StartTime": "1795271833",
    "EndTime": "1826807833",
    "TimeLimit": "1-02:03:04",
    "Deadline": "N/A",
    "NodeList": "n[3-4]",
    "BatchHost": "n3",
    "SchedNodes": "(null)",
    "NumNodes": "2",
    "NumCPUs": "4",
    "NumTasks": "2",
    "tres-per-node": "gres:gpu:4",
    "tres-per-job": "N/A",
    "tres-per-task": "N/A",
    "tres-per-socket": "N/A",
    "tres-alloc": "cpu=4,mem=8000M,node=2,billing=4,gres/gpu=8",
    "Licenses": "(null)",
    "admin_comment": "pollux:v1 min-gpus=1 max-gpus=8 cpus-per-gpu=2 submitted=1795271000",
    "Name": "train",
}
"""A job of 22.05.8 (all fields that polluxd asks for)."""
PENDING = {
    **RUNNING,
    "State": "PENDING",
    "Reason": "BeginTime",
    "StartTime": "1795271953",
    "EndTime": "NONE",
    "NodeList": "",
    "BatchHost": "n/a",
    "NumNodes": "1-2",
    "NumCPUs": "2-4",
}


def squeue(jobs: Iterable[Mapping[str, str]], form: str) -> str:
    """The output of `SQUEUE_FORMAT2=form squeue --noheader`."""
    fields = [re.fullmatch(r"([\w-]+):(\d*)(.*)", word) for word in form.split(",")]
    return "".join("".join(_printed(job[f[1]], f[2]) + f[3] for f in fields if f) + "\n" for job in jobs)


def _printed(value: str, width: str) -> str:
    """Cut a value to its width, and fill it up with blanks, as squeue does."""
    return value[: int(width)].ljust(int(width)) if width else value


def queue(*jobs: dict[str, str]) -> Queue:
    query = jobs_query()
    return parse_jobs(squeue(jobs, query.format), query)
