"""What people, dashboards and tools read, and what administrators order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polluxd.errors import ReportError
from polluxd.model import Allocation, Move

from . import rows
from .costs import MOST_OF_JOB, costs_of
from .gateway_statements import MOST_BYTES, MOST_REPORTS
from .leadership import TROUBLE
from .transactions import Session
from .views import (
    CycleSummary,
    CycleView,
    EndedJob,
    HistoryPoint,
    JobExplanation,
    JobView,
    Leader,
    MoveCost,
    SettingChange,
)

_POINTS = 2000
"""Reports of a job in an answer."""
_FORECASTS = 600
"""Runs of forecasts that are kept: at least two days of them."""
_MOST = 20_000
"""Jobs, and moves, in an answer: what people ask for is bounded, however much there is."""


class PeopleStore(Session):
    """The part of the store behind `polluxctl`; role `pollux_read` suffices for what only reads."""

    def jobs_view(
        self, *, ended: bool = True, since: float = 0.0, uid: int | None = None, most: int = _MOST
    ) -> list[JobView]:
        """One row per job of one user or of all, by job id; without those that ended unless `ended`.

        Of those that ended, the newest, since a POSIX time.
        """
        asked = {"since": since if ended else float("inf"), "uid": uid, "most": most}
        return [rows.job_view(row) for row in self._ask("jobs_view", job_id=None, **asked)]

    def explain(self, job_id: int) -> JobExplanation | None:
        """Everything known of one job; None where it is not known."""
        with self._transaction() as run:
            jobs = run("jobs_view", job_id=job_id, since=0.0, uid=None, most=1)
            if not jobs:
                return None
            reported = run("report_of", job_id=job_id)
            decided = run("latest_allocation_of", job_id=job_id)
            holds = bool(decided) and decided[0]["until"] is None
            cycles = (
                run("newest_decision")
                if holds
                else run("cycle", id=decided[0]["cycle_id"])
                if decided
                else []
            )
        report, rejected = None, ""
        if reported:
            try:
                report = rows.report(reported[0])
            except ReportError as error:
                rejected = str(error)
        return JobExplanation(
            job=rows.job_view(jobs[0]),
            report=report,
            allocation=rows.allocation(decided[0]) if decided else None,
            cycle=rows.cycle(cycles[0]) if cycles else None,
            rejected=rejected,
        )

    def report_history(self, job_id: int | None = None, *, since: float = 0.0) -> list[HistoryPoint]:
        """Return the reports received since a POSIX time, of one job or of all jobs, by job and time.

        Where a job has many, evenly thinned to between a half of `_POINTS` and all of them.
        """
        found = self._ask("report_history", job_id=job_id, since=since, most=_POINTS)
        return [rows.history_point(row) for row in found]

    def ended_jobs(self, since: float, most: int) -> list[EndedJob]:
        """Return the newest jobs that ran and have ended since a POSIX time, by their end."""
        return [rows.ended_job(row) for row in self._ask("ended_jobs", since=since, most=most)]

    def forecasts(self, most: int = 1) -> list[dict[str, Any]]:
        """Return the newest runs of forecasts, the newest first, as `record_forecast` took them."""
        return [row["foretold"] for row in self._ask("forecasts", most=most)]

    def record_forecast(self, cycle_id: int, foretold: Mapping[str, Any]) -> None:
        """Keep what was foretold from a cycle's snapshot, and the newest `_FORECASTS` in all."""
        with self._transaction() as run:
            run("record_forecast", cycle_id=cycle_id, foretold=json.dumps(foretold, allow_nan=False))
            run("prune_forecasts", most=_FORECASTS)

    def reported(self) -> list[dict[str, Any]]:
        """Return the ten users whose jobs have reported most today (UTC), with `share` of what one may."""
        return [
            {**row, "share": max(row["reports"] / MOST_REPORTS, row["bytes"] / MOST_BYTES)}
            for row in self._ask("reported")
        ]

    def latest_cycle(self) -> CycleView | None:
        found = self._ask("latest_cycle")
        return rows.cycle(found[0]) if found else None

    def cycle(self, cycle_id: int) -> CycleView | None:
        """One cycle; None where it is not known (any more)."""
        found = self._ask("cycle", id=cycle_id)
        return rows.cycle(found[0]) if found else None

    def cycles(self, newest: int = 20) -> list[CycleSummary]:
        """The newest cycles, newest first."""
        found = self._ask("cycles", newest=newest)
        return [CycleSummary(rows.cycle(r), r["jobs"], r["changed"], r["kept"]) for r in found]

    def cycles_between(self, since: float, until: float, *, kept: bool = False) -> list[CycleView]:
        """Return the cycles that began between two POSIX times, oldest first; `kept`: those with a stored snapshot."""
        return [rows.cycle(row) for row in self._ask("cycles_between", since=since, until=until, kept=kept)]

    def cluster_over_time(self, since: float, every_s: float) -> list[dict[str, Any]]:
        """Return `at`, `gpus`, `plain`, `held`, `waiting` and `speedup` of a decision in each `every_s` seconds.

        `plain` are GPUs of plain jobs, `held` those of Pollux jobs, `waiting` the least that waiting ones need.
        """
        return [dict(row) for row in self._ask("cluster_over_time", since=since, every_s=every_s)]

    def newest_snapshot(self) -> tuple[int, Any] | None:
        """Return the id of the newest cycle with a stored snapshot, and this one as decoded JSON; None without any."""
        found = self._ask("newest_snapshot")
        return (found[0]["cycle_id"], found[0]["snapshot"]) if found else None

    def cycle_snapshot(self, cycle_id: int) -> Any:
        """Return the snapshot that a cycle decided on, as decoded JSON; None where none is stored."""
        found = self._ask("cycle_snapshot", id=cycle_id)
        return found[0]["snapshot"] if found else None

    def allocations(self, cycle_id: int, *, made_in_it: bool = False) -> list[Allocation]:
        """Return the decisions that held in a cycle.

        Those of an earlier cycle have its numbers: newer ones differ by less than a tenth. With `made_in_it`, return
        those of the cycle itself alone.
        """
        found = self._ask("allocations", cycle_id=cycle_id)
        return [rows.allocation(row) for row in found if not made_in_it or row["cycle_id"] == cycle_id]

    def moves(self, job_id: int | None = None) -> list[Move]:
        """All remembered moves of one job or of all, oldest first."""
        return [rows.move(row) for row in self._ask("moves", job_id=job_id, most=_MOST)]

    def move_costs(self, job_id: int | None = None, *, ended: bool = True) -> list[MoveCost]:
        """What each completed move cost, split by step; first starts are none. Unless `ended`, of present jobs."""
        if job_id is None and ended:
            return costs_of(self._ask("completed_moves", most=_MOST))
        return costs_of(self._ask("completed_moves_by_job", job_id=job_id, most=MOST_OF_JOB))

    def rentals(self, since: float) -> list[dict[str, Any]]:
        """Return what rented nodes cost from the UTC day of a POSIX time on, by day, type and job."""
        return [{**row, "day": row["day"].isoformat()} for row in self._ask("rentals", since=since)]

    def leader(self) -> Leader | None:
        """Who leads, as the database has it."""
        found = self._ask("leader", trouble=TROUBLE)
        if not found:
            return None
        row = found[0]
        return Leader(
            row["epoch"], row["holder"], row["since"].timestamp(), row["leased"], row["trouble"] or ""
        )

    def setting_audit(self, newest: int = 100) -> list[SettingChange]:
        """The newest changes, newest first."""
        found = self._ask("setting_audit", newest=newest)
        return [
            SettingChange(r["at"].timestamp(), r["who"], r["name"], r["from_value"], r["to_value"])
            for r in found
        ]

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

    def set_settings(self, values: Mapping[str, object], who: str) -> None:
        """Set fields of PolicySettings in one transaction, all or none, audited. Raises ConfigError."""
        encoded = {name: rows.setting_to_json(name, value) for name, value in values.items()}
        with self._transaction() as run:
            run("set_who", who=who)
            for name, value in encoded.items():
                run("set_setting", name=name, value=value)
