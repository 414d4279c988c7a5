"""Reads `scontrol --oneliner --details show job|node` as printed by Slurm 22.05 and later.

`KEY=value KEY=value ...`, one record per line. Values may hold blanks, and some are the user's own text (JobName,
Comment, Command, WorkDir, StdOut): a key counts where it first appears behind the job's name, only keys that are
needed are looked for, and what a job holds is read from before those words. What a user can forge that way is the
description of a job of his own: neither other jobs' capacity nor the reading of the rest.

Call scontrol with SLURM_TIME_FORMAT=%s: times are then POSIX timestamps.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
from ClusterShell.RangeSet import RangeSet, RangeSetException

from polluxd.errors import DirectiveError, SlurmGarbled
from polluxd.model import JobState, Node
from polluxd.slurm.directives import parse_admin_comment
from polluxd.slurm.protocol import SlurmJob

_STATES = {
    **{state.value: state for state in JobState},
    "CONFIGURING": JobState.RUNNING,  # nodes are held, the prolog runs
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STAGE_OUT": JobState.COMPLETING,
    "STOPPED": JobState.SUSPENDED,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "BOOT_FAIL": JobState.FAILED,
    "DEADLINE": JobState.FAILED,
    "LAUNCH_FAILED": JobState.FAILED,
    "NODE_FAIL": JobState.FAILED,
    "OUT_OF_MEMORY": JobState.FAILED,
    "PREEMPTED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
    "TIMEOUT": JobState.FAILED,
    "REVOKED": JobState.CANCELLED,
}

# A node that shows any other word (DRAIN, DOWN, MAINT, REBOOT_ISSUED, POWERED_DOWN, NOT_RESPONDING, RESERVED, ...)
# gets no new work.
_USABLE_NODE_STATES = frozenset(
    {"IDLE", "MIXED", "ALLOCATED", "COMPLETING", "PLANNED", "CLOUD", "DYNAMIC_NORM", "BLOCKED"}
)

_HEAD = re.compile(
    # 26.05 has SLUID=.
    r"JobId=(?P<id>\d+) (?:\S+=\S* )*?JobName=(?P<name>.*?)(?: SLUID=\S*)? "
    r"UserId=(?P<user>\S*)\((?P<uid>\d+)\) GroupId=",
    re.DOTALL,
)
_NODE_HEAD = re.compile(r"NodeName=(\S+) ")
_GRES_GPU = re.compile(r"^(?:gres[:/])?gpu(?:[:=](?P<type>[A-Za-z_][\w.+-]*))?(?:[:=](?P<count>\d+))?$")
_MEMORY = re.compile(r"^(\d+(?:\.\d+)?)([KMGTP]?)$")
_MB = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}


_NO_NAME = re.compile(r"[\s!&^/]")
"""In no node's name: to the library that reads node lists they are set operators, steps or nothing."""
_MOST_NODES = 1 << 17
"""Twice what Slurm can have."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs that a gres expression names; `type` is empty where none or several are named."""

    count: int
    type: str = ""


def parse_jobs(text: str) -> tuple[SlurmJob, ...]:
    """All jobs of `scontrol -o -d show job`.

    A job whose AdminComment has Pollux' mark but makes no sense is not ours: it is left alone, with its GPUs.

    Raises:
        SlurmGarbled: a record is incomplete or of an unknown form.
    """
    jobs = tuple(_job(record) for record in _records(text, "JobId=", "No jobs in the system", _HEAD))
    twice = [job_id for job_id, times in Counter(job.job_id for job in jobs).items() if times > 1]
    if twice:
        # Somebody forges records with line breaks in a job's name: neither copy can be believed.
        raise SlurmGarbled(
            f"scontrol shows jobs {twice} more than once: look for a line break in a job's name"
        )
    return jobs


def parse_nodes(text: str, jobs: Iterable[SlurmJob] = ()) -> tuple[Node, ...]:
    """All nodes of `scontrol -o -d show node`; what `jobs` without a spec hold there is counted as foreign.

    Raises:
        SlurmGarbled: a record is incomplete or of an unknown form.
    """
    nodes = (_node(record) for record in _records(text, "NodeName=", "No nodes in the system", _NODE_HEAD))
    return with_foreign_use(nodes, jobs)


