"""What a slurmctld does in time, for the fake: jobs start, end and leave their nodes, and nodes boot and go off."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from polluxd.model import JobState, Node
from polluxd.slurm.fake.fake_job import FakeJob, shown
from polluxd.slurm.fake.fake_power import PowerSaving
from polluxd.slurm.protocol import SlurmJob

CRED_EXPIRE_S = 120.0
"""slurm.conf's AuthInfo=cred_expire: a requeued job waits one second more than this unless it is told otherwise."""


class FakeSlurmctld:
    """Nodes, jobs and a clock.

    Args:
        nodes: the cluster.
        now: POSIX time at the start.
        exit_s: how long a job's processes take to exit (COMPLETING) [s].
        start_s: how long the scheduler takes to start a job that may start [s].
        forgets_s: how long after its end a job is shown (slurm.conf's MinJobAge) [s].
        kept_off_s: how long after its end an attempt bars its nodes to the job's next one [s]: a start there fails.
        saving: power saving, of the nodes that are off at first; None: none, and a job starts at once on any node.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        *,
        now: float = 1_700_000_000.0,
        exit_s: float = 0.1,
        start_s: float = 0.7,
        forgets_s: float = math.inf,
        kept_off_s: float = 0.0,
        saving: PowerSaving | None = None,
    ) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._now = now
        self._exit_s = exit_s
        self._start_s = start_s
        self._forgets_s = forgets_s
        self._kept_off_s = kept_off_s
        self._saving = saving
        if saving is not None:
            saving.keep(self._nodes.values())
        self._jobs: dict[int, FakeJob] = {}
        self.refusal: Callable[[FakeJob, Sequence[str]], str] = lambda _job, _nodes: ""
        """Why Slurm does not start a job on these nodes, in words of squeue: a rule that no record shows."""

    def clock(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Advance the clock by `seconds`.

        Events that are due on the way happen in order, each at its time. slurmctld looks at what was asked of it 50 ms
        later.
        """
        until = self._now + seconds
        following = self._now + 0.05
        while self._now < until:
            before, self._now = self._now, min(until, following)
            if self._saving is not None:
                self._saving.count(self._nodes.values(), self._now - before)
            self._pass_time()
            following = min((at for at in self._events() if at > self._now), default=until)

    def _events(self) -> Iterator[float]:
        """Yield when the state of each job or node may change by itself."""
        if self._saving is not None:
            yield from self._saving.events()
        for job in self._jobs.values():
            match job.state:
                case JobState.RUNNING if job.started is not None and job.raw_state == "RUNNING":
                    yield job.started + (math.inf if job.runtime is None else job.runtime)
                    yield job.started + (math.inf if job.time_limit_s is None else job.time_limit_s)
                case JobState.COMPLETING:
                    yield job.leaves_at
                case JobState.PENDING:
                    yield job.begin + self._start_s

    def _pass_time(self) -> None:
        if any(job.ended is not None for job in self._jobs.values()):
            self._jobs = {
                number: job
                for number, job in self._jobs.items()
                if job.ended is None or self._now < job.ended + self._forgets_s
            }
        for job in self._jobs.values():
            if job.raw_state == "RUNNING" and job.started is not None:
                if job.runtime is not None and self._now >= job.started + job.runtime:
                    self._leave(job, JobState.COMPLETED)
                elif job.time_limit_s is not None and self._now >= job.started + job.time_limit_s:
                    self._leave(job, JobState.FAILED)
            if job.state is JobState.COMPLETING and self._now >= job.leaves_at:
                self._gone(job)
        for job in self._jobs.values():
            if job.state is JobState.PENDING:
                self._try_start(job)
        if self._saving is not None:
            self._save_power(self._saving)

    def _save_power(self, saving: PowerSaving) -> None:
        """Switch nodes on and off. A job whose nodes have booted runs from now on: Slurm sets its start time again."""
        used = {name for job in self._jobs.values() for name in job.held}
        for name, power in saving.changes(self._nodes, used, self._now).items():
            self._nodes[name] = replace(self._nodes[name], power=power)
        for job in self._jobs.values():
            if job.raw_state == "CONFIGURING" and all(self._nodes[name].power == "on" for name in job.held):
                job.raw_state, job.started = "RUNNING", self._now

    def _leave(self, job: FakeJob, becomes: JobState) -> None:
        job.state, job.raw_state, job.becomes = JobState.COMPLETING, "COMPLETING", becomes
        job.leaves_at = self._now + self._exit_s

    def _gone(self, job: FakeJob) -> None:
        assert job.becomes is not None
        job.left_at, job.left_nodes = self._now, frozenset(job.held)
        if job.becomes is JobState.PENDING:
            job.held = {}
            job.state, job.raw_state, job.started = JobState.PENDING, "PENDING", None
            job.begin = self._now + CRED_EXPIRE_S + 1
        else:
            self._end(job, job.becomes)

    def _end(self, job: FakeJob, state: JobState) -> None:
        job.held = {}
        job.state, job.raw_state, job.ended = state, state.value, self._now

    def _try_start(self, job: FakeJob) -> None:
        if job.on_hold or job.bad_constraints or self._now < job.begin + self._start_s or self._waits(job):
            return
        free = self._free()
        names = (
            job.required
            or tuple(n for n, gpus in free.items() if gpus >= job.gpus_per_node)[: job.nodes_wanted]
        )
        fits = len(names) >= job.nodes_wanted and all(free.get(n, 0) >= job.gpus_per_node for n in names)
        if (why := self.refusal(job, names)) != job.refused:
            job.refused = why
        if why or not fits:
            return
        # A job that may start in the very second in which it was requeued, on a node that it left: its old
        # credential is revoked there, and the new start with it.
        left = -math.inf if job.left_at is None else job.left_at
        too_soon = math.floor(max(job.begin, 0.0)) == math.floor(max(left, -1.0))
        too_soon = too_soon or self._now < left + self._kept_off_s
        if too_soon and not job.left_nodes.isdisjoint(names):
            job.state, job.raw_state = JobState.FAILED, "FAILED"
            job.started = job.ended = self._now
            return
        job.held = dict.fromkeys(sorted(names), job.gpus_per_node)  # the first has the batch script
        job.state, job.raw_state, job.started = JobState.RUNNING, "RUNNING", self._now
        if self._saving is not None and any(self._nodes[name].power != "on" for name in job.held):
            job.raw_state = "CONFIGURING"
            for name in job.held:
                if self._nodes[name].power == "off":
                    self._saving.boot(name, self._now)
                    self._nodes[name] = replace(self._nodes[name], power="booting")

    def _waits(self, job: FakeJob) -> bool:
        other = self._jobs.get(job.depends_on) if job.depends_on is not None else None
        return other is not None and not other.state.finished

    def _free(self) -> Mapping[str, int]:
        used = Counter[str]()
        for job in self._jobs.values():
            used.update(job.held)
        return {
            name: (node.gpus - used[name]) if node.schedulable else 0 for name, node in self._nodes.items()
        }

    def _show(self, job: FakeJob) -> SlurmJob:
        return shown(job, waits=self._waits(job), now=self._now)
