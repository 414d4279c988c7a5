"""Decide what rank 0 does next about a resize. Pure.

    idle --ordered (shrink)-------------------------> ready --offered--> acting --decided--> moving --resized--> idle
      `-----ordered (grow)--> recruiting --recruited---^

There is at most one open order, until rank 0 follows or refuses it, or the scheduler withdraws it. Until the ranks
move, rank 0 can still refuse: at any obstacle it refuses with a reason, and the training goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from pollux.resize.requests import Answer, ResizeRequest


class ResizePhase(StrEnum):
    """How far the order that stands is."""

    IDLE = "idle"
    """No order stands."""
    RECRUITING = "recruiting"
    """A companion job's ranks are on their way."""
    READY = "ready"
    """The ranks can carry the order out; the next decision tells them to."""
    ACTING = "acting"
    """The decision is sent. All ranks carry it out after the same optimizer step."""
    CALLED_BACK = "called back"
    """The order was withdrawn before the ranks carried it out. They will go on unchanged."""
    MOVING = "moving"
    """The ranks form new process groups, or end: there is no way back."""


@dataclass(frozen=True)
class ResizeState:
    """Where rank 0 is."""

    phase: ResizePhase = ResizePhase.IDLE
    request: ResizeRequest | None = None
    """The order that stands; None when idle."""
    first_step_of: int = 0
    """The finished move whose first optimizer step has not been made yet; 0: none."""
    answering: bool = False
    """An acknowledgement is being sent: the next order waits for it."""
    in_effect: int = 0
    """The newest move after which a step was made; 0: none."""


# -- what happens ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """These processes started after a shrink that rank 0 may not have acknowledged."""

    move: int
    answer: Answer


@dataclass(frozen=True)
class Ordered:
    """The scheduler orders a resize."""

    request: ResizeRequest
    obstacle: str | None = None
    """Why it cannot be followed; None where it can."""
    done: Answer | None = None
    """The ranks are already as ordered: an earlier start shrank, and died before it could acknowledge."""


@dataclass(frozen=True)
class Garbled:
    """The scheduler gives an order other than a resize."""

    move: int
    why: str


@dataclass(frozen=True)
class Withdrawn:
    """No order to resize stands any more."""


@dataclass(frozen=True)
class Recruited:
    """All joiners are ready."""

    move: int


@dataclass(frozen=True)
class RecruitmentEnded:
    """Not all joiners come."""

    move: int
    why: str


@dataclass(frozen=True)
class Offered:
    """Rank 0 makes its next decision for all ranks."""


@dataclass(frozen=True)
class PutOff:
    """The decision did not come between two steps: it has to come again."""


@dataclass(frozen=True)
class Decided:
    """At the agreed step nothing is in the way."""


@dataclass(frozen=True)
class Declined:
    """There is an obstacle, at the agreed step."""

    why: str


@dataclass(frozen=True)
class Regrouped:
    """All ranks are in their new process groups."""

    answer: Answer


@dataclass(frozen=True)
class Stepped:
    """An optimizer step is over."""


@dataclass(frozen=True)
class Answered:
    """The acknowledgement was delivered, or given up."""


@dataclass(frozen=True)
class Closed:
    """The training is over."""


Event = (
    Started
    | Ordered
    | Garbled
    | Withdrawn
    | Recruited
    | RecruitmentEnded
    | Offered
    | PutOff
    | Decided
    | Declined
    | Regrouped
    | Stepped
    | Answered
    | Closed
)

# -- what rank 0 does -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refuse:
    """Tell the scheduler why rank 0 refuses the order."""

    move: int
    why: str


@dataclass(frozen=True)
class SubmitCompanion:
    """Submit a companion job, and wait for its ranks."""

    request: ResizeRequest


@dataclass(frozen=True)
class SendAway:
    """End the companion job and its ranks: they are not needed."""


@dataclass(frozen=True)
class Admit:
    """The companion's ranks have joined: stop listening for joiners."""


@dataclass(frozen=True)
class Announce:
    """Put the move into the decision for all ranks."""

    move: int


@dataclass(frozen=True)
class Acknowledge:
    """Tell the scheduler that the move is done; first await leaving ranks."""

    move: int
    answer: Answer


@dataclass(frozen=True)
class ReportNow:
    """Send a report now: the move is in effect."""


Action = Refuse | SubmitCompanion | SendAway | Admit | Announce | Acknowledge | ReportNow
Next = tuple[ResizeState, tuple[Action, ...]]


