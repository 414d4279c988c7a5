"""What Slurm says now of jobs' nodes, features, reservations and array throttles.

AdminComment has these as of the submission. An administrator may change them on a waiting job (scontrol(1), `update`),
and a user the throttle of an array: what Slurm shows counts. One call of squeue shows them of all jobs; squeue(1) has
excluded nodes in its older format alone.

ReqNodeList is polluxd's, too: each move writes the nodes of its target. So a list counts as an administrator's where it
is neither the user's nor the one that polluxd wrote last.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from polluxd.errors import DirectiveError, SlurmGarbled
from polluxd.model import JobState
from polluxd.slurm.demands import matches, shortened
from polluxd.slurm.notation import node_names
from polluxd.slurm.protocol import SlurmJob

FORMAT = "%A|%F|%K|%n|%x|%v|%z|%f"
"""The value of SQUEUE_FORMAT. Features come last: they may have a bar."""
_NUMBER = re.compile(r"[0-9]{1,10}")
_THROTTLE = re.compile(r"%(\d{1,9})$")
_SHOWN_THROTTLE = re.compile(
    r"JobId=\d+ ArrayJobId=(\d+) ArrayTaskId=\S+ (?:ArrayTaskThrottle=(\d{1,9}) )?JobName="
)
_NOTHING = ("", "(null)", "N/A", "NONE")


class _Words(NamedTuple):
    """What one job's line says."""

    required: frozenset[str]
    excluded: frozenset[str]
    reservation: str
    features: str
    one_thread: bool
    """--threads-per-core=1 or --hint=nomultithread: Slurm gives a core for each CPU that the job asks for."""


@dataclass(slots=True)
class PresentWords:
    """What Slurm says now, and what polluxd itself wrote."""

    _jobs: dict[int, _Words] = field(default_factory=dict)
    _throttles: dict[int, int | None] = field(default_factory=dict)
    """By array, most tasks that run at one time; None: no limit."""
    _written: dict[int, frozenset[str]] = field(default_factory=dict)
    """The ReqNodeList that polluxd wrote last into each job."""
    _ordered: dict[int, frozenset[str]] = field(default_factory=dict)
    """The nodes that an administrator chose for each job."""

    def read(self, text: str, ours: Container[int]) -> None:
        """Take in what the answer to `FORMAT` says of jobs and arrays of `ours`.

        A line that makes no sense leaves its job as it was submitted.
        """
        self._jobs, self._throttles = {}, {}
        for line in text.split("\n"):
            parts = line.split("|", 7)
            if len(parts) != 8 or not all(map(_NUMBER.fullmatch, parts[:2])) or int(parts[0]) not in ours:
                continue
            number, array, tasks, required, excluded, reservation, each, features = parts
            if not tasks.isdigit() and tasks not in _NOTHING:
                found = _THROTTLE.search(tasks)
                self._throttles[int(array)] = int(found[1]) or None if found else None
            try:
                nodes = frozenset(node_names(required)), frozenset(node_names(excluded))
            except SlurmGarbled:
                continue
            bound_to, wanted = (word if word not in _NOTHING else "" for word in (reservation, features))
            self._jobs[int(number)] = _Words(*nodes, bound_to, wanted, each.endswith(":1"))

    def unknown_throttles(self, jobs: Iterable[SlurmJob]) -> list[int]:
        """Return the arrays with a limit whose present one squeue does not show: each task has a record of its own."""
        return sorted(
            {
                job.array[0]
                for job in jobs
                if job.array is not None
                and job.state is JobState.PENDING
                and job.demands.array_limit is not None
                and job.array[0] not in self._throttles
            }
        )

    def read_throttle(self, array: int, text: str) -> None:
        """Take in what `scontrol -o show job ARRAY` says first."""
        found = _SHOWN_THROTTLE.match(text)
        if found and int(found[1]) == array:
            self._throttles[array] = int(found[2]) or None if found[2] else None

    def wrote(self, job_id: int, nodes: Iterable[str]) -> None:
        """Take in which ReqNodeList polluxd writes."""
        self._written[job_id] = frozenset(nodes)

    def ordered(self, job_id: int) -> frozenset[str]:
        """Return the nodes that an administrator chose; none: nobody did."""
        return self._ordered.get(job_id, frozenset())

    def applied(self, jobs: Iterable[SlurmJob]) -> tuple[tuple[SlurmJob, ...], Mapping[str, str]]:
        """Return the jobs with what Slurm says now, and why some cannot be understood: those are left alone."""
        unreadable: dict[str, str] = {}
        found, alive = [], set[int]()
        for job in jobs:
            alive.add(job.job_id)
            words = self._jobs.get(job.job_id)
            if job.spec is None or job.companion is not None or job.state.finished:
                found.append(job)
                continue
            try:
                found.append(self._with_words(job, words))
            except DirectiveError:
                assert words is not None
                unreadable[f"job {job.job_id}"] = (
                    f"its Features={shortened(words.features)} are not features with & and |"
                )
                found.append(replace(job, spec=None))
        self._written = {number: nodes for number, nodes in self._written.items() if number in alive}
        self._ordered = {number: nodes for number, nodes in self._ordered.items() if number in alive}
        return tuple(found), unreadable

    def _with_words(self, job: SlurmJob, words: _Words | None) -> SlurmJob:
        demands = job.demands
        if job.array is not None and job.array[0] in self._throttles:
            demands = replace(demands, array_limit=self._throttles[job.array[0]])
        if words is not None:
            if words.features:
                matches(words.features, frozenset())
            demands = replace(
                demands,
                nodelist=self._nodes(job, words.required),
                exclude=words.excluded,
                reservation=words.reservation,
                constraint=words.features,
            )
        spec = job.spec
        if spec is not None and words is not None and words.one_thread != spec.one_thread:
            spec = replace(spec, one_thread=words.one_thread)
        same = demands == job.demands and spec is job.spec
        return job if same else replace(job, demands=demands, spec=spec)

    def _nodes(self, job: SlurmJob, shown: frozenset[str]) -> frozenset[str]:
        """Return the nodes to which the job is bound."""
        written, own = self._written.get(job.job_id), job.demands.nodelist
        # After a restart of polluxd nobody knows who wrote the list of a job that has been requeued.
        polluxds = shown == written or (written is None and job.restart_count > 0)
        if job.state is JobState.PENDING and not polluxds:
            if shown and shown != own:
                self._ordered[job.job_id] = shown
            else:
                self._ordered.pop(job.job_id, None)
        return self._ordered.get(job.job_id, own)
