"""What `pyslurm_worker` answers, as the rest of polluxd knows it: the same records as `records` reads from scontrol."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from polluxd.errors import DirectiveError, SlurmGarbled
from polluxd.model import JobState, Node
from polluxd.slurm.directives import parse_admin_comment
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.records import (
    index_count,
    job_state,
    node_names,
    parse_gpus,
    schedulable,
    with_foreign_use,
)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


_Any = TypeVar("_Any", bound=_Record)


class _Held(_Record):
    """What a job holds on one node."""

    cpu_ids: str | None
    """Indices of cores, such as `0-3,7`."""
    threads: int
    """Of each core."""
    gres: list[str]


class _Job(_Record):
    id: int
    name: str | None
    user: str | None
    uid: int
    account: str | None
    partition: str | None
    qos: str | None
    state: str
    reason: str | None
    restarts: int
    submitted: float | None
    eligible: float | None
    started: float | None
    ends: float | None
    limit: int | None
    """Minutes."""
    nodes: str | None
    batch_host: str | None
    held: dict[str, _Held]
    num_nodes: int
    gres_per_node: list[str]
    cpus: int
    cpus_per_task: int | None
    memory_per_node: int | None
    required_nodes: str | None
    on_hold: bool
    dependent: bool
    admin_comment: str | None
    command: str | None


class _Node(_Record):
    name: str
    state: str
    gres: list[str]
    cpus: int
    partitions: list[str]


class _Jobs(_Record):
    jobs: list[_Job]


class _Cluster(_Jobs):
    nodes: list[_Node]


def read_jobs(answer: object) -> tuple[SlurmJob, ...]:
    """The answer to `jobs`. Raises SlurmGarbled."""
    return _jobs(_checked(_Jobs, {"jobs": answer}).jobs, {})


def read_cluster(answer: object) -> tuple[tuple[SlurmJob, ...], tuple[Node, ...]]:
    """The answer to `observe`: jobs, and nodes with what jobs without a spec hold there. Raises SlurmGarbled."""
    cluster = _checked(_Cluster, answer)
    nodes = tuple(map(_node, cluster.nodes))
    jobs = _jobs(cluster.jobs, {node.name: node.gpus for node in nodes})
    return jobs, with_foreign_use(nodes, jobs)


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
    """`gpus_of`: those of each node, the bound where it is not known what a job still holds there."""
    state = job_state(record.state)
    pending = state is JobState.PENDING
    try:
        directives = parse_admin_comment(record.admin_comment or "")
    except DirectiveError:
        directives = None
    nodes = () if pending else node_names(record.nodes or "")
    gpus = Counter({name: parse_gpus(",".join(part.gres)).count for name, part in record.held.items()})
    cpus = {name: index_count(part.cpu_ids or "") * part.threads for name, part in record.held.items()}
    per_node = parse_gpus(",".join(record.gres_per_node)).count if record.gres_per_node else None
    if state is JobState.COMPLETING and not +gpus:
        # As in `records`: the GPUs of a job that leaves may be in use still. Its total is not told here.
        gpus.update({name: gpus_of.get(name, 0) if per_node is None else per_node for name in nodes})
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
        nodes=nodes,
        gpus_per_node_held=+gpus,
        cpus_per_node_held={name: count for name, count in cpus.items() if count},
        requested_nodes=record.num_nodes,
        requested_gpus_per_node=per_node,
        requested_cpus=record.cpus,
        cpus_per_task=record.cpus_per_task or 1,
        mem_per_node_mb=record.memory_per_node,
        required_nodes=node_names(record.required_nodes or ""),
        held_by_user=pending and record.on_hold,
        dependent=pending and record.dependent,
        begin_time=directives.begin if directives else None,
        admin_comment=record.admin_comment or "",
        command=record.command or "",
        spec=directives.spec if directives else None,
        batch_host=record.batch_host or "",
        companion=directives.companion if directives else None,
    )


def _node(record: _Node) -> Node:
    gpus = parse_gpus(",".join(record.gres))
    return Node(
        name=record.name,
        gpus=gpus.count,
        gpu_type=gpus.type,
        schedulable=schedulable(record.state),
        partitions=frozenset(record.partitions),
        cpus=record.cpus,
    )
