"""How a start ends: node 0's decision, leavers, and that an end comes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.launcher.failures import odd_end
from pollux.launcher.machine import step
from pollux.launcher.messages import (
    Alert,
    AnnounceMove,
    AskForMove,
    AwaitLeavers,
    Done,
    Left,
    MoveNotice,
    NodesLeft,
    StartDecided,
    StartGrace,
)
from pollux.launcher.outcome import Again, Failure, Outcome, Resized
from pollux.launcher.state import (
    End,
    Event,
    Finish,
    FromNode,
    FromRank0,
    LauncherState,
    NodeGone,
    ParentGone,
    Phase,
    Signalled,
    StartTerms,
    Tell,
    TellRank0,
    Tick,
    WorkerEnded,
)
from tests.unit.agent.launcher_steps import (
    FAILURE,
    HUB,
    KILL,
    MINE,
    NODE,
    NOW,
    SHRINK,
    TERM,
    at,
    end,
    ended,
    finish,
    fresh,
    in_phase,
    run,
)


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
        "a rank is lost",
        lambda: (
            s := replace(HUB, may_retry=True, recovers=True),
            ended(s, 137, 137),
            BOTH_DONE,
        ),
        ((0, 1, 2), Resized(), True),
    ),
    (
        "a node is lost",
        lambda: (
            s := replace(HUB, may_retry=True, recovers=True),
            run(s, fresh(s), NodeGone(2))[0],
            [WorkerEnded(0, end(137)), WorkerEnded(1, end(137)), FromNode(1, Done(FAILURE))],
        ),
        ((0, 1), Resized(), True, 0, True),
    ),
    (
        "an abort where ranks are lent",
        lambda: (
            HUB,
            ended(HUB, 134, 0, state=replace(fresh(HUB), move=MoveNotice(7, frozenset(), True))),
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
    assert "lost the connection to the launcher of node" in lost.why
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

ends = st.builds(End, st.sampled_from([0, 1, 75, 76, 134, 137]), st.just(5000.0))
moves = st.builds(MoveNotice, st.integers(1, 3), st.frozensets(st.integers(1, 2)), st.booleans())
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
            st.sampled_from([Alert(), Alert(True), AskForMove(), Left()]),
        ),
    ),
    st.builds(NodeGone, st.integers(0, 2)),
    st.sampled_from([ParentGone(), Tick()]),
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([HUB, NODE, replace(HUB, may_restart=True, may_retry=True, recovers=True)]),
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
