"""The one door to Postgres."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import URL

from polluxd.config.settings import PolicySettings
from polluxd.errors import StoreError, StoreRejected
from polluxd.model import DaemonMode, Move, Placement, Plan, Report, Step
from polluxd.slurm.protocol import SlurmJob

from . import rows
from .connection import Connector, our_errors
from .costs import MOST_OF_JOB, costs_of, totals
from .migrations import apply_migrations
from .newest_reports import NewestReports
from .people import PeopleStore
from .sqlfiles import migrations
from .views import CycleRecords
from .written import Written, plan_digest

log = logging.getLogger(__name__)

_DAY_S = 86400.0
_RENTALS_S = 800 * _DAY_S
_NEWS_S = 0.5
"""Time between two looks for news of moves under way."""


class Bell:
    """A pause that a signal handler may end: a pipe rather than an Event.

    A handler that takes a lock of the thread that it interrupts never returns.
    """

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        os.set_blocking(self._in, False)

    def ring(self) -> None:
        """End a wait now. Safe in a signal handler and in any thread."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._in, b"!")

    def wait(self, timeout_s: float) -> bool:
        """Wait for the bell; True where it rang."""
        if not select.select([self._out], [], [], max(0.0, timeout_s))[0]:
            return False
        with contextlib.suppress(BlockingIOError):
            os.read(self._out, 4096)
        return True

    def close(self) -> None:
        for end in (self._out, self._in):
            with contextlib.suppress(OSError):
                os.close(end)


