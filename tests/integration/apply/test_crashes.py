"""polluxd finishes every move, wherever its predecessor died.

polluxd dies once before and once after each of its writing calls to Slurm and to the database. The next
polluxd finishes every open move. The database is real. Slurm is the fake, which test_slurm_contract holds
to the real Slurm.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from contrib.devcluster.postgres import DevPostgres
from pollux.goodput import BatchLimits
from polluxd.apply.intents import Intent
from polluxd.apply.placed import held
from polluxd.apply.reconciler import Reconciler
from polluxd.config.settings import MoveSettings
from polluxd.errors import SlurmError, SlurmRefused, SlurmUnavailable, StoreError, StoreUnavailable
from polluxd.model import NO_PLACEMENT, JobSpec, JobState, Node, Placement, Report, Step
from polluxd.slurm.fake import FakeSlurm
from polluxd.slurm.protocol import Geometry
from polluxd.store import CycleRecords, Store

pytestmark = pytest.mark.slurm

_names = (f"crash{n}" for n in itertools.count(1))
WRITES = {"signal", "requeue", "configure", "renew", "plan_move", "advance"}


class Killed(BaseException):
    """kill -9 of polluxd."""


class Mortal:
    """Forward calls to Slurm or the store, and die at the n-th writing call.

    The calls to Slurm and to the store share one count. `after` says whether polluxd dies before or after the
    call takes effect.
    """

    def __init__(self, inner: Any, count: Counter[str], dies_at: int, *, after: bool) -> None:
        self._inner, self._count, self._dies_at, self._after = inner, count, dies_at, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in WRITES:
            return found

        def call(*args: Any, **words: Any) -> Any:
            self._count["calls"] += 1
            now = self._count["calls"] == self._dies_at
            if now and not self._after:
                raise Killed
            answer = found(*args, **words)
            if now:
                raise Killed
            return answer

        return call


@pytest.fixture
def store(dev_postgres: DevPostgres) -> Iterator[Store]:
    admin = Store(dev_postgres.admin_url, "any")
    admin.migrate()
    admin.close()
    made = Store(dev_postgres.url, next(_names), lease_s=60)
    assert made.lead() is not None
    yield made
    made.close()


class World:
    """Two nodes of four GPUs, and jobs that a plan moves.

    Two Pollux jobs swap their nodes, one starts and one is parked. A foreign job holds one GPU.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.slurm = FakeSlurm([Node("n1", 4), Node("n2", 4)])
        self.targets: dict[int, Placement] = {}
        moves = [
            (Placement(("n1",), 3), Placement(("n2",), 2)),
            (Placement(("n2",), 2), Placement(("n1",), 3)),
            (NO_PLACEMENT, Placement(("n2",), 1)),
            (Placement(("n2",), 1), NO_PLACEMENT),
        ]
        for source, target in moves:
            job_id = self.slurm.submit(JobSpec())
            if source:
                self.slurm.configure(job_id, Geometry(source.nodes, source.gpus_per_node, 1), start=True)
            self.targets[job_id] = target
        self.foreign = self.slurm.submit(None, gpus_per_node=1)
        self.slurm.advance(3.0)
        self.slurm.calls.clear()
        self.worst = Counter[str]()

    def reports(self) -> dict[int, Report]:
        """Agents that report their first step a second after they started."""
        now = self.slurm.clock()
        return {
            j.job_id: Report(
                attempt=j.restart_count,
                at=now,
                limits=BatchLimits(32, 256, 8, 64),
                first_step_at=now,
                checkpointed=True,
            )
            for j in self.slurm.observe().jobs
            if j.state is JobState.RUNNING and j.start_time is not None and now > j.start_time + 1
        }

    def agents_answer(self) -> None:
        """Acknowledge every drain, as agents do that read the row or the signal."""
        epoch = self.store.epoch
        assert epoch is not None
        for move in self.store.open_moves():
            if move.step is Step.DRAINING:
                self.store.advance(move.id, Step.CHECKPOINTED, self.slurm.clock(), epoch=epoch)

    def records(self) -> CycleRecords:
        return replace(self.store.records(), reports=self.reports())

    def reconciler(self, slurm: Any, store: Any) -> Reconciler:
        def authorize() -> int:
            assert self.store.epoch is not None
            return self.store.epoch

        return Reconciler(
            slurm,
            store,
            limits=MoveSettings(cooldown_s=0.0, planned_timeout_s=300.0, start_timeout_s=60.0),
            lease=120.0,
            authorize=authorize,
            clock=self.slurm.clock,
            monotonic=self.slurm.clock,
        )

    def wished(self) -> list[Intent]:
        """Return a move for every job that is not where the plan wants it.

        The next cycle would ask for the same moves.
        """
        wished = []
        for job in self.slurm.observe().jobs:
            target = self.targets.get(job.job_id)
            source = held(job)
            if target is None or source is None or source == target:
                continue
            path = "start" if not source else "requeue" if target else "park"
            if job.state is (JobState.PENDING if path == "start" else JobState.RUNNING):
                wished.append(Intent(job.job_id, job.restart_count, path, source, target, "by hand"))
        return wished

    def run(self, reconciler: Reconciler, seconds: float = 30.0) -> None:
        until = self.slurm.clock() + seconds
        while self.slurm.clock() < until:
            state = self.slurm.observe()
            reconciler.begin(self.wished(), self.records())
            reconciler.tick(reconciler.gather(state), self.records())
            self.agents_answer()
            self.slurm.advance(0.3)
            used = Counter[str]()
            for job in self.slurm.observe().jobs:
                used.update(job.gpus_per_node_held)
            self.worst |= used
            if not self.store.open_moves() and not self.wished():
                return

    def assert_converged(self) -> None:
        jobs = {job.job_id: job for job in self.slurm.observe().jobs}
        assert {j: held(jobs[j]) for j in self.targets} == self.targets
        assert all(n <= 4 for n in self.worst.values()), f"above capacity: {self.worst}"
        assert jobs[self.foreign].state is JobState.RUNNING
        assert all(job_id != self.foreign for _, job_id in self.slurm.calls)
        # Requeued exactly once where the plan moved a running job, never otherwise.
        assert {j: jobs[j].restart_count for j in self.targets} == {1: 1, 2: 1, 3: 0, 4: 1}


