"""Do rank 0's part in a resize: order, joiners, decision, answer.

`machine.transition` says what comes next; a `Resizer` does it. Orders come from the publisher's thread, joiners from a
thread of their own, everything else from the training thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pollux.checkpoint.parts import fingerprint_of
from pollux.errors import PolluxAgentError
from pollux.launcher.rank_channel import LauncherLine
from pollux.ranks.rendezvous import until
from pollux.ranks.resharding import obstacle_to_resharding, sharding_of
from pollux.ranks.world import World
from pollux.resize import machine
from pollux.resize.capability import ResizeCapability, capability_of
from pollux.resize.companion_job import CompanionJob, Wanted
from pollux.resize.groups import Groups
from pollux.resize.machine import ResizePhase, ResizeState, transition
from pollux.resize.rehearsal import NewestCall
from pollux.resize.requests import Answer, Leavers, ResizeDecision, ResizeRequest, objection
from pollux.scheduler.line import Receipt, SchedulerLine
from pollux.slurm_job.attempt import Attempt
from pollux.slurm_job.code_version import code_version
from pollux.training.growing_model import GrowingModel
from pollux.training.training import Training

logger = logging.getLogger("pollux")

ANSWERS = 5
"""Attempts of rank 0 to acknowledge a resize if nobody receives it, each of some 20 s."""


class Resizer:
    """The resizes of one training. Only rank 0 gets orders."""

    def __init__(self, training: Training, attempt: Attempt, line: SchedulerLine, groups: Groups) -> None:
        self.capability = ResizeCapability.REQUEUE
        """Known in full where the loop begins."""
        self.state = ResizeState(first_step_of=attempt.resized_for)
        self.cost: float | None = None
        """Seconds from the last step before the newest resize to the first step after it."""
        self.refused: dict[str, Any] | None = None
        """The newest refused order, and the reason."""
        self.code = code_version()
        self.recruit_wait = attempt.settings.recruit_wait
        self._training, self._attempt, self._line, self._groups = training, attempt, line, groups
        self._lock = threading.Lock()
        self._newest: NewestCall | None = None
        self._launcher: LauncherLine | None = None
        self._companion: CompanionJob | None = None
        self._stopped_at: float | None = None
        """When the last step before the newest resize was over; POSIX seconds."""
        self._answer = Answer(Receipt(0, 0.0, 0.0))
        """To the order that the ranks act on."""

    # -- where training begins --------------------------------------------------------------------------------

    def prepare(self) -> None:
        """On rank 0, before orders may come."""
        self._launcher = LauncherLine.from_environment()

    def acknowledge_earlier(self) -> None:
        """Acknowledge the shrink after which these processes started."""
        if self._attempt.resized_for and self._line.connected:
            answer = Answer(self._receipt(0.0, self._stopped_at))
            self._advance(machine.Started(self._attempt.resized_for, answer))

    def interrupted(self, at: float | None) -> None:
        """Take from the checkpoint when the last step before it ended."""
        self._stopped_at = at

    def watch_calls(self) -> None:
        """Note what the model is called with."""
        first = self._training.models[0]
        self._newest = NewestCall(first.model, first.module)

    def begin_loop(self, loops: int) -> None:
        """On rank 0: loop number `loops` over the epochs begins."""
        if loops == 1:
            self.capability = capability_of(self._training, self._attempt)
        else:
            # A joiner cannot tell which loop to enter.
            self.capability = ResizeCapability.REQUEUE

    # -- orders, off the training thread ----------------------------------------------------------------------

    def order(self, terms: Mapping[str, Any], *, resting: bool) -> None:
        """Take an order to resize. `resting`: the training makes no more steps."""
        try:
            request = ResizeRequest.parse(terms)
        except PolluxAgentError as error:
            self._advance(machine.Garbled(int(terms["id"]), str(error)))
            return
        world = self._training.world
        done, obstacle = None, None
        if request.kind == "shrink" and set(request.nodes) == set(world.places):
            done = Answer(self._receipt(0.0, self._training.last_step_at))
        else:
            obstacle = self._obstacle(request, resting=resting)
        self._advance(machine.Ordered(request, obstacle, done))

    def withdraw(self) -> None:
        """No order to resize stands any more."""
        self._advance(machine.Withdrawn())

    def _obstacle(self, request: ResizeRequest, *, resting: bool) -> str | None:
        why = objection(request, self._training.world, self.capability, resting=resting)
        if why is not None:
            return why
        try:
            self._groups.open()
        except PolluxAgentError as error:
            return str(error)
        if request.kind == "grow" and not request.begins:
            return "these processes started after the companion job was submitted, and know nothing of it"
        if request.kind == "grow" and self._attempt.directory is None:
            return "expected a checkpoint directory, where joiners are told the way"
        return None

    def same(self) -> dict[str, str]:
        """Return the facts that must be equal on all ranks, by name."""
        module = self._training.models[0].module
        return {
            **self.code,
            "the model": fingerprint_of([module]),
            "the model's sharding": sharding_of(module),
        }

    # -- the training thread ----------------------------------------------------------------------------------

    def offer(self) -> int:
        """The move that all ranks are to act on by the next decision; 0 for none."""
        found = self._advance(machine.Offered())
        return next((action.move for action in found if isinstance(action, machine.Announce)), 0)

    def put_off(self) -> None:
        """The decision did not come right after a step: it has to come again."""
        self._advance(machine.PutOff())

    def decide(self, move: int, seconds: float | None, trouble: str = "") -> ResizeDecision | None:
        """On rank 0 at the agreed step: the decision for all ranks.

        None if there is an obstacle.

        `seconds`: duration of the checkpoint; None if none was written. `trouble`: why it could not be written.
        """
        request = self.state.request
        if request is None or request.number != move:
            return None
        try:
            if trouble:
                # In place, too: if the move fails half-way, the ranks start again from this checkpoint.
                raise PolluxAgentError(trouble)
            decision = self._decision(request)
            self._advance(machine.Decided())
            if self.state.phase is not ResizePhase.MOVING:
                return None  # withdrawn at the last moment
            self._tell(decision)
        except PolluxAgentError as error:
            self._advance(machine.Declined(str(error)))
            return None
        receipt = self._receipt(seconds or 0.0, self._training.last_step_at)
        self._answer = Answer(receipt, self._leavers(self._training.world, decision))
        self._stopped_at = self._training.last_step_at
        return decision

    def _decision(self, request: ResizeRequest) -> ResizeDecision:
        """Raise PolluxAgentError where the request cannot be followed now."""
        world = self._training.world
        why = objection(request, world, self.capability, resting=False)
        if why is not None:
            raise PolluxAgentError(why)
        first = self._training.models[0]
        why = obstacle_to_resharding(first.module, first.optimizer)
        if why is not None:
            # At the beginning of the loop, the optimizer had no state yet.
            self.capability = ResizeCapability.REQUEUE
            raise PolluxAgentError(why)
        companion = self._companion if request.kind == "grow" else None
        if request.kind == "grow" and (companion is None or not companion.roll_call()):
            raise PolluxAgentError("not every joiner that was ready answers")
        stay = tuple(rank for rank, place in enumerate(world.places) if place in request.nodes)
        joiners = 0 if companion is None else companion.wanted.ranks
        size = len(stay) + joiners
        choice = self._training.choice_on(size // world.per_node, size)
        rendezvous = self._groups.rendezvous
        return ResizeDecision(
            request.number,
            self._groups.generation + 1,
            stay,
            joiners,
            sum(rank >= world.size - world.lent for rank in stay) + joiners,
            world.per_node,
            choice.local_batch,
            choice.accumulation,
            *(
                ("", 0, "")
                if rendezvous is None
                else (rendezvous.address, rendezvous.port, rendezvous.secret)
            ),
        )

    def _tell(self, decision: ResizeDecision) -> None:
        """Tell the launchers and the joiners about the move. Raises PolluxAgentError if they do not accept it."""
        if self._launcher is not None:
            leaving = self._leavers(self._training.world, decision).nodes
            self._launcher.announce(decision.number, leaving, lent=decision.lent)
        if decision.joiners and self._companion is not None:
            self._companion.go(asdict(decision))

    @staticmethod
    def _leavers(world: World, decision: ResizeDecision) -> Leavers:
        own = range(world.size - world.lent)
        staying = {world.places[rank] for rank in decision.stay}
        nodes = frozenset(world.places[rank] for rank in own) - staying
        return Leavers(nodes, world.size - len(decision.stay), decision.name)

    def resized(self) -> None:
        """On rank 0: all ranks are in their new groups."""
        self._advance(machine.Regrouped(self._answer))

    def refuse(self, move: int, why: str) -> None:
        """Tell the scheduler why a move, or a drain, is refused."""
        self._do(machine.Refuse(move, why))

    def after_step(self) -> None:
        """An optimizer step is over."""
        if self.state.first_step_of:
            if self._stopped_at:
                self.cost = max(self._training.last_step_at - self._stopped_at, 0.0)
            self._advance(machine.Stepped())

    def close(self) -> None:
        """End the resizes: send joiners back, refuse the standing order."""
        self._advance(machine.Closed())

    def report(self) -> dict[str, Any]:
        """The resizes' share of a report."""
        capability, done = self.capability, self.state.in_effect
        found = {
            "resize": capability.value if capability is not ResizeCapability.REQUEUE else None,
            "resized": done or None,
            "resize_refused": self.refused,
            "resize_cost": self.cost if done else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    # -- what the machine says --------------------------------------------------------------------------------

    def _advance(self, event: machine.Event) -> tuple[machine.Action, ...]:
        with self._lock:
            self.state, actions = transition(self.state, event)
        for action in actions:
            self._do(action)
        return actions

    def _do(self, action: machine.Action) -> None:
        match action:
            case machine.Refuse(move, why):
                logger.warning("move %d: refused: %s", move, why)
                self.refused = {"id": move, "why": why[:300]}
                self._line.wake()
            case machine.SubmitCompanion(request):
                self._companion = self._companion_for(request)
                self._thread("pollux-recruit", self._bring, self._companion, daemon=True)
            case machine.SendAway():
                companion, self._companion = self._companion, None
                if companion is not None:
                    # Not a daemon: a script that ends waits until Slurm has been told.
                    self._thread("pollux-send-away", companion.send_away, daemon=False)
            case machine.Admit():
                companion, self._companion = self._companion, None
                if companion is not None:
                    companion.close()
            case machine.Acknowledge(move, answer):
                self._thread("pollux-answer", self._acknowledge, move, answer, daemon=True)
            case machine.ReportNow():
                self._line.wake()
            case machine.Announce():
                pass  # `offer` returns it

    @staticmethod
    def _thread(name: str, body: Any, *args: Any, daemon: bool) -> None:
        threading.Thread(target=body, args=args, name=name, daemon=daemon).start()

    def _companion_for(self, request: ResizeRequest) -> CompanionJob:
        world, directory = self._training.world, self._attempt.directory
        assert directory is not None
        added = len(request.nodes) - world.nodes
        facts = {
            "per_node": world.per_node,
            "first": world.size,
            "size": world.size + added * world.per_node,
            "nodes": len(request.nodes),
            "adaptive": self._attempt.adaptive,
            "grows": isinstance(self._training.models[0].model, GrowingModel),
            "call": None if self._newest is None else self._newest.shapes,
        }
        wanted = Wanted(request.number, added, world.per_node, request.nonce)
        rendezvous = self._groups.open()
        return CompanionJob(wanted, rendezvous, directory, facts, self.same(), wait=self.recruit_wait)

    def _bring(self, companion: CompanionJob) -> None:
        move = companion.wanted.move
        try:
            companion.bring()
        except Exception as error:  # any error: the training goes on, and the scheduler has to know
            self._advance(machine.RecruitmentEnded(move, str(error)))
        else:
            self._advance(machine.Recruited(move))

    def _receipt(self, seconds: float, last_step_at: float | None) -> Receipt:
        return Receipt(self._training.progress.optimizer_steps, seconds, last_step_at or 0.0)

    def _acknowledge(self, move: int, answer: Answer) -> None:
        """In a thread: acknowledge as soon as every leaving rank has ended. The training goes on."""
        try:
            self._see_off(answer.leavers)
            if not self._line.connected:
                return
            for _ in range(ANSWERS):
                if self._line.acknowledge(move, answer.receipt, time.time()):
                    return
            logger.warning("move %d is done, but the acknowledgement could not be delivered", move)
        finally:
            self._advance(machine.Answered())

    def _see_off(self, leavers: Leavers) -> None:
        """Wait until the leavers have ended. Launchers see it on the job's own nodes; a companion's ranks say so."""
        wait = self._attempt.settings.gone_wait
        if leavers.nodes and self._launcher is not None:
            missing = leavers.nodes - self._launcher.gone(leavers.nodes, wait)
            if missing:
                logger.warning("nodes that have not ended after %.0f s: %s", wait, ", ".join(missing))
        elif leavers.ranks and self._groups.rendezvous is not None:
            rendezvous, name = self._groups.rendezvous, f"{leavers.name}/left"
            until(lambda: rendezvous.count(name) >= leavers.ranks, wait)
