"""The process that reads Slurm through pyslurm, the only one that imports it.

`pyslurm_client` runs this file by its path. pyslurm endangers the process that imports it in three ways:

- pyslurm holds the interpreter's lock through every call, for as long as slurmctld keeps it waiting.
- libslurm ends the process if it finds no slurm.conf.
- The import changes how the process loads libraries (RTLD_DEEPBIND and RTLD_GLOBAL).

Here, each of them costs at worst a process that can be killed and started again. This file imports only the standard
library and pyslurm.

The worker writes what `squeue --array` and `scontrol show node` would print, so that polluxd reads both in one way. A
request is a JSON list: the value of SQUEUE_FORMAT2, the id of the one job that is asked for or null, and whether nodes
follow the jobs. The answer is a JSON object with `text`, with `refused` (Slurm's words) or with `fault`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

_HOLDING = ("RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STOPPED")


def read(pyslurm: Any, form: str, only: int | None, nodes: bool) -> str:
    """Write the jobs in the format `form`, and the nodes where they are asked for."""
    # All are loaded for a single one too: Job.load leaves out what is in hidden partitions, and asks for steps.
    jobs = list(pyslurm.Jobs.load().values())
    parts = [write_jobs((job for job in jobs if only in (None, job.id)), form)]
    if nodes:
        parts.append(write_nodes(pyslurm.Nodes.load().values(), jobs))
    return "".join(parts)


def write_jobs(jobs: Iterable[Any], form: str) -> str:
    """Write a record for each job, and for each task of an array that waits."""
    # `NAME:SUFFIX`, or `NAME:1SUFFIX` where the first letter is enough.
    fields = [
        (name, suffix.lstrip("1")) for name, _, suffix in (word.partition(":") for word in form.split(","))
    ]
    return "".join(
        "".join(f"{record[name]}{suffix}" for name, suffix in fields) + "\n"
        for job in jobs
        for record in _records(job)
    )


def _records(job: Any) -> Iterator[dict[str, object]]:
    gpus = _gpus_otherwise(job)
    record: dict[str, object] = {
        "JobID": job.id,
        "ArrayJobID": _or_nothing(job.array_id),
        # pyslurm takes task 0 for none.
        "ArrayTaskID": "N/A" if job.array_id is None else job.array_task_id or 0,
        "UserID": job.user_id,
        "UserName": job.user_name or job.user_id,
        "Account": _or_nothing(job.account),
        "QOS": _or_nothing(job.qos),
        "Partition": _or_nothing(job.partition),
        "State": job.state,
        "Reason": "_".join((_text(lambda: job.state_reason) or "None").split()),
        "RestartCnt": job.requeue_count,
        "PriorityLong": job.priority or 0,
        "Dependency": "" if job.dependencies is None else "a",
        "SubmitTime": _or_nothing(job.submit_time),
        "EligibleTime": _or_nothing(job.eligible_time),
        "StartTime": _or_nothing(job.start_time),
        "EndTime": _or_nothing(job.end_time),
        "TimeLimit": "UNLIMITED" if job.time_limit is None else f"{job.time_limit}:00",
        "Deadline": _or_nothing(job.deadline),
        "NodeList": _or_nothing(job.allocated_nodes),
        "BatchHost": _or_nothing(job.batch_host),
        "SchedNodes": _or_nothing(job.scheduled_nodes),
        "NumNodes": job.num_nodes or 1,
        "NumCPUs": job.cpus or 1,
        "NumTasks": job.ntasks or 1,
        "tres-per-node": ",".join(_gres(job.gres_per_node)),
        "tres-per-job": f"gres:gpu:{gpus}" if gpus else "N/A",
        "tres-per-task": "N/A",
        "tres-per-socket": "N/A",
        "tres-alloc": _tres(job),
        "Licenses": ",".join(job.licenses or []),
        "admin_comment": _text(lambda: job.admin_comment) or "",
        "Name": _text(lambda: job.name) or "",
    }
    waiting = job.array_tasks_waiting if job.state == "PENDING" else None
    if not waiting:
        yield record
    else:
        for task in _tasks(waiting):
            yield record | {"ArrayTaskID": task}


def _tasks(waiting: str) -> Iterator[int]:
    """Return the numbers in a list such as `1-3,7-11:2`."""
    for part in waiting.split(","):
        numbers, _, step = part.partition(":")
        first, _, last = numbers.partition("-")
        yield from range(int(first), int(last or first) + 1, int(step or 1))


def _gpus_otherwise(job: Any) -> int:
    """Return the GPUs of a job that asks for them in another way than per node; else 0.

    pyslurm cannot read the other ways. The request as a whole shows them, where Slurm counts GPUs
    (AccountingStorageTRES); else what the job holds.
    """
    per_node = _gpus(job.gres_per_node)
    asked = getattr(job, "requested_tres", None)
    if asked is not None and (gpus := asked.gres.get("gpu")) is not None:
        return 0 if gpus.count == per_node * asked.node.count else int(gpus.count)
    return 0 if per_node else sum(_gpus(part["gres"]) for part in job.get_resource_layout_per_node().values())


def write_nodes(nodes: Iterable[Any], jobs: Iterable[Any]) -> str:
    """Write a line for each node."""
    # pyslurm asks slurmctld for no details of nodes, such as which GPUs are in use. 26.05 shows what a job held
    # after its end.
    used: dict[str, list[str]] = {}
    for job in jobs:
        if job.state in _HOLDING:
            for name, part in job.get_resource_layout_per_node().items():
                used.setdefault(name, []).extend(_gres(part["gres"]))
    lines = []
    for node in nodes:
        fields = {
            "NodeName": node.name,
            "CPUAlloc": node.allocated_cpus or 0,
            "CPUEfctv": node.effective_cpus or node.total_cpus,
            "CPUTot": node.total_cpus or node.effective_cpus,
            "ActiveFeatures": ",".join(node.active_features or []) or "(null)",
            "Gres": ",".join(_gres(node.configured_gres)),
            "GresUsed": ",".join(used.get(node.name, [])),
            "RealMemory": node.real_memory or 0,
            "AllocMem": node.allocated_memory or 0,
            "MemSpecLimit": node.memory_reserved_for_system or 0,
            "TmpDisk": node.temporary_disk or 0,
            "State": node.state,
            "Partitions": ",".join(node.partitions or []),
        }
        cores = {
            "Sockets": "sockets",
            "CoresPerSocket": "cores_per_socket",
            "ThreadsPerCore": "threads_per_core",
        }
        fields |= {key: getattr(node, name) for key, name in cores.items() if getattr(node, name, None)}
        lines.append(" ".join(f"{key}={value}" for key, value in fields.items()) + "\n")
    return "".join(lines)


def _gres(counts: Mapping[str, Any] | None) -> list[str]:
    """Write gres as Slurm does, such as `gpu:a100:2`.

    pyslurm gives `{"gpu:a100": 2}` or `{"gpu:a100": {"count": 2, ...}}`.
    """
    return [
        f"{name}:{count['count'] if isinstance(count, Mapping) else count}"
        for name, count in (counts or {}).items()
    ]


def _gpus(counts: Mapping[str, Any] | None) -> int:
    return sum(int(text.rpartition(":")[2]) for text in _gres(counts) if "gpu" in text)


def _tres(job: Any) -> str:
    """Write what a job holds, or asks for, as Slurm counts it; empty where an older pyslurm does not tell."""
    found = getattr(job, "allocated_tres", None) or getattr(job, "requested_tres", None)
    if found is None:
        return ""
    counts = {name: getattr(found, name, None) for name in ("cpu", "node", "billing")}
    counts |= {f"gres/{name}": gres for name, gres in found.gres.items()}
    counts |= {f"license/{name}": license for name, license in found.license.items()}
    words = [f"{name}={count.count}" for name, count in counts.items() if count is not None]
    memory = getattr(found, "mem", None)
    return ",".join([*words, *([] if memory is None else [f"mem={int(memory.count)}M"])])


def _or_nothing(value: object) -> object:
    return "N/A" if value is None else value


def _text(read: Callable[[], str | None]) -> str | None:
    """Read a text that a user wrote, whatever its encoding.

    pyslurm decodes strictly. Without this function, one user's text could stop the reading of everybody's jobs.
    """
    try:
        return read()
    except UnicodeDecodeError as error:
        return bytes(error.object).decode(errors="replace")


def main() -> None:
    os.dup2(2, 1)  # what libslurm prints goes to polluxd's log
    requests = Connection(int(sys.argv[1]))
    while True:
        try:
            request = json.loads(requests.recv_bytes())
        except EOFError:
            return  # polluxd has ended
        try:
            import pyslurm  # noqa: PLC0415 - an import that fails is an answer

            answer = {"text": read(pyslurm, *request)}
        except Exception as error:  # whatever somebody's build may raise
            kind = "refused" if type(error).__name__ == "RPCError" else "fault"
            answer = {kind: f"{type(error).__name__}: {error}" if kind == "fault" else str(error)}
        requests.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
