"""Find the limits of Slurm that count a job, and leave users the jobs that these let them submit and run.

Limits of accounts, users, QOSes and partitions (sacctmgr(1), Resource limits): a QOS's limit replaces the same limit
of the account.

A companion is a job of its own to the limits on numbers of jobs (MaxSubmitJobs, MaxJobs and the like). A user whose
last job a companion takes cannot submit, or start, another one, and Slurm does not say why. So a job grows by a
companion only while one more job of its user is left, and gives its newest companion back where none is. All functions
here are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from polluxd.model import JobState
from polluxd.slurm.limits import GroupLimits, JobLimits, Limits, Qos
from polluxd.slurm.protocol import ClusterState, SlurmJob

_USING = (JobState.RUNNING, JobState.SUSPENDED)
_WORDS = {"submitted": "submitted jobs", "jobs": "running jobs"}


class LimitScope(NamedTuple):
    """A group of jobs that a limit counts together."""

    name: str
    limits: GroupLimits
    enforced: frozenset[str]
    """TRES whose limit binds this job, `jobs` and `submitted`; for other TRES its use counts all the same."""


class JobBounds(NamedTuple):
    """All that limits one job."""

    scopes: tuple[LimitScope, ...]
    job: tuple[tuple[str, JobLimits], ...]


class Lookup:
    """The limits of jobs by account, user, partition and QOS."""

    def __init__(self, state: ClusterState) -> None:
        self._limits: Limits = state.limits
        self._partitions = state.rules.partitions
        self._known: dict[tuple[str, str, int, str, str], JobBounds] = {}

    def of(self, job: SlurmJob) -> JobBounds:
        key = job.user, job.account, job.uid, job.partition, job.qos
        if key not in self._known:
            self._known[key] = self._find(*key)
        return self._known[key]

    def _find(self, user: str, account: str, uid: int, partition: str, qos: str) -> JobBounds:
        scopes: list[LimitScope] = []
        per_job: list[tuple[str, JobLimits]] = []
        taken: set[str] = set()
        wall_set, taken_job = False, set[str]()
        for one in self._qoses(partition, qos):
            around = (
                (f"QOS {one.name}", one.group, ""),
                (f"user {user} in QOS {one.name}", one.per_user, "user "),
                (f"account {account} in QOS {one.name}", one.per_account, "account "),
            )
            for name, group, kind in around:
                scopes.append(_scope(name, group, taken, kind))
            per_job.append((f"QOS {one.name}", _without(one.job, taken_job, wall=wall_set)))
            taken_job |= one.job.tres.keys() | {f"{name} minutes" for name in one.job.minutes}
            wall_set = wall_set or one.job.wall_s is not None
        taken_by_qos = frozenset(taken)
        known = self._limits.associations
        own = known.get((account, uid, partition)) or known.get((account, uid, ""))
        if own is not None:
            name = f"user {user} in account {account}"
            scopes.append(_scope(name, own.group, set(taken_by_qos), ""))
            # The jobs of one user, as MaxJobsPerUser and MaxSubmitJobsPerUser of a QOS limit them.
            jobs = GroupLimits(jobs=own.jobs, submitted=own.submitted)
            scopes.append(_scope(f"{name} (MaxJobs)", jobs, set(taken_by_qos), "user "))
            per_job.append((f"account {account}", _without(own.job, taken_job, wall=wall_set)))
        up, seen = account, set[str]()
        while up and up not in seen and (one_up := known.get((up, None, ""))) is not None:
            seen.add(up)
            scopes.append(_scope(f"account {up}", one_up.group, set(taken_by_qos), ""))
            up = one_up.parent
        return JobBounds(tuple(scopes), tuple(per_job))

    def _qoses(self, partition: str, qos: str) -> list[Qos]:
        """The QOSes of the job, in order of precedence."""
        rule = self._partitions.get(partition)
        names = [name for name in (rule.qos if rule else "", qos) if name]
        return [self._limits.qos[name] for name in dict.fromkeys(names) if name in self._limits.qos]


def _scope(name: str, group: GroupLimits, taken: set[str], kind: str) -> LimitScope:
    """The scope, with the limits that no earlier one of this kind replaces."""
    keys = {*group.tres, *(f"{name} minutes" for name in group.running_minutes)}
    keys |= {name for name in ("jobs", "submitted") if getattr(group, name) is not None}
    enforced = frozenset(key for key in keys if kind + key not in taken)
    taken |= {kind + key for key in keys}
    return LimitScope(name, group, enforced)


def _without(limits: JobLimits, taken: set[str], *, wall: bool) -> JobLimits:
    return JobLimits(
        {name: most for name, most in limits.tres.items() if name not in taken},
        None if wall else limits.wall_s,
        minutes={name: most for name, most in limits.minutes.items() if f"{name} minutes" not in taken},
        per_node=limits.per_node,
    )


class Slots(NamedTuple):
    """What limits on numbers of jobs mean for companions."""

    none_left: dict[int, str]
    """Jobs that may not take a further companion, and the limit."""
    returns: dict[int, tuple[int, str]]
    """Jobs that give their newest companion back: the GPUs that they keep, and the limit."""


def submit_slots(state: ClusterState, ours: Iterable[SlurmJob], bounds: Lookup) -> Slots:
    """Return which jobs may have no further companion, and which have one too many.

    Args:
        ours: Pollux' jobs, each with its companions, the oldest first.
    """
    used = Counter[tuple[str, str]]()
    waits = set[str]()
    """Scopes in which a job waits for the end of another."""
    for job in state.jobs:
        if job.state.finished:
            continue
        for scope in bounds.of(job).scopes:
            companions = len(job.companions)
            used[scope.name, "submitted"] += max(len(job.tasks), 1) + companions
            used[scope.name, "jobs"] += (job.state in _USING) + companions
            counted_out = job.spec is not None or "Jobs" in job.reason
            if counted_out and job.state is JobState.PENDING and not job.kept_back(state.taken_at):
                waits.add(scope.name)
    none_left: dict[int, str] = {}
    returns: dict[int, tuple[int, str]] = {}
    returned = set[tuple[str, str]]()
    for job in ours:
        for scope in bounds.of(job).scopes:
            limits = {"submitted": scope.limits.submitted, "jobs": scope.limits.jobs}
            for key, most in limits.items():
                if most is None or key not in scope.enforced:
                    continue
                free, rule = (
                    most - used[scope.name, key],
                    f"the limit of {most} {_WORDS[key]} of {scope.name}",
                )
                if free < 2:
                    none_left.setdefault(job.job_id, rule)
                lacks = free < 1 and (key == "submitted" or scope.name in waits)
                if lacks and job.companions and (scope.name, key) not in returned:
                    returned.add((scope.name, key))
                    newest = max(job.companions, key=lambda companion: companion.job_id)
                    kept = sum(job.gpus_per_node_held.values()) - sum(newest.gpus_per_node_held.values())
                    if kept < (job.spec.min_gpus if job.spec else 1):
                        continue
                    returns.setdefault(job.job_id, (kept, f"{rule}, whose last one a companion took,"))
    return Slots(none_left, returns)
