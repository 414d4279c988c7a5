"""Read `squeue` through one format for Slurm 22.05 to 26.05.

A random word separates the fields: `squeue` gets it through its environment, which other users cannot read, so nothing
that a user wrote, such as the name of a job, can end a field or a record.

A job holds on each of its nodes the GPUs that it asked for per node: Slurm grants exactly these. No version of squeue
shows the allocation itself; `node_records.attribute` works it out for jobs that asked in another way.

Slurm bounds each text of a user (1,024 bytes; the submission hook bounds AdminComment), so a record has a few KiB. The
list of jobs that a job waits for has no such bound: polluxd asks for its first letter. Other fields have no width,
because squeue fills a field up to its width with blanks.

Call squeue with SLURM_TIME_FORMAT=%s: times are then POSIX timestamps. Call it with --array: each task of a
job array is then one record, and tasks that Slurm itself still keeps in one record have the same JobID.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil
from sys import intern
from types import MappingProxyType
from typing import NamedTuple

from polluxd.errors import DirectiveError, SlurmGarbled
from polluxd.model import JobState
from polluxd.slurm.demands import of_plain_job
from polluxd.slurm.directives import Directives, parse_admin_comment
from polluxd.slurm.notation import duration, node_names, parse_gpus
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.states import job_state

_FIELDS = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "UserID",
    "UserName",
    "Account",
    "QOS",
    "Partition",
    "State",
    "Reason",
    "RestartCnt",
    "PriorityLong",
    "Dependency",
    "SubmitTime",
    "EligibleTime",
    "StartTime",
    "EndTime",
    "TimeLimit",
    "Deadline",
    "NodeList",
    "BatchHost",
    "SchedNodes",
    "NumNodes",
    "NumCPUs",
    "NumTasks",
    "tres-per-node",
    "tres-per-job",
    "tres-per-task",
    "tres-per-socket",
    "tres-alloc",
    "Licenses",
    "admin_comment",
    "Name",
)
_FIRST_LETTER = frozenset({"Dependency"})
_NOTHING = frozenset({"", "(null)", "N/A", "n/a", "NONE", "None", "Unknown"})
_MAY_HOLD = (JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING)
_DIGITS = 18
_LONGEST_NAME = 64  # each task of an array repeats it, in the database and in each decision's snapshot
_NUMBER = re.compile(r"(\d{1,18})(K?)(?:-\d+K?)?")
_MEMORY = re.compile(r"(?:^|,)mem=(\d{1,12}(?:\.\d{1,6})?)([KMGTP]?)(?:,|$)")
_MEGABYTES = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
BAD_CONSTRAINTS, LAUNCH_FAILED = "BadConstraints", "launch failed requeued held"
HELD_BY_SLURM = (BAD_CONSTRAINTS, LAUNCH_FAILED)
"""Reasons of jobs that Slurm itself holds: no node could have it, or a node failed at its start (its Prolog, say)."""


@dataclass(frozen=True, slots=True)
class Query:
    """One call of squeue, with the words that end its fields and records."""

    separator: str
    end: str
    """Not the separator: a name may begin with a line break."""

    @property
    def format(self) -> str:
        """The value of SQUEUE_FORMAT2.

        squeue prints a field without a width whole; the separator is its suffix.
        """
        *first, last = ((name, 1 if name in _FIRST_LETTER else "") for name in _FIELDS)
        words = [f"{name}:{width}{self.separator}" for name, width in first]
        return ",".join([*words, f"{last[0]}:{last[1]}{self.end}"])

    def records(self, text: str) -> Iterator[str]:
        """Split the answer into records. Raises SlurmGarbled where it is cut off."""
        end, start = self.end + "\n", 0
        # One by one: a list of them would be as large as the answer.
        while (stop := text.find(end, start)) >= 0:
            yield text[start:stop]
            start = stop + len(end)
        if start < len(text) and not text.isspace():
            raise SlurmGarbled(f"squeue's answer is cut off: it ends in {text[-40:]!r}")


def jobs_query() -> Query:
    """Ask for all that polluxd knows of jobs, with words that users cannot know."""
    return Query(f"<{secrets.token_hex(8)}>", f"<{secrets.token_hex(8)}>")


class Record(NamedTuple):
    """What one record of `jobs_query` says."""

    job: SlurmJob | None
    """None: it makes no sense."""
    complaint: str = ""
    """What makes no sense in it."""
    task: tuple[int, int] | None = None
    """Of a task of an array that waits: the record's job id, and the task's number."""
    scattered: bool = False
    leaving: int | None = None
    lost: bool = False
    """It makes no sense, and its job may hold GPUs."""
    text: str = ""
    """The record, in the words of `Known`."""


class Known(NamedTuple):
    """Records of an earlier answer. A record of the same text says the same."""

    separator: str
    """Between fields; a random word that never leaves this process, since the words of answers are new each time."""
    records: Mapping[str, Record] = MappingProxyType({})
    """By text."""


@dataclass(frozen=True, slots=True)
class Queue:
    """What an answer says."""

    jobs: tuple[SlurmJob, ...]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Records that could not be understood, by job: why. Their jobs are left alone."""
    lost: bool = False
    """A job that may hold GPUs is in no other field: its record could not be understood."""
    scattered: frozenset[int] = frozenset()
    """Jobs that run on several nodes and did not ask for GPUs per node: what they hold on each is not known here."""
    leaving: Mapping[int, int] = field(default_factory=dict)
    """GPUs per node, at most, of jobs whose processes are ending, where `jobs` does not say what they hold."""
    records: Mapping[str, Record] = field(default_factory=dict)
    """By their text, for the next answer."""


