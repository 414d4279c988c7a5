"""What rank 0 does with orders to resize, and with their end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pollux.errors import LaunchError, PolluxAgentError
from pollux.ranks.world import World
from pollux.resize.requests import Answer, ResizeDecision, ResizeRequest
from pollux.resize.resizer import ResizePhase, Resizer
from pollux.scheduler.line import SchedulerLine

BUSY = ("refuse", 5, "the ranks are acting on another order at this moment")
OVER = ("refuse", 4, "the training is over")


class Recorded(Resizer):
    """The resizer of a job on the nodes n1 and n2, which notes what it does."""

    def __init__(self, resized_for: int = 0) -> None:
        world = World(0, 2, 2, torch.device("cpu"), None, places=("n1", "n2"))
        training: Any = SimpleNamespace(
            world=world, last_step_at=99.0, progress=SimpleNamespace(optimizer_steps=12)
        )
        settings = SimpleNamespace(recruit_wait=1.0, gone_wait=1.0)
        attempt: Any = SimpleNamespace(resized_for=resized_for, settings=settings, directory=Path("/c"))
        groups: Any = SimpleNamespace(open=lambda: None, rendezvous=None)
        line: Any = SimpleNamespace(connected=True, wake=lambda: self.did.append("report"))
        super().__init__(training, attempt, line, groups)
        self.in_place = True
        self.did: list[Any] = []
        self.companions = 0
        self.in_the_way = ""
        self.launcher_objects = False

    def _recruit(self, request: ResizeRequest) -> None:
        self._companion: Any = SimpleNamespace(close=self.admitted)
        self.companions += 1
        self.did.append(("submit", request.number))

    def admitted(self) -> None:
        self.companions -= 1
        self.did.append("admit")

    def _send_away(self) -> None:
        if self._companion is not None:
            self._companion = None
            self.companions -= 1
            self.did.append("send away")

    def _acknowledge(self, move: int, answer: Answer) -> None:
        self.answering = True
        self.did.append(("acknowledge", move))

    def refuse(self, move: int, why: str) -> None:
        self.did.append(("refuse", move, why))

    def _decision(self, request: ResizeRequest) -> ResizeDecision:
        if self.in_the_way:
            raise PolluxAgentError(self.in_the_way)
        return ResizeDecision(request.number, 1, (0,), 0, 0, 1, 8, 0, "", 0, "")

    def _tell(self, decision: ResizeDecision) -> None:
        if self.launcher_objects:
            raise LaunchError("no")


Event = Callable[[Recorded], object]


def order(kind: str, number: int = 4, nodes: str = "", **more: Any) -> Event:
    nodes = nodes or {"shrink": "n1", "grow": "n1 n2 n3"}[kind]
    terms = {"id": number, "path": "resize", "kind": kind, "nodes": nodes.split(), "gpus_per_node": 1}
    return lambda resizer: resizer.order(terms | more, resting=False)


def decide(why: str = "", *, launcher_objects: bool = False) -> Event:
    def event(resizer: Recorded) -> None:
        resizer.in_the_way, resizer.launcher_objects = why, launcher_objects
        if resizer.phase in (ResizePhase.ACTING, ResizePhase.CALLED_BACK):  # the ranks have the decision
            resizer.decide(4, 0.5)

    return event


def resized(resizer: Recorded) -> None:
    if resizer.phase is ResizePhase.MOVING:
        resizer.resized()


def answered(resizer: Recorded) -> None:
    resizer.answering = False


def recruited(move: int, trouble: str | None = None) -> Event:
    return lambda resizer: resizer.recruited(move, trouble)


SHRINK, GROW = order("shrink"), order("grow")
READY_TO_GROW = [GROW, recruited(4)]
OFFER, PUT_OFF, WITHDRAW, CLOSE, STEP = (
    Resizer.offer, Resizer.put_off, Resizer.withdraw, Resizer.close, Resizer.after_step
)  # fmt: skip


def run(*events: Event, resized_for: int = 0) -> tuple[Recorded, list[Any]]:
    """The resizer after the events, and what it did in the last one."""
    resizer, before = Recorded(resized_for), 0
    for event in events:
        before = len(resizer.did)
        event(resizer)
    return resizer, resizer.did[before:]


@pytest.mark.parametrize(
    ("events", "then", "did"),
    [
        ([GROW], "recruiting", [("submit", 4)]),
        ([GROW, recruited(4, "alone")], "idle", ["send away", ("refuse", 4, "alone")]),
        ([GROW, recruited(5)], "recruiting", []),
        ([GROW, recruited(4)], "ready", []),
        ([GROW, CLOSE], "idle", ["send away", OVER]),
        ([*READY_TO_GROW, recruited(4)], "ready", []),
        ([*READY_TO_GROW, order("shrink", 5)], "ready", ["send away"]),
        ([SHRINK, order("shrink", 5, gpus_per_node="x")], "ready", [("refuse", 5)]),
        ([SHRINK, order("grow", 5, step="draining")], "ready", [("refuse", 5)]),
        ([SHRINK, OFFER, order("shrink", 5)], "acting", [BUSY]),
        ([SHRINK, OFFER, PUT_OFF], "ready", []),
        ([SHRINK, OFFER, decide()], "moving", []),
        ([*READY_TO_GROW, OFFER, decide("no")], "idle", ["send away", ("refuse", 4, "no")]),
        ([SHRINK, OFFER, decide(launcher_objects=True)], "idle", [("refuse", 4, "no")]),
        ([*READY_TO_GROW, OFFER, WITHDRAW], "called back", ["send away"]),
        ([*READY_TO_GROW, OFFER, WITHDRAW, decide()], "idle", []),
        ([*READY_TO_GROW, OFFER, WITHDRAW, decide("no")], "idle", []),
        ([*READY_TO_GROW, OFFER, WITHDRAW, PUT_OFF], "idle", []),
        ([*READY_TO_GROW, OFFER, WITHDRAW, WITHDRAW], "called back", []),
        ([*READY_TO_GROW, OFFER, WITHDRAW, CLOSE], "idle", []),
        ([*READY_TO_GROW, OFFER, decide(), WITHDRAW], "moving", []),
        ([*READY_TO_GROW, OFFER, decide(), CLOSE], "moving", []),
        ([*READY_TO_GROW, OFFER, decide(), resized], "idle", ["admit"]),
        ([SHRINK, OFFER, decide(), resized], "idle", [("acknowledge", 4)]),
    ],
)
def test_an_event_in_a_phase(events: list[Event], then: str, did: list[Any]) -> None:
    resizer, found = run(*events)
    assert resizer.phase is ResizePhase(then)
    if did and did[-1] == ("refuse", 5):
        found = [each[:2] for each in found]  # the reasons are `objection`'s
    assert found == did


def test_an_answer_on_its_way_holds_the_next_order_back() -> None:
    resizer, _ = run(SHRINK, OFFER, decide(), resized, STEP, order("shrink", 5))
    assert resizer.offer() == 0
    answered(resizer)
    assert resizer.offer() == 5


@pytest.mark.parametrize(("events", "answering"), [([SHRINK], True), (READY_TO_GROW, False)])
def test_a_resize_is_in_effect_from_its_first_step_on_and_not_ordered_again(
    events: list[Event], answering: bool
) -> None:
    """A grow is not acknowledged, and does not hold the next order back."""
    resizer, _ = run(*events, OFFER, decide(), resized)
    assert (resizer.first_step_of, resizer.in_effect, resizer.answering) == (4, 0, answering)
    for in_effect in (0, 4):
        resizer.did.clear()
        events[0](resizer)
        assert resizer.did == []
        resizer.after_step()
        assert (resizer.first_step_of, resizer.in_effect) == (0, 4)
        assert resizer.did == ([] if in_effect else ["report"])


def test_a_shrink_that_was_done_before_is_in_effect_at_once() -> None:
    done, did = run(order("shrink", nodes="n1 n2"))
    assert (done.in_effect, done.answering, done.phase) == (4, True, ResizePhase.IDLE)
    assert did == [("acknowledge", 4)]


def test_an_earlier_shrink_is_answered_before_its_first_step() -> None:
    started, did = run(Resizer.acknowledge_earlier, resized_for=3)
    assert (started.first_step_of, started.answering, started.in_effect) == (3, True, 0)
    assert did == [("acknowledge", 3)]


EVENTS: list[Event] = [
    SHRINK, GROW, order("shrink", 5), order("grow", 5), order("shrink", 5, path="requeue"),
    order("shrink", 5, nodes="n1 n2"), recruited(4), recruited(5), recruited(4, "alone"), recruited(5, "alone"),
    OFFER, PUT_OFF, WITHDRAW, CLOSE, STEP, decide(), decide("in the way"), resized, answered,
]  # fmt: skip


@given(st.lists(st.sampled_from(EVENTS), max_size=40))
def test_no_companion_is_left_behind_whatever_comes(events: list[Event]) -> None:
    resizer = Recorded()
    for event in (*events, WITHDRAW, decide("end"), resized, CLOSE):
        event(resizer)
        grows = resizer.request is not None and resizer.request.kind == "grow"
        assert resizer.companions == int(grows and resizer.phase is not ResizePhase.CALLED_BACK), event
        assert (resizer.request is None) == (resizer.phase is ResizePhase.IDLE)
    assert resizer.phase is ResizePhase.IDLE
    assert not resizer.companions


def test_outside_of_a_pollux_job_there_is_nobody_to_tell() -> None:
    line = SchedulerLine(None)
    line.wake()
    line.close()
    assert not line.connected
