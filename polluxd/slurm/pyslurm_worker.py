"""The worker process, the only process that imports pyslurm.

`pyslurm_process` runs this file by its path. pyslurm endangers the process that imports it in three ways:

- pyslurm holds the interpreter's lock through every call, for as long as slurmctld keeps it waiting.
- libslurm ends the process if it finds no slurm.conf.
- The import changes how the process loads libraries (RTLD_DEEPBIND and RTLD_GLOBAL).

Here, each of them costs at worst a process that can be killed and started again. This file imports only the standard
library and pyslurm.

Requests and answers are one JSON object per line. The first line is `{"pyslurm": version}` or `{"unusable": why}`.
Each request `{"id": n, "do": name, ...}` then has one answer: `{"id": n, "done": value}`, `{"id": n, "refused":
Slurm's words}` or `{"id": n, "fault": exception}`. Times are POSIX timestamps, memory is in MB, time limits are in
minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/usr/local/etc/slurm.conf")
"""Where libslurm looks when SLURM_CONF is not set: distributions, configless nodes, its own default prefix."""
_LONGEST_TEXT = 4096
"""Characters; polluxd understands no text of a user that is longer."""


class Requests:
    """The requests that the worker serves, by method name.

    `pyslurm` is the imported module, initialised.
    """

    def __init__(self, pyslurm: Any) -> None:
        self._pyslurm = pyslurm
        self._threads: dict[str, int] = {}
        self._counts_gpus = False
        """Slurm counts GPUs among the TRES (AccountingStorageTRES): a job without them has none."""

    def observe(self) -> dict[str, Any]:
        """Read all nodes and jobs."""
        nodes = [self._node(node) for node in self._load_nodes()]
        return {"nodes": nodes, "jobs": self.jobs()}

    def jobs(self, only: int | None = None) -> list[dict[str, Any]]:
        # All are loaded for a single one too: Job.load leaves out what is in hidden partitions, and asks for steps.
        loaded = list(self._pyslurm.Jobs.load().values())
        self._counts_gpus = self._counts_gpus or any("gres/gpu" in _tres(job) for job in loaded)
        return [self._job(job) for job in loaded if only is None or job.id == only]

    def _load_nodes(self) -> list[Any]:
        nodes = list(self._pyslurm.Nodes.load().values())
        self._threads = {node.name: node.threads_per_core or 1 for node in nodes}
        return nodes

    def _node(self, node: Any) -> dict[str, Any]:
        return {
            "name": node.name,
            "state": node.state,
            "gres": _gres(node.configured_gres),
            "cpus": node.effective_cpus or node.total_cpus,
            "partitions": node.partitions,
            "features": list(node.active_features or []),
            "tmp_mb": node.temporary_disk or 0,
            "memory_mb": max((node.real_memory or 0) - (node.memory_reserved_for_system or 0), 0),
        }

    def _gpus_otherwise(self, job: Any) -> bool:
        """Tell whether a job asks for GPUs in another way than per node.

        pyslurm cannot read the other ways; the request as a whole shows them.
        """
        per_node = sum(int(text.rpartition(":")[2]) for text in _gres(job.gres_per_node) if "gpu" in text)
        asked = getattr(job, "requested_tres", None)
        if asked is None or not self._counts_gpus:
            return not per_node
        gpus = asked.gres.get("gpu")
        return gpus is not None and gpus.count != per_node * asked.node.count

    def _job(self, job: Any) -> dict[str, Any]:
        layout = job.get_resource_layout_per_node()
        if not self._threads.keys() >= layout.keys():
            self._load_nodes()
        return {
            "id": job.id,
            "name": _text(lambda: job.name),
            "user": job.user_name,
            "uid": job.user_id,
            "account": job.account,
            "partition": job.partition,
            "qos": job.qos,
            "state": job.state,
            "reason": _text(lambda: job.state_reason),
            "restarts": job.requeue_count,
            "submitted": job.submit_time,
            "eligible": job.eligible_time,
            "started": job.start_time,
            "ends": job.end_time,
            "limit": job.time_limit,
            "deadline": job.deadline,
            "nodes": job.allocated_nodes,
            "batch_host": job.batch_host,
            "held": {
                name: {
                    "cpu_ids": part["cpu_ids"],
                    "threads": self._threads.get(name, 1),
                    "gres": _gres(part["gres"]),
                    "memory_mb": part.get("memory") or 0,
                }
                for name, part in layout.items()
            },
            "gres_per_node": _gres(job.gres_per_node),
            "gpus_otherwise": self._gpus_otherwise(job),
            "on_hold": job.priority == 0,
            "dependent": job.dependencies is not None,
            "priority": job.priority or 0,
            "planned_nodes": job.scheduled_nodes,
            "licenses": job.licenses or [],
            "tres": _tres(job),
            "memory_mb": _memory_mb(job),
            "array": job.array_id,
            "array_task": job.array_task_id,
            "array_waiting": job.array_tasks_waiting,
            "admin_comment": _text(lambda: job.admin_comment),
        }


def _gres(counts: Mapping[str, Any] | None) -> list[str]:
    """Write gres as Slurm does, such as `gpu:a100:2`.

    pyslurm gives `{"gpu:a100": 2}` or `{"gpu:a100": {"count": 2, ...}}`.
    """
    return [
        f"{name}:{count['count'] if isinstance(count, Mapping) else count}"
        for name, count in (counts or {}).items()
    ]


def _resources(job: Any) -> Any:
    """Return what a job holds, or asks for.

    None where an older pyslurm does not tell.
    """
    return getattr(job, "allocated_tres", None) or getattr(job, "requested_tres", None)


def _memory_mb(job: Any) -> int:
    """Return a job's memory on all nodes; 0 where Slurm does not tell."""
    memory = getattr(_resources(job), "mem", None)
    return 0 if memory is None else int(memory.count)


