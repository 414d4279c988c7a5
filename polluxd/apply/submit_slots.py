"""Leave users the jobs that Slurm lets them submit and run: companions take none of the last.

A companion is a job of its own to Slurm's limits on numbers of jobs (MaxSubmitJobs, MaxJobs and the like). A user whose
last job a companion takes cannot submit, or start, another one, and Slurm does not say why. So a job grows by a
companion only while one more job of its user is left, and gives its newest companion back where none is. All functions
here are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from polluxd.apply.limit_scopes import Lookup
from polluxd.model import JobState
from polluxd.slurm.protocol import ClusterState, SlurmJob

_USING = (JobState.RUNNING, JobState.SUSPENDED)


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


_WORDS = {"submitted": "submitted jobs", "jobs": "running jobs"}