class Store(PeopleStore):
    """Everything polluxd remembers of one cluster.

    Several threads may use a Store, but only one thread may call `wait`.

    Every method raises StoreUnavailable (no answer in time: retry later) or StoreRejected (schema, rights,
    constraint). Methods that write for the leader also raise LeaderLost.

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
        connector = Connector(url, connect_timeout=connect_timeout, statement_timeout=statement_timeout)
        super().__init__(connector, cluster, lease_s=lease_s)
        self._bell = Bell()
        self._seen_report = 0
        self._written = Written()
        self._newest = NewestReports()

    def close(self) -> None:
        """Resign and close every connection."""
        self.resign()
        self._bell.close()
        self._engine.dispose()

    def migrate(self) -> list[str]:
        """Bring the schema to this version; return the names of the migrations that this took. Idempotent."""
        with our_errors(self._connector.place, self._connector.failed):
            connection = self._connector.open()
            connection.answer_within_s = 600.0
            try:
                return apply_migrations(connection)
            finally:
                connection.close()

    def check_schema(self) -> None:
        """Check that all migrations of this version are applied. StoreRejected names the command to run."""
        applied = {row["name"] for row in self._ask("applied_migrations")}
        if missing := [m.name for m in migrations() if m.name not in applied]:
            raise StoreRejected(
                f"{self._connector.place} lacks the migrations {', '.join(missing)}: run `polluxctl db upgrade`"
            )

    # Settings

    def settings(self, defaults: PolicySettings | None = None) -> PolicySettings:
        """What administrators set, over `defaults`."""
        found = {row["name"]: row["value"] for row in self._ask("settings")}
        return rows.settings_from_rows(found, defaults or PolicySettings())

    # What a cycle reads

    def records(
        self, defaults: PolicySettings | None = None, *, restarts_since: float | None = None
    ) -> CycleRecords:
        """Read what the database holds at one moment.

        Args:
            defaults: of the settings that no administrator set.
            restarts_since: POSIX time. With it, read also what a decision alone needs.
        """
        with self._reading() as run:
            found = {row["name"]: row["value"] for row in run("settings")}
            reports = self._newest.read(run)
            moves = [rows.move(row) for row in run("open_moves")]
            settings = rows.settings_from_rows(found, defaults or PolicySettings())
            spent = rows.spent(run("spent")) if settings.cloud_prices else None
            records = CycleRecords(settings, reports, self._newest.rejected, moves, spent)
            if restarts_since is None:
                return records
            return replace(
                records,
                times={row["job_id"]: rows.job_times(row) for row in run("job_times")},
                totals=totals(costs_of(run("completed_moves_by_job", job_id=None, most=MOST_OF_JOB))),
                pins={row["job_id"]: f"pinned by {row['pinned_by']}" for row in run("pins")},
                restarts={
                    row["user_name"]: row["restarts"] for row in run("restarts_since", since=restarts_since)
                },
            )

    def reports(self) -> dict[int, Report]:
        """Return the latest usable reports alone (`CycleRecords.reports`)."""
        with self._reading() as run:
            return self._newest.read(run)

    # Jobs and cycles

    def sync_jobs(self, jobs: Sequence[SlurmJob]) -> None:
        """Store the jobs that opted in, as Slurm shows them.

        Other jobs are passed over. Stored jobs that Slurm no longer shows have ended.
        """
        ours = {job.job_id: job for job in jobs if job.spec is not None}
        written = self._written.under(self.epoch)
        known = written.jobs or {}
        # The client of Slurm returns the very same object for a job that did not change.
        fresh = [job for job_id, job in ours.items() if known.get(job_id) is not job]
        changed = [
            row
            for job in fresh
            if (row := rows.job_to_json(job))
            != (rows.job_to_json(known[job.job_id]) if job.job_id in known else None)
        ]
        with self._transaction(fenced=True) as run:
            if changed:
                sent = json.dumps(changed)
                for row in run("forget_reused_jobs", jobs=sent):
                    log.info("job id %d was used again: its former life is forgotten", row["job_id"])
                    (written.decisions or {}).pop(row["job_id"], None)
                run("upsert_jobs", jobs=sent)
            if written.jobs is None or known.keys() - ours.keys():
                run("end_unseen_jobs", job_ids=list(ours))
        self._written = replace(written, jobs=ours)

    def take_in(self) -> None:
        """Let moves go on whose drains agents have acknowledged."""
        with self._transaction(fenced=True) as run:
            run("take_acknowledgements")

    def remember_fits(self) -> None:
        """Keep the newest fits, with which later runs of the same trainings begin."""
        with self._transaction(fenced=True) as run:
            run("remember_priors")

    def news(self) -> bool:
        """Whether a move under way has an answer of its job since the last call."""
        try:
            (row,) = self._ask("news", seen=self._seen_report)
        except StoreError:
            return False
        self._seen_report = row["newest"]
        return bool(row["found"])

    def record_cycle(
        self,
        plan: Plan | None,
        *,
        mode: DaemonMode | str,
        note: str = "",
        durations: Mapping[str, float],
        started_at: float,
        snapshot_json: Callable[[], str] | None = None,
    ) -> int:
        """Record a cycle and its decisions; return the cycle's id.

        Decisions that did not change are not written again. A snapshot that the database does not take is left out.
        """
        with self._transaction(fenced=True) as run:
            recorded = run(
                "record_cycle",
                epoch=self.epoch,
                mode=DaemonMode(mode).value,
                started_at=started_at,
                note=note,
                objective=rows.finite_or_none(plan.objective) if plan else None,
                upper_bound=rows.finite_or_none(plan.upper_bound) if plan else None,
                gap=rows.finite_or_none(plan.gap) if plan else None,
                solver=plan.solver if plan else None,
                durations=json.dumps(dict(durations)),
                plan_digest=plan_digest(plan.allocations) if plan else None,
            )
            cycle_id = int(recorded[0]["id"])
            written = replace(self._written.under(self.epoch))
            if plan:
                unknown = written.decisions is None
                changed, ended = written.decide(plan.allocations)
                run("end_decisions", cycle_id=cycle_id, everything=unknown, job_ids=ended)
                if changed:
                    run(
                        "record_allocations", cycle_id=cycle_id, allocations=rows.allocations_to_json(changed)
                    )
        self._written = written
        if snapshot_json is not None:
            self._keep_snapshot(cycle_id, snapshot_json())
        return cycle_id

    def _keep_snapshot(self, cycle_id: int, text: str) -> None:
        """Add a snapshot to its cycle, or log why that fails.

        Its size and its text depend on users. In the cycle's transaction, which holds the leader's row, the lease could
        not be renewed during the write.
        """
        try:
            self._ask("record_snapshot", cycle_id=cycle_id, snapshot=text)
        except StoreError as error:
            log.warning(
                "cycle %d is recorded without its snapshot of %d characters, and cannot be replayed: %s",
                *(cycle_id, len(text), error),
            )

    def record_rentals(self, counted: Sequence[Mapping[str, object]], at: float) -> None:
        """Add what rented nodes have cost up to the POSIX time `at`."""
        with self._transaction(fenced=True) as run:
            run("record_rentals", rows=json.dumps(counted), at=at)

    def boots(self) -> dict[str, Any]:
        """Return the boots of nodes that `record_boots` has written last; empty without any."""
        with self._reading() as run:
            return next((dict(row["seen"]) for row in run("boots")), {})

    def record_boots(self, seen: Mapping[str, object]) -> None:
        """Write the boots of nodes, for the next polluxd."""
        with self._transaction(fenced=True) as run:
            run("record_boots", seen=json.dumps(seen))

    # Moves

    def open_moves(self) -> list[Move]:
        """Return the moves under way, oldest first (`CycleRecords.moves`)."""
        return [rows.move(row) for row in self._ask("open_moves")]

    def resizes(self, ids: Sequence[int]) -> dict[int, Move]:
        """Return moves within allocations, by id.

        These are the moves in `ids`, and all moves of present attempts that failed after they had begun.
        """
        return {row["id"]: rows.move(row) for row in self._ask("resizes", ids=list(ids))}

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
    ) -> Move:
        """Write the intent of a move before polluxd acts on it.

        The move has the step `planned`, at the POSIX time `at` or now.

        Raises:
            LeaderLost: `epoch` is not the newest.
            StoreRejected: the job has a move under way.
        """
        with self._transaction() as run:
            run("fence", epoch=epoch)
            planned = run(
                "plan_move",
                job_id=job_id,
                attempt=attempt,
                path=path,
                source=rows.placement_to_json(source),
                target=rows.placement_to_json(target),
                reason=reason,
                at=time.time() if at is None else at,
                epoch=epoch,
            )
        return rows.move(planned[0])

    def advance(
        self,
        move_id: int,
        step: Step,
        at: float,
        *,
        epoch: int,
        detail: str = "",
        ends_at: float | None = None,
    ) -> bool:
        """Write that a move reached `step` at the POSIX time `at`.

        Returns False when the move is at this step already, beyond it, or over. `ends_at`, where given, is stored as
        `Move.ends_at`.

        Raises:
            LeaderLost: `epoch` is not the newest.
            StoreRejected: the path has no such step.
        """
        with self._transaction() as run:
            run("fence", epoch=epoch)
            reached = run(
                "advance",
                id=move_id,
                step=Step(step).value,
                at=at,
                epoch=epoch,
                detail=detail,
                ends_at=ends_at,
            )
        return bool(reached)

    # Upkeep

    def wait(self, timeout_s: float, *, for_news: bool) -> bool:
        """Sleep up to `timeout_s` seconds, or until `wake()`.

        With `for_news`, news of a move ends the sleep, too. Returns True when it ended early. Raises no StoreError.
        """
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            if self._bell.wait(min(left, _NEWS_S) if for_news else left):
                return True
            if for_news and self.news():
                return True
        return False

    def wake(self) -> None:
        """End `wait` now; safe in a signal handler."""
        self._bell.ring()

    def prune(
        self,
        now: float,
        *,
        history_s: float,
        snapshots_s: float,
        jobs_s: float,
        priors_s: float = 365 * 86400.0,
    ) -> None:
        """Delete records that are older than the given numbers of seconds.

        `history_s` is for reports and cycles, `snapshots_s` for snapshots, `jobs_s` for ended jobs, and `priors_s`
        for priors.
        """
        with self._transaction() as run:
            run("prune_history", before=now - history_s)
            run("prune_reported", before=now - history_s)
            run("thin_history", before=now - _DAY_S)
            run("prune_acknowledgements", before=now - history_s)
            run("prune_decisions", before=now - history_s)
            run("prune_cycles", before=now - history_s)
            run("prune_snapshots", before=now - snapshots_s)
            run("prune_jobs", before=now - jobs_s)
            run("prune_priors", before=now - priors_s)
            run("prune_tokens")
            run("prune_rentals", before=now - _RENTALS_S)
