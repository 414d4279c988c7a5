"""Administrators' orders, and the restart budget's count."""

from __future__ import annotations

import json
from collections.abc import Mapping

from polluxd.model import Move

from . import rows
from .setting_rows import setting_to_json
from .transactions import Session

FORMER_AGENT = "its agent reports to polluxd 0.1: the job trains plainly until it ends"
"""Why a job that has run since an upgrade stays as it is."""


class AdministratorOrders(Session):
    """The part of the store behind commands that change a job or a setting.

    They are `polluxctl pin`, `unpin`, `cancel-move` and `settings set`.
    """

    def pins(self) -> dict[int, str]:
        """Why jobs stay as they are: who pinned them, or their agent."""
        with self._transaction() as run:
            return {
                row["job_id"]: FORMER_AGENT if row["pinned_by"] is None else f"pinned by {row['pinned_by']}"
                for row in run("pins")
            }

    def set_pin(self, job_id: int, who: str, *, pinned: bool) -> bool:
        """Pin or unpin a job, audited; False: no such job that has not ended."""
        with self._transaction() as run:
            found = run("pin_of", job_id=job_id)
            if not found:
                return False
            if bool(found[0]["pinned_by"]) is not pinned:
                run("set_pin", job_id=job_id, pinned_by=who if pinned else None)
                run(
                    "audit_order",
                    who=who,
                    name=f"pin of job {job_id}",
                    from_value=json.dumps(not pinned),
                    to_value=json.dumps(pinned),
                )
        return True

    def cancel_move(self, job_id: int, who: str) -> Move | None:
        """Cancel the job's move under way, audited.

        Returns the move as it was before, or None where the job has no move under way. A move that is no longer
        `revocable` goes on, and nothing is written.
        """
        with self._transaction() as run:
            found = run("move_to_cancel", job_id=job_id)
            if not found:
                return None
            move = rows.move(found[0])
            if move.revocable:
                run("cancel_move", id=move.id, cancelled_by=who)
                run(
                    "audit_order",
                    who=who,
                    name=f"move {move.id} of job {job_id}",
                    from_value=json.dumps(move.step.value),
                    to_value=json.dumps("cancelled"),
                )
        return move

    def restarts_since(self, since: float) -> dict[str, int]:
        """Count, by user, the restarts of running jobs.

        Restarts that were ordered since the POSIX time `since` count, and restarts that are planned. A resize in place
        does not count: it ends no process except on the nodes that the job gives back. Jobs that polluxd has forgotten
        count for the user ''.
        """
        with self._transaction() as run:
            return {row["user_name"]: row["restarts"] for row in run("restarts_since", since=since)}

    def set_setting(self, name: str, value: object, who: str) -> None:
        """Set one field of PolicySettings, audited.

        Raises:
            ConfigError: no such setting, or a value that is not allowed.
        """
        self.set_settings({name: value}, who)

    def set_settings(self, values: Mapping[str, object], who: str) -> None:
        """Set several fields in one transaction, all or none, audited.

        Raises:
            ConfigError: no such setting, or a value that is not allowed.
        """
        encoded = {name: setting_to_json(name, value) for name, value in values.items()}
        with self._transaction() as run:
            run("set_who", who=who)
            for name, value in encoded.items():
                run("set_setting", name=name, value=value)
