"""What administrators order of single jobs, and what the restart budget counts."""

from __future__ import annotations

import json

from polluxd.model import Reallocation

from . import rows
from .session import Session


class Orders(Session):
    """The part of the store behind `polluxctl pin`, `unpin` and `cancel-move`."""

    def pins(self) -> dict[int, str]:
        """Who pinned each pinned job that has not ended."""
        with self._transaction() as run:
            return {row["job_id"]: row["pinned_by"] for row in run("pins")}

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

    def cancel_move(self, job_id: int, who: str) -> Reallocation | None:
        """Take back the job's move under way, audited; the move as it was, None where there is none."""
        with self._transaction() as run:
            found = run("cancel_move", job_id=job_id, cancelled_by=who)
            if not found:
                return None
            run(
                "audit_order",
                who=who,
                name=f"move {found[0]['id']} of job {job_id}",
                from_value=json.dumps(found[0]["step"]),
                to_value=json.dumps("cancelled"),
            )
        return rows.reallocation(found[0])

    def drains_since(self, since: float) -> int:
        """How many running jobs were ordered to leave their GPUs since a POSIX time."""
        with self._transaction() as run:
            return int(run("drains_since", since=since)[0]["count"])
