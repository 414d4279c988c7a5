"""Slurm through its own commands, `squeue`, `scontrol` and `scancel`.

This works with every version, from an unprivileged account with Operator rights (or as SlurmUser or root where there is
no slurmdbd).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from polluxd.errors import SlurmGarbled, SlurmRefused
from polluxd.model import JobState, Node
from polluxd.slurm.commands import Commands
from polluxd.slurm.node_records import attribute, parse_nodes
from polluxd.slurm.present_words import FORMAT, PresentWords
from polluxd.slurm.protocol import ClusterState, Geometry, SlurmJob
from polluxd.slurm.queue import Known, Query, jobs_query, parse_jobs
from polluxd.slurm.rarely_asked import RarelyAsked
from polluxd.slurm.rules import Rules, parse_licenses, parse_partitions, parse_reservations
from polluxd.slurm.site_defaults import kept_off_s, shares_memory, with_site_defaults, without_memory

log = logging.getLogger(__name__)

_ARRAYS_AT_ONCE = 20
"""Arrays whose throttle is asked for at a time: each takes one request."""
_TASKS_AT_ONCE = 100
"""Tasks of an array that get a record of their own at a time: each takes one request."""
_WORDS_AT_ONCE = 8000
"""Jobs whose present words are asked for at a time: Linux allows 128 KiB of one argument."""

_STATE = re.compile(r"\sJobState=(\S+)")
"""The first one in a record is Slurm's: the hook keeps such words out of names, and a path with them comes later."""
_UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)
_SLURMDBD = re.compile(r"^AccountingStorageType\s*=\s*accounting_storage/slurmdbd\s*$", re.MULTILINE)
_MAIL_TYPES = re.compile(r"\sMailType=([A-Z0-9_,]+)")
_OF_MOVES = frozenset({"BEGIN", "REQUEUE"})
"""scontrol(1), MailType: what Slurm would send of the two halves of a move through the queue."""


