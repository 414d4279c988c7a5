"""A database in memory that several processes share, in which leaders come and go and users take moves back."""

from __future__ import annotations

from dataclasses import replace

from polluxd.model import Move
from polluxd.store.fake import FakeStore


class TroubledStore(FakeStore):
    """One polluxd process's access, with what the daemon and polluxctl do beside the cycle."""

    def resign(self) -> None:
        if self.epoch == self.rows.epoch:
            self.rows.lease_until = self.rows.clock()
        self.epoch = None

    def tell(self, trouble: str) -> None:
        """Show why the leader takes no action: nobody looks here."""

    @property
    def lease_left(self) -> float:
        if self.epoch is None:
            return 0.0
        return max(0.0, self._confirmed_at + self._lease_s - self.rows.clock())

    def cancel_move(self, job_id: int, who: str) -> Move | None:
        self._must_answer()
        for move in self.open_moves():
            if move.job_id == job_id:
                if move.revocable:
                    self.rows.moves[move.id - 1] = replace(move, cancelled_by=who)
                return move
        return None