def transition(state: ResizeState, event: Event) -> Next:
    """Return the next state, and the actions of rank 0. An event without meaning in this state changes nothing."""
    match event:
        case Started(move, answer):
            return replace(state, first_step_of=move, answering=True), (Acknowledge(move, answer),)
        case Garbled(move, why):
            return state, (Refuse(move, why),)
        case Ordered():
            return _ordered(state, event)
        case Recruited() | RecruitmentEnded():
            return _recruiting(state, event)
        case Withdrawn() | Closed():
            return _ended(state, event)
        case Offered() | PutOff() | Decided() | Declined() | Regrouped():
            return _at_a_step(state, event)
        case Stepped() if state.first_step_of:
            return replace(state, first_step_of=0, in_effect=state.first_step_of), (ReportNow(),)
        case Answered():
            return replace(state, answering=False), ()
    return state, ()


def _recruiting(state: ResizeState, event: Recruited | RecruitmentEnded) -> Next:
    if state.phase is not ResizePhase.RECRUITING or not _is(state, event.move):
        return state, ()
    if isinstance(event, Recruited):
        return replace(state, phase=ResizePhase.READY), ()
    return _idle(state), (SendAway(), Refuse(event.move, event.why))


def _ended(state: ResizeState, event: Withdrawn | Closed) -> Next:
    """Close the order, unless the ranks are already moving."""
    if state.request is None or state.phase is ResizePhase.MOVING:
        return state, ()
    if isinstance(event, Withdrawn) and state.phase is ResizePhase.ACTING:
        return replace(state, phase=ResizePhase.CALLED_BACK), _companion(state)
    if isinstance(event, Withdrawn) and state.phase is ResizePhase.CALLED_BACK:
        return state, ()
    if isinstance(event, Withdrawn):
        return _idle(state), _companion(state)
    if state.phase is ResizePhase.CALLED_BACK:
        return _idle(state), ()
    return _idle(state), (*_companion(state), Refuse(state.request.number, "the training is over"))


def _at_a_step(state: ResizeState, event: Offered | PutOff | Decided | Declined | Regrouped) -> Next:
    request = state.request
    if request is None:
        return state, ()
    match event, state.phase:
        case Offered(), ResizePhase.READY if not state.answering:
            return replace(state, phase=ResizePhase.ACTING), (Announce(request.number),)
        case PutOff(), ResizePhase.ACTING:
            return replace(state, phase=ResizePhase.READY), ()
        case Decided(), ResizePhase.ACTING:
            return replace(state, phase=ResizePhase.MOVING), ()
        case ((PutOff() | Decided() | Declined()), ResizePhase.CALLED_BACK):
            return _idle(state), ()
        case Declined(why), _:
            return _idle(state), (*_companion(state), Refuse(request.number, why))
        case Regrouped(answer), ResizePhase.MOVING:
            return _resized(state, request, answer)
    return state, ()


def _ordered(state: ResizeState, event: Ordered) -> Next:
    request = event.request
    if request.number in (state.first_step_of, state.in_effect) or _is(state, request.number):
        return state, ()
    if event.done is not None:
        after = replace(state, in_effect=request.number, answering=True)
        return after, (Acknowledge(request.number, event.done),)
    if event.obstacle is not None:
        return state, (Refuse(request.number, event.obstacle),)
    if state.phase in (ResizePhase.ACTING, ResizePhase.CALLED_BACK, ResizePhase.MOVING):
        return state, (Refuse(request.number, "the ranks are acting on another order at this moment"),)
    given_up = _companion(state)
    if request.kind == "shrink":
        return replace(state, phase=ResizePhase.READY, request=request), given_up
    recruiting = replace(state, phase=ResizePhase.RECRUITING, request=request)
    return recruiting, (*given_up, SubmitCompanion(request))


def _resized(state: ResizeState, request: ResizeRequest, answer: Answer) -> Next:
    after = replace(_idle(state), first_step_of=request.number)
    if request.kind == "grow":
        # The scheduler sees the companion's ranks run, and the move in the next report.
        return after, (Admit(),)
    return replace(after, answering=True), (Acknowledge(request.number, answer),)


def _idle(state: ResizeState) -> ResizeState:
    return replace(state, phase=ResizePhase.IDLE, request=None)


def _is(state: ResizeState, move: int) -> bool:
    return state.request is not None and state.request.number == move


def _companion(state: ResizeState) -> tuple[Action, ...]:
    """Send the companion's ranks away if the order asked for a companion."""
    return (SendAway(),) if state.request is not None and state.request.kind == "grow" else ()