def parse_jobs(text: str, query: Query, known: Known | None = None) -> Queue:
    """Read the answer to `jobs_query`.

    Raises:
        SlurmGarbled: the answer as a whole is cut off or of another form. One record that makes no sense costs that
            record alone.
    """
    jobs: list[SlurmJob] = []
    tasks: dict[int, list[int]] = {}
    unreadable: dict[str, str] = {}
    scattered: set[int] = set()
    leaving: dict[int, int] = {}
    records: dict[str, Record] = {}
    lost = False
    known = known or Known(query.separator)
    for line in query.records(text):
        same = line.replace(query.separator, known.separator)
        record = known.records.get(same) or _record(line, query)._replace(text=same)
        records[record.text] = record
        if record.task is not None:
            waiting = tasks.setdefault(record.task[0], [])
            waiting.append(record.task[1])
            if len(waiting) > 1:
                continue  # one record of Slurm, one line for each of its tasks
        job = record.job
        lost = lost or record.lost
        if job is None:
            unreadable[f"job {line.split(query.separator, 1)[0][:20]}"] = record.complaint
            continue
        jobs.append(job)
        if record.complaint:
            unreadable[f"job {job.job_id}"] = record.complaint
        if record.scattered:
            scattered.add(job.job_id)
        if record.leaving is not None:
            leaving[job.job_id] = record.leaving
    together = {job_id: tuple(sorted(several)) for job_id, several in tasks.items() if len(several) > 1}
    if together:
        jobs = [replace(j, tasks=together[j.job_id]) if j.job_id in together else j for j in jobs]
    return Queue(tuple(jobs), unreadable, lost, frozenset(scattered), leaving, records)


def _record(line: str, query: Query) -> Record:
    """Read one record."""
    row, task, lost = line.split(query.separator), None, True
    try:
        if len(row) != len(_FIELDS):
            raise SlurmGarbled(f"expected {len(_FIELDS)} fields, got {len(row)}")
        record = dict(zip(_FIELDS, row, strict=True))
        lost = job_state(record["State"]) in _MAY_HOLD
        number = record["ArrayTaskID"]
        if _is_number(number) and _is_number(row[0]) and record["State"] == "PENDING":
            task = int(row[0]), int(number)
        job, complaint, held, most = _job(record)
        holds = job.state in _MAY_HOLD and held is None and bool(job.nodes)
        ending = job.state is JobState.COMPLETING and (job.spec is None or held is None)
        return Record(job, complaint, task, holds, most if ending else None)
    except SlurmGarbled as error:
        return Record(None, str(error), task, lost=lost)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS


def _job(record: Mapping[str, str]) -> tuple[SlurmJob, str, int | None, int]:
    """Read a job.

    Also return a complaint about its AdminComment, its GPUs per node (None: not known), and the most GPUs that it can
    hold on one of its nodes.
    """
    state = job_state(record["State"])
    pending = state is JobState.PENDING
    directives, complaint = _directives(_text(record, "admin_comment"))
    nodes = () if pending else node_names(record["NodeList"])
    asked = _asked(record)
    held = asked.per_node if asked.per_node is not None or len(nodes) != 1 else asked.in_all
    holding = nodes if state in _MAY_HOLD else ()
    submitted, array = _time(record, "SubmitTime") or 0.0, _array(record)
    cpus = ceil(_number(record, "NumCPUs") / max(len(nodes), 1))
    name = record["Name"][:_LONGEST_NAME]
    return (
        SlurmJob(
            job_id=_number(record, "JobID"),
            name=f"{name} {array[0]}_{array[1]}" if array else name,
            user=intern(_text(record, "UserName")),
            uid=_number(record, "UserID"),
            account=intern(_text(record, "Account")),
            partition=intern(_text(record, "Partition")),
            qos=intern(_text(record, "QOS")),
            state=state,
            raw_state=intern(record["State"]),
            reason=intern(record["Reason"]),
            restart_count=_number(record, "RestartCnt"),
            submit_time=directives.submitted if directives and directives.submitted else submitted,
            queued_at=submitted,
            start_time=None if pending else _time(record, "StartTime"),
            eligible_time=_time(record, "EligibleTime"),
            end_time=_time(record, "EndTime") if state.finished else None,
            time_limit_s=duration(record["TimeLimit"]),
            deadline=_time(record, "Deadline"),
            nodes=nodes,
            gpus_per_node_held=dict.fromkeys(holding, held) if held else {},
            cpus_per_node_held=dict.fromkeys(holding, cpus) if state is not JobState.COMPLETING else {},
            requested_gpus_per_node=asked.per_node,
            # Slurm itself takes the priority of a job that it could start nowhere; `release` gives it back.
            held_by_user=state in (JobState.PENDING, JobState.RUNNING)
            and _number(record, "PriorityLong") == 0
            and record["Reason"] != BAD_CONSTRAINTS,
            # Of a job that waits for none, squeue prints nothing here, or the first letter of "(null)".
            dependent=pending and record["Dependency"][:1].isalpha(),
            begin_time=directives.begin if directives else None,
            admin_comment=_text(record, "admin_comment"),
            spec=directives.spec if directives else None,
            batch_host=_text(record, "BatchHost"),
            companion=directives.companion if directives else None,
            mem_per_gpu_mb=_memory_per_gpu(record, asked),
            tres=_tres(record["tres-alloc"]),
            array=array,
            priority=_number(record, "PriorityLong"),
            planned_nodes=node_names(record["SchedNodes"]) if pending else (),
            licenses=parse_requested_licenses(_text(record, "Licenses")),
            demands=directives.demands if directives else of_plain_job(asked.text),
        ),
        complaint,
        held,
        next((count for count in (asked.per_node, asked.in_all) if count is not None), 1 << 20),
    )


