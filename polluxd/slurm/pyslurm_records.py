"""Read the answers of `pyslurm_worker`.

The values are those that `queue` and `node_records` read from commands.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polluxd.errors import DirectiveError, SlurmGarbled
from polluxd.model import JobState, Node
from polluxd.slurm.demands import of_plain_job
from polluxd.slurm.directives import parse_admin_comment
from polluxd.slurm.gres import parse_gpus
from polluxd.slurm.node_lists import index_count, node_names
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.queue import BAD_CONSTRAINTS, parse_requested_licenses
from polluxd.slurm.states import job_state, power, schedulable


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


_TASKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
_MOST_TASKS = 4_000_001
"""The largest MaxArraySize that Slurm takes (slurm.conf(5))."""

_Any = TypeVar("_Any", bound=_Record)
_Count = Annotated[int, Field(ge=0)]
_Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""POSIX seconds."""


class _Held(_Record):
    """What a job holds on one node."""

    cpu_ids: str | None
    """Indices of cores, such as `0-3,7`."""
    threads: _Count
    """Of each core."""
    gres: list[str]
    memory_mb: _Count = 0


class _Job(_Record):
    id: int
    name: str | None
    user: str | None
    uid: _Count
    account: str | None
    partition: str | None
    qos: str | None
    state: str
    reason: str | None
    restarts: _Count
    submitted: _Time | None
    eligible: _Time | None
    started: _Time | None
    ends: _Time | None
    limit: _Count | None
    """Minutes."""
    deadline: _Time | None = None
    nodes: str | None
    batch_host: str | None
    held: dict[str, _Held]
    gres_per_node: list[str]
    gpus_otherwise: bool
    """The job asks for GPUs in another way than per node."""
    on_hold: bool
    dependent: bool
    priority: _Count
    planned_nodes: str | None
    licenses: list[str]
    tres: dict[str, _Count]
    """Empty: this pyslurm does not tell."""
    memory_mb: _Count = 0
    """On all nodes; 0: Slurm does not tell."""
    array: _Count | None
    array_task: _Count | None
    """None in a record of tasks that wait, and of task 0, as pyslurm takes 0 for nothing."""
    array_waiting: str | None
    """Tasks that wait in one record, such as `1-3,7-11:2`."""
    admin_comment: str | None


class _Node(_Record):
    name: str
    state: str
    gres: list[str]
    cpus: _Count
    partitions: list[str]
    features: list[str] = []
    tmp_mb: _Count | None = None
    memory_mb: _Count = 0


class _Jobs(_Record):
    jobs: list[_Job]


class _Cluster(_Jobs):
    nodes: list[_Node]


def read_jobs(answer: object) -> tuple[SlurmJob, ...]:
    """Read the answer to `jobs`. Raises SlurmGarbled."""
    return _jobs(_checked(_Jobs, {"jobs": answer}).jobs, {})


def read_cluster(answer: object) -> tuple[tuple[SlurmJob, ...], tuple[Node, ...]]:
    """Read the answer to `observe`: jobs and nodes.

    The nodes say what jobs without a spec hold there. Raises SlurmGarbled.
    """
    cluster = _checked(_Cluster, answer)
    nodes = tuple(map(_node, cluster.nodes))
    jobs = _jobs(cluster.jobs, {node.name: node.gpus for node in nodes})
    return jobs, _with_foreign_use(nodes, jobs, cluster.jobs)


def _with_foreign_use(
    nodes: Iterable[Node], jobs: Iterable[SlurmJob], records: Iterable[_Job]
) -> tuple[Node, ...]:
    """Add to each node what jobs without a spec hold there."""
    gpus, cpus, memory = Counter[str](), Counter[str](), Counter[str]()
    for job, record in zip(jobs, records, strict=True):
        if job.spec is None:
            gpus.update(job.gpus_per_node_held)
            cpus.update(job.cpus_per_node_held)
            if not job.state.finished:
                memory.update({name: part.memory_mb for name, part in record.held.items()})
    return tuple(
        replace(
            node,
            foreign_gpus=gpus[node.name],
            foreign_cpus=cpus[node.name],
            foreign_memory_mb=memory[node.name],
        )
        for node in nodes
    )


def _checked(kind: type[_Any], answer: object) -> _Any:
    try:
        return kind.model_validate(answer)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the answer"
        raise SlurmGarbled(f"pyslurm's worker: {where}: {first['msg']}") from None


def _jobs(records: Sequence[_Job], gpus_of: Mapping[str, int]) -> tuple[SlurmJob, ...]:
    return tuple(_job(record, gpus_of) for record in records)


