"""An in-memory database, for the simulator and for tests (`tests/troubled_store.py` has the daemon's and users' calls).

It has what polluxd's cycle reads and writes, with the real database's rules for moves and leaders.
`tests/integration/store/test_fake.py` compares it with the real database.

    rows = FakeRows(clock)
    one, two = FakeStore(rows), FakeStore(rows)     # two processes
    one.lead()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polluxd.config.settings import PolicySettings
from polluxd.errors import LeaderLost, StoreRejected, StoreUnavailable
from polluxd.model import RESTARTING_PATHS, DaemonMode, Move, Placement, Plan, Report, Spent, Step
from polluxd.slurm.protocol import SlurmJob

from .costs import cost_of, is_move, totals
from .views import CycleRecords, JobTimes, MoveCost

_ORDER = {step: rank for rank, step in enumerate(Step)}


@dataclass
class FakeRows:
    """The tables, shared by every process."""

    clock: Callable[[], float]
    """Seconds that only go forward: the server's."""
    moves: list[Move] = field(default_factory=list)
    reports: dict[int, Report] = field(default_factory=dict)
    jobs: dict[int, SlurmJob] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    times: dict[int, JobTimes] = field(default_factory=dict)
    """By job that has not ended; `held_at` is as old as the last look at the job's GPUs."""
    resumed: dict[int, dict[str, float]] = field(default_factory=dict)
    """By move: what the job's agent reported of its return to training (`first_step_at`, `resize_cost`)."""
    acknowledged: dict[int, dict[str, float]] = field(default_factory=dict)
    """By move: what the agent reported when it stopped (`last_step_at`)."""
    costs: dict[int, list[MoveCost]] = field(default_factory=dict)
    """By job: its completed moves."""
    open: dict[int, None] = field(default_factory=dict)
    """Ids of the moves that have not ended, in order."""
    failed_resizes: list[int] = field(default_factory=list)
    """Ids of resizes that failed."""
    pins: dict[int, str] = field(default_factory=dict)
    rentals: list[dict[str, Any]] = field(default_factory=list)
    """Counted costs of rented nodes, which the real database adds up."""
    boots: dict[str, Any] = field(default_factory=dict)
    cycles: int = 0
    note: str = ""
    """Of the newest cycle."""
    epoch: int = 0
    lease_until: float = float("-inf")
    down: bool = False

    def acknowledge(self, move_id: int, at: float, **stamps: float) -> bool:
        """As an agent does: the checkpoint that a drain asked for is there."""
        move = self.moves[move_id - 1]
        if self.down or move.step is not Step.DRAINING:
            return False
        self.acknowledged[move_id] = stamps
        times = {**move.times, Step.CHECKPOINTED: at}
        self.moves[move_id - 1] = replace(move, step=Step.CHECKPOINTED, times=times)
        return True


