"""The state machine of a node's launcher: what each event leads to."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from pollux.launcher.machine import begin
from pollux.launcher.messages import (
    Alert,
    AnnounceMove,
    AskForMove,
    AwaitLeavers,
    Done,
    MoveNotice,
    Refused,
    StartGrace,
    Stop,
    Taken,
)
from pollux.launcher.outcome import Failure, Outcome, Resized
from pollux.launcher.state import (
    Action,
    End,
    Finish,
    FromNode,
    FromRank0,
    NodeGone,
    Phase,
    Signalled,
    SignalWorkers,
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
    end,
    ended,
    fresh,
    in_phase,
    run,
)

ANNOUNCED = [
    (
        AnnounceMove(7, ("n2", "elsewhere"), 0),
        [Tell(SHRINK), TellRank0(Taken(7))],
        Resized(7, ("n2",)),
    ),
    (
        AnnounceMove(7, (), 2),
        [Tell(MoveNotice(7, frozenset(), True)), TellRank0(Taken(7))],
        Resized(5),
    ),
    (
        AnnounceMove(0, (), 0),
        [TellRank0(Refused(0, "expected a move's number from 1, got 0"))],
        Resized(5),
    ),
    (AnnounceMove(5, (), 0), [TellRank0(Refused(5, "it is over already"))], Resized(5)),
    (
        AnnounceMove(7, ("n0", "n2"), 0),
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
    state, actions = run(HUB, before, FromRank0(AnnounceMove(7, ("n2",), 0)))
    assert actions == [TellRank0(Refused(7, "the ranks are being ended"))]
    assert state == before
    assert run(HUB, in_phase(HUB, phase, SHRINK), FromRank0(AwaitLeavers(7)))[1] == []


def test_the_grace_period_begins_with_the_first_end_or_when_rank_0_waits() -> None:
    announced, _ = run(HUB, fresh(HUB), FromRank0(AnnounceMove(7, ("n2",), 0)))
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
    before = in_phase(terms, phase, MINE if phase is Phase.LEAVING else None)
    state, actions = run(terms, before, Signalled(signal.SIGINT))
    assert state.phase is Phase.STOPPING
    assert actions == [SignalWorkers(signal.SIGINT)]
    assert state.kill_at is not None
    assert KILL in run(terms, state, (20.0, Tick()))[1]
    state, actions = run(terms, state, WorkerEnded(0, end(130)), WorkerEnded(1, end(130)))
    number = signal.SIGTERM if phase is Phase.STOPPING else signal.SIGINT
    assert actions == [Finish(Outcome(ended_by=number))]


@pytest.mark.parametrize("setting", [HUB, NODE])
def test_after_term_the_workers_of_all_nodes_have_time_to_save(setting: StartTerms) -> None:
    graces = setting.graces
    state, actions = run(setting, fresh(setting), Signalled(signal.SIGTERM))
    assert actions == [Tell(Stop()), TERM]
    assert run(setting, state, Signalled(signal.SIGTERM))[1] == [TERM], "told once"
    assert run(setting, state, (graces.stop - 1.0, Tick()))[1] == []
    assert run(setting, state, (graces.stop, Tick()))[1] == [KILL]
    hurried, _ = run(setting, state, Signalled(signal.SIGINT))
    assert run(setting, hurried, (graces.term, Tick()))[1] == [KILL]
    told, actions = run(setting, fresh(setting), FromNode(0 if setting is NODE else 1, Stop()))
    assert actions == ([TERM] if setting is NODE else [Tell(Stop()), TERM])
    assert run(setting, told, FromNode(2, Stop()))[1] == []
    _, actions = run(setting, told, WorkerEnded(0, end(143)), WorkerEnded(1, end(143)))
    assert actions == [Finish(Outcome(ended_by=signal.SIGTERM))]


def test_ranks_that_have_saved_and_ended_by_themselves_have_not_failed() -> None:
    said = end(143, why="sys.exit(143)", said_at=NOW.posix)
    state, actions = run(NODE, fresh(NODE), WorkerEnded(0, said))
    assert (state.phase, actions) == (Phase.STOPPING, [])
    _, actions = run(NODE, state, WorkerEnded(1, said))
    assert actions == [Finish(Outcome(ended_by=signal.SIGTERM))]
    state, _ = run(NODE, fresh(NODE), WorkerEnded(0, end(143)))
    assert state.phase is Phase.FAILING, "somebody has ended one rank of a script without the agent"


LOST = replace(HUB, recovers=True, may_retry=True)


@pytest.mark.parametrize("event", [WorkerEnded(1, end(137)), FromNode(2, Alert(True)), NodeGone(2)])
def test_after_a_loss_all_others_are_killed_at_once(event: Any) -> None:
    state, actions = run(LOST, fresh(LOST), event)
    assert (state.phase, state.recovers) == (Phase.FAILING, True)
    assert actions == [Tell(Alert(True)), KILL]


@pytest.mark.parametrize("terms", [HUB, replace(LOST, may_retry=False), replace(LOST, recovers=False)])
def test_a_loss_that_nobody_would_restore_is_a_failure(terms: StartTerms) -> None:
    state, actions = run(terms, fresh(terms), WorkerEnded(1, end(137)))
    assert (state.recovers, actions) == (False, [Tell(Alert(False))])
    assert state.term_at == NOW.clock + terms.graces.sibling


@pytest.mark.parametrize("status", [1, 134, 143])
def test_a_rank_that_fails_by_itself_is_no_loss(status: int) -> None:
    assert not run(LOST, fresh(LOST), WorkerEnded(1, end(status)))[0].recovers


def test_a_loss_counts_though_another_rank_failed_of_it_before() -> None:
    raised = end(1, why="RuntimeError: Connection closed by peer", said_at=NOW.posix)
    for loss in (WorkerEnded(1, end(137)), FromNode(1, Alert(True)), NodeGone(1)):
        state, actions = run(LOST, fresh(LOST), WorkerEnded(0, raised), loss)
        assert state.recovers
        assert actions == [Tell(Alert(True)), KILL]
    # But not that of a worker which this launcher has killed.
    late, actions = run(LOST, fresh(LOST), WorkerEnded(0, raised), (3.0, Tick()), (13.0, Tick()))
    assert actions == [KILL]
    killed = WorkerEnded(1, End(137, NOW.posix + 13.1))
    assert not run(LOST, late, (13.1, killed))[0].recovers


@pytest.mark.parametrize("message", [AskForMove(), Alert(), Alert(True), Done(FAILURE)])
def test_node_0_answers_after_its_own_workers_have_ended_well(message: Any) -> None:
    state, actions = run(LOST, ended(LOST, 0, 0), FromNode(1, message))
    assert (state.phase, state.recovers) == (Phase.FAILING, False), (
        "the training was over: nothing is restored"
    )
    assert Tell(Alert(False)) in actions
    state, actions = run(LOST, ended(LOST, 0, 0), NodeGone(2))
    assert not state.recovers
    assert Tell(Alert(False)) in actions


def test_a_loss_counts_though_all_workers_of_node_0_have_failed_of_it() -> None:
    state, actions = run(LOST, ended(LOST, 1, 1), FromNode(1, Alert(True)))
    assert state.recovers
    assert Tell(Alert(True)) in actions


def test_another_node_tells_node_0_of_a_loss_and_kills_when_it_is_told() -> None:
    state, actions = run(NODE, fresh(NODE), WorkerEnded(0, end(137)))
    assert (state.phase, actions) == (Phase.FAILING, [Tell(Alert(True))])
    assert run(NODE, state, FromNode(0, Alert(True)))[1] == [KILL]
    alerted, actions = run(NODE, fresh(NODE), FromNode(0, Alert(False)))
    assert actions == []
    assert run(NODE, alerted, WorkerEnded(0, end(137)))[1] == [Tell(Alert(True))], "the loss may be the cause"
    over, actions = run(NODE, state, FromNode(0, Alert(True)), WorkerEnded(1, end(137)))
    assert [type(action.message) for action in actions if isinstance(action, Tell)] == [Done]
    assert over.reported
    late = run(NODE, over, FromNode(0, Alert(False)))[1]
    assert not [action for action in late if isinstance(action, Tell)], (
        "it could reach node 0 in the next start"
    )


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
    told = actions[-1].message if isinstance(actions[-1], Tell) else None
    assert isinstance(told, Done)
    assert told.failure is not None
    assert told.failure.rank == rank