def _array(record: Mapping[str, str]) -> tuple[int, int] | None:
    numbers = record["ArrayJobID"], record["ArrayTaskID"]
    if not all(map(_is_number, numbers)):
        return None
    return int(numbers[0]), int(numbers[1])


@lru_cache(maxsize=16384)
def _directives(comment: str) -> tuple[Directives | None, str]:
    """Read the directives, or say why a comment makes no sense."""
    try:
        return parse_admin_comment(comment), ""
    except DirectiveError as error:
        return None, str(error)


class _Asked(NamedTuple):
    """GPUs that a job asked for."""

    per_node: int | None
    """None: it asked in another way."""
    in_all: int | None
    """None: it asked per node, or Slurm does not tell."""
    text: str
    """All requests for GPUs, in whatever way."""


def _asked(record: Mapping[str, str]) -> _Asked:
    texts = [record[f"tres-per-{what}"] for what in ("node", "job", "task", "socket")]
    per_node, per_job, per_task, per_socket = ("gpu" in text for text in texts)
    in_all = None
    if per_job:
        in_all = parse_gpus(texts[1]).count
    elif per_task:
        in_all = parse_gpus(texts[2]).count * max(1, _number(record, "NumTasks"))
    other = per_job or per_task or per_socket
    return _Asked(
        None if other else parse_gpus(texts[0]).count if per_node else 0,
        in_all,
        ",".join(text for text in texts if "gpu" in text),
    )


def _memory_per_gpu(record: Mapping[str, str], asked: _Asked) -> int:
    """Memory that goes with each GPU [MB]; 0 where Slurm does not tell."""
    memory = _MEMORY.search(record["tres-alloc"])
    if memory is None:
        return 0
    gpus = asked.in_all or 0
    if asked.per_node is not None:
        gpus = asked.per_node * max(1, _number(record, "NumNodes"))
    # Rounded down: jobs that share a node's memory to the last megabyte fit there.
    return int(float(memory[1]) * _MEGABYTES[memory[2]] / gpus) if gpus else 0


@lru_cache(maxsize=16384)
def _tres(text: str) -> Mapping[str, int]:
    """TRES as whole numbers; memory in MB."""
    items = (item.rpartition("=") for item in text.split(","))
    memory = _MEMORY.search(text)
    known = {"mem": int(float(memory[1]) * _MEGABYTES[memory[2]])} if memory else {}
    return known | {name: int(count) for name, _, count in items if name and _is_number(count)}


@lru_cache(maxsize=4096)
def parse_requested_licenses(text: str) -> Mapping[str, int]:
    """Licenses of `matlab:2,ansys`; a remote one is `name@server:count`."""
    items = (item.rpartition(":") for item in filter(None, re.split("[,;|]", text)))
    return {name or count: int(count) if name and _is_number(count) else 1 for name, _, count in items}


def _text(record: Mapping[str, str], key: str) -> str:
    value = record[key]
    return "" if value in _NOTHING else value


def _number(record: Mapping[str, str], key: str) -> int:
    if _is_number(record[key]):
        return int(record[key])
    # A pending job may ask for a range such as "1-2": its least counts.
    found = _NUMBER.fullmatch(record[key])
    if found is None:
        raise SlurmGarbled(f"expected {key} as a number, got {record[key][:40]!r}")
    return int(found[1]) * (1024 if found[2] else 1)


def _time(record: Mapping[str, str], key: str) -> float | None:
    value = record[key]
    if value in _NOTHING:
        return None
    if not _is_number(value):
        raise SlurmGarbled(f"expected {key} as a POSIX time, got {value[:40]!r}")
    return float(value)
