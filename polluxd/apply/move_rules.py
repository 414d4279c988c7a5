"""What may be done with each job now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from polluxd.apply.headroom import Headroom
from polluxd.apply.paths import PathOptions
from polluxd.apply.startable import Eligibility


@dataclass(frozen=True, slots=True)
class MoveRules:
    """The rules of Slurm, of the configuration, and of recent moves, by job."""

    options: PathOptions = field(default_factory=PathOptions)
    allowed: Headroom = field(default_factory=Headroom)
    """What Slurm's limits leave to jobs."""
    eligibility: Mapping[int, Eligibility] = field(default_factory=dict)
    """Jobs that Slurm would not start everywhere."""
    resting: Callable[[int], float] = lambda _job_id: 0.0
    """Seconds for which a job is still to be left alone."""
    spent: Callable[[str], str] = lambda _user: ""
    """Why no running job of a user may be restarted now; empty where one may."""