def _tres(job: Any) -> dict[str, int]:
    """Write what a job holds, or asks for, as Slurm's limits count it."""
    found = _resources(job)
    if found is None:
        return {}
    counts = {name: getattr(found, name, None) for name in ("cpu", "node", "billing")}
    counts |= {f"gres/{name}": gres for name, gres in found.gres.items()}
    counts |= {f"license/{name}": license for name, license in found.license.items()}
    return {name: count.count for name, count in counts.items() if count is not None}


def _text(read: Callable[[], str | None]) -> str | None:
    """Read a text that a user wrote, whatever its encoding and length.

    pyslurm decodes strictly. Without this function, one user's text could stop the reading of everybody's jobs.
    """
    try:
        text = read()
    except UnicodeDecodeError as error:
        text = error.object.decode(errors="replace")
    return None if text is None else text[:_LONGEST_TEXT]


def _configuration() -> str:
    """Return the slurm.conf that libslurm will find.

    Raises:
        FileNotFoundError: there is none that can be read, and libslurm would end the process.
    """
    named = os.environ.get("SLURM_CONF")
    for place in [named] if named else _CONFIGURATIONS:
        with contextlib.suppress(OSError), Path(place).open("rb"):
            return place
    raise FileNotFoundError(f"no slurm.conf can be read at {named or ', '.join(_CONFIGURATIONS)}")


def serve(requests: Iterable[bytes], answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer until the requests end."""
    try:
        configuration = _configuration()
        import pyslurm  # noqa: PLC0415 - only now is it known that libslurm will not end the process

        answer({"pyslurm": str(pyslurm.__version__)})
    except Exception as error:  # whatever the import of somebody's build may raise
        answer({"unusable": f"{type(error).__name__}: {error}"})
        return
    known: Requests | None = None
    for line in requests:
        request = json.loads(line)
        number, name = request.pop("id"), request.pop("do")
        try:
            if known is None:
                # Here, not before the first answer: another version's library is never initialised.
                pyslurm.slurm_init(configuration)
                known = Requests(pyslurm)
            answer({"id": number, "done": getattr(known, name)(**request)})
        except pyslurm.RPCError as error:
            answer({"id": number, "refused": str(error)})
        except Exception as error:  # a version's other form: the caller has another way
            answer({"id": number, "fault": f"{type(error).__name__}: {error}"})


def main() -> None:
    # What libslurm prints must not pass for an answer.
    with os.fdopen(os.dup(1), "w", encoding="ascii") as out:
        os.dup2(2, 1)

        def answer(message: dict[str, Any]) -> None:
            out.write(json.dumps(message) + "\n")
            out.flush()

        serve(sys.stdin.buffer, answer)


if __name__ == "__main__":
    main()
