"""What rank 0 does next about a resize: a pure function.

    idle --ordered (shrink)-------------------------> ready --offered--> acting --decided--> moving --resized--> idle
      `-----ordered (grow)--> recruiting --recruited---^

One order stands at a time, until it is followed, refused or withdrawn. Before the ranks move nothing is given up:
whatever is in the way is refused with a reason, and the training goes on unharmed.
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
    """The ranks can act on it; the next decision tells them."""
    ACTING = "acting"
    """The ranks are told, and come to it after the same optimizer step."""
    CALLED_BACK = "called back"
    """The order was withdrawn while the ranks came to it: they will go on as they are."""
    MOVING = "moving"
    """The ranks form new process groups, or end: there is no way back."""


@dataclass(frozen=True)
class ResizeState:
    """Where rank 0 is."""

    phase: ResizePhase = ResizePhase.IDLE
    request: ResizeRequest | None = None
    """The order that stands; None when idle."""
    first_step_of: int = 0
    """The move that is done, and whose first optimizer step is to come; 0: none."""
    answering: bool = False
    """An acknowledgement is on its way: the next order waits for it."""
    in_effect: int = 0
    """The newest move whose first step is over; 0: none."""


# -- what happens ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """A relaunch started these processes; the scheduler hears this rank."""

    move: int
    answer: Answer


@dataclass(frozen=True)
class Ordered:
    """The scheduler orders a resize."""

    request: ResizeRequest
    obstacle: str | None = None
    """Why it cannot be followed; None where it can."""
    done: Answer | None = None
    """The ranks are as it asks for already: an earlier start shrank, and died before it could say so."""


@dataclass(frozen=True)
class Garbled:
    """The scheduler orders something that is no resize."""

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
    """The decision came between no two steps: it has to come again."""


@dataclass(frozen=True)
class Decided:
    """At the agreed step nothing is in the way."""


@dataclass(frozen=True)
class Declined:
    """Something is in the way: at the agreed step, or as ranks were lost."""

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
    """The acknowledgement was heard, or given up."""


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
    """Tell the scheduler why the order cannot be followed."""

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
    """The companion's ranks are in: close the way in."""


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
    """The next state, and what rank 0 does on the way.

    An event that means nothing here changes nothing.
    """
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
    """The order stands no more, unless the ranks are moving already."""
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
    """Send the companion's ranks away where the order asked for some."""
    return (SendAway(),) if state.request is not None and state.request.kind == "grow" else ()
