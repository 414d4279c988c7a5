"""The state machine of node 0's launcher: what each event leads to, and how a start ends."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.launcher.machine import step
from pollux.launcher.messages import (
    AnnounceMove,
    AwaitLeavers,
    EndWorkers,
    Leave,
    NodesLeft,
    Order,
    Refused,
    Signalled,
    Stop,
    Taken,
    WorkerEnded,
)
from pollux.launcher.state import (
    Action,
    Again,
    Event,
    Finish,
    FromNode,
    FromRank0,
    NodeGone,
    Now,
    Outcome,
    ParentGone,
    Phase,
    Resized,
    StartTerms,
    State,
    Tell,
    TellRank0,
    Tick,
    begin,
)

TERMS = StartTerms((2, 2, 2), ("n0", "n1", "n2"))
RESTORES = replace(TERMS, recovers=True, may_retry=True)
NOW = Now(1000.0, 5000.0)
ALL = frozenset({0, 1, 2})
AFTER_FAILURE, AT_ONCE, HURRY = EndWorkers(3.0, 13.0), EndWorkers(0.0, 0.0), EndWorkers(8.0, 16.0)
SHRINK = FromRank0(AnnounceMove(7, ("n2", "elsewhere"), 0))


def ended(node: int, local_rank: int, status: int, *, at: float = NOW.posix, **more: Any) -> FromNode:
    lost = status == 137
    return FromNode(node, WorkerEnded(local_rank, status, at, f"pid 1, n{node}", **({"lost": lost} | more)))


def node_ended(node: int, *statuses: int, **more: Any) -> list[Event]:
    return [ended(node, local_rank, status, **more) for local_rank, status in enumerate(statuses)]


def run(
    *events: Event | tuple[float, Event], terms: StartTerms = TERMS, state: State | None = None
) -> tuple[State, list[Action]]:
    """The state after the events, each at NOW or so many seconds later; and all actions."""
    state, found = state or begin(terms, Resized(5)), list[Action]()
    for each in events:
        seconds, event = each if isinstance(each, tuple) else (0.0, each)
        state, actions = step(terms, state, event, Now(NOW.clock + seconds, NOW.posix + seconds))
        found += actions
    return state, found


def outcome(*events: Event | tuple[float, Event], terms: StartTerms = TERMS) -> Outcome | None:
    found = [action.outcome for action in run(*events, terms=terms)[1] if isinstance(action, Finish)]
    return found[0] if found else None


def told(order: Order, nodes: frozenset[int] = ALL) -> Tell:
    return Tell(nodes, order)


# -- failures and losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [1, 76, 134, 137])
@pytest.mark.parametrize("node", [0, 1])
def test_a_failure_ends_the_workers_of_all_nodes(node: int, status: int) -> None:
    state, actions = run(ended(node, 1, status), ended(2, 0, 1))
    assert actions == [told(AFTER_FAILURE)], "once"
    assert state.phase is Phase.FAILING
    assert state.running == {0: {0, 1}, 1: {0, 1}, node: {0}, 2: {1}}


@pytest.mark.parametrize("event", [ended(0, 1, 137), ended(2, 0, 137), NodeGone(2), ended(1, 0, 75, why="x")])
def test_after_a_loss_all_others_are_killed_at_once(event: Event) -> None:
    state, actions = run(event, ended(1, 1, 137), terms=RESTORES)
    assert actions == [told(AT_ONCE, state.connected)]
    assert state.recovers


@pytest.mark.parametrize(
    "terms", [TERMS, replace(RESTORES, may_retry=False), replace(RESTORES, recovers=False)]
)
def test_a_loss_that_nobody_would_restore_is_a_failure(terms: StartTerms) -> None:
    assert run(ended(1, 1, 137), terms=terms)[1] == [told(AFTER_FAILURE)]


@pytest.mark.parametrize(
    ("status", "lost"), [(1, False), (134, False), (143, False), (137, False), (75, False)]
)
def test_a_rank_that_fails_by_itself_or_is_ended_by_its_launcher_is_no_loss(status: int, lost: bool) -> None:
    assert not run(ended(1, 0, status, lost=lost), terms=RESTORES)[0].recovers


def test_a_loss_counts_though_another_rank_failed_of_it_before() -> None:
    raised = ended(0, 0, 1, why="RuntimeError: Connection closed by peer")
    for loss in (ended(0, 1, 137), ended(1, 0, 137), NodeGone(2)):
        state, actions = run(raised, loss, terms=RESTORES)
        assert state.recovers
        assert actions == [told(AFTER_FAILURE), told(AT_ONCE, state.connected)]
    state, _ = run(*node_ended(0, 1, 1), ended(1, 0, 137), terms=RESTORES)
    assert state.recovers, "though all workers of node 0 have failed of it"


def test_where_rank_0_has_ended_well_nothing_is_restored() -> None:
    for loss in (ended(1, 0, 137), NodeGone(2)):
        state, actions = run(*node_ended(0, 0, 0), loss, terms=RESTORES)
        assert not state.recovers
        assert actions == [told(AFTER_FAILURE, state.connected)], "the others are ended all the same"


# -- signals --------------------------------------------------------------------------------------------------


def test_after_term_the_workers_of_all_nodes_have_time_to_save() -> None:
    for node in (0, 1):
        events = [FromNode(node, Signalled(signal.SIGTERM))] * 2
        assert run(*events)[1] == [told(Stop(), ALL - {node})], "told once"
        assert outcome(*events, *node_ended(0, 143, 143)) == Outcome(ended_by=signal.SIGTERM)
    assert run(FromNode(0, Signalled(signal.SIGINT)))[1] == [], "the other launchers get it themselves"
    assert run(*events, ended(1, 0, 1), NodeGone(2))[1] == run(*events)[1], "nothing is a failure any more"


def test_ranks_that_have_saved_and_ended_by_themselves_have_not_failed() -> None:
    state, actions = run(ended(1, 0, 143, why="sys.exit(143)"))
    assert (state.phase, actions) == (Phase.STOPPING, [told(EndWorkers(600.0, 610.0))])
    assert outcome(*node_ended(0, 143, 143, why="sys.exit(143)")) == Outcome(ended_by=signal.SIGTERM)
    assert run(ended(1, 0, 143))[0].phase is Phase.FAILING, "somebody has ended one rank of a plain script"


# -- moves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("announce", "answer", "resized"),
    [
        (AnnounceMove(7, (), 2), Taken(7), Resized(5)),
        (AnnounceMove(0, (), 0), Refused(0, "expected a move's number from 1, got 0"), Resized(5)),
        (AnnounceMove(5, (), 0), Refused(5, "it is over already"), Resized(5)),
        (AnnounceMove(7, ("n0", "n2"), 0), Refused(7, "expected n0, where rank 0 is, to stay"), Resized(5)),
    ],
)
def test_an_announcement_of_rank_0(announce: AnnounceMove, answer: Taken | Refused, resized: Resized) -> None:
    state, actions = run(FromRank0(announce))
    assert actions == [TellRank0(answer)]
    assert (state.resized, state.phase) == (resized, Phase.TRAINING)


@pytest.mark.parametrize("before", [ended(1, 0, 1), FromNode(0, Signalled(signal.SIGTERM))])
def test_an_announcement_comes_too_late_where_ranks_are_being_ended(before: Event) -> None:
    state, _ = run(before)
    assert run(SHRINK, FromRank0(AwaitLeavers(0)), state=state) == (
        state,
        [TellRank0(Refused(7, "the ranks are being ended"))],
    )


def test_nodes_leave_in_order() -> None:
    state, actions = run(SHRINK)
    assert actions == [told(Leave(), frozenset({2})), TellRank0(Taken(7))]
    assert (state.staying, state.leaving, state.resized) == ({0, 1}, {2}, Resized(7, ("n2",)))
    hurry = told(HURRY, frozenset({2}))
    assert run(FromRank0(AwaitLeavers(6)), state=state)[1] == []
    assert run(*[FromRank0(AwaitLeavers(7))] * 2, state=state)[1] == [hurry], "once"
    after, actions = run(ended(2, 0, 139), ended(2, 1, 76), NodeGone(2), state=state)
    assert actions == [hurry, TellRank0(NodesLeft(("n2",)))]
    assert after.phase is Phase.TRAINING
    assert after.odd is not None
    assert after.odd.status == 139
    assert run(ended(2, 0, 0), state=state)[1] == [], (
        "the training was over before the move: nobody is hurried"
    )
    killed, _ = run(ended(2, 0, 137, asked=True), state=state)
    assert killed.odd is None


def test_ranks_are_named_as_the_agent_counts_now() -> None:
    state, _ = run(FromRank0(AnnounceMove(7, ("n1",), 0)), ended(2, 1, 3))
    assert [failure.rank for failure in state.failures] == [3]


# -- how a start ends -----------------------------------------------------------------------------------------

WELL: list[Event] = [*node_ended(1, 0, 0), *node_ended(2, 0, 0)]
ABORTED: list[Event] = [*node_ended(0, 134, 0), *WELL]


def test_a_start_ends_when_all_workers_have_ended() -> None:
    assert outcome(*node_ended(0, 0, 0), *node_ended(1, 0, 0), ended(2, 0, 0)) is None
    assert outcome(*node_ended(0, 0, 0), *WELL) == Outcome()
    assert outcome(*WELL, *node_ended(0, 0, 0)) == Outcome()


def test_node_0_does_not_wait_for_ever_for_the_others() -> None:
    events = node_ended(0, 1, 0)
    assert outcome(*events, (17.9, Tick())) is None
    assert outcome(*events, (18.0, Tick())) is not None


def test_the_earliest_failure_is_the_cause() -> None:
    later = ended(0, 0, 1, at=4999.0, why="RuntimeError: Connection closed by peer")
    first = ended(1, 0, 3, at=4998.0, why="ValueError")
    end = outcome(later, first, ended(0, 1, 0), ended(1, 1, 0), *node_ended(2, 0, 0))
    assert end is not None
    assert end.failure is not None
    assert (end.failure.rank, end.failure.why, end.status) == (2, "ValueError", 3)


@pytest.mark.parametrize(("status", "rank"), [(137, 1), (134, 0)])
def test_a_killed_rank_is_the_cause_though_its_peers_raised_before_it_was_reaped(
    status: int, rank: int
) -> None:
    raised = ended(0, 0, 1, at=4999.9, why="RuntimeError: Connection closed by peer")
    end = outcome(raised, ended(0, 1, status), *WELL)
    assert end is not None
    assert end.failure is not None
    assert end.failure.rank == rank


@pytest.mark.parametrize(
    ("terms", "events", "again"),
    [
        (replace(TERMS, may_restart=True), [*node_ended(0, 1, 1), *WELL], Again((0, 1, 2), Resized(5))),
        (TERMS, [*node_ended(0, 1, 1), *WELL], None),
        (replace(TERMS, may_retry=True), [*node_ended(0, 75, 1), *WELL], Again((0, 1, 2), Resized(5), True)),
        (TERMS, [*node_ended(0, 75, 75), *WELL], None),
        (replace(TERMS, may_restart=True), [NodeGone(2), *node_ended(0, 1, 1), *node_ended(1, 0, 0)], None),
        (RESTORES, [*node_ended(0, 137, 137), *WELL], Again((0, 1, 2), Resized(5), True)),
        (
            RESTORES,
            [NodeGone(2), *node_ended(0, 137, 137), *node_ended(1, 137, 137)],
            Again((0, 1), Resized(5), True, lost=True),
        ),
        (TERMS, [FromRank0(AnnounceMove(7, (), 2)), *ABORTED], Again((0, 1, 2), Resized(5), True)),
        (replace(TERMS, may_retry=True), ABORTED, None),
    ],
)
def test_who_starts_again(terms: StartTerms, events: list[Event], again: Again | None) -> None:
    end = outcome(*events, terms=terms)
    assert end is not None
    assert end.again == again


def test_the_next_start_waits_for_nodes_that_leave() -> None:
    terms = replace(TERMS, may_restart=True)
    events = [SHRINK, *node_ended(0, 1, 1), *node_ended(1, 0, 0)]
    assert outcome(*events, terms=terms) is None
    end = outcome(*events, NodeGone(2), terms=terms)
    assert end is not None
    assert end.again == Again((0, 1), Resized(7, ("n2",)))
    late = outcome(*events, (18.0, Tick()), terms=terms)
    assert late is not None
    assert late.again is not None


def test_a_companion_ends_with_its_parent() -> None:
    lender = replace(TERMS, companion=True)
    assert run(ended(0, 0, 76), terms=lender)[0].phase is Phase.TRAINING
    assert run(ParentGone(), ParentGone(), terms=lender)[1] == [told(AFTER_FAILURE)]
    over = [*node_ended(0, 143, 143, at=5003.0), *node_ended(1, 0, 0), *node_ended(2, 0, 0)]
    end = outcome(ParentGone(), *over, terms=lender)
    assert end is not None
    assert end.status == 1
    assert outcome(ParentGone(), *WELL, *node_ended(0, 0, 76), terms=lender) == Outcome()


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
events = st.one_of(
    st.builds(FromNode, st.integers(0, 2), ends | st.just(Signalled(signal.SIGTERM))),
    st.builds(FromRank0, st.builds(AnnounceMove, st.integers(0, 3), names, st.integers(0, 2))),
    st.builds(FromRank0, st.builds(AwaitLeavers, st.integers(0, 3))),
    st.builds(NodeGone, st.integers(1, 2)),
    st.sampled_from([ParentGone(), Tick(), FromNode(0, Signalled(signal.SIGINT))]),
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([TERMS, replace(RESTORES, may_restart=True)]),
    st.lists(st.tuples(st.floats(0, 30), events), max_size=12),
)
def test_every_start_comes_to_an_end(terms: StartTerms, happening: list[tuple[float, Event]]) -> None:
    """Whatever has happened: once all workers have ended and leavers are gone, or time is up, the start is over."""
    state, clock = begin(terms, Resized()), 0.0

    def over(event: Event) -> bool:
        nonlocal state
        state, actions = step(terms, state, event, Now(1000.0 + clock, 5000.0 + clock))
        return any(isinstance(action, Finish) for action in actions)

    for seconds, event in happening:
        match event:
            case FromNode(node, WorkerEnded(local_rank)) if local_rank not in state.running[node]:
                continue
            case FromNode(node) | NodeGone(node) if node not in state.connected:
                continue
        clock += seconds
        if over(event):
            return
    for number, local_rank in [(each, local_rank) for each in ALL for local_rank in state.running[each]]:
        if over(FromNode(number, WorkerEnded(local_rank, 137, 5000.0 + clock, asked=True))):
            return
    clock += terms.graces.gone + terms.graces.reports
    assert over(Tick()), state
