"""Administrators' orders."""

from __future__ import annotations

import json
from collections.abc import Mapping

from polluxd.model import Move

from . import rows
from .setting_rows import setting_to_json
from .transactions import Session


class AdministratorOrders(Session):
    """The part of the store behind commands that change a job or a setting.

    They are `polluxctl pin`, `unpin`, `cancel-move` and `settings set`.
    """

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
