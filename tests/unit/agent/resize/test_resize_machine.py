"""The state machine of in-place resizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.resize.machine import (
    Acknowledge,
    Action,
    Admit,
    Announce,
    Answered,
    Closed,
    Decided,
    Declined,
    Event,
    Garbled,
    Offered,
    Ordered,
    PutOff,
    Recruited,
    RecruitmentEnded,
    Refuse,
    Regrouped,
    ReportNow,
    ResizePhase,
    ResizeState,
    SendAway,
    Started,
    Stepped,
    SubmitCompanion,
    Withdrawn,
    transition,
)
from pollux.resize.requests import Answer, ResizeRequest
from pollux.scheduler.line import Receipt


def request(kind: str, number: int = 4) -> ResizeRequest:
    return ResizeRequest(number, "resize", kind, ("n1",), 1, True)


SHRINK, GROW = request("shrink"), request("grow")
ANSWER = Answer(Receipt(step=12, checkpoint_s=0.5, last_step_at=99.0))
BUSY = Refuse(5, "the ranks are acting on another order at this moment")
OVER = Refuse(4, "the training is over")

EVENTS: list[Event] = [
    Started(3, ANSWER),
    Ordered(request("shrink", 5)),
    Ordered(request("grow", 5)),
    Ordered(request("shrink", 5), obstacle="no"),
    Ordered(request("shrink", 5), done=ANSWER),
    Ordered(SHRINK),
    Garbled(5, "what?"),
    Withdrawn(),
    Recruited(4),
    Recruited(5),
    RecruitmentEnded(4, "alone"),
    RecruitmentEnded(5, "alone"),
    Offered(),
    PutOff(),
    Decided(),
    Declined("in the way"),
    Regrouped(ANSWER),
    Stepped(),
    Answered(),
    Closed(),
]


@pytest.mark.parametrize(
    ("phase", "standing", "event", "then", "actions"),
    [
        ("recruiting", GROW, RecruitmentEnded(4, "alone"), "idle", (SendAway(), Refuse(4, "alone"))),
        ("recruiting", GROW, Recruited(5), "recruiting", ()),
        ("recruiting", GROW, Recruited(4), "ready", ()),
        ("recruiting", GROW, Closed(), "idle", (SendAway(), OVER)),
        ("idle", None, Ordered(GROW), "recruiting", (SubmitCompanion(GROW),)),
        ("ready", GROW, Recruited(4), "ready", ()),
        ("ready", GROW, Ordered(request("shrink", 5)), "ready", (SendAway(),)),
        ("ready", SHRINK, Garbled(5, "what?"), "ready", (Refuse(5, "what?"),)),
        ("ready", SHRINK, Ordered(request("grow", 5), obstacle="no"), "ready", (Refuse(5, "no"),)),
        ("acting", SHRINK, Ordered(request("shrink", 5)), "acting", (BUSY,)),
        ("acting", SHRINK, PutOff(), "ready", ()),
        ("acting", SHRINK, Decided(), "moving", ()),
        ("acting", GROW, Declined("no"), "idle", (SendAway(), Refuse(4, "no"))),
        ("acting", GROW, Withdrawn(), "called back", (SendAway(),)),
        ("called back", GROW, Decided(), "idle", ()),
        ("called back", GROW, Withdrawn(), "called back", ()),
        ("called back", GROW, Closed(), "idle", ()),
        ("moving", GROW, Withdrawn(), "moving", ()),
        ("moving", GROW, Regrouped(ANSWER), "idle", (Admit(),)),
        ("moving", SHRINK, Regrouped(ANSWER), "idle", (Acknowledge(4, ANSWER),)),
    ],
)
def test_an_event_in_a_phase(
    phase: str, standing: ResizeRequest | None, event: Event, then: str, actions: tuple[Action, ...]
) -> None:
    found, given = transition(ResizeState(ResizePhase(phase), standing), event)
    assert (found.phase, given) == (ResizePhase(then), actions)


def test_an_answer_on_its_way_holds_the_next_order_back() -> None:
    waiting = ResizeState(ResizePhase.READY, SHRINK, answering=True)
    assert transition(waiting, Offered()) == (waiting, ())
    answered, _ = transition(waiting, Answered())
    assert transition(answered, Offered())[1] == (Announce(4),)


def test_a_resize_is_in_effect_from_its_first_step_on_and_not_ordered_again() -> None:
    moved, _ = transition(ResizeState(ResizePhase.MOVING, SHRINK), Regrouped(ANSWER))
    assert (moved.first_step_of, moved.in_effect, moved.answering) == (4, 0, True)
    assert transition(moved, Ordered(SHRINK)) == (moved, ())
    stepped, actions = transition(moved, Stepped())
    assert (stepped.first_step_of, stepped.in_effect, actions) == (0, 4, (ReportNow(),))
    assert transition(stepped, Stepped()) == (stepped, ())
    assert transition(stepped, Ordered(SHRINK)) == (stepped, ())


def test_a_grow_is_not_acknowledged_and_does_not_hold_the_next_order_back() -> None:
    moved, _ = transition(ResizeState(ResizePhase.MOVING, GROW), Regrouped(ANSWER))
    assert (moved.first_step_of, moved.answering) == (4, False)


def test_a_shrink_that_was_done_before_is_in_effect_at_once() -> None:
    done, _ = transition(ResizeState(), Ordered(SHRINK, done=ANSWER))
    assert (done.in_effect, done.answering, done.phase) == (4, True, ResizePhase.IDLE)


def test_an_earlier_shrink_is_answered_before_its_first_step() -> None:
    started, _ = transition(ResizeState(first_step_of=3), Started(3, ANSWER))
    assert (started.first_step_of, started.answering, started.in_effect) == (3, True, 0)


def companions(actions: Iterable[Action]) -> int:
    """Return the change in the number of companion jobs on their way."""
    counts = {SubmitCompanion: 1, SendAway: -1, Admit: -1}
    return sum(counts.get(type(action), 0) for action in actions)


@given(st.lists(st.sampled_from(EVENTS), max_size=40))
def test_no_companion_is_left_behind_whatever_comes(events: list[Event]) -> None:
    state, open_companions = ResizeState(), 0
    for event in (*events, Withdrawn(), Declined("end"), Closed()):
        before = state
        state, actions = transition(state, event)
        open_companions += companions(actions)
        grows = state.request is not None and state.request.kind == "grow"
        assert open_companions == int(grows and state.phase is not ResizePhase.CALLED_BACK), (before, event)
        assert (state.request is None) == (state.phase is ResizePhase.IDLE)
    assert state.phase is ResizePhase.IDLE
    assert not open_companions


def test_states_differ_only_in_what_happened() -> None:
    """An event without effect leaves the other fields unchanged."""
    busy = ResizeState(first_step_of=7, answering=True, in_effect=6)
    for event in (Recruited(4), PutOff(), Decided(), Declined("x"), Regrouped(ANSWER), Withdrawn(), Closed()):
        assert transition(busy, event) == (busy, ())
    assert transition(busy, Answered())[0] == replace(busy, answering=False)
