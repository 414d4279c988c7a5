"""Limits that Slurm has shown by a refusal. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from polluxd.apply.refused.causes import Counted
from polluxd.apply.refused.refused_nodes import newest_of_users
from polluxd.slurm.protocol import SlurmJob

_OF_USER = ("job", "array", "licenses")
"""What a limit counts by, where a user may have any number."""


@dataclass(slots=True)
class RefusedLimit:
    """A limit that Slurm has shown by a refusal."""

    reason: str
    since: float
    """POSIX time [s]."""
    tried_at: float
    """The newest refusal, by a clock that does not step."""
    job: SlurmJob
    amounts: tuple[float, ...]
    """What was refused, with what others used, the least first: what works shows some of them to be out of date."""
    good: float
    """The most that is known to work."""
    record: tuple[object, ...]
    """The limits and rules under which it was met."""
    stopped: bool = False
    """It has stopped a training."""
    met: Mapping[int, str] = field(default_factory=dict)
    """All jobs that were refused by it, with their users."""

    @property
    def refused(self) -> float:
        return self.amounts[0]


def bounded(limits: dict[Counted, RefusedLimit]) -> dict[Counted, RefusedLimit]:
    """The newest limits of each user, and all of a partition, a QOS or an account: as many as the site has."""
    of_site = {key: one for key, one in limits.items() if key.shared[0][0] not in _OF_USER}
    of_jobs = {key: one for key, one in limits.items() if key not in of_site}
    return of_site | newest_of_users(of_jobs, lambda one: one.job.user)
