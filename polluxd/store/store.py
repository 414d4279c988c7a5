"""The one door to Postgres."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import URL, Connection, text

from polluxd.errors import LeaderLost, ReportError, StoreRejected
from polluxd.model import (
    Allocation,
    Mode,
    Placement,
    Plan,
    Reallocation,
    Report,
    Settings,
    Step,
)

from . import rows
from .connection import Connector, our_errors
from .costs import cost_of, is_reallocation, totals
from .leadership import Leadership
from .migrations import apply_migrations
from .sqlfiles import queries
from .views import (
    CycleView,
    Explanation,
    HistoryPoint,
    JobView,
    Leader,
    ObservedJob,
    ReallocationCost,
    ReallocTotals,
    SettingChange,
)
from .wakeups import Wakeups

log = logging.getLogger(__name__)


class Store:
    """Everything polluxd remembers of one cluster. For several threads, `wait_for_notify` for one.

    Every method raises StoreUnavailable (no answer in time: retry later) or StoreRejected (schema, rights,
    constraint), and those that write for the leader LeaderLost.

    Args:
        url: of the owner role `pollux_daemon` (`polluxctl` may read with `pollux_read`).
        cluster: Slurm's ClusterName; rows of other clusters are not seen.
        connect_timeout, statement_timeout: seconds.
        lease_s: how long a stalled leader may act, and a new one waits after an unclean end [s].
    """

    def __init__(
        self,
        url: str | URL,
        cluster: str,
        *,
        connect_timeout: float = 3,
        statement_timeout: float = 5,
        lease_s: float = 15,
    ) -> None:
        self.cluster = cluster
        self._connector = Connector(url, connect_timeout=connect_timeout, statement_timeout=statement_timeout)
        self._engine = self._connector.engine()
        self._leadership = Leadership(self._connector, cluster, lease_s=lease_s)
        self._wakeups = Wakeups(self._connector)
        self._rejected: dict[int, str] = {}

    def close(self) -> None:
        """Resign and close every connection."""
        self._leadership.resign()
        self._wakeups.close()
        self._engine.dispose()

    def migrate(self) -> list[str]:
        """Bring the schema to this version; returns the names of the migrations applied now. Idempotent."""
        with our_errors(self._connector.place):
            connection = self._connector.open()
            connection.answer_within_s = 600.0
            try:
                return apply_migrations(connection)
            finally:
                connection.close()

    def install_secret(self, secret: bytes) -> None:
        """Accept tokens signed with `secret` (16 bytes at least) or the one before it; older ones lapse."""
        if len(secret) < 16:
            raise StoreRejected(f"a token secret has at least 16 bytes, this one has {len(secret)}")
        with self._transaction() as run:
            run("install_secret", key=secret)
            run("forget_old_secrets")

    # Leadership

    def lead(self) -> int | None:
        """Lead or go on leading: the fencing epoch; None while another polluxd leads."""
        return self._leadership.lead()

    def still_leading(self) -> bool:
        """Ask the database, and renew the lease. False also when it does not answer."""
        return self._leadership.still_leading()

    @property
    def lease_left(self) -> float:
        """Seconds for which a leader may act on Slurm without asking again (no call is made)."""
        return self._leadership.lease_left

    @property
    def epoch(self) -> int | None:
        return self._leadership.epoch

    def resign(self) -> None:
        self._leadership.resign()

    def leader(self) -> Leader | None:
        """Who leads, as the database has it."""
        with self._transaction() as run:
            found = run("leader")
        if not found:
            return None
        row = found[0]
        return Leader(row["epoch"], row["holder"], row["since"].timestamp(), row["leased"])

    # Settings

    def settings(self, defaults: Settings | None = None) -> Settings:
        """What administrators set, over `defaults`."""
        with self._transaction() as run:
            found = run("settings")
        return rows.settings({row["name"]: row["value"] for row in found}, defaults or Settings())

    def set_setting(self, name: str, value: object, who: str) -> None:
        """Set one field of model.Settings, audited. Raises ConfigError for a value that makes no sense."""
        encoded = rows.setting_to_json(name, value)
        with self._transaction() as run:
            run("set_who", who=who)
            run("set_setting", name=name, value=encoded)

    def setting_audit(self, newest: int = 100) -> list[SettingChange]:
        """The newest changes, newest first."""
        with self._transaction() as run:
            found = run("setting_audit", newest=newest)
        return [
            SettingChange(r["at"].timestamp(), r["who"], r["name"], r["from_value"], r["to_value"])
            for r in found
        ]

    # Reports

    def reports(self) -> dict[int, Report]:
        """The latest report of each job that has not ended, less the unusable ones (`rejected_reports`)."""
        with self._transaction() as run:
            found = run("reports")
        usable: dict[int, Report] = {}
        rejected: dict[int, str] = {}
        now = time.time()
        for row in found:
            try:
                usable[row["job_id"]] = rows.report(row, now)
            except ReportError as error:
                rejected[row["job_id"]] = str(error)
                if self._rejected.get(row["job_id"]) != str(error):
                    log.warning("report left out: %s", error)
        self._rejected = rejected
        return usable

    def rejected_reports(self) -> dict[int, str]:
        """What the last `reports()` left out, and why."""
        return dict(self._rejected)

    def report_history(self, job_id: int | None = None, *, since: float = 0.0) -> list[HistoryPoint]:
        """Past reports by job and time, of one job or all, received since a POSIX time."""
        with self._transaction() as run:
            return [rows.history_point(row) for row in run("report_history", job_id=job_id, since=since)]

    # Jobs and cycles

    def sync_jobs(self, jobs: Sequence[ObservedJob]) -> dict[int, float]:
        """Remember our jobs as Slurm shows them, others passed over; those it shows no more have ended.

        Returns when each was first submitted (POSIX seconds, by job id): Slurm's own time starts anew at a requeue.
        """
        ours = [rows.job_to_json(job) for job in jobs if job.spec is not None]
        encoded = json.dumps(ours)
        with self._transaction(fenced=True) as run:
            for row in run("forget_reused_jobs", jobs=encoded):
                log.info("job id %d was used again: its former life is forgotten", row["job_id"])
            known = run("upsert_jobs", jobs=encoded)
            run("end_unseen_jobs", job_ids=[job["job_id"] for job in ours])
        return {row["job_id"]: row["submitted_at"].timestamp() for row in known}

    def record_cycle(
        self,
        plan: Plan | None,
        *,
        mode: Mode | str,
        note: str = "",
        durations: Mapping[str, float],
        started_at: float,
        snapshot_json: str | None = None,
    ) -> int:
        """Record a cycle and its allocations (none where nothing was decided); returns the cycle's id."""
        with self._transaction(fenced=True) as run:
            recorded = run(
                "record_cycle",
                epoch=self.epoch,
                mode=Mode(mode).value,
                started_at=started_at,
                note=note,
                objective=rows.finite_or_none(plan.objective) if plan else None,
                upper_bound=rows.finite_or_none(plan.upper_bound) if plan else None,
                gap=rows.finite_or_none(plan.gap) if plan else None,
                solver=plan.solver if plan else None,
                durations=json.dumps(dict(durations)),
                snapshot=snapshot_json,
            )
            cycle_id = int(recorded[0]["id"])
            if plan and plan.allocations:
                run("record_allocations", cycle_id=cycle_id, allocations=rows.allocations_to_json(plan))
        return cycle_id

    def latest_cycle(self) -> CycleView | None:
        with self._transaction() as run:
            found = run("latest_cycle")
        return rows.cycle(found[0]) if found else None

    def cycle_snapshot(self, cycle_id: int) -> Any:
        """The snapshot that a cycle decided on, as decoded JSON; None where it was not kept."""
        with self._transaction() as run:
            found = run("cycle_snapshot", id=cycle_id)
        return found[0]["snapshot"] if found else None

    def allocations(self, cycle_id: int) -> list[Allocation]:
        with self._transaction() as run:
            return [rows.allocation(row) for row in run("allocations", cycle_id=cycle_id)]

    # Re-allocations

    def open_reallocations(self) -> list[Reallocation]:
        """Moves under way, oldest first: what a restarted polluxd must finish or abandon."""
        with self._transaction() as run:
            return [rows.reallocation(row) for row in run("open_reallocations")]

    def plan_reallocation(
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
    ) -> Reallocation:
        """Write the intent of a move, before anything is done about it (step `planned`, at `at` or now).

        Raises:
            LeaderLost: `epoch` is not the newest.
            StoreRejected: the job has a move under way.
        """
        with self._transaction() as run:
            run("fence", epoch=epoch)
            planned = run(
                "plan_reallocation",
                job_id=job_id,
                attempt=attempt,
                path=path,
                source=rows.placement_to_json(source),
                target=rows.placement_to_json(target),
                reason=reason,
                at=time.time() if at is None else at,
                epoch=epoch,
            )
        return rows.reallocation(planned[0])

    def advance(self, realloc_id: int, step: Step, at: float, *, epoch: int, detail: str = "") -> bool:
        """Write that a move reached `step` at POSIX time `at`. False: it is already there, beyond, or over.

        Raises:
            LeaderLost: `epoch` is not the newest.
            StoreRejected: the path has no such step.
        """
        with self._transaction() as run:
            run("fence", epoch=epoch)
            return bool(
                run("advance", id=realloc_id, step=Step(step).value, at=at, epoch=epoch, detail=detail)
            )

    def reallocations(self, job_id: int | None = None) -> list[Reallocation]:
        """All remembered moves of one job or of all, oldest first."""
        with self._transaction() as run:
            return [rows.reallocation(row) for row in run("reallocations", job_id=job_id)]

    def reallocation_costs(
        self, job_id: int | None = None, *, active_only: bool = False
    ) -> list[ReallocationCost]:
        """What each completed move cost, split by step; first starts are none."""
        with self._transaction() as run:
            found = run("completed_reallocations", active=active_only)
        return [
            cost_of(row, rows.placement(row["source"]), rows.placement(row["target"]))
            for row in found
            if is_reallocation(row["path"], row["attempt"]) and job_id in (None, row["job_id"])
        ]

    def realloc_totals(self) -> dict[int, ReallocTotals]:
        """Completed re-allocations and their cost per job that has not ended; jobs without any are absent."""
        return totals(self.reallocation_costs(active_only=True))

    # For people

    def jobs_view(self, *, ended: bool = True) -> list[JobView]:
        """One row per job, by job id; without those that ended unless `ended`."""
        with self._transaction() as run:
            return [rows.job_view(row) for row in run("jobs_view", job_id=None, ended=ended)]

    def explain(self, job_id: int) -> Explanation | None:
        """Everything known of one job; None where it is not known."""
        with self._transaction() as run:
            jobs = run("jobs_view", job_id=job_id, ended=True)
            if not jobs:
                return None
            reported = run("report_of", job_id=job_id)
            decided = run("latest_allocation_of", job_id=job_id)
            cycles = run("cycle", id=decided[0]["cycle_id"]) if decided else []
            moves = run("reallocations", job_id=job_id)
        report = None
        if reported:
            with contextlib.suppress(ReportError):
                report = rows.report(reported[0], time.time())
        return Explanation(
            job=rows.job_view(jobs[0]),
            report=report,
            allocation=rows.allocation(decided[0]) if decided else None,
            cycle=rows.cycle(cycles[0]) if cycles else None,
            reallocations=tuple(rows.reallocation(row) for row in moves),
        )

    # Upkeep

    def wait_for_notify(self, timeout_s: float) -> bool:
        """Sleep up to `timeout_s` seconds; True: a NOTIFY or `wake()` cut it short. Raises no StoreError."""
        return self._wakeups.wait(timeout_s)

    def wake(self) -> None:
        """End `wait_for_notify` now; safe in a signal handler."""
        self._wakeups.ring()

    def prune(
        self, now: float, *, history_s: float, snapshots_s: float, jobs_s: float, priors_s: float = 365 * 86400.0
    ) -> None:
        """Forget what is older than so many seconds: reports and cycles, cycles' snapshots, jobs that ended, and
        what earlier runs have taught."""
        with self._transaction() as run:
            run("prune_history", before=now - history_s)
            run("prune_cycles", before=now - history_s)
            run("prune_snapshots", before=now - snapshots_s)
            run("prune_jobs", before=now - jobs_s)
            run("prune_priors", before=now - priors_s)

    @contextlib.contextmanager
    def _transaction(self, *, fenced: bool = False) -> Iterator[_Run]:
        """Named queries in one transaction; `fenced`: refused when this process led and leads no more."""
        with our_errors(self._connector.place), self._engine.begin() as connection:
            run = _Run(connection, self.cluster)
            if fenced and self.epoch is not None:
                run("fence", epoch=self.epoch)
            yield run


class _Run:
    """Runs a query by its name; returns its rows as mappings."""

    def __init__(self, connection: Connection, cluster: str) -> None:
        self._connection = connection
        self._cluster = cluster

    def __call__(self, query: str, /, **words: object) -> list[Mapping[str, Any]]:
        result = self._connection.execute(text(queries()[query]), {"cluster": self._cluster, **words})
        return [dict(row) for row in result.mappings()] if result.returns_rows else []


__all__ = ["LeaderLost", "Store"]