def with_foreign_use(nodes: Iterable[Node], jobs: Iterable[SlurmJob]) -> tuple[Node, ...]:
    """The nodes, with what jobs without a spec hold there."""
    foreign_gpus, foreign_cpus = Counter[str](), Counter[str]()
    for job in jobs:
        if job.spec is None:
            foreign_gpus.update(job.gpus_per_node_held)
            foreign_cpus.update(job.cpus_per_node_held)
    return tuple(
        replace(node, foreign_gpus=foreign_gpus[node.name], foreign_cpus=foreign_cpus[node.name])
        for node in nodes
    )


def job_state(word: str) -> JobState:
    """The state that Slurm's word stands for."""
    # An unknown word is a state of a later Slurm: the job is left as it is, with what it holds.
    return _STATES.get(word, JobState.COMPLETING)


def schedulable(state: str) -> bool:
    """Whether a node in a state such as `IDLE+DRAIN` gets new work. (An asterisk: it does not respond.)"""
    return all(word in _USABLE_NODE_STATES for word in state.split("+"))


def parse_gpus(text: str) -> Gpus:
    """GPUs in a gres list such as `gpu:4`, `gres:gpu:a100:2`, `gres/gpu:2(IDX:0-1),gres/nic:1`, `gpu:a100:4(S:0)`.

    Raises:
        SlurmGarbled: a GPU is named in a form that is not known.
    """
    count, types = 0, set[str]()
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        if not re.match(r"^(?:gres[:/])?gpu(?:[:=]|$)", item):
            continue
        found = _GRES_GPU.match(item)
        if found is None:
            raise SlurmGarbled(f"expected GPUs as gpu[:type][:count], got {item!r}")
        count += int(found["count"] or 1)
        types.add(found["type"] or "")
    return Gpus(count, types.pop() if len(types) == 1 else "")


