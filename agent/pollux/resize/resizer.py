"""Do rank 0's part in a resize: order, joiners, decision, answer.

    idle --order (shrink)---------------------------> ready --offer--> acting --decide--> moving --resized--> idle
      `----order (grow)--> recruiting --recruited---^

There is at most one open order, until rank 0 follows or refuses it, or the scheduler withdraws it. Until the ranks
move, rank 0 can still refuse: at any obstacle it refuses with a reason, and the training goes on.

Orders come from the publisher's thread, joiners from a thread of their own, everything else from the training thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import Any

from pollux.checkpoint.parts import fingerprint_of
from pollux.errors import PolluxAgentError
from pollux.launcher.rank_channel import LauncherLine
from pollux.ranks.rendezvous import until
from pollux.ranks.resharding import obstacle_to_resharding, sharding_of
from pollux.ranks.world import World
from pollux.resize.capability import resizes_in_place
from pollux.resize.companion_job import CompanionJob, Wanted
from pollux.resize.groups import Groups
from pollux.resize.rehearsal import NewestCall
from pollux.resize.requests import Answer, ResizeDecision, ResizeRequest, objection
from pollux.scheduler.line import Receipt, SchedulerLine
from pollux.slurm_job.attempt import Attempt
from pollux.slurm_job.code_version import code_version
from pollux.training.growing_model import GrowingModel
from pollux.training.training import Training

logger = logging.getLogger("pollux")

ANSWERS = 5
"""Attempts of rank 0 to acknowledge a resize if nobody receives it, each of some 20 s."""


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


class Resizer:
    """The resizes of one training. Only rank 0 gets orders."""

    def __init__(self, training: Training, attempt: Attempt, line: SchedulerLine, groups: Groups) -> None:
        self.in_place = False
        """Ranks may join and leave the processes; known where the loop begins."""
        self.phase = ResizePhase.IDLE
        self.request: ResizeRequest | None = None
        """The order that stands; None when idle."""
        self.first_step_of = attempt.resized_for
        """The finished move whose first optimizer step has not been made yet; 0: none."""
        self.answering = False
        """An acknowledgement is being sent: the next order waits for it."""
        self.in_effect = 0
        """The newest move after which a step was made; 0: none."""
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
            self._acknowledge(self._attempt.resized_for, Answer(self._receipt(0.0, self._stopped_at)))

    def interrupted(self, at: float | None) -> None:
        """Take from the checkpoint when the last step before it ended."""
        self._stopped_at = at

    def watch_calls(self) -> None:
        """Note what the model is called with."""
        first = self._training.models[0]
        self._newest = NewestCall(first.model, first.module)

    def begin_loop(self, loops: int) -> None:
        """On rank 0: loop number `loops` over the epochs begins."""
        # A joiner cannot tell which of several loops to enter.
        self.in_place = loops == 1 and resizes_in_place(self._training, self._attempt)

    # -- orders, off the training thread ----------------------------------------------------------------------

    def order(self, terms: Mapping[str, Any], *, resting: bool) -> None:
        """Take an order to resize. `resting`: the training makes no more steps."""
        try:
            request = ResizeRequest.parse(terms)
        except PolluxAgentError as error:
            self.refuse(int(terms["id"]), str(error))
            return
        done = request.kind == "shrink" and set(request.nodes) == set(self._training.world.places)
        obstacle = None if done else self._obstacle(request, resting=resting)
        with self._lock:
            number, standing = request.number, 0 if self.request is None else self.request.number
            if number in (self.first_step_of, self.in_effect, standing):
                return
            if done:
                # An earlier start shrank, and died before it could acknowledge.
                self.in_effect = number
                self._acknowledge(number, Answer(self._receipt(0.0, self._training.last_step_at)))
            elif obstacle is not None:
                self.refuse(number, obstacle)
            elif self.phase in (ResizePhase.ACTING, ResizePhase.CALLED_BACK, ResizePhase.MOVING):
                self.refuse(number, "the ranks are acting on another order at this moment")
            else:
                self._send_away()
                self.request = request
                self.phase = ResizePhase.READY if request.kind == "shrink" else ResizePhase.RECRUITING
                if request.kind == "grow":
                    self._recruit(request)

    def withdraw(self) -> None:
        """No order to resize stands any more."""
        with self._lock:
            if self.phase is ResizePhase.ACTING:
                self.phase = ResizePhase.CALLED_BACK
                self._send_away()
            elif self.phase in (ResizePhase.RECRUITING, ResizePhase.READY):
                self._rest()

    def recruited(self, move: int, trouble: str | None = None) -> None:
        """All joiners of a move are ready. `trouble`: why not all of them come."""
        with self._lock:
            if (
                self.phase is not ResizePhase.RECRUITING
                or self.request is None
                or self.request.number != move
            ):
                return
            if trouble is None:
                self.phase = ResizePhase.READY
            else:
                self._rest()
                self.refuse(move, trouble)

    def _rest(self) -> None:
        """Forget the order that stands."""
        self.phase, self.request = ResizePhase.IDLE, None
        self._send_away()

    def _obstacle(self, request: ResizeRequest, *, resting: bool) -> str | None:
        why = objection(request, self._training.world, in_place=self.in_place, resting=resting)
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
        with self._lock:
            if self.phase is not ResizePhase.READY or self.request is None or self.answering:
                return 0
            self.phase = ResizePhase.ACTING
            return self.request.number

    def put_off(self) -> None:
        """The decision did not come right after a step: it has to come again."""
        with self._lock:
            if self.phase is ResizePhase.ACTING:
                self.phase = ResizePhase.READY
            elif self.phase is ResizePhase.CALLED_BACK:
                self._rest()

    def decide(self, move: int, seconds: float | None, trouble: str = "") -> ResizeDecision | None:
        """On rank 0 at the agreed step: the decision for all ranks; None if there is an obstacle.

        `seconds`: duration of the checkpoint; None if none was written. `trouble`: why it could not be written.
        """
        request = self.request
        if request is None or request.number != move:
            return None
        try:
            if trouble:
                # In place, too: if the move fails half-way, the ranks start again from this checkpoint.
                raise PolluxAgentError(trouble)
            decision = self._decision(request)
            with self._lock:
                if self.phase is not ResizePhase.ACTING:
                    self._rest()
                    return None  # withdrawn at the last moment
                self.phase = ResizePhase.MOVING
            self._tell(decision)
        except PolluxAgentError as error:
            with self._lock:
                called_back = self.phase is ResizePhase.CALLED_BACK
                self._rest()
            if not called_back:
                self.refuse(move, str(error))
            return None
        world, receipt = self._training.world, self._receipt(seconds or 0.0, self._training.last_step_at)
        ended = world.size - len(decision.stay)
        self._answer = Answer(receipt, _leaving(world, decision), ended, decision.name)
        self._stopped_at = self._training.last_step_at
        return decision

    def _decision(self, request: ResizeRequest) -> ResizeDecision:
        """Raise PolluxAgentError where the request cannot be followed now."""
        world = self._training.world
        why = objection(request, world, in_place=self.in_place, resting=False)
        if why is not None:
            raise PolluxAgentError(why)
        first = self._training.models[0]
        why = self._training.tied or obstacle_to_resharding(
            first.module, first.optimizer, self._training.script_part
        )
        if why:
            # At the beginning of the loop, the optimizer had no state yet.
            self.in_place = False
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
            leaving = _leaving(self._training.world, decision)
            self._launcher.announce(decision.number, leaving, lent=decision.lent)
        if decision.joiners and self._companion is not None:
            self._companion.go(asdict(decision))

    def resized(self) -> None:
        """On rank 0: all ranks are in their new groups."""
        with self._lock:
            request, self.request, self.phase = self.request, None, ResizePhase.IDLE
            assert request is not None
            self.first_step_of = request.number
            if request.kind == "shrink":
                self._acknowledge(request.number, self._answer)
            elif self._companion is not None:
                # The scheduler sees the companion's ranks run, and the move in the next report.
                self._companion.close()
                self._companion = None

    def refuse(self, move: int, why: str) -> None:
        """Tell the scheduler why a move, or a drain, is refused."""
        logger.warning("move %d: refused: %s", move, why)
        self.refused = {"id": move, "why": why[:300]}
        self._line.wake()

    def after_step(self) -> None:
        """An optimizer step is over."""
        if self.first_step_of:
            if self._stopped_at:
                self.cost = max(self._training.last_step_at - self._stopped_at, 0.0)
            with self._lock:
                self.in_effect, self.first_step_of = self.first_step_of, 0
            self._line.wake()

    def close(self) -> None:
        """End the resizes: send joiners back, refuse the standing order."""
        with self._lock:
            request, called_back = self.request, self.phase is ResizePhase.CALLED_BACK
            if request is None or self.phase is ResizePhase.MOVING:
                return
            self._rest()
        if not called_back:
            self.refuse(request.number, "the training is over")

    def report(self) -> dict[str, Any]:
        """The resizes' share of a report."""
        done = self.in_effect
        found = {
            "resize": "in-place" if self.in_place and not self._training.tied else None,
            "resized": done or None,
            "resize_refused": self.refused,
            "resize_cost": self.cost if done else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    # -- in threads of their own ------------------------------------------------------------------------------

    def _recruit(self, request: ResizeRequest) -> None:
        """Submit a companion job, and wait for its ranks."""
        self._companion = self._companion_for(request)
        threading.Thread(
            target=self._bring, args=(self._companion,), name="pollux-recruit", daemon=True
        ).start()

    def _send_away(self) -> None:
        """End the companion job and its ranks, if there is one: they are not needed."""
        companion, self._companion = self._companion, None
        if companion is not None:
            # Not a daemon: a script that ends waits until Slurm has been told.
            threading.Thread(target=companion.send_away, name="pollux-send-away", daemon=False).start()

    def _acknowledge(self, move: int, answer: Answer) -> None:
        """Tell the scheduler that the move is done."""
        self.answering = True
        threading.Thread(
            target=self._answered, args=(move, answer), name="pollux-answer", daemon=True
        ).start()

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
        trouble = None
        try:
            companion.bring()
        except Exception as error:  # any error: the training goes on, and the scheduler has to know
            trouble = str(error)
        self.recruited(companion.wanted.move, trouble)

    def _receipt(self, seconds: float, last_step_at: float | None) -> Receipt:
        return Receipt(self._training.progress.optimizer_steps, seconds, last_step_at or 0.0)

    def _answered(self, move: int, answer: Answer) -> None:
        """In a thread: acknowledge as soon as every leaving rank has ended. The training goes on."""
        try:
            self._see_off(answer)
            if not self._line.connected:
                return
            for _ in range(ANSWERS):
                if self._line.acknowledge(move, answer.receipt, time.time()):
                    return
            logger.warning("move %d is done, but the acknowledgement could not be delivered", move)
        finally:
            with self._lock:
                self.answering = False

    def _see_off(self, answer: Answer) -> None:
        """Wait until the leavers have ended. Launchers see it on the job's own nodes; a companion's ranks say so."""
        wait = self._attempt.settings.gone_wait
        if answer.nodes and self._launcher is not None:
            missing = answer.nodes - self._launcher.gone(answer.nodes, wait)
            if missing:
                logger.warning("nodes that have not ended after %.0f s: %s", wait, ", ".join(missing))
        elif answer.ranks and self._groups.rendezvous is not None:
            rendezvous, name = self._groups.rendezvous, f"{answer.name}/left"
            until(lambda: rendezvous.count(name) >= answer.ranks, wait)


def _leaving(world: World, decision: ResizeDecision) -> frozenset[str]:
    """Return the nodes of the job's own allocation that leave."""
    staying = {world.places[rank] for rank in decision.stay}
    return frozenset(world.places[: world.size - world.lent]) - staying