def test_the_moves_converge_undisturbed(store: Store) -> None:
    world = World(store)
    world.run(world.reconciler(world.slurm, store))
    world.assert_converged()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_call(
    dev_postgres: DevPostgres, store: Store, after: bool, record_property: Callable[[str, object], None]
) -> None:
    survived = 0
    for dies_at in itertools.count(1):
        own = Store(dev_postgres.url, next(_names), lease_s=60)
        try:
            assert own.lead() is not None
            world = World(own)
            count = Counter[str]()
            first = world.reconciler(
                Mortal(world.slurm, count, dies_at, after=after), Mortal(own, count, dies_at, after=after)
            )
            try:
                world.run(first)
            except Killed:
                survived += 1
            else:
                break  # the scenario has fewer calls than this: every one of them has been the last
            world.slurm.advance(0.5)
            world.run(world.reconciler(world.slurm, own), seconds=60.0)
            world.assert_converged()
        finally:
            own.close()
    assert survived >= 20
    record_property("crashes survived", f"{survived}/{survived}")
    print(
        f"killed {'after' if after else 'before'} each of {survived} calls: {survived}/{survived} converged"
    )


FAULTS: list[tuple[str, SlurmError, bool]] = [
    *(
        (c, SlurmUnavailable("timed out"), False)
        for c in ("observe", "signal", "requeue", "configure", "renew")
    ),
    *((c, SlurmUnavailable("timed out"), True) for c in ("signal", "requeue", "configure", "renew")),
    ("signal", SlurmRefused("no step"), False),
]


@pytest.mark.parametrize(("call", "error", "applied"), FAULTS)
def test_slurm_fails_or_answers_too_late(store: Store, call: str, error: SlurmError, applied: bool) -> None:
    world = World(store)
    world.slurm.fail(call, error, applied=applied, times=2)
    reconciler = world.reconciler(world.slurm, store)
    for _ in range(4):  # the daemon's loop: an error ends the turn, the next turn looks again
        try:
            world.run(reconciler)
        except SlurmError:
            world.slurm.advance(2.0)
    world.assert_converged()


@pytest.mark.parametrize("call", ["plan_move", "advance", "open_moves"])
def test_the_database_is_away_for_a_while(store: Store, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(store)
    reconciler = world.reconciler(world.slurm, store)
    real = getattr(store, call)
    failures = iter([True, False, True, True])

    def flaky(*args: Any, **words: Any) -> Any:
        if next(failures, False):
            raise StoreUnavailable
        return real(*args, **words)

    monkeypatch.setattr(store, call, flaky)
    for _ in range(6):
        try:
            world.run(reconciler)
        except StoreError:
            world.slurm.advance(2.0)
    world.assert_converged()


def test_a_job_cancelled_in_the_midst_of_a_move_is_not_brought_back(store: Store) -> None:
    world = World(store)
    reconciler = world.reconciler(world.slurm, store)
    reconciler.begin(world.wished(), world.records())
    reconciler.tick(reconciler.gather(world.slurm.observe()), world.records())
    world.slurm.finish(4, JobState.CANCELLED)
    world.agents_answer()
    world.run(reconciler, seconds=10.0)
    job = world.slurm.jobs([4])[4]
    assert job.state is JobState.CANCELLED
    assert job.restart_count == 0
    failed = [m for m in store.moves(4) if m.step is Step.FAILED]
    assert failed
    assert "ended" in failed[0].detail
