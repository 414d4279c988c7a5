"""The state machine of in-place resizes: every event in every phase."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import get_args

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

STATES = [
    ResizeState(),
    *(
        ResizeState(phase, SHRINK)
        for phase in (ResizePhase.READY, ResizePhase.ACTING, ResizePhase.CALLED_BACK, ResizePhase.MOVING)
    ),
    *(ResizeState(phase, GROW) for phase in ResizePhase if phase is not ResizePhase.IDLE),
]
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


def after(phase: ResizePhase, standing: ResizeRequest | None, *actions: Action) -> tuple[object, ...]:
    return (phase, standing, *actions)


def expected(phase: ResizePhase, standing: ResizeRequest | None) -> dict[Event, tuple[object, ...]]:
    """Return phase, standing order and actions after each effective event."""
    grows = standing is not None and standing.kind == "grow"
    away: tuple[Action, ...] = (SendAway(),) if grows else ()
    idle, stays = (ResizePhase.IDLE, None), (phase, standing)
    table = {
        Started(3, ANSWER): after(*stays, Acknowledge(3, ANSWER)),
        Garbled(5, "what?"): after(*stays, Refuse(5, "what?")),
        Ordered(request("shrink", 5), obstacle="no"): after(*stays, Refuse(5, "no")),
        Ordered(request("shrink", 5), done=ANSWER): after(*stays, Acknowledge(5, ANSWER)),
    }
    shrink, grow = request("shrink", 5), request("grow", 5)
    if phase in (ResizePhase.ACTING, ResizePhase.CALLED_BACK, ResizePhase.MOVING):
        table |= {Ordered(shrink): after(*stays, BUSY), Ordered(grow): after(*stays, BUSY)}
    else:
        table[Ordered(shrink)] = after(ResizePhase.READY, shrink, *away)
        table[Ordered(grow)] = after(ResizePhase.RECRUITING, grow, *away, SubmitCompanion(grow))
    match phase:
        case ResizePhase.IDLE:
            table[Ordered(SHRINK)] = after(ResizePhase.READY, SHRINK)
        case ResizePhase.RECRUITING:
            table[Recruited(4)] = after(ResizePhase.READY, GROW)
            table[RecruitmentEnded(4, "alone")] = after(*idle, SendAway(), Refuse(4, "alone"))
            table[Declined("in the way")] = after(*idle, *away, Refuse(4, "in the way"))
            table |= {Withdrawn(): after(*idle, *away), Closed(): after(*idle, *away, OVER)}
        case ResizePhase.READY:
            table[Offered()] = after(ResizePhase.ACTING, standing, Announce(4))
            table[Declined("in the way")] = after(*idle, *away, Refuse(4, "in the way"))
            table |= {Withdrawn(): after(*idle, *away), Closed(): after(*idle, *away, OVER)}
        case ResizePhase.ACTING:
            table[PutOff()] = after(ResizePhase.READY, standing)
            table[Decided()] = after(ResizePhase.MOVING, standing)
            table[Declined("in the way")] = after(*idle, *away, Refuse(4, "in the way"))
            table[Withdrawn()] = after(ResizePhase.CALLED_BACK, standing, *away)
            table[Closed()] = after(*idle, *away, OVER)
        case ResizePhase.CALLED_BACK:
            table |= {
                event: after(*idle) for event in (PutOff(), Decided(), Declined("in the way"), Closed())
            }
        case ResizePhase.MOVING:
            table[Declined("in the way")] = after(*idle, *away, Refuse(4, "in the way"))
            table[Regrouped(ANSWER)] = after(*idle, Admit() if grows else Acknowledge(4, ANSWER))
    return table


def named(each: ResizeState | Event) -> str:
    if not isinstance(each, ResizeState):
        return type(each).__name__
    return f"{each.phase.value} {each.request.kind if each.request else 'nothing'}"


@pytest.mark.parametrize(("state", "event"), list(product(STATES, EVENTS)), ids=named)
def test_each_event_in_each_phase(state: ResizeState, event: Event) -> None:
    found, actions = transition(state, event)
    unchanged = (state.phase, state.request)
    assert (found.phase, found.request, *actions) == expected(state.phase, state.request).get(
        event, unchanged
    )


def test_the_table_has_every_phase_and_every_event() -> None:
    assert {state.phase for state in STATES} == set(ResizePhase)
    assert {type(event) for event in EVENTS} == set(get_args(Event))


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
