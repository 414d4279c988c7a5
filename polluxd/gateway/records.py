"""What the gateway asks of the database.

`polluxd.store.gateway_statements` implements it. Every method raises StoreUnavailable or StoreRejected, and may be
called in several threads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

Refusal = Literal["over", "unknown", "too-often", "too-much", "too-long"]
"""Why the database refused: the attempt or its job is over, polluxd has not seen it run yet, it asks too often, its
user has reported much today, or the report is too long."""


class Holder(NamedTuple):
    """Who holds a token."""

    uid: int
    job_id: int | None = None
    """None: a user of polluxctl."""
    attempt: int = 0
    expires_s: float | None = None
    """Seconds left; None: as long as the attempt."""


class SentReport(NamedTuple):
    """One report that was checked."""

    holder: Holder
    document: Mapping[str, Any]


class Orders(NamedTuple):
    """What one attempt is to do."""

    attempt: int
    drain: int | None
    """Id of the move to stop for."""
    resize: Mapping[str, Any] | None


class Records(Protocol):
    """The statements of the gateway."""

    def attempt_of(self, job_id: int, attempt: int) -> tuple[int, Refusal | None] | None:
        """Return the uid of a job, and why this attempt gets no token; None: polluxd knows no such job."""

    def issue(self, holder: Holder, token_hash: bytes) -> None: ...

    def token_of(self, token_hash: bytes) -> tuple[Holder, Refusal | None] | None: ...

    def store_reports(self, reports: Sequence[SentReport]) -> list[Refusal | None]:
        """Store reports in one statement; return why each was refused, or None."""

    def acknowledge(self, holder: Holder, move_id: int, facts: Mapping[str, Any]) -> Refusal | bool:
        """Return whether the move counts on the checkpoint, or a refusal."""

    def introduce(
        self, holder: Holder, fingerprint: str, gpu_type: str
    ) -> Refusal | Mapping[str, Any] | None:
        """Return what earlier runs of the training measured; None: nothing."""

    def open_orders(self) -> Mapping[int, Orders]:
        """Return the open orders by job."""

    def over(self, holders: Sequence[Holder]) -> Collection[Holder]:
        """Return those whose attempt or job is over."""