def _job(record: _Job, gpus_of: Mapping[str, int]) -> SlurmJob:
    """Convert one job record.

    `gpus_of` gives the GPUs of each node. It is the upper bound where pyslurm does not tell how many GPUs a job still
    holds on a node.
    """
    state = job_state(record.state)
    pending = state is JobState.PENDING
    try:
        directives = parse_admin_comment(record.admin_comment or "")
    except DirectiveError:
        directives = None
    nodes = () if pending else node_names(record.nodes or "")
    # 26.05 still shows what a job held after its end.
    parts = {} if state.finished else record.held
    gpus = Counter({name: parse_gpus(",".join(part.gres)).count for name, part in parts.items()})
    cpus = {name: index_count(part.cpu_ids or "") * part.threads for name, part in parts.items()}
    per_node = None if record.gpus_otherwise else parse_gpus(",".join(record.gres_per_node)).count
    if state is JobState.COMPLETING and not +gpus:
        # 22.05 counts the GPUs of a job as free from its first signal on, while its processes may still use them.
        gpus.update({name: gpus_of.get(name, 0) if per_node is None else per_node for name in nodes})
    waiting = _tasks(record.array_waiting) if record.array_waiting and pending else ()
    array = None
    if record.array is not None:
        array = (record.array, waiting[0] if waiting else record.array_task or 0)
    return SlurmJob(
        job_id=record.id,
        name=record.name or "",
        user=record.user or str(record.uid),
        uid=record.uid,
        account=record.account or "",
        partition=record.partition or "",
        qos=record.qos or "",
        state=state,
        raw_state=record.state,
        reason="_".join((record.reason or "None").split()),
        restart_count=record.restarts,
        submit_time=directives.submitted if directives and directives.submitted else record.submitted or 0.0,
        start_time=None if pending else record.started,
        eligible_time=record.eligible,
        end_time=record.ends if state.finished else None,
        time_limit_s=None if record.limit is None else 60.0 * record.limit,
        deadline=record.deadline,
        nodes=nodes,
        gpus_per_node_held=+gpus,
        cpus_per_node_held={name: count for name, count in cpus.items() if count},
        requested_gpus_per_node=per_node,
        held_by_user=state in (JobState.PENDING, JobState.RUNNING)
        and record.on_hold
        and record.reason != BAD_CONSTRAINTS,
        dependent=pending and record.dependent,
        begin_time=directives.begin if directives else None,
        admin_comment=record.admin_comment or "",
        spec=directives.spec if directives else None,
        batch_host=record.batch_host or "",
        companion=directives.companion if directives else None,
        mem_per_gpu_mb=_memory_per_gpu(record, per_node, len(nodes)),
        demands=directives.demands if directives else of_plain_job(",".join(record.gres_per_node)),
        tres=record.tres or {"gres/gpu": gpus.total(), "cpu": sum(cpus.values()), "node": len(nodes)},
        array=array,
        tasks=waiting if len(waiting) > 1 else (),
        priority=record.priority,
        planned_nodes=node_names(record.planned_nodes or "") if pending else (),
        licenses=parse_requested_licenses(",".join(record.licenses)),
    )


def _memory_per_gpu(record: _Job, per_node: int | None, nodes: int) -> int:
    """Memory that goes with each GPU [MB]; 0 where Slurm does not tell."""
    asked = None if per_node is None else per_node * max(1, record.tres.get("node", nodes))
    gpus = record.tres.get("gres/gpu", 0) if asked is None else asked
    return record.memory_mb // gpus if gpus else 0


def _tasks(text: str) -> tuple[int, ...]:
    """Read the numbers of tasks that wait in one record, sorted.

    Raises:
        SlurmGarbled: the text is no list of numbers, or has more of them than an array can.
    """
    found: set[int] = set()
    for part in text.split(","):
        numbers = _TASKS.fullmatch(part)
        if numbers is None:
            raise SlurmGarbled(f"pyslurm's worker: expected numbers of tasks, got {text[:40]!r}")
        first, last, step = (None if number is None else int(number) for number in numbers.groups())
        tasks = range(first or 0, (first or 0 if last is None else last) + 1, step or 1)
        if len(found) + len(tasks) > _MOST_TASKS:
            raise SlurmGarbled(f"pyslurm's worker: an array of more than {_MOST_TASKS} tasks: {text[:40]!r}")
        found.update(tasks)
    return tuple(sorted(found))


def _node(record: _Node) -> Node:
    gpus = parse_gpus(",".join(record.gres))
    return Node(
        name=record.name,
        gpus=gpus.count,
        gpu_type=gpus.type,
        schedulable=schedulable(record.state),
        partitions=frozenset(record.partitions),
        cpus=record.cpus,
        features=frozenset(record.features),
        tmp_mb=record.tmp_mb,
        memory_mb=record.memory_mb,
        power=power(record.state),
    )
