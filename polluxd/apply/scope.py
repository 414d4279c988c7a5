"""Find the Pollux jobs that polluxd leaves alone.

Those outside of section [scope] are plain jobs to polluxd: a site begins with one partition, account or user, and
widens the scope later. So is a job with a deadline while it waits: the hook of Slurm 22.05 does not see deadlines, and
gives it a lease. A job whose AdminComment has lost Pollux' mark (an administrator or a tool of the site has
overwritten it) looks like a plain one from then on; it has not ended.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from polluxd.config.settings import ScopeSettings
from polluxd.errors import SlurmRefused
from polluxd.model import JobState
from polluxd.slurm.demands import Demands
from polluxd.slurm.protocol import ClusterState, SlurmClient, SlurmJob

log = logging.getLogger(__name__)


class Scope:
    """The jobs that polluxd acts on."""

    def __init__(self, settings: ScopeSettings, slurm: SlurmClient, authorize: Callable[[], int]) -> None:
        self._settings = settings
        self._slurm = slurm
        self._authorize = authorize
        self._released: frozenset[int] = frozenset()

    def why_outside(self, job: SlurmJob) -> str:
        """Say why polluxd does not act on the job; empty where it does."""
        has = {"partitions": set(job.partition.split(",")), "accounts": {job.account}, "users": {job.user}}
        unnamed = {
            setting: asked.difference(names)
            for setting, asked in has.items()
            if (names := getattr(self._settings, setting))
        }
        if unnamed and all(unnamed.values()):
            lacking = " and ".join(
                f"scope.{setting} does not name {', '.join(sorted(names))}"
                for setting, names in unnamed.items()
            )
            return f"it is outside of the scope in polluxd.toml: {lacking}. Slurm runs it as a plain job"
        if job.deadline is not None and job.state is JobState.PENDING and not job.companion:
            return "it has a deadline (--deadline), which could pass while polluxd keeps it back. Slurm starts it"
        return ""

    def divide(self, state: ClusterState) -> tuple[ClusterState, Sequence[SlurmJob]]:
        """Return the cluster with the jobs outside of the scope as plain ones, and these jobs with the reason."""
        outside = [
            replace(job, left_alone=why)
            for job in state.jobs
            if job.spec is not None and (why := self.why_outside(job))
        ]
        if not outside:
            return state, ()
        apart = {job.job_id for job in outside}
        gpus, cpus, memory = Counter[str](), Counter[str](), Counter[str]()
        for job in outside:
            gpus.update(job.gpus_per_node_held)
            cpus.update(job.cpus_per_node_held)
            memory.update({name: n * job.mem_per_gpu_mb for name, n in job.gpus_per_node_held.items()})
        nodes = tuple(
            replace(
                node,
                foreign_gpus=node.foreign_gpus + gpus[node.name],
                foreign_cpus=node.foreign_cpus + cpus[node.name],
                foreign_memory_mb=node.foreign_memory_mb + memory[node.name],
            )
            for node in state.nodes
        )
        jobs = tuple(
            replace(job, spec=None, companion=None, demands=Demands(gpu_types=job.demands.gpu_types))
            if job.job_id in apart
            else job
            for job in state.jobs
        )
        return replace(state, nodes=nodes, jobs=jobs), outside

    def release(self, outside: Sequence[SlurmJob], now: float) -> None:
        """End the leases that the submission hook has given to jobs outside of the scope, once for each."""
        waiting = [job for job in outside if job.state is JobState.PENDING and not job.held_by_user]
        leased = [
            job.job_id
            for job in waiting
            if (job.eligible_time or 0.0) > now >= (job.begin_time or 0.0)
            and job.job_id not in self._released
        ]
        self._released &= frozenset(job.job_id for job in waiting)
        if not leased:
            return
        self._authorize()
        try:
            self._slurm.renew(leased, now)
        except SlurmRefused as error:
            log.warning("leases of jobs that polluxd leaves alone could not be ended: %s", error)
        self._released |= frozenset(leased)


_LOST = (
    "its AdminComment has lost Pollux' mark, so that it looks like a plain job. polluxd's log has the command that "
    "writes the mark again"
)


class LostMarks:
    """The comments of the jobs that had a mark.

    A restart of polluxd loses them: the job then counts as a plain one.
    """

    def __init__(self) -> None:
        self._known: Mapping[tuple[int, int], SlurmJob] = {}
        self.lost: Sequence[SlurmJob] = ()
        """Jobs without their mark, as Slurm shows them, with what the mark said."""

    def observe(self, jobs: Sequence[SlurmJob]) -> None:
        """Take in all jobs that Slurm shows; log each mark that is gone, once."""
        former, logged = self._known, {job.job_id for job in self.lost}
        known, lost = {}, []
        for job in jobs:
            key = job.job_id, job.uid
            before = former.get(key)
            if job.spec is not None:
                known[key] = job
            elif before is not None and not job.state.finished:
                known[key] = before
                marked = ("spec", "demands", "companion", "submit_time", "begin_time")
                found = {name: getattr(before, name) for name in marked}
                lost.append(replace(job, left_alone=_LOST, **found))
                if job.job_id not in logged:
                    log.error(
                        "job %d is Pollux' and its AdminComment has lost the mark: polluxd leaves it alone. As root: "
                        "scontrol update JobId=%d AdminComment='%s'",
                        job.job_id,
                        job.job_id,
                        before.admin_comment,
                    )
        self._known, self.lost = known, tuple(lost)

    def note(self) -> str:
        """Return the text for `polluxctl status`; empty where no mark is lost."""
        if not self.lost:
            return ""
        named = ", ".join(str(job.job_id) for job in self.lost[:5])
        return f"left alone, since their AdminComment has lost Pollux' mark: jobs {named}"
