"""What a cycle asks of the database: the store by Postgres and its fake both answer it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from polluxd.config.settings import PolicySettings
from polluxd.model import DaemonMode, Move, Placement, Plan, Step
from polluxd.slurm.protocol import SlurmJob

from .views import CycleRecords


class CycleStore(Protocol):
    """The calls of `Controller` and `Reconciler`. `Store` describes each of them."""

    def still_leading(self) -> bool: ...

    def records(
        self, defaults: PolicySettings | None = None, *, restarts_since: float | None = None
    ) -> CycleRecords: ...

    def sync_jobs(self, jobs: Sequence[SlurmJob]) -> None: ...

    def take_in(self) -> None: ...

    def remember_fits(self) -> None: ...

    def record_cycle(
        self,
        plan: Plan | None,
        *,
        mode: DaemonMode | str,
        note: str = "",
        durations: Mapping[str, float],
        started_at: float,
        snapshot_json: Callable[[], str] | None = None,
    ) -> int: ...

    def record_rentals(self, counted: Sequence[Mapping[str, Any]], at: float) -> None: ...

    def boots(self) -> dict[str, Any]: ...

    def record_boots(self, seen: Mapping[str, Any]) -> None: ...

    def moves(self, job_id: int | None = None) -> list[Move]: ...

    def resizes(self, ids: Sequence[int]) -> dict[int, Move]: ...

    def plan_move(
        self,
        job_id: int,
        attempt: int,
        path: str,
        source: Placement,
        target: Placement,
        reason: str,
        epoch: int,
        *,
        at: float | None = None,
    ) -> Move: ...

    def advance(
        self,
        move_id: int,
        step: Step,
        at: float,
        *,
        epoch: int,
        detail: str = "",
        ends_at: float | None = None,
    ) -> bool: ...
