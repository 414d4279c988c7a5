"""The state machine of node 0's launcher: what each event leads to, and how a start ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Set
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.launcher.machine import Outcome, Phase, Resized, StartMachine, StartTerms
from pollux.launcher.messages import (
    AnnounceMove,
    AwaitLeavers,
    EndWorkers,
    Leave,
    MoveAnswer,
    NodesLeft,
    Order,
    Signalled,
    Stop,
    WorkerEnded,
)

TERMS = StartTerms((2, 2, 2), ("n0", "n1", "n2"), Resized(5))
RETRIES = replace(TERMS, may_retry=True)
CLOCK, POSIX = 1000.0, 5000.0
ALL = {0, 1, 2}
AFTER_FAILURE, AT_ONCE, HURRY = EndWorkers(3.0, 13.0), EndWorkers(0.0, 0.0), EndWorkers(8.0, 16.0)

Event = Callable[[StartMachine], None]


def report(node: int, message: WorkerEnded | Signalled) -> Event:
    if isinstance(message, Signalled):
        return lambda machine: machine.signalled(node, message)
    return lambda machine: machine.worker_ended(node, message)


def announce(*announcement: Any) -> Event:
    return lambda machine: machine.announced(AnnounceMove(*announcement))


def await_leavers(move: int) -> Event:
    return lambda machine: machine.awaited(AwaitLeavers(move))


def gone(node: int) -> Event:
    return lambda machine: machine.node_gone(node)


PARENT_GONE: Event = StartMachine.parent_gone
SHRINK = announce(7, ("n2", "elsewhere"), 0)
TERM = Signalled(signal.SIGTERM)


def tick(_: StartMachine) -> None:
    """Time has passed."""


def ended(node: int, local_rank: int, status: int, *, at: float = POSIX, **more: Any) -> Event:
    end = WorkerEnded(local_rank, status, at, f"pid 1, n{node}", **({"lost": status == 137} | more))
    return report(node, end)


def node_ended(node: int, *statuses: int, **more: Any) -> list[Event]:
    return [ended(node, local_rank, status, **more) for local_rank, status in enumerate(statuses)]


class Recorded(StartMachine):
    """A machine that notes what it says, and its times."""

    def __init__(self, terms: StartTerms = TERMS, *, restores: bool = False) -> None:
        self.said: list[Any] = []
        self.seconds = 0.0
        super().__init__(
            terms,
            lambda nodes, order: self.said.append(told(order, nodes)),
            self.said.append,
            lambda: restores,
            lambda: CLOCK + self.seconds,
            lambda: POSIX + self.seconds,
        )


def run(
    *events: Event | tuple[float, Event], terms: StartTerms = TERMS, restores: bool = False
) -> tuple[Recorded, list[Any]]:
    """The machine after the events, each at once or so many seconds later; and all that it has said."""
    machine = Recorded(terms, restores=restores)
    for each in events:
        machine.seconds, event = each if isinstance(each, tuple) else (0.0, each)
        event(machine)
        machine.conclude()
    return machine, machine.said


def outcome(*events: Event | tuple[float, Event], **more: Any) -> Outcome | None:
    return run(*events, **more)[0].outcome


def told(order: Order, nodes: Set[int] = frozenset(ALL)) -> tuple[Order, frozenset[int]]:
    return order, frozenset(nodes)


# -- failures and losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [1, 76, 134, 137])
@pytest.mark.parametrize("node", [0, 1])
def test_a_failure_ends_the_workers_of_all_nodes(node: int, status: int) -> None:
    machine, said = run(ended(node, 1, status), ended(2, 0, 1))
    assert said == [told(AFTER_FAILURE)], "once"
    assert machine.phase is Phase.FAILING
    assert machine.running == {0: {0, 1}, 1: {0, 1}, node: {0}, 2: {1}}


@pytest.mark.parametrize("event", [ended(0, 1, 137), ended(2, 0, 137), gone(2), ended(1, 0, 75, why="x")])
def test_after_a_loss_all_others_are_killed_at_once(event: Event) -> None:
    machine, said = run(event, ended(1, 1, 137), terms=RETRIES, restores=True)
    assert said == [told(AT_ONCE, machine.connected)]
    assert machine.recovers


@pytest.mark.parametrize(("terms", "restores"), [(TERMS, False), (TERMS, True), (RETRIES, False)])
def test_a_loss_that_nobody_would_restore_is_a_failure(terms: StartTerms, restores: bool) -> None:
    assert run(ended(1, 1, 137), terms=terms, restores=restores)[1] == [told(AFTER_FAILURE)]


@pytest.mark.parametrize("status", [1, 134, 143, 137, 75])
def test_a_rank_that_fails_by_itself_or_is_ended_by_its_launcher_is_no_loss(status: int) -> None:
    assert not run(ended(1, 0, status, lost=False), terms=RETRIES, restores=True)[0].recovers


@pytest.mark.parametrize("loss", [ended(0, 1, 137), ended(1, 0, 137), gone(2)])
def test_a_loss_counts_though_another_rank_failed_of_it_before(loss: Event) -> None:
    raised = ended(0, 0, 1, why="RuntimeError: Connection closed by peer")
    machine, said = run(raised, loss, terms=RETRIES, restores=True)
    assert machine.recovers
    assert said[0][0] == AFTER_FAILURE
    assert said[1:] == [told(AT_ONCE, machine.connected)]


def test_a_loss_counts_though_all_workers_of_node_0_have_failed_of_it() -> None:
    assert run(*node_ended(0, 1, 1), ended(1, 0, 137), terms=RETRIES, restores=True)[0].recovers


@pytest.mark.parametrize("loss", [ended(1, 0, 137), gone(2)])
def test_where_rank_0_has_ended_well_nothing_is_restored(loss: Event) -> None:
    machine, said = run(*node_ended(0, 0, 0), loss, terms=RETRIES, restores=True)
    assert not machine.recovers
    assert said == [told(AFTER_FAILURE, machine.connected)], "the others are ended all the same"


# -- signals --------------------------------------------------------------------------------------------------


def test_after_term_the_workers_of_all_nodes_have_time_to_save() -> None:
    for node in (0, 1):
        events = [report(node, TERM)] * 2
        assert run(*events)[1] == [told(Stop(), ALL - {node})], "once"
        assert outcome(*events, *node_ended(0, 143, 143)) == Outcome(ended_by=signal.SIGTERM)
    assert run(report(0, Signalled(signal.SIGINT)))[1] == [], "the other launchers get it themselves"
    assert run(*events, ended(1, 0, 1), gone(2))[1] == run(*events)[1], "nothing is a failure any more"


def test_ranks_that_have_saved_and_ended_by_themselves_have_not_failed() -> None:
    machine, said = run(ended(1, 0, 143, why="sys.exit(143)"))
    assert (machine.phase, said) == (Phase.STOPPING, [told(EndWorkers(600.0, 610.0))])
    assert outcome(*node_ended(0, 143, 143, why="sys.exit(143)")) == Outcome(ended_by=signal.SIGTERM)
    assert run(ended(1, 0, 143))[0].phase is Phase.FAILING, "somebody has ended one rank of a plain script"


# -- moves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("announcement", "why"),
    [
        ((7, (), 2), ""),
        ((0, (), 0), "expected a move's number from 1, got 0"),
        ((5, (), 0), "it is over already"),
        ((7, ("n0", "n2"), 0), "expected n0, where rank 0 is, to stay"),
    ],
)
def test_an_announcement_of_rank_0(announcement: tuple[Any, ...], why: str) -> None:
    machine, said = run(announce(*announcement))
    assert said == [MoveAnswer(announcement[0], why)]
    assert (machine.resized, machine.phase) == (Resized(5), Phase.TRAINING)


@pytest.mark.parametrize("before", [ended(1, 0, 1), report(0, TERM)])
def test_an_announcement_comes_too_late_where_ranks_are_being_ended(before: Event) -> None:
    machine, said = run(before, SHRINK, await_leavers(0))
    assert said == [*run(before)[1], MoveAnswer(7, "the ranks are being ended")]
    assert (machine.staying, machine.move_id) == (ALL, 0)


def test_nodes_leave_in_order() -> None:
    leave, hurry = [told(Leave(), {2}), MoveAnswer(7)], told(HURRY, {2})
    machine, said = run(SHRINK)
    assert said == leave
    assert (machine.staying, machine.leaving, machine.resized) == ({0, 1}, {2}, Resized(7, ("n2",)))
    assert run(SHRINK, await_leavers(6))[1] == leave
    assert run(SHRINK, await_leavers(7), await_leavers(7))[1] == [*leave, hurry], "once"
    after, said = run(SHRINK, ended(2, 0, 139), ended(2, 1, 76), gone(2))
    assert said == [*leave, hurry, NodesLeft(("n2",))]
    assert after.phase is Phase.TRAINING
    assert after.odd is not None
    assert after.odd.status == 139
    assert run(SHRINK, ended(2, 0, 0))[1] == leave, "the training was over before: nobody is hurried"
    assert run(SHRINK, ended(2, 0, 137, asked=True))[0].odd is None


def test_ranks_are_named_as_the_agent_counts_now() -> None:
    machine, _ = run(announce(7, ("n1",), 0), ended(2, 1, 3))
    assert [failure.rank for failure in machine.failures] == [3]


# -- how a start ends -----------------------------------------------------------------------------------------

WELL: list[Event] = [*node_ended(1, 0, 0), *node_ended(2, 0, 0)]
ABORTED: list[Event] = [*node_ended(0, 134, 0), *WELL]
LOST: list[Event] = [*node_ended(0, 137, 137), *WELL]


def test_a_start_ends_when_all_workers_have_ended() -> None:
    assert outcome(*node_ended(0, 0, 0), *node_ended(1, 0, 0), ended(2, 0, 0)) is None
    assert outcome(*node_ended(0, 0, 0), *WELL) == outcome(*WELL, *node_ended(0, 0, 0)) == Outcome()


def test_node_0_does_not_wait_for_ever_for_the_others() -> None:
    events = node_ended(0, 1, 0)
    assert outcome(*events, (17.9, tick)) is None
    assert outcome(*events, (18.0, tick)) is not None


RAISED = "RuntimeError: Connection closed by peer"


@pytest.mark.parametrize(
    ("events", "rank"),
    [
        (
            [
                ended(0, 0, 1, at=4999.0, why=RAISED),
                ended(1, 0, 3, at=4998.0, why="ValueError"),
                ended(0, 1, 0),
                ended(1, 1, 0),
                *node_ended(2, 0, 0),
            ],
            2,
        ),
        ([ended(0, 0, 1, at=4999.9, why=RAISED), ended(0, 1, 137), *WELL], 1),
        ([ended(0, 0, 1, at=4999.9, why=RAISED), ended(0, 1, 134), *WELL], 0),
    ],
    ids=["earlier", "killed before its peers raised, reaped after", "aborted of it"],
)
def test_the_earliest_failure_is_the_cause(events: list[Event], rank: int) -> None:
    end = outcome(*events)
    assert end is not None
    assert end.failure is not None
    assert end.failure.rank == rank
    if rank == 2:
        assert (end.failure.why, end.status) == ("ValueError", 3)


RESTARTS = replace(TERMS, may_restart=True)


@pytest.mark.parametrize(
    ("terms", "events", "again"),
    [
        (RESTARTS, [*node_ended(0, 1, 1), *WELL], ((0, 1, 2), False, False)),
        (TERMS, [*node_ended(0, 1, 1), *WELL], None),
        (RETRIES, [*node_ended(0, 75, 1), *WELL], ((0, 1, 2), True, False)),
        (TERMS, [*node_ended(0, 75, 75), *WELL], None),
        (RESTARTS, [gone(2), *node_ended(0, 1, 1), *node_ended(1, 0, 0)], None),
        (TERMS, [announce(7, (), 2), *ABORTED], ((0, 1, 2), True, False)),
        (RETRIES, ABORTED, None),
        (RETRIES, LOST, ((0, 1, 2), True, False)),
        (RETRIES, [gone(2), *node_ended(0, 137, 137), *node_ended(1, 137, 137)], ((0, 1), True, True)),
    ],
)
def test_who_starts_again(terms: StartTerms, events: list[Event], again: tuple[Any, ...] | None) -> None:
    end = outcome(*events, terms=terms, restores=True)
    assert end is not None
    assert not end.ended_by
    found = end.next_nodes, end.asked, end.lost
    assert found == again if again else not end.next_nodes
    assert events is not LOST or not outcome(*LOST, terms=terms).next_nodes, "nothing can be restored"


def test_the_next_start_waits_for_nodes_that_leave() -> None:
    events = [SHRINK, *node_ended(0, 1, 1), *node_ended(1, 0, 0)]
    assert outcome(*events, terms=RESTARTS) is None
    machine, _ = run(*events, gone(2), terms=RESTARTS)
    assert machine.outcome is not None
    assert (machine.outcome.next_nodes, machine.resized) == ((0, 1), Resized(7, ("n2",)))
    late = outcome(*events, (18.0, tick), terms=RESTARTS)
    assert late is not None
    assert late.next_nodes == (0, 1)


def test_a_companion_ends_with_its_parent() -> None:
    lender = replace(TERMS, companion=True)
    assert run(ended(0, 0, 76), terms=lender)[0].phase is Phase.TRAINING
    assert run(PARENT_GONE, PARENT_GONE, terms=lender)[1] == [told(AFTER_FAILURE)]
    over = [*node_ended(0, 143, 143, at=5003.0), *node_ended(1, 0, 0), *node_ended(2, 0, 0)]
    end = outcome(PARENT_GONE, *over, terms=lender)
    assert end is not None
    assert end.status == 1
    assert outcome(PARENT_GONE, *WELL, *node_ended(0, 0, 76), terms=lender) == Outcome()


# -- whatever comes -------------------------------------------------------------------------------------------

statuses = st.sampled_from([0, 1, 75, 76, 134, 137, 143])
ends = st.builds(
    WorkerEnded,
    st.integers(0, 1),
    statuses,
    st.floats(4000, 6000),
    why=st.sampled_from(["", "x"]),
    lost=st.booleans(),
)
names = st.lists(st.sampled_from(["n0", "n1", "n2", "x"])).map(tuple)
reports = st.tuples(st.integers(0, 2), ends | st.sampled_from([TERM, Signalled(signal.SIGINT)]))
events = st.one_of(
    st.builds(announce, st.integers(0, 3), names, st.integers(0, 2)),
    st.builds(await_leavers, st.integers(0, 3)),
    st.sampled_from([PARENT_GONE, tick]),
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([TERMS, replace(RETRIES, may_restart=True)]),
    st.booleans(),
    st.lists(st.tuples(st.floats(0, 30), reports | st.integers(1, 2) | events), max_size=12),
)
def test_every_start_comes_to_an_end(
    terms: StartTerms, restores: bool, happening: list[tuple[float, Any]]
) -> None:
    """Whatever has happened: once all workers have ended and leavers are gone, or time is up, the start is over."""
    machine = Recorded(terms, restores=restores)

    def over(event: Event) -> bool:
        event(machine)
        machine.conclude()
        return machine.outcome is not None

    for seconds, each in happening:
        match each:
            case (node, WorkerEnded(local_rank)) if local_rank not in machine.running[node]:
                continue
            case (node, _) | int(node) if node not in machine.connected:
                continue
            case (node, message):
                event = report(node, message)
            case int(node):
                event = gone(node)
            case _:
                event = each
        machine.seconds += seconds
        if over(event):
            return
    for number, workers in machine.running.items():
        for local_rank in copy(workers):
            if over(report(number, WorkerEnded(local_rank, 137, POSIX + machine.seconds, asked=True))):
                return
    machine.seconds += terms.graces.gone + terms.graces.reports
    assert over(tick)