class ScontrolClient(Commands):
    """A SlurmClient over command lines.

    Keep `timeout` below the leader's lease. `clock` gives POSIX time, for `ClusterState.taken_at`.
    """

    def __init__(
        self, *, conf: Path | str | None = None, timeout: float = 10.0, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(conf, timeout=timeout)
        self._clock = clock
        self._mine: dict[int, SlurmJob] = {}
        """Jobs that opted in, as they were read last."""
        self._seen: frozenset[int | str] = frozenset()
        self._memory: Mapping[str, int] = {}
        """Of each node [MB]."""
        self._rarely = RarelyAsked(self.ask, clock)
        self._known = Known(jobs_query().separator)
        """Of the last answer."""
        self._words = PresentWords()

    def observe(self) -> ClusterState:
        taken_at = self._clock()
        jobs, nodes, unreadable = self._read_all()
        if gone := self._seen - _to_come_again(jobs, nodes):
            # An answer that is cut off between two records looks whole. Slurm shows a job for MinJobAge after its end,
            # and a node for good: polluxd asks once more for jobs and nodes that are missing, and then believes it.
            log.info("%d jobs and nodes are missing from Slurm's answer: it is asked again", len(gone))
            jobs, nodes, unreadable = self._read_all()
        self._learn_all(jobs)
        if not nodes:
            raise SlurmGarbled(
                "Slurm shows no node at all (it hides cloud nodes that are powered down, unless slurm.conf has "
                "PrivateData=cloud)"
            )
        self._seen = frozenset(j.job_id for j in jobs if not j.state.finished) | {n.name for n in nodes}
        rack = self._rarely.racks()
        if rack:
            nodes = tuple(replace(node, rack=rack.get(node.name, "")) for node in nodes)
        self._memory = {node.name: node.memory_mb for node in nodes if node.memory_mb}
        rules, senseless = self._rules()
        limits, unreadable_limits = self._rarely.limits()
        configuration = self._rarely.configuration()
        if not shares_memory(configuration):
            nodes = without_memory(nodes)
        jobs, no_words = self._with_present_words(jobs)
        jobs = with_site_defaults(jobs, nodes, rules.partitions, limits, configuration)
        return ClusterState(
            taken_at,
            nodes,
            jobs,
            {**unreadable, **senseless, **unreadable_limits, **no_words},
            rules,
            limits,
            kept_off_s(configuration),
        )

    def _with_present_words(
        self, jobs: tuple[SlurmJob, ...]
    ) -> tuple[tuple[SlurmJob, ...], Mapping[str, str]]:
        """Return jobs as administrators and users have changed them since their submission."""
        ours = {job.array[0] if job.array else job.job_id for job in jobs if job.spec is not None}
        text, asked = "", sorted(ours)
        for start in range(0, len(asked), _WORDS_AT_ONCE):
            # Plain jobs have lists of 16 KiB. The first job twice: squeue refuses one that is gone if it is alone.
            some = ",".join(map(str, [asked[start], *asked[start : start + _WORDS_AT_ONCE]]))
            command = ("squeue", "--local", "--all", "--noheader", f"--jobs={some}")
            text += self.ask(*command, environment={"SQUEUE_FORMAT": FORMAT})
        self._words.read(text, ours)
        for array in self._words.unknown_throttles(jobs)[:_ARRAYS_AT_ONCE]:
            self._words.read_throttle(array, self._rarely.array(array))
        return self._words.applied(jobs)

    def _rules(self) -> tuple[Rules, Mapping[str, str]]:
        """Slurm's rules, and the records of them that make no sense."""
        show = ("scontrol", "--local", "-a", "-o", "show")
        partitions, senseless = parse_partitions(self.ask(*show, "partition"))
        reservations, more = parse_reservations(self.ask(*show, "reservation"))
        licenses = {}
        if re.search(r"^Licenses\s*=\s*(?!\(null\))\S", self._rarely.configuration(), re.MULTILINE):
            licenses = parse_licenses(self.ask("scontrol", "--local", "-o", "show", "licenses"))
        return Rules(partitions, reservations, licenses, self._rarely.preemption()), {**senseless, **more}

    def jobs(self, job_ids: Sequence[int]) -> dict[int, SlurmJob]:
        if not job_ids:
            return {}
        wanted = set(job_ids)
        if len(job_ids) > 1:
            return {job.job_id: job for job in self._all_jobs() if job.job_id in wanted}
        return {job.job_id: job for job in self._learn(self._read_jobs(job_ids[0])) if job.job_id in wanted}

    def requeue(self, job_id: int) -> None:
        self._must_be_ours([job_id])
        self._may_requeue(job_id)
        # Plain `requeue` runs a job again that has ended a moment ago; `incomplete` passes over it.
        self.ask("scontrol", "requeue", "incomplete", self._address(job_id))

    def _may_requeue(self, job_id: int) -> None:
        """Refuse the requeue of a job that is COMPLETING, and keep Slurm from sending mail about the job's moves.

        Its user has had the mail of its first start. Slurm 24.11.5 to 26.05.3 crash when a job is requeued that is
        COMPLETING on a node that is DOWN.
        """
        record = self.ask("scontrol", "--local", "-o", "show", "job", self._address(job_id))
        if (state := _STATE.search(record)) and "COMPLETING" in state[1]:
            raise SlurmRefused(
                f"job {job_id} is COMPLETING: polluxd requeues it once its processes have ended"
            )
        kept = quiet_mail(record)
        try:
            if kept:
                self.ask("scontrol", "update", f"JobId={self._address(job_id)}", f"MailType={kept}")
        except SlurmRefused as error:
            log.info("job %d: Slurm sends mail about its moves: %s", job_id, error)

    def run_again(self, job_id: int) -> None:
        self._must_be_ours([job_id])
        self._may_requeue(job_id)
        self.ask("scontrol", "requeue", self._address(job_id))

    def configure(
        self, job_id: int, geometry: Geometry, *, start: bool, time_limit_s: float | None = None
    ) -> None:
        self._must_be_ours([job_id])
        gpus = ("gres:gpu", geometry.gpu_type, str(geometry.gpus_per_node))
        k, cpus = len(geometry.nodes), geometry.cpus_per_task
        required: Sequence[str] = geometry.nodes
        if (
            geometry.anywhere
        ):  # an administrator's nodes stay where Slurm, which needs all of them, can grant that
            ordered = self._words.ordered(job_id)
            required = sorted(ordered) if len(ordered) <= k else ()
        self._words.wrote(job_id, required)
        arguments = [
            f"JobId={self._address(job_id)}",
            f"NumNodes={k}-{k}",  # "2" alone is refused on a one-node job: its maximum stays 1
            f"NumTasks={k}",
            f"NumCPUs={k * cpus}",  # left out when shrinking: BadConstraints
            f"CPUsPerTask={cpus}",
            # Stays as at submission otherwise, and a smaller size would never fit.
            f"MinCPUsNode={max(cpus, geometry.min_cpus)}",
            "TasksPerNode=1",
            # Slurm adds all requests for GPUs up: clear the other ways of asking for them.
            "TresPerJob=",
            "TresPerTask=",
            f"TresPerNode={':'.join(filter(None, gpus))}",
            f"ReqNodeList={','.join(required)}",
        ]
        if geometry.mem_per_node_mb is not None:
            # Where jobs do not share out memory, Slurm checks a request against the node's all the same.
            room = [self._memory[name] for name in geometry.nodes if name in self._memory]
            arguments.append(f"MinMemoryNode={min([geometry.mem_per_node_mb, *room])}")
        if time_limit_s is not None:
            arguments.append(_time_limit(time_limit_s))
        if start:
            # Wakes the scheduler at once. Left out, the job waits for cred_expire + 1 s after its requeue: a delay that
            # protects it on nodes of the attempt before, so the caller waits as long there (`slurm.site_defaults`).
            arguments.append("StartTime=now")
        self.ask("scontrol", "update", *arguments)

    def release(self, job_id: int) -> None:
        self._must_be_ours([job_id])
        self.ask("scontrol", "release", self._address(job_id))

    def limit_time(self, job_id: int, seconds: float) -> None:
        self._must_be_ours([job_id])
        self.ask("scontrol", "update", f"JobId={self._address(job_id)}", _time_limit(seconds))

    def probe(self, job_id: int) -> None:
        self._must_be_ours([job_id])
        job = self._mine[job_id]
        same = "TimeLimit=UNLIMITED" if job.time_limit_s is None else _time_limit(job.time_limit_s)
        self.ask("scontrol", "update", f"JobId={self._address(job_id)}", same)
        if job.qos not in (admitted := self._rarely.qos_of(job.user, job.account)) and admitted:
            raise SlurmRefused(f"user {job.user} has no QOS {job.qos} in account {job.account} any more")

    def ask_limits(self) -> None:
        self._rarely.ask_limits()

    def can_shrink(self) -> bool:
        return _SLURMDBD.search(self._rarely.configuration()) is not None

    def shrink(self, job_id: int, nodes: Sequence[str]) -> None:
        self._must_be_ours([job_id])
        now = self.jobs([job_id]).get(job_id)
        if now is None or now.state is not JobState.RUNNING:
            raise SlurmRefused(f"job {job_id} does not run (any more): it has no nodes to give back")
        kept, held = set(nodes), set(now.nodes)
        if kept == held:
            return
        # Slurm itself would take the batch host away as well, and the batch script with it.
        if now.batch_host not in kept or not kept < held:
            raise SlurmRefused(
                f"cannot shrink job {job_id} to {','.join(nodes)}: it holds {','.join(now.nodes)} and its batch script "
                f"runs on {now.batch_host or 'no node'}"
            )
        self.ask("scontrol", "update", f"JobId={self._address(job_id)}", f"NodeList={','.join(nodes)}")

    def cancel(self, job_ids: Sequence[int]) -> None:
        if not job_ids:
            return
        self._must_be_ours(job_ids, companions=True)
        try:
            self.ask("scancel", *map(str, job_ids))
        except SlurmRefused:
            # Those that ended in the meantime are refused, and are no trouble.
            now = [job for job in self._all_jobs() if job.job_id in job_ids]
            if any(not job.state.finished and job.state is not JobState.COMPLETING for job in now):
                raise

    def renew(self, job_ids: Sequence[int], until: float) -> None:
        if not job_ids:
            return
        self._must_be_ours(job_ids)
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(until))
        ids = ",".join(map(self._address, job_ids))
        try:
            self.ask("scontrol", "update", f"JobId={ids}", f"StartTime={when}")
        except SlurmRefused:
            # Slurm goes on to the other jobs after one that started or ended in the meantime; that is no trouble.
            now = [job for job in self._all_jobs() if job.job_id in job_ids and job.state is JobState.PENDING]
            if any((job.eligible_time or 0.0) < until - 1 for job in now):
                raise

    def _all_jobs(self) -> tuple[SlurmJob, ...]:
        return self._learn_all(self._read_jobs())

    def _read_all(self) -> tuple[tuple[SlurmJob, ...], tuple[Node, ...], Mapping[str, str]]:
        """Jobs, nodes, and the records that could not be understood."""
        query = jobs_query()
        shown_jobs, shown_nodes = self._ask_all(query)
        queue = parse_jobs(shown_jobs, query, self._known)
        self._known = self._known._replace(records=queue.records)
        records = parse_nodes(shown_nodes)
        jobs, nodes, unknown = attribute(queue, records)
        return jobs, nodes, {**queue.unreadable, **records.unreadable, **unknown}

    def _read_jobs(self, job_id: int | None = None) -> tuple[SlurmJob, ...]:
        """All jobs, or one; none where Slurm has forgotten it."""
        query = jobs_query()
        try:
            queue = parse_jobs(self._ask_jobs(query, job_id), query, self._known)
        except SlurmRefused as error:
            if job_id is not None and _UNKNOWN_JOB.search(str(error)):
                return ()
            raise
        # What a scattered job holds is known from the nodes alone.
        return self._read_all()[0] if queue.scattered else queue.jobs

    def _ask_all(self, query: Query) -> tuple[str, str]:
        """Return what Slurm shows of all jobs and of all nodes."""
        return self._ask_jobs(query), self.ask("scontrol", "--local", "-a", "-o", "-d", "show", "node")

    def _ask_jobs(self, query: Query, job_id: int | None = None) -> str:
        """Return what Slurm shows of all jobs, or of one."""
        one = () if job_id is None else (f"--jobs={job_id}",)
        command = ("squeue", "--local", "--all", "--noheader", "--states=all", "--array", *one)
        return self.ask(*command, environment={"SQUEUE_FORMAT2": query.format})

    def _learn_all(self, jobs: tuple[SlurmJob, ...]) -> tuple[SlurmJob, ...]:
        self._mine.clear()  # polluxd runs for months: drop jobs that Slurm has forgotten
        return self._learn(jobs)

    def _learn(self, jobs: tuple[SlurmJob, ...]) -> tuple[SlurmJob, ...]:
        for job in jobs:
            if job.spec is not None:
                self._mine[job.job_id] = job
            else:
                self._mine.pop(job.job_id, None)
        return jobs

    def _address(self, job_id: int) -> str:
        """The job as Slurm's commands name it. The bare id of a task of an array stands for the whole array."""
        job = self._mine.get(job_id)
        return str(job_id) if job is None or job.array is None else _tasks(job)

    def _must_be_ours(self, job_ids: Sequence[int], *, companions: bool = False) -> None:
        """Raise SlurmRefused for a job that is not Pollux' (or no companion)."""

        def foreign() -> list[int]:
            known = (self._mine.get(job_id) for job_id in job_ids)
            wrong = (job is None or (companions and job.companion is None) for job in known)
            return sorted(job_id for job_id, is_wrong in zip(job_ids, wrong, strict=True) if is_wrong)

        if foreign():
            self._all_jobs()
        if found := foreign():
            what, does = ("are no companions", "end") if companions else ("did not opt in", "touch")
            raise SlurmRefused(f"jobs {found} {what} (or are gone): polluxd does not {does} them")