class FakeStore:
    """One polluxd process's access to `FakeRows`.

    It has the methods that `Controller` and `Reconciler` call.

    Args:
        lease_s: how long a leader may act after it was last confirmed [s].
    """

    def __init__(self, rows: FakeRows, *, lease_s: float = 15.0) -> None:
        self.rows = rows
        self.epoch: int | None = None
        self._lease_s = lease_s
        self._confirmed_at = float("-inf")

    # Leadership

    def lead(self) -> int | None:
        self._must_answer()
        if self.still_leading():
            return self.epoch
        if self.rows.clock() < self.rows.lease_until:
            return None
        self.rows.epoch += 1
        self.epoch = self.rows.epoch
        self._confirm()
        return self.epoch

    def still_leading(self) -> bool:
        if self.epoch is None:
            return False
        if self.rows.down:
            return False
        if self.epoch != self.rows.epoch:
            self.epoch = None
            return False
        self._confirm()
        return True

    def _confirm(self) -> None:
        self._confirmed_at = self.rows.clock()
        self.rows.lease_until = self._confirmed_at + self._lease_s

    def _must_answer(self, epoch: int | None = None) -> None:
        if self.rows.down:
            raise StoreUnavailable
        if epoch is not None and epoch != self.rows.epoch:
            raise LeaderLost(f"epoch {epoch} no longer leads (now: {self.rows.epoch})")

    # What is observed and decided

    def settings(self, defaults: PolicySettings | None = None) -> PolicySettings:
        self._must_answer()
        found = defaults or PolicySettings()
        return replace(found, **self.rows.settings) if self.rows.settings else found  # type: ignore[arg-type]

    def records(
        self, defaults: PolicySettings | None = None, *, restarts_since: float | None = None
    ) -> CycleRecords:
        settings = self.settings(defaults)
        spent = self._spent() if settings.cloud_prices else None
        known = CycleRecords(settings, dict(self.rows.reports), {}, self.open_moves(), spent)
        if restarts_since is None:
            return known
        pins = {job: f"pinned by {who}" for job, who in self.rows.pins.items()}
        costs = (cost for job_id in self.rows.times for cost in self.rows.costs.get(job_id, ()))
        return replace(
            known,
            times=dict(self.rows.times),
            totals=totals(costs),
            pins=pins,
            restarts=self._restarts(restarts_since),
        )

    def sync_jobs(self, jobs: Sequence[SlurmJob]) -> None:
        self._must_answer(self.epoch)
        self.rows.jobs = {job.job_id: job for job in jobs if job.spec is not None}
        now, before = self.rows.clock(), self.rows.times
        self.rows.times = {}
        for job_id, job in self.rows.jobs.items():
            if job.state.finished:
                continue
            known, held = before.get(job_id), job.gpus_per_node_held
            if known is None:
                known = JobTimes(job.submit_time)
            elif not held:
                self.rows.times[job_id] = known
                continue
            self.rows.times[job_id] = JobTimes(
                known.submitted_at,
                known.started_at or job.start_time,
                now if held else known.held_at,
                max(known.most_gpus, sum(held.values())),
                max(known.most_nodes, len(held)),
            )

    def take_in(self) -> None:
        self._must_answer(self.epoch)

    def remember_fits(self) -> None:
        self._must_answer(self.epoch)

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
        self._must_answer(self.epoch)
        self.rows.cycles, self.rows.note = self.rows.cycles + 1, note
        return self.rows.cycles

    def record_rentals(self, counted: Sequence[Mapping[str, Any]], at: float) -> None:
        self._must_answer(self.epoch)
        self.rows.rentals.extend({**row, "counted_at": at} for row in counted)

    def boots(self) -> dict[str, Any]:
        self._must_answer()
        return self.rows.boots

    def record_boots(self, seen: Mapping[str, Any]) -> None:
        self._must_answer(self.epoch)
        self.rows.boots = dict(seen)

    def _spent(self) -> Spent | None:
        counted = self.rows.rentals
        if not counted:
            return None
        sums = Counter[str]()
        for row in counted:
            sums[row["account"]] += row["cost"]
        # Without a calendar, all is of this month.
        return Spent(sums, max(row["counted_at"] for row in counted))

    # Moves

    def open_moves(self) -> list[Move]:
        self._must_answer()
        return [self.rows.moves[number - 1] for number in self.rows.open]

    def moves(self, job_id: int | None = None) -> list[Move]:
        self._must_answer()
        return [move for move in self.rows.moves if job_id in (None, move.job_id)]

    def _restarts(self, since: float) -> dict[str, int]:
        jobs = self.rows.jobs
        return dict(
            Counter(
                jobs[move.job_id].user if move.job_id in jobs else ""
                for move in self.rows.moves
                if move.path in RESTARTING_PATHS
                and (move.step is Step.PLANNED or move.times.get(Step.DRAINING, float("-inf")) >= since)
            )
        )

    def resizes(self, ids: Sequence[int]) -> dict[int, Move]:
        self._must_answer()
        asked = (self.rows.moves[number - 1] for number in ids if 0 < number <= len(self.rows.moves))
        failed = filter(self._broken, (self.rows.moves[number - 1] for number in self.rows.failed_resizes))
        found = {move.id: move for move in (*asked, *failed) if move.in_allocation}
        return dict(sorted(found.items()))

    def _broken(self, move: Move) -> bool:
        begun = not move.times.keys().isdisjoint((Step.DRAINING, Step.RECRUITING))
        job = self.rows.jobs.get(move.job_id)
        ours = job is not None and not job.state.finished and job.restart_count == move.attempt
        return move.step is Step.FAILED and begun and ours

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
        self._must_answer(epoch)
        if any(move.job_id == job_id for move in self.open_moves()):
            raise StoreRejected(f"move_one_open: job {job_id} has a move under way")
        times = {Step.PLANNED: self.rows.clock() if at is None else at}
        number = len(self.rows.moves) + 1
        move = Move(
            number, job_id, attempt, path, source, target, reason, Step.PLANNED, times, nonce=f"{number:032x}"
        )
        self.rows.moves.append(move)
        self.rows.open[number] = None
        return move

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
        self._must_answer(epoch)
        move = self.rows.moves[move_id - 1]
        if move.step.terminal or _ORDER[step] <= _ORDER[move.step]:
            return False
        if step in (Step.TRAINING, Step.PARKED) and (move.path == "park") is (step is Step.TRAINING):
            raise StoreRejected(f"move {move_id} ({move.path}) cannot go to step {step}")
        self.rows.moves[move_id - 1] = replace(
            move,
            step=step,
            times={**move.times, step: at},
            detail="; ".join(part for part in (move.detail, detail) if part),
            ends_at=move.ends_at if ends_at is None else ends_at,
        )
        if step.terminal:
            self._ended(self.rows.moves[move_id - 1])
        return True

    def _ended(self, move: Move) -> None:
        del self.rows.open[move.id]
        if move.step is Step.FAILED and move.in_allocation:
            self.rows.failed_resizes.append(move.id)
        if move.step is Step.TRAINING and is_move(move.path, move.attempt):
            row: dict[str, Any] = {
                "id": move.id,
                "job_id": move.job_id,
                "path": move.path,
                "times": move.times,
                "acknowledged": self.rows.acknowledged.get(move.id),
                "resumed": self.rows.resumed.get(move.id),
            }
            self.rows.costs.setdefault(move.job_id, []).append(cost_of(row, move.source, move.target))
