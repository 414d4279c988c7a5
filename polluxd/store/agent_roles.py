"""The database roles of the users whose jobs report."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from polluxd.errors import StoreError

from .transactions import QueryRunner

log = logging.getLogger(__name__)

_ADMIT_EVERY_S = 10.0
"""Between two looks at agents' roles and sessions, while no new user comes."""
_LONGEST_SESSION_S = 10.0
"""Longest transaction of an agent; its own take milliseconds."""


class AgentRoles:
    """Make, repair and drop users' database roles.

    Args:
        transaction: begins a transaction of named queries.
    """

    def __init__(self, transaction: Callable[[], AbstractContextManager[QueryRunner]]) -> None:
        self._transaction = transaction
        self._users: frozenset[int] = frozenset()
        self._admitted_at = float("-inf")
        self._trouble = ""

    def look_again(self) -> None:
        """Have the next `admit` ask the database, whatever the users."""
        self._admitted_at = float("-inf")

    def admit(self, users: frozenset[int]) -> None:
        """Create users' database roles, and end agents' overlong sessions.

        New users get a role, and changed roles are repaired. If a role cannot be made, its user has no reports; other
        users are not affected.
        """
        now = time.monotonic()
        if users <= self._users and now - self._admitted_at < _ADMIT_EVERY_S:
            return
        trouble = []
        try:
            with self._transaction() as run:
                for row in run("admit_users"):
                    if row["trouble"]:
                        trouble.append(f"{row['admitted']}: {row['trouble']}")
                    else:
                        log.info("database role %s was made or repaired", row["admitted"])
            with self._transaction() as run:
                for row in run("end_agent_sessions", seconds=_LONGEST_SESSION_S):
                    log.warning(
                        "ended %d database sessions of role %s: a transaction was open for over %g s",
                        row["ended"],
                        row["role"],
                        _LONGEST_SESSION_S,
                    )
            self._users, self._admitted_at = users, now
        except StoreError as error:
            trouble.append(str(error))
        if (told := "; ".join(trouble)) and told != self._trouble:
            log.warning("agents' database roles: %s", told)
        self._trouble = told

    def dismiss(self) -> None:
        """Drop the roles of users without a job, or with a forgotten secret."""
        with self._transaction() as run:
            for row in run("dismiss_users"):
                log.info(
                    "database role %s was dropped: its user has no job, or its secret is forgotten",
                    row["role"],
                )
