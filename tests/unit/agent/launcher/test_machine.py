"""The state machine of a node's launcher.

What each event leads to in each phase, and what holds in all of them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.launcher.machine import begin, odd_end, step
from pollux.launcher.messages import (
    Alert,
    AnnounceMove,
    AskForMove,
    AwaitLeavers,
    Done,
    Left,
    MoveNotice,
    NodesLeft,
    Refused,
    StartDecided,
    StartGrace,
    Taken,
)
from pollux.launcher.outcome import Again, Failure, Outcome, Resized
from pollux.launcher.state import (
    Action,
    End,
    Event,
    Finish,
    FromNode,
    FromRank0,
    Graces,
    LauncherState,
    NodeGone,
    Now,
    ParentGone,
    Phase,
    Signalled,
    SignalWorkers,
    StartTerms,
    Tell,
    TellRank0,
    Tick,
    WorkerEnded,
)

GRACES = Graces()
HUB = StartTerms(0, (2, 2, 2), ("n0", "n1", "n2"), "n0")
NODE = replace(HUB, node=1, where="n1")
NOW = Now(1000.0, 5000.0)
TERM, KILL = SignalWorkers(signal.SIGTERM), SignalWorkers(signal.SIGKILL)
SHRINK = MoveNotice(7, False, frozenset({2}))
"""Removes node 2."""
MINE = MoveNotice(7, False, frozenset({1}))
RELAUNCH = MoveNotice(7, True, frozenset({2}))
FAILURE = Failure(4999.0, 4, 3, "ValueError", "pid 9, n2")


def at(seconds: float) -> Now:
    return Now(NOW.clock + seconds, NOW.posix + seconds)


def end(status: int, **more: Any) -> End:
    return End(status, NOW.posix, pid=11, **more)


def run(
    terms: StartTerms, state: LauncherState, *events: Event | tuple[float, Event]
) -> tuple[LauncherState, list[Action]]:
    """The state after the events, each at NOW or so many seconds later.

    And the last one's actions.
    """
    actions: list[Action] = []
    for each in events:
        seconds, event = each if isinstance(each, tuple) else (0.0, each)
        state, actions = step(terms, state, event, at(seconds))
    return state, actions


def fresh(terms: StartTerms) -> LauncherState:
    return begin(terms, Resized())


def in_phase(terms: StartTerms, phase: Phase, move: MoveNotice | None = None) -> LauncherState:
    """A state of that phase, both workers running; LEAVING is for `move`."""
    state = replace(fresh(terms), move=move, phase=phase)
    if move is not None and terms.hub:
        state = replace(state, staying=state.staying - move.leaving, leaving=move.leaving)
    if phase is Phase.LEAVING:
        state = replace(state, grace_begun=True, term_at=NOW.clock + 8, kill_at=NOW.clock + 16)
    if phase is Phase.FAILING:
        state = replace(state, term_at=NOW.clock + 3, decide_by=NOW.clock + 18)
    if phase is Phase.STOPPING:
        state = replace(state, stopped_by=signal.SIGTERM, kill_at=NOW.clock + 10)
    return state


WORKER_ENDS = [
    # (terms, phase, move, status) -> (phase, actions)
    *[(s, p, m, 0, p, []) for s in (HUB, NODE) for p in Phase for m in (None, SHRINK)],
    (HUB, Phase.TRAINING, None, 1, Phase.FAILING, [Tell(Alert())]),
    (HUB, Phase.TRAINING, None, 76, Phase.FAILING, [Tell(Alert())]),
    (HUB, Phase.TRAINING, SHRINK, 77, Phase.FAILING, [Tell(Alert())]),
    (HUB, Phase.TRAINING, RELAUNCH, 1, Phase.LEAVING, [Tell(StartGrace(7))]),
    (HUB, Phase.LEAVING, RELAUNCH, 1, Phase.LEAVING, []),
    (NODE, Phase.TRAINING, None, 1, Phase.FAILING, [Tell(Alert())]),
    (NODE, Phase.TRAINING, None, 76, Phase.ASKING, [Tell(AskForMove())]),
    (NODE, Phase.TRAINING, None, 77, Phase.ASKING, [Tell(AskForMove())]),
    (NODE, Phase.ASKING, None, 76, Phase.ASKING, [Tell(AskForMove())]),
    (NODE, Phase.ASKING, None, 1, Phase.FAILING, [Tell(Alert())]),
    (NODE, Phase.TRAINING, SHRINK, 76, Phase.ASKING, [Tell(AskForMove())]),
    (NODE, Phase.TRAINING, MINE, 1, Phase.LEAVING, [Tell(StartGrace(7))]),
    (NODE, Phase.TRAINING, RELAUNCH, 76, Phase.LEAVING, [Tell(StartGrace(7))]),
    (NODE, Phase.LEAVING, MINE, 139, Phase.LEAVING, []),
    *[(s, Phase.FAILING, None, 1, Phase.FAILING, []) for s in (HUB, NODE)],
    *[(s, Phase.STOPPING, None, 143, Phase.STOPPING, []) for s in (HUB, NODE)],
]


@pytest.mark.parametrize(("terms", "phase", "move", "status", "then", "expected"), WORKER_ENDS)
def test_a_worker_s_end(
    terms: StartTerms,
    phase: Phase,
    move: MoveNotice | None,
    status: int,
    then: Phase,
    expected: list[Action],
) -> None:
    state, actions = run(terms, in_phase(terms, phase, move), WorkerEnded(0, end(status)))
    assert (state.phase, actions) == (then, expected)
    assert state.running == {1}


MESSAGES: list[tuple[StartTerms, Phase, MoveNotice | None, int, Any, Phase, list[Action]]] = [
    # To node 0.
    (HUB, Phase.TRAINING, None, 1, AskForMove(), Phase.FAILING, [Tell(Alert())]),
    (HUB, Phase.TRAINING, SHRINK, 1, AskForMove(), Phase.FAILING, [Tell(Alert())]),
    (HUB, Phase.TRAINING, SHRINK, 2, AskForMove(), Phase.TRAINING, []),
    (HUB, Phase.TRAINING, RELAUNCH, 1, AskForMove(), Phase.TRAINING, []),
    (HUB, Phase.TRAINING, None, 1, Alert(), Phase.FAILING, [Tell(Alert())]),
    (HUB, Phase.TRAINING, SHRINK, 2, Alert(), Phase.TRAINING, []),
    (HUB, Phase.TRAINING, None, 1, Done(None), Phase.TRAINING, []),
    (HUB, Phase.TRAINING, None, 2, Done(FAILURE), Phase.FAILING, [Tell(Alert())]),
    (HUB, Phase.TRAINING, SHRINK, 2, Done(FAILURE), Phase.TRAINING, []),
    (HUB, Phase.TRAINING, SHRINK, 2, StartGrace(7), Phase.TRAINING, [Tell(StartGrace(7))]),
    (HUB, Phase.TRAINING, RELAUNCH, 1, StartGrace(7), Phase.LEAVING, [Tell(StartGrace(7))]),
    (HUB, Phase.TRAINING, RELAUNCH, 1, StartGrace(6), Phase.TRAINING, []),
    (HUB, Phase.TRAINING, None, 2, Left(), Phase.TRAINING, []),
    (HUB, Phase.TRAINING, None, 1, MoveNotice(9, True, frozenset()), Phase.TRAINING, []),
    (HUB, Phase.TRAINING, None, 1, StartDecided(FAILURE, None), Phase.TRAINING, []),
    *[(HUB, Phase.FAILING, None, 1, m, Phase.FAILING, []) for m in (Alert(), AskForMove(), Done(FAILURE))],
    *[(HUB, Phase.STOPPING, None, 1, m, Phase.STOPPING, []) for m in (Alert(), AskForMove(), Done(FAILURE))],
    # To another node. It does not answer an alert.
    (NODE, Phase.TRAINING, None, 0, Alert(), Phase.FAILING, []),
    (NODE, Phase.ASKING, None, 0, Alert(), Phase.FAILING, []),
    (NODE, Phase.LEAVING, MINE, 0, Alert(), Phase.FAILING, []),
    (NODE, Phase.TRAINING, None, 0, SHRINK, Phase.TRAINING, []),
    (NODE, Phase.TRAINING, None, 0, MINE, Phase.TRAINING, []),
    (NODE, Phase.ASKING, None, 0, SHRINK, Phase.TRAINING, []),
    (NODE, Phase.TRAINING, MINE, 0, StartGrace(7), Phase.LEAVING, [Tell(StartGrace(7))]),
    (NODE, Phase.TRAINING, SHRINK, 0, StartGrace(7), Phase.TRAINING, [Tell(StartGrace(7))]),
    (NODE, Phase.TRAINING, None, 0, StartGrace(7), Phase.TRAINING, []),
    (NODE, Phase.LEAVING, MINE, 0, StartGrace(7), Phase.LEAVING, []),
    (NODE, Phase.TRAINING, None, 0, Done(FAILURE), Phase.TRAINING, []),
    (NODE, Phase.TRAINING, None, 0, MoveNotice(9, True, frozenset({7})), Phase.TRAINING, []),
    (NODE, Phase.STOPPING, None, 0, Alert(), Phase.STOPPING, []),
]


@pytest.mark.parametrize(("terms", "phase", "move", "node", "message", "then", "expected"), MESSAGES)
def test_a_message_of_another_launcher(
    terms: StartTerms,
    phase: Phase,
    move: MoveNotice | None,
    node: int,
    message: Any,
    then: Phase,
    expected: Any,
) -> None:
    state, actions = run(terms, in_phase(terms, phase, move), FromNode(node, message))
    assert (state.phase, actions) == (then, expected)


ANNOUNCED = [
    (
        AnnounceMove(7, "resize", ("n2", "elsewhere"), 0),
        [Tell(SHRINK), TellRank0(Taken(7))],
        Resized(7, ("n2",)),
    ),
    (AnnounceMove(7, "relaunch", ("n2",), 0), [Tell(RELAUNCH), TellRank0(Taken(7))], Resized(7, ("n2",))),
    (
        AnnounceMove(7, "resize", (), 2),
        [Tell(MoveNotice(7, False, frozenset(), True)), TellRank0(Taken(7))],
        Resized(5),
    ),
    (
        AnnounceMove(0, "resize", (), 0),
        [TellRank0(Refused(0, "expected a move's number from 1, got 0"))],
        Resized(5),
    ),
    (AnnounceMove(5, "resize", (), 0), [TellRank0(Refused(5, "it is over already"))], Resized(5)),
    (
        AnnounceMove(7, "resize", ("n0", "n2"), 0),
        [TellRank0(Refused(7, "expected n0, where rank 0 is, to stay"))],
        Resized(5),
    ),
]


@pytest.mark.parametrize(("announce", "expected", "resized"), ANNOUNCED)
def test_an_announcement_of_rank_0(announce: AnnounceMove, expected: list[Action], resized: Resized) -> None:
    state, actions = run(HUB, begin(HUB, Resized(5)), FromRank0(announce))
    assert actions == expected
    assert state.resized == resized
    assert state.phase is Phase.TRAINING


@pytest.mark.parametrize("phase", [Phase.FAILING, Phase.STOPPING])
def test_an_announcement_comes_too_late_where_ranks_are_being_ended(phase: Phase) -> None:
    before = in_phase(HUB, phase)
    state, actions = run(HUB, before, FromRank0(AnnounceMove(7, "resize", ("n2",), 0)))
    assert actions == [TellRank0(Refused(7, "the ranks are being ended"))]
    assert state == before
    assert run(HUB, in_phase(HUB, phase, SHRINK), FromRank0(AwaitLeavers(7)))[1] == []


def test_the_grace_period_begins_with_the_first_end_or_when_rank_0_waits() -> None:
    announced, _ = run(HUB, fresh(HUB), FromRank0(AnnounceMove(7, "resize", ("n2",), 0)))
    assert run(HUB, announced, FromRank0(AwaitLeavers(6)))[1] == []
    state, actions = run(HUB, announced, FromRank0(AwaitLeavers(7)))
    assert actions == [Tell(StartGrace(7))]
    assert run(HUB, state, FromRank0(AwaitLeavers(7)))[1] == [], "once"
    leaver, _ = run(NODE, fresh(NODE), FromNode(0, MINE), FromNode(0, StartGrace(7)))
    assert run(NODE, leaver, (7.9, Tick()))[1] == []
    assert run(NODE, leaver, (8.0, Tick()))[1] == [TERM]
    assert run(NODE, leaver, (8.0, Tick()), (15.9, Tick()))[1] == []
    assert run(NODE, leaver, (8.0, Tick()), (16.0, Tick()))[1] == [KILL]
    over, _ = run(NODE, fresh(NODE), FromNode(0, MINE), WorkerEnded(0, end(0)))
    assert not over.grace_begun, "training was over before the move"
    quick, actions = run(NODE, fresh(NODE), WorkerEnded(0, end(76)), FromNode(0, MINE))
    assert (quick.phase, actions) == (Phase.LEAVING, [Tell(StartGrace(7))]), (
        "quicker than the word of the move"
    )


@pytest.mark.parametrize("terms", [HUB, NODE])
@pytest.mark.parametrize("phase", list(Phase))
def test_a_signal_stops_from_any_phase(terms: StartTerms, phase: Phase) -> None:
    before = in_phase(terms, phase, RELAUNCH if phase is Phase.LEAVING else None)
    state, actions = run(terms, before, Signalled(signal.SIGINT))
    assert state.phase is Phase.STOPPING
    assert actions == [SignalWorkers(signal.SIGINT)]
    assert state.kill_at is not None
    assert KILL in run(terms, state, (20.0, Tick()))[1]
    state, actions = run(terms, state, WorkerEnded(0, end(130)), WorkerEnded(1, end(130)))
    number = signal.SIGTERM if phase is Phase.STOPPING else signal.SIGINT
    assert actions == [Finish(Outcome(ended_by=number))]


def test_after_a_failure_the_others_have_a_moment_then_term_then_kill() -> None:
    state, _ = run(NODE, fresh(NODE), WorkerEnded(0, end(1)))
    assert state.due == NOW.clock + 3
    state, actions = run(NODE, state, (3.0, Tick()))
    assert actions == [TERM]
    assert state.due == NOW.clock + 13
    state, actions = run(NODE, state, (13.0, Tick()))
    assert actions == [KILL]
    assert run(NODE, state, (22.9, Tick()))[1] == []
    assert run(NODE, state, (23.0, Tick()))[1] == [KILL], "again, for whatever was forked since"


def test_of_two_failures_the_earlier_one_is_named_by_what_the_workers_said() -> None:
    later = end(1, why="RuntimeError: Connection closed by peer", said_at=NOW.posix - 1)
    first = end(3, why="ValueError", said_at=NOW.posix - 2)
    state, actions = run(NODE, fresh(NODE), WorkerEnded(0, later), WorkerEnded(1, first))
    assert actions == [Tell(Done(Failure(NOW.posix - 2, 3, 3, "ValueError", "pid 11, n1")))]
    assert state.reported


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGKILL, 3), (signal.SIGABRT, 2)])
def test_a_killed_rank_is_the_cause_though_its_peers_raised_before_it_was_reaped(
    number: signal.Signals, rank: int
) -> None:
    raised = end(1, why="RuntimeError: Connection closed by peer", said_at=NOW.posix - 0.1)
    _, actions = run(NODE, fresh(NODE), WorkerEnded(0, raised), WorkerEnded(1, end(128 + number)))
    (told,) = [action.message for action in actions if isinstance(action, Tell)]
    assert isinstance(told, Done)
    assert told.failure is not None
    assert told.failure.rank == rank


def ended(terms: StartTerms, *statuses: int, state: LauncherState | None = None) -> LauncherState:
    state = state or fresh(terms)
    return run(terms, state, *(WorkerEnded(rank, end(status)) for rank, status in enumerate(statuses)))[0]


def finish(actions: Iterable[Action]) -> Finish | None:
    return next((action for action in actions if isinstance(action, Finish)), None)


def test_node_0_decides_when_all_have_reported() -> None:
    state = ended(HUB, 0, 0)
    assert finish(run(HUB, state, FromNode(1, Done(None)))[1]) is None
    state, actions = run(HUB, state, FromNode(1, Done(None)), FromNode(2, Done(None)))
    assert actions == [Finish(Outcome(), tell=True)]
    state = ended(HUB, 0, 0)
    _, actions = run(
        HUB, state, FromNode(2, Done(FAILURE)), FromNode(1, Done(replace(FAILURE, at=4998.0, rank=2)))
    )
    decided = finish(actions)
    assert decided is not None
    assert decided.outcome.failure == replace(FAILURE, at=4998.0, rank=2)


def test_node_0_decides_without_a_report_when_time_is_up() -> None:
    state = ended(HUB, 1, 0)
    assert finish(run(HUB, state, (17.9, Tick()))[1]) is None
    decided = finish(run(HUB, state, (18.0, Tick()))[1])
    assert decided is not None
    assert decided.outcome.status == 1


BOTH_DONE: list[Event] = [FromNode(1, Done(None)), FromNode(2, Done(None))]

AGAIN: list[
    tuple[str, Callable[[], tuple[StartTerms, LauncherState, list[Event]]], tuple[Any, ...] | None]
] = [
    (
        "a restart is left",
        lambda: (
            s := replace(HUB, may_restart=True),
            ended(s, 1, 1),
            BOTH_DONE,
        ),
        ((0, 1, 2), Resized(), False),
    ),
    (
        "none is left",
        lambda: (HUB, ended(HUB, 1, 1), BOTH_DONE),
        None,
    ),
    (
        "a rank asks",
        lambda: (
            s := replace(HUB, may_retry=True),
            ended(s, 75, 1),
            BOTH_DONE,
        ),
        ((0, 1, 2), Resized(), True),
    ),
    (
        "a rank asks once too often",
        lambda: (HUB, ended(HUB, 75, 75), BOTH_DONE),
        None,
    ),
    (
        "a launcher is lost",
        lambda: (s := replace(HUB, may_restart=True), ended(s, 1, 1), [FromNode(1, Done(None)), NodeGone(2)]),
        None,
    ),
    (
        "a relaunch waits for the leaver's end",
        lambda: (
            HUB,
            ended(HUB, 77, 77, state=in_phase(HUB, Phase.LEAVING, RELAUNCH)),
            [FromNode(1, Done(None))],
        ),
        None,
    ),
    (
        "a relaunch goes on after the leaver's end",
        lambda: (
            HUB,
            ended(HUB, 77, 77, state=in_phase(HUB, Phase.LEAVING, RELAUNCH)),
            [FromNode(1, Done(None)), NodeGone(2)],
        ),
        ((0, 1), Resized(), False),
    ),
    (
        "an abort where ranks are lent",
        lambda: (
            HUB,
            ended(HUB, 134, 0, state=replace(fresh(HUB), move=MoveNotice(7, False, frozenset(), True))),
            BOTH_DONE,
        ),
        ((0, 1, 2), Resized(), True),
    ),
]


@pytest.mark.parametrize(("made", "again"), [case[1:] for case in AGAIN], ids=[case[0] for case in AGAIN])
def test_who_starts_again(made: Callable[[], Any], again: tuple[Any, ...] | None) -> None:
    terms, state, events = made()
    found = finish(run(terms, state, *events)[1])
    if again is None:
        assert found is None or found.outcome.again is None
    else:
        assert found is not None
        assert found.outcome.again == Again(*again)


def test_the_end_of_a_leaver_is_told_and_that_of_another_is_a_failure() -> None:
    announced = in_phase(HUB, Phase.TRAINING, SHRINK)
    state, actions = run(HUB, announced, NodeGone(2))
    assert actions == [TellRank0(NodesLeft(("n2",)))]
    assert state.phase is Phase.TRAINING
    state, actions = run(HUB, announced, NodeGone(1))
    assert actions == [Tell(Alert())]
    lost = state.reports[1]
    assert lost is not None
    assert "has gone without a word" in lost.why
    state, actions = run(NODE, fresh(NODE), NodeGone(0))
    assert (state.phase, actions) == (Phase.FAILING, [Tell(Alert())])
    outcome = finish(run(NODE, state, WorkerEnded(0, end(143)), WorkerEnded(1, end(143)))[1])
    assert outcome is not None
    assert outcome.outcome.status == 143 or outcome.outcome.failure is not None


def test_a_leaver_ends_well_however_its_workers_ended() -> None:
    state = in_phase(NODE, Phase.LEAVING, MINE)
    state, actions = run(NODE, state, WorkerEnded(0, end(76)), WorkerEnded(1, end(139)))
    assert actions == [Tell(Left()), Finish(Outcome(left=True))]
    odd = odd_end(NODE, state)
    assert odd is not None
    assert odd.status == 139


def test_an_asking_node_waits_for_the_answer() -> None:
    state, actions = run(NODE, fresh(NODE), WorkerEnded(0, end(76)), WorkerEnded(1, end(76)))
    assert finish(actions) is None
    assert not state.reported
    _, actions = run(NODE, state, FromNode(0, MINE))
    assert finish(actions) == Finish(Outcome(left=True))
    _, actions = run(NODE, state, FromNode(0, Alert()))
    assert [type(action.message) for action in actions if isinstance(action, Tell)] == [Done]


def test_the_decision_ends_a_node_once_its_workers_have_ended() -> None:
    told = StartDecided(FAILURE, Again((0, 1), Resized(7, ("n2",)), False, 2000))
    state, actions = run(NODE, in_phase(NODE, Phase.FAILING), FromNode(0, told))
    assert actions == []
    _, actions = run(NODE, state, WorkerEnded(0, end(1)), WorkerEnded(1, end(1)))
    assert finish(actions) == Finish(Outcome(FAILURE, again=told.again))
    for nonsense in (Again((0, 2), port=1), Again((0, 1, 3), port=1)):
        state, _ = run(NODE, in_phase(NODE, Phase.FAILING), FromNode(0, StartDecided(None, nonsense)))
        assert state.decided is None


def test_ranks_are_named_as_the_agent_counts_now() -> None:
    last = replace(HUB, node=2, where="n2")
    state, _ = run(last, fresh(last), FromNode(0, MINE))
    assert state.first_rank == 2


def test_a_companion_ends_with_its_parent() -> None:
    lender = replace(HUB, companion=True)
    assert run(lender, fresh(lender), WorkerEnded(0, end(76)))[0].phase is Phase.TRAINING
    state, _ = run(lender, fresh(lender), ParentGone())
    assert state.term_at == NOW.clock + 3
    state, actions = run(lender, state, (3.0, Tick()))
    assert actions == [TERM]
    assert state.orphaned is not None


# -- whatever comes -------------------------------------------------------------------------------------------

ends = st.builds(End, st.sampled_from([0, 1, 75, 76, 77, 134, 137]), st.just(5000.0))
moves = st.builds(
    MoveNotice, st.integers(1, 3), st.booleans(), st.frozensets(st.integers(1, 2)), st.booleans()
)
failures = st.none() | st.builds(
    Failure, st.floats(4000, 6000), st.integers(0, 5), st.integers(1, 255), st.just("why"), st.just("n")
)
events = st.one_of(
    st.builds(
        WorkerEnded,
        st.integers(0, 1),
        ends,
    ),
    st.builds(Signalled, st.sampled_from([signal.SIGTERM, signal.SIGINT])),
    st.builds(
        FromRank0,
        st.one_of(
            st.builds(
                AnnounceMove,
                st.integers(0, 3),
                st.sampled_from(["resize", "relaunch"]),
                st.lists(st.sampled_from(["n0", "n1", "n2", "x"])).map(tuple),
                st.integers(0, 2),
            ),
            st.builds(AwaitLeavers, st.integers(0, 3)),
        ),
    ),
    st.builds(
        FromNode,
        st.integers(0, 2),
        st.one_of(
            moves,
            st.builds(StartGrace, st.integers(0, 3)),
            st.builds(Done, failures),
            st.builds(StartDecided, failures, st.none()),
            st.sampled_from([Alert(), AskForMove(), Left()]),
        ),
    ),
    st.builds(NodeGone, st.integers(0, 2)),
    st.sampled_from([ParentGone(), Tick()]),
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([HUB, NODE, replace(HUB, may_restart=True, may_retry=True)]),
    st.lists(st.tuples(st.floats(0, 30), events), max_size=12),
)
def test_every_start_comes_to_an_end(terms: StartTerms, happening: list[tuple[float, Event]]) -> None:
    """Whatever has happened.

    Once the others are gone and workers that are killed end, the launcher finishes.
    """
    state, clock, over = fresh(terms), 0.0, False
    for seconds, event in happening:
        if isinstance(event, WorkerEnded) and event.local_rank not in state.running:
            continue
        if isinstance(event, FromNode | NodeGone) and event.node not in state.connected:
            continue
        clock += seconds
        state, actions = step(terms, state, event, at(clock))
        assert sum(isinstance(action, Finish) for action in actions) <= 1
        if over := finish(actions) is not None:
            return
        assert state.kill_at is None or state.kill_at > at(clock).clock
    actions = []
    for node in sorted(state.connected):
        state, actions = step(terms, state, NodeGone(node), at(clock))
        over = over or finish(actions) is not None
    killed = False
    for _ in range(60):
        if over:
            break
        clock += 5.0
        state, actions = step(terms, state, Tick(), at(clock))
        killed = killed or KILL in actions
        over = finish(actions) is not None
        for local_rank in sorted(state.running) if killed or (clock > 100 and not over) else ():
            state, actions = step(terms, state, WorkerEnded(local_rank, End(137, 5000.0 + clock)), at(clock))
            over = over or finish(actions) is not None
    assert over, state