def node_names(text: str) -> tuple[str, ...]:
    """The names in a node list such as `n[1-3,7],gpu-a`, sorted; none for `(null)`.

    Raises:
        SlurmGarbled: it is no node list.
    """
    if text in ("", "(null)", "None"):
        return ()
    if _NO_NAME.search(text) or _reach(text) > _MOST_NODES:
        raise SlurmGarbled(f"expected a node list of at most {_MOST_NODES} names, got {text[:80]!r}")
    try:
        # No group resolver: a name with "@" must not make the library run commands of the machine's configuration.
        return tuple(NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise SlurmGarbled(f"expected a node list, got {text!r}: {error}") from error


def _reach(text: str) -> int:
    """How many names a node list spells out, about: it is not to be tried with one of billions."""
    names = 0
    for part in re.split(r",(?![^\[]*\])", text):
        product = 1
        for brackets in re.findall(r"\[([^\]]*)\]", part):
            ranges = re.findall(r"(\d{1,18})-(\d{1,18})", brackets)
            product *= max(1, brackets.count(",") + 1 + sum(int(last) - int(first) for first, last in ranges))
        names += product
    return names


def _records(text: str, first_key: str, none: str, head: re.Pattern[str]) -> Iterator[str]:
    """The records of an output, each matching `head`."""
    stripped = text.strip()
    if not stripped or stripped == none:
        return
    if not text.endswith("\n"):
        raise SlurmGarbled(f"scontrol's output is cut off: it ends in {text[-40:]!r}")
    record = ""
    for line in text.split("\n"):
        # Slurm prints a line break within a job's name as it is, and a user may put anything behind it. A record
        # ends only where the next one starts and its own head is complete.
        if line.startswith(first_key) and head.match(record):
            yield record
            record = ""
        if line.strip():
            if not record and not line.startswith(first_key):
                raise SlurmGarbled(f"expected a record that starts with {first_key}, got {line[:80]!r}")
            record += line + "\n"
    yield record


class _Fields:
    """The fields of one record, looked up by key."""

    def __init__(self, record: str, about: str) -> None:
        self._record = " " + record
        self._about = about
        # Slurm prints what a job holds before the first of the user's own words.
        self._slurms_own = re.split(r"\s(?:Network|Command)=", self._record, maxsplit=1)[0]

    def get(self, key: str) -> str | None:
        """The word after ` KEY=`; None where the key is missing."""
        found = re.search(rf"\s{re.escape(key)}=(\S*)", self._record)
        return found[1] if found else None

    def own(self, key: str) -> str | None:
        """The same, of what Slurm prints before any of the user's own words."""
        found = re.search(rf"\s{re.escape(key)}=(\S*)", self._slurms_own)
        return found[1] if found else None

    def phrase(self, key: str, *following: str) -> str:
        """The text after ` KEY=` up to one of the keys that may follow it; empty where the key is missing."""
        ends = "|".join(re.escape(k) + "=" for k in following)
        found = re.search(rf"\s{re.escape(key)}=(.*?)(?=\s+(?:{ends})|$)", self._record, re.DOTALL)
        return found[1].strip() if found else ""

    def word(self, key: str) -> str:
        value = self.get(key)
        if value is None:
            raise SlurmGarbled(
                f"{self._about} has no {key}= (cut off, or a Slurm version that is not known?)"
            )
        return value

    def gpus_per_node(self) -> int | None:
        """GPUs asked for per node; None where the job asked otherwise, or its user forged nonsense there."""
        try:
            # Printed behind the user's words, so that any of them may pass for it.
            return parse_gpus(text).count if (text := self.get("TresPerNode")) else None
        except SlurmGarbled:
            return None

    def number(self, key: str) -> int:
        # 22.05 shows a range of nodes or CPUs of a pending job as "1-2", the least first.
        value = self.word(key)
        found = re.match(r"^(\d+)(K?)(?:-\d+K?)?$", value)
        if found is None:
            raise SlurmGarbled(f"{self._about}: {key} is a number, not {value!r}")
        return int(found[1]) * (1024 if found[2] else 1)

    def time(self, key: str) -> float | None:
        value = self.word(key)
        if value in ("Unknown", "None", "N/A", "(null)", ""):
            return None
        if not value.isdigit():
            raise SlurmGarbled(f"{self._about}: {key} is a POSIX time, not {value!r}")
        return float(value)

    def details(self) -> Iterator[tuple[tuple[str, ...], str, str]]:
        """(nodes, CPU indices, gres) of each group of nodes that the job holds."""
        pattern = r"\sNodes=(\S+) CPU_IDs=(\S*) Mem=\S+ GRES=(\S*)"
        for found in re.finditer(pattern, self._slurms_own):
            yield node_names(found[1]), found[2], found[3]


def _job(record: str) -> SlurmJob:
    head = _HEAD.match(record)
    if head is None:
        raise SlurmGarbled(f"expected a job record (JobId= JobName= UserId= GroupId=), got {record[:80]!r}")
    job_id = int(head["id"])
    fields = _Fields(record[head.end() - len("GroupId=") :], f"scontrol's record of job {job_id}")
    raw_state = fields.word("JobState")
    state = job_state(raw_state)
    admin_comment = fields.phrase("AdminComment", "SystemComment", "Comment", "StdErr", "StdIn", "StdOut")
    try:
        directives = parse_admin_comment(admin_comment)
    except DirectiveError:
        directives = None
    gpus, cpus = Counter[str](), Counter[str]()
    for nodes, cpu_ids, gres in fields.details():
        for node in nodes:
            gpus[node] += parse_gpus(gres).count
            cpus[node] += index_count(cpu_ids)
    per_node = fields.gpus_per_node()
    if state is JobState.COMPLETING and not +gpus:
        # Slurm 22.05 counts these GPUs as free from the first signal on (GresUsed too), while the job's processes may
        # still use them: NodeList has the nodes that are not rid of it. Their number is known exactly where it was
        # asked for per node, as ours are; else the job's total is the bound.
        each = per_node if per_node is not None else parse_gpus(fields.own("JOB_GRES") or "").count
        gpus.update(dict.fromkeys(node_names(fields.word("NodeList")), each))
    memory = fields.own("MinMemoryNode")
    submitted = fields.time("SubmitTime")
    return SlurmJob(
        job_id=job_id,
        name=head["name"],
        user=head["user"],
        uid=int(head["uid"]),
        account=_named(fields.word("Account")),
        partition=_named(fields.word("Partition")),
        qos=_named(fields.word("QOS")),
        state=state,
        raw_state=raw_state,
        reason=fields.word("Reason"),
        restart_count=fields.number("Restarts"),
        submit_time=directives.submitted if directives and directives.submitted else submitted or 0.0,
        start_time=None if state is JobState.PENDING else fields.time("StartTime"),
        eligible_time=fields.time("EligibleTime"),
        end_time=fields.time("EndTime") if state.finished else None,
        time_limit_s=_duration(fields.word("TimeLimit")),
        nodes=node_names(fields.word("NodeList")) if state is not JobState.PENDING else (),
        gpus_per_node_held=+gpus,
        cpus_per_node_held=+cpus,
        requested_nodes=fields.number("NumNodes"),
        requested_gpus_per_node=per_node,
        requested_cpus=fields.number("NumCPUs"),
        cpus_per_task=_number_or(fields.get("CPUs/Task"), 1),
        mem_per_node_mb=_memory_mb(memory) if memory is not None else None,
        required_nodes=node_names(fields.word("ReqNodeList")),
        held_by_user=state is JobState.PENDING and fields.number("Priority") == 0,
        dependent=state is JobState.PENDING and fields.word("Dependency") not in ("(null)", ""),
        begin_time=directives.begin if directives else None,
        admin_comment=admin_comment,
        command=fields.phrase("Command", "SubmitLine", "WorkDir"),
        spec=directives.spec if directives else None,
        batch_host=_named(fields.own("BatchHost") or ""),
        companion=directives.companion if directives else None,
    )


def _node(record: str) -> Node:
    name = _NODE_HEAD.match(record)
    if name is None:
        raise SlurmGarbled(f"expected a node record (NodeName=), got {record[:80]!r}")
    fields = _Fields(record, f"scontrol's record of node {name[1]}")
    gpus = parse_gpus(fields.word("Gres"))
    partitions = fields.get("Partitions") or ""
    return Node(
        name=name[1],
        gpus=gpus.count,
        gpu_type=gpus.type,
        schedulable=schedulable(fields.word("State")),
        partitions=frozenset(p for p in partitions.split(",") if p),
        cpus=_number_or(fields.get("CPUEfctv"), fields.number("CPUTot")),
    )


def _named(text: str) -> str:
    return "" if text in ("(null)", "N/A") else text


def _number_or(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdigit() else default


def index_count(indices: str) -> int:
    """How many indices `0-3,7` names. Raises SlurmGarbled."""
    try:
        if _reach(f"[{indices}]") > _MOST_NODES:
            raise RangeSetException(f"more than {_MOST_NODES}")
        return len(RangeSet(indices)) if indices else 0
    except RangeSetException as error:
        raise SlurmGarbled(f"expected indices such as 0-3,7, got {indices[:80]!r}") from error


def _memory_mb(text: str) -> int | None:
    found = _MEMORY.match(text)
    if found is None:
        raise SlurmGarbled(f"expected memory such as 300M or 4G, got {text!r}")
    return round(float(found[1]) * _MB[found[2]]) or None


def _duration(text: str) -> float | None:
    """Seconds of `D-HH:MM:SS`, `HH:MM:SS`, `MM:SS`; None for UNLIMITED."""
    if text in ("UNLIMITED", "Partition_Limit", "N/A", "INVALID"):
        return None
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(p.isdigit() for p in parts) or (dash and not days.isdigit()) or len(parts) > 3:
        raise SlurmGarbled(f"expected a duration D-HH:MM:SS, got {text!r}")
    seconds = 0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return float(seconds + 86400 * int(days or 0))
