"""polluxd dies at each of its calls while something else goes wrong.

It dies before or after a call to Slurm or to the database. The next polluxd finishes every move. Slurm and the
database are the fakes, held to the real ones by their contract tests.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from polluxd.errors import SlurmUnavailable
from polluxd.model import NO_PLACEMENT, JobState, Placement, Plan, Snapshot, Step
from tests import build

from .faults import FAULTS
from .world import LEADER_LEASE_S, Killed, Process, World

pytestmark = pytest.mark.timeout(900)

WRITES = {
    *("requeue", "configure", "renew", "limit_time", "shrink", "cancel", "probe"),
    *("plan_move", "advance"),
}


@dataclass(frozen=True)
class Story:
    """Jobs and moves of a world.

    `set_out` returns the final placement of each job, by its id.
    """

    nodes: int
    set_out: Callable[[World], dict[int, Placement]]
    restarts: dict[int, int]
    """By job id: most of them, whatever goes wrong; undisturbed exactly as many, less `avoidable`."""
    avoidable: frozenset[int] = frozenset()
    """Jobs that are requeued only where a move within the allocation has failed."""


def queue(world: World) -> dict[int, Placement]:
    """Four jobs on two nodes: a swap, a first start, a park."""
    moves = [
        (Placement(("n1",), 3), Placement(("n2",), 2)),
        (Placement(("n2",), 2), Placement(("n1",), 3)),
        (NO_PLACEMENT, Placement(("n2",), 1)),
        (Placement(("n2",), 1), NO_PLACEMENT),
    ]
    return {world.submit(at=source or None, time_limit_s=7200.0): target for source, target in moves}


def on(*names: str) -> Placement:
    return Placement(names, 4)


def within(world: World) -> dict[int, Placement]:
    """Set six jobs out on ten whole nodes.

    Before the moves, two jobs have grown by companions. Then one job gives a node back to a job that waits to grow
    into it, one shrinks through the queue, one with a companion goes through the queue, and one gives up its
    companion. The last job is parked with its companion.
    """
    moves = [
        (on("n1", "n2"), on("n1", "n2"), on("n1"), "in-place"),
        (on("n3"), on("n3"), on("n2", "n3"), "in-place"),
        (on("n4", "n5"), on("n4", "n5"), on("n4"), "requeue"),
        (on("n6"), on("n6", "n7"), on("n5", "n7"), "in-place"),
        (on("n8"), on("n8", "n9"), on("n8"), "in-place"),
        (on("n10"), on("n10", "n11"), NO_PLACEMENT, "in-place"),
    ]
    ids = [world.submit(at=source, time_limit_s=7200.0, able=able) for source, _, _, able in moves]
    world.pass_time(4.0)
    before = {job_id: placed for job_id, (_, placed, _, _) in zip(ids, moves, strict=True)}
    world.policy = asking_for(before)
    process = Process(world)
    live(world, process, 60.0, before)
    assert {j: world.place(j) for j in ids} == before
    assert sum(world.requeued.values()) == 0
    process.store.resign()
    world.pass_time(3.0)
    return {job_id: target for job_id, (_, _, target, _) in zip(ids, moves, strict=True)}


QUEUE = Story(2, queue, {1: 1, 2: 1, 3: 0, 4: 1})
WITHIN = Story(12, within, {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1}, frozenset({1, 2, 5}))


def asking_for(targets: dict[int, Placement]) -> Callable[[Snapshot], Plan]:
    def policy(snapshot: Snapshot) -> Plan:
        wanted = {j.job_id: j.placement if j.pinned else targets[j.job_id] for j in snapshot.jobs}
        return build.plan(snapshot.jobs, wanted)

    return policy


class Failpoints:
    """Stop polluxd at its n-th writing call, for a while or for good.

    A freeze counts the calls of `authorize` instead.
    """

    def __init__(self, at: int, *, after: bool, then: Callable[[], None]) -> None:
        self.passed = 0
        self._at, self._after, self._then = at, after, then

    def door(self, freeze: bool) -> Callable[[str, Any], Any]:
        def wrap(name: str, inner: Any) -> Any:
            if name == "authorize":
                return self.point(inner) if freeze and not self._after else inner
            return _Door(self, inner, watched=not freeze or self._after)

        return wrap

    def point(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def pointed(*args: Any, **words: Any) -> Any:
            self.passed += 1
            now = self.passed == self._at
            if now and not self._after:
                self._then()
            answer = call(*args, **words)
            if now and self._after:
                self._then()
            return answer

        return pointed


class _Door:
    def __init__(self, points: Failpoints, inner: Any, *, watched: bool) -> None:
        self._points, self._inner, self._watched = points, inner, watched

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._points.point(found) if self._watched and name in WRITES else found


def kill() -> None:
    raise Killed


def live(world: World, process: Process, seconds: float, targets: dict[int, Placement]) -> None:
    """polluxd runs until everything is where it is to be."""
    until = world.slurm.clock() + seconds
    while world.slurm.clock() < until:
        process.turn()
        world.pass_time(0.3)
        world.assert_sound()
        settled = {j: world.place(j) for j in targets} == targets
        if settled and not any(not m.step.terminal for m in world.rows.moves):
            return


def scenario(story: Story, fault: str, at: int, *, after: bool) -> tuple[bool, list[str]]:
    """One run; (was there such a failpoint, what is wrong at the end)."""
    world = World(nodes=story.nodes)
    try:
        targets = story.set_out(world)
        foreign = world.submit_foreign(1)
        world.pass_time(4.0)
        world.policy = asking_for(targets)
        second: list[Process] = []

        def take_over() -> None:
            """Freeze this process past its lease; another leads and acts."""
            world.pass_time(LEADER_LEASE_S + 0.5)
            second.append(Process(world))
            for _ in range(4):
                second[0].turn()
                world.pass_time(0.3)

        freeze = fault == "second leader"
        points = Failpoints(at, after=after, then=take_over if freeze else kill)
        first = Process(world, points.door(freeze))
        try:
            live(world, first, 60.0, targets)
        except Killed:
            first.store.epoch = None
        if points.passed < at:
            return False, wrong(world, story, targets, foreign, disturbed=False)
        match fault:
            case "database down":
                world.rows.down = True
            case "scontrol times out" | "applied but timed out":
                for call in ("observe", "requeue", "configure", "renew", "shrink", "cancel"):
                    error = SlurmUnavailable("no answer in time")
                    world.slurm.fail(call, error, applied=fault.startswith("applied"), times=2)
            case "slurmctld restarts":
                world.slurm.break_controller(2.0, forgets_s=1.0)
        world.pass_time(0.5)
        last = second[0] if second else Process(world)
        for _ in range(8):
            last.turn()
            if freeze:
                first.turn()  # awake again, and no leader any more
            world.pass_time(0.5)
        world.rows.down = False
        live(world, last, 120.0, targets)
        return True, wrong(world, story, targets, foreign)
    finally:
        world.close()


def wrong(
    world: World, story: Story, targets: dict[int, Placement], foreign: int, *, disturbed: bool = True
) -> list[str]:
    faults = [
        f"job {j}: {world.place(j)}, not {p}"
        for j, p in targets.items()
        if world.place(j) != p or world.truth(j).state.finished
    ]
    lent = {c for j in targets for c in world.trainings[j].lent}
    faults += [
        f"companion {c} lends to nobody and still {world.truth(c).raw_state}"
        for c in world.companions - lent
        if not world.truth(c).state.finished
    ]
    if any(not m.step.terminal for m in world.rows.moves):
        faults.append("a move is still open")
    if world.truth(foreign).state is not JobState.RUNNING:
        faults.append("the foreign job is gone")
    drained = Counter(m.job_id for m in world.rows.moves if Step.REQUEUED in m.times)
    restarts = {j: world.truth(j).restart_count for j in targets}
    if restarts != {j: drained[j] for j in targets} or any(
        world.requeued[j] > n for j, n in restarts.items()
    ):
        faults.append(f"requeued {restarts}, by moves {dict(drained)}")
    least = {j: 0 if j in story.avoidable else n for j, n in story.restarts.items()}
    most = story.restarts if disturbed else least
    if any(not least[j] <= restarts[j] <= most[j] for j in targets):
        faults.append(f"restarts {restarts}, expected {least} to {most}")
    return faults


@pytest.mark.parametrize("story", [QUEUE, WITHIN], ids=["queue", "within"])
def test_the_moves_converge_undisturbed(story: Story) -> None:
    assert scenario(story, "nothing", 10_000, after=False) == (False, [])


def test_each_job_takes_the_fastest_path_that_it_can() -> None:
    world = World(nodes=WITHIN.nodes)
    targets = within(world)
    world.policy = asking_for(targets)
    live(world, Process(world), 60.0, targets)
    last = {move.job_id: move.path for move in world.rows.moves}
    world.close()
    assert last == {1: "resize", 2: "resize", 3: "requeue", 4: "requeue", 5: "resize", 6: "park"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("story", [QUEUE, WITHIN], ids=["queue", "within"])
def test_killed_at_every_failpoint_while(story: Story, fault: str) -> None:
    tried, unsound = 0, []
    for after in (False, True):
        for at in itertools.count(1):
            there, faults = scenario(story, fault, at, after=after)
            if not there:
                break
            tried += 1
            unsound += [f"{'after' if after else 'before'} call {at}: {f}" for f in faults]
    print(f"killed at each of {tried} failpoints, {fault}: {tried - len(unsound)}/{tried} converged")
    assert tried >= 50
    assert not unsound, "\n".join(unsound)
