"""What may be done with each job now, and the restarts that polluxd may still order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from polluxd.apply.headroom import Headroom
from polluxd.apply.intents import Intent
from polluxd.apply.paths import PathOptions
from polluxd.apply.startable import Eligibility
from polluxd.config.settings import MoveSettings
from polluxd.model import RESTARTING_PATHS


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


class RestartBudget:
    """Restarts of the last hour, against the limits per hour.

    Args:
        limits: section [moves] of polluxd.toml; 0 means no limit.
        ordered: restarts of the last hour and planned restarts, by user.
    """

    def __init__(self, limits: MoveSettings, ordered: Mapping[str, int]) -> None:
        self._cluster, self._user = limits.restarts_per_hour, limits.user_restarts_per_hour
        self._ordered = Counter(ordered)

    def charge(self, intent: Intent) -> str:
        """Count the intent if its move restarts the job and the budget allows it.

        Returns why it is not allowed; empty where it is.
        """
        if intent.path not in RESTARTING_PATHS:
            return ""
        if spent := self.spent(intent.user):
            return spent
        self._ordered[intent.user] += 1
        return ""

    def spent(self, user: str) -> str:
        """Return why no job of `user` may be restarted now; empty where one may."""
        if self._cluster and self._ordered.total() >= self._cluster:
            return f"the cluster's {self._cluster} restarts an hour are used up"
        if self._user and self._ordered[user] >= self._user:
            return f"the {self._user} restarts an hour of user {user} are used up"
        return ""
