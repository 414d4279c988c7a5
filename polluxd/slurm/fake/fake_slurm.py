"""An in-memory Slurm, for the simulator and for tests (`tests/troubled_slurm.py` adds faults).

It has the real protocol, a clock that the test advances, and the state transitions and traps of the real Slurm. Each
of these was tried on Slurm 22.05.8; `tests/integration/test_slurm_contract.py` compares the fake with the real Slurm.

    slurm = FakeSlurm([Node("n1", gpus=4), Node("n2", gpus=4)])
    job = slurm.submit(JobSpec(max_gpus=8))
    slurm.configure(job, Geometry(("n1",), 2, 2), start=True)
    slurm.advance(1.0)
    assert slurm.jobs([job])[job].state is JobState.RUNNING
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from polluxd.errors import SlurmRefused
from polluxd.model import JobSpec, JobState, Node
from polluxd.slurm.fake.fake_job import FakeJob
from polluxd.slurm.fake.fake_slurmctld import CRED_EXPIRE_S, FakeSlurmctld
from polluxd.slurm.limits import Limits
from polluxd.slurm.protocol import ClusterState, Companion, Geometry, SlurmJob


class FakeSlurm(FakeSlurmctld):
    """A SlurmClient without Slurm.

    Args:
        nodes: the cluster.
        slurmdbd: whether the cluster has slurmdbd, which lets running jobs shrink.
        now: POSIX time at the start.
        times: the other times of `FakeSlurmctld`, and its power saving.
    """

    def __init__(
        self, nodes: Iterable[Node], *, slurmdbd: bool = True, now: float = 1_700_000_000.0, **times: Any
    ) -> None:
        super().__init__(nodes, now=now, **times)
        self._slurmdbd = slurmdbd
        self._submitted = 0
        self.refuses_update: Callable[[int, Geometry], str] = lambda _job_id, _geometry: ""
        """Why the site's hook refuses a job's new geometry."""
        self.calls: list[tuple[str, int]] = []
        """Each writing call that was tried, as (name, job id), in order."""
        self.limits, self.limits_asked = Limits(), 0

    # --- the test's hands ---------------------------------------------------------------------

    def submit(
        self,
        spec: JobSpec | None = None,
        *,
        name: str = "job",
        user: str = "alice",
        nodes: int = 1,
        gpus_per_node: int = 1,
        lease: float = 120.0,
        begin: float | None = None,
        depends_on: int | None = None,
        runtime: float | None = None,
        time_limit_s: float | None = None,
        companion: Companion | None = None,
        uid: int = 1000,
    ) -> int:
        """Submit a job as sbatch with the submission hook does.

        A job with a spec is kept back by a lease of `lease` seconds. A job without a spec may start at once.
        """
        self._submitted += 1
        job_id = self._submitted
        earliest = max(self._now, begin or 0.0)
        self._jobs[job_id] = FakeJob(
            job_id=job_id,
            name=name,
            user=user,
            spec=spec,
            submitted=self._now,
            begin=earliest + (lease if spec is not None else 0.0),
            own_begin=begin,
            nodes_wanted=nodes,
            gpus_per_node=gpus_per_node,
            asked=(nodes, gpus_per_node),
            runtime=runtime,
            time_limit_s=time_limit_s,
            depends_on=depends_on,
            companion=companion,
            uid=uid,
        )
        return job_id

    def truth(self, job_id: int) -> SlurmJob:
        """Return the job as slurmctld would show it."""
        return self._show(self._jobs[job_id])

    def finish(self, job_id: int, state: JobState = JobState.COMPLETED) -> None:
        """End the job as if by itself (or as cancelled, or failed)."""
        job = self._jobs[job_id]
        if job.state is JobState.RUNNING:
            self._leave(job, state)
        elif job.state is JobState.PENDING:
            self._end(job, state)

    def break_node(self, name: str) -> None:
        """Take a node down.

        Slurm itself requeues each Pollux job that ran there, at once and at its present size. Companions and jobs
        without a spec fail.
        """
        self.set_schedulable(name, False)
        for job in self._jobs.values():
            if job.state is JobState.RUNNING and name in job.held:
                again = job.spec is not None and job.companion is None
                job.restarts += again
                self._leave(job, JobState.PENDING if again else JobState.FAILED)

    def set_schedulable(self, node: str, schedulable: bool) -> None:
        """Drain or resume a node; its running jobs go on."""
        self._nodes[node] = replace(self._nodes[node], schedulable=schedulable)

    # --- SlurmClient --------------------------------------------------------------------------

    def observe(self) -> ClusterState:
        jobs = tuple(self._show(job) for job in self._jobs.values())
        foreign = Counter[str]()
        foreign_cpus = Counter[str]()
        for job in jobs:
            if job.spec is None:
                foreign.update(job.gpus_per_node_held)
                foreign_cpus.update(job.cpus_per_node_held)
        nodes = tuple(
            replace(node, foreign_gpus=foreign[node.name], foreign_cpus=foreign_cpus[node.name])
            if foreign[node.name]
            else node
            for node in self._nodes.values()
        )
        return ClusterState(self._now, nodes, jobs, limits=self.limits, kept_off_s=self._kept_off_s)

    def jobs(self, job_ids: Sequence[int]) -> dict[int, SlurmJob]:
        return {i: self._show(self._jobs[i]) for i in job_ids if i in self._jobs}

    def requeue(self, job_id: int) -> None:
        job = self._ours("requeue", job_id)
        if job.companion is not None:
            raise SlurmRefused(f"scontrol requeue {job_id}: Requested operation is presently disabled")
        if job.state is JobState.COMPLETING:
            raise SlurmRefused(
                f"job {job_id} is COMPLETING: polluxd requeues it once its processes have ended"
            )
        if job.state is JobState.RUNNING:
            job.restarts += 1
            self._leave(job, JobState.PENDING)

    def run_again(self, job_id: int) -> None:
        job = self._ours("run_again", job_id)
        if job.state is not JobState.FAILED:
            raise SlurmRefused(f"scontrol requeue {job_id}: Job is pending execution")
        job.restarts += 1
        job.state, job.raw_state = JobState.PENDING, "PENDING"
        job.started = job.ended = None
        job.begin = self._now + CRED_EXPIRE_S + 1

    def configure(
        self, job_id: int, geometry: Geometry, *, start: bool, time_limit_s: float | None = None
    ) -> None:
        job = self._ours("configure", job_id)
        named = () if geometry.anywhere else geometry.nodes
        unknown = [n for n in named if n not in self._nodes]
        if unknown or job.state is not JobState.PENDING:
            raise SlurmRefused(f"scontrol update: Invalid node name specified for job {job_id}")
        if why := self.refuses_update(job_id, geometry):
            raise SlurmRefused(f"scontrol update: {why}")
        job.nodes_wanted = len(geometry.nodes)
        job.required = named
        job.gpus_per_node = geometry.gpus_per_node
        job.bad_constraints = any(
            self._nodes[n].memory_mb and (geometry.mem_per_node_mb or 0) > self._nodes[n].memory_mb
            for n in named
        )
        job.cpus_per_task = geometry.cpus_per_task
        if geometry.mem_per_node_mb is not None:
            job.mem_per_node_mb = geometry.mem_per_node_mb
        if time_limit_s is not None:
            job.time_limit_s = 60.0 * math.ceil(time_limit_s / 60.0)
        if start:
            job.begin = self._now

    def release(self, job_id: int) -> None:
        job = self._ours("release", job_id)
        job.bad_constraints = False

    def limit_time(self, job_id: int, seconds: float) -> None:
        job = self._ours("limit_time", job_id)
        job.time_limit_s = 60.0 * math.ceil(seconds / 60.0)

    def probe(self, job_id: int) -> None:
        self._ours("probe", job_id)

    def ask_limits(self) -> None:
        self.limits_asked += 1

    def can_shrink(self) -> bool:
        return self._slurmdbd

    def shrink(self, job_id: int, nodes: Sequence[str]) -> None:
        job = self._ours("shrink", job_id)
        if job.state is not JobState.RUNNING:
            raise SlurmRefused(f"job {job_id} does not run (any more)")
        if set(nodes) != set(job.held):
            host = next(iter(job.held))
            if not self._slurmdbd or host not in nodes or not set(nodes) < set(job.held):
                raise SlurmRefused(f"scontrol update: job {job_id} cannot shrink to {','.join(nodes)}")
            job.held = {name: gpus for name, gpus in job.held.items() if name in nodes}

    def cancel(self, job_ids: Sequence[int]) -> None:
        self.calls += [("cancel", job_id) for job_id in job_ids]
        found = [self._jobs.get(job_id) for job_id in job_ids]
        if any(job is None or job.companion is None for job in found):
            raise SlurmRefused(f"jobs {job_ids} are no companions (or are gone): polluxd does not end them")
        for job_id in job_ids:
            self.finish(job_id, JobState.CANCELLED)

    def renew(self, job_ids: Sequence[int], until: float) -> None:
        jobs = [self._ours("renew", job_id) for job_id in job_ids]
        for job in jobs:
            if job.state is JobState.PENDING:
                job.begin = float(math.floor(until))  # scontrol's times have whole seconds

    # --- inside -------------------------------------------------------------------------------

    def _ours(self, call: str, job_id: int) -> FakeJob:
        self.calls.append((call, job_id))
        job = self._jobs.get(job_id)
        if job is None or job.spec is None:
            raise SlurmRefused(f"jobs [{job_id}] did not opt in (or are gone): polluxd does not touch them")
        return job