def _to_come_again(jobs: Sequence[SlurmJob], nodes: Sequence[Node]) -> frozenset[int | str]:
    """Ids of jobs, ended or not, and names of nodes."""
    return frozenset(job.job_id for job in jobs) | {node.name for node in nodes}


def _tasks(job: SlurmJob) -> str:
    """Name a task of a job array, or the tasks that wait in one record.

    An update of a single task gives it a record of its own. Many tasks get theirs by and by: the rest of the list is
    updated as one record.
    """
    assert job.array is not None
    array, tasks = job.array[0], job.tasks or (job.array[1],)
    alone, rest = tasks[:_TASKS_AT_ONCE], tasks[_TASKS_AT_ONCE:]
    return ",".join(
        [*(f"{array}_{task}" for task in alone), *([f"{array}_[{','.join(map(str, rest))}]"] if rest else [])]
    )


def _time_limit(seconds: float) -> str:
    return f"TimeLimit={max(1, ceil(seconds / 60.0))}"


def quiet_mail(record: str) -> str:
    """Return the MailType by which a job's moves send no mail: a move is no news for its user.

    Args:
        record: `scontrol -o show job`. Users' text stands in it, too: whatever that claims, the result is one of
            Slurm's own words, and is for the user's own job.

    Returns:
        Empty where the job sends no mail about its moves.
    """
    found = _MAIL_TYPES.findall(record)
    types = found[-1].split(",") if found else []
    kept = [name for name in types if name not in _OF_MOVES]
    return "" if len(kept) == len(types) else ",".join(kept) or "NONE"
