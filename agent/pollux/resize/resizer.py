"""Resizing in place: the ranks that stay form their process groups anew, and train on where they were.

The scheduler's order comes to rank 0, which passes it on in its next decision; all ranks act on it after the same
optimizer step. Those that leave end their processes; those that stay, and those that come in from a companion job,
form new groups over a store in rank 0's process, and go on in mid-pass. A relaunch ends all processes at that step
instead, for the launchers to start those of the remaining nodes anew.

Until the order is told to all ranks nothing is given up: whatever is in the way is refused, with a reason, and the
training goes on unharmed. After it, the death of a rank ends them all, as ever, and the checkpoint taken at that very
step is what is lost the least from.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from pollux.checkpoint.checkpointer import fingerprint_of
from pollux.checkpoint.restart import Restart
from pollux.errors import LEFT_STATUS, RELAUNCH_STATUS, RETRY_STATUS, PolluxAgentError, RankLost
from pollux.goodput import BatchChoice
from pollux.launcher.rank_channel import LauncherLine
from pollux.ranks.control import ControlExchange
from pollux.ranks.handover import hand_over
from pollux.ranks.rendezvous import Rendezvous, leave_groups, tell_environment, until
from pollux.ranks.world import World
from pollux.resize.capability import ResizeCapability, ability_of, least_ability, lesser
from pollux.resize.companion_job import Recruit, Wanted
from pollux.resize.joining import Joiner
from pollux.resize.requests import Leavers, ResizeDecision, ResizeRequest, objection
from pollux.slurm_job.code_version import code_version
from pollux.tuning.batch_choice import choose_on_arrival, initial_choice

if TYPE_CHECKING:
    from pollux.loop.session import Job

logger = logging.getLogger("pollux")

LEAVE_WAIT = 5.0
"""Seconds for which a rank that leaves waits until the others have let go of the groups that it is in."""

GONE_WAIT = 20.0
"""Seconds for which rank 0 waits for the leavers to have ended, before it acknowledges all the same."""

ANSWERS = 5
"""Times that a resize is acknowledged where nobody hears it, each of some 20 s."""


class Resizer:
    """A job's resizes, on every rank."""

    def __init__(self, job: Job, restart: Restart, exchange: ControlExchange, joiner: Joiner | None) -> None:
        self.capability = ResizeCapability.REQUEUE
        """What the job can do; known in full where its loop begins."""
        self.resized = 0
        """The newest move of this kind that is in effect."""
        self.cost: float | None = None
        """Seconds from the last step before it to the first step after it."""
        self.refused: dict[str, Any] | None = None
        """The newest order that could not be followed, and why."""
        self.generation = 0
        """Resizes of these processes so far."""
        self._job, self._restart, self._exchange, self._joiner = job, restart, exchange, joiner
        self._line: LauncherLine | None = None
        self._meeting: Rendezvous | None = None
        self._recruit: Recruit | None = None
        self._asked: ResizeRequest | None = None
        self._acting: ResizeRequest | None = None
        self._answering = False
        self._moving: tuple[int, float | None] | None = None
        """A resize whose first step is to come: its id, and when the last step before it was over."""
        self._loops = 0
        self._edition = code_version()

    # -- where the loop begins --------------------------------------------------------------------------------

    def begin(self) -> None:
        """The loop over the epochs begins; a joiner comes in here."""
        self._loops += 1
        if self._joiner is not None and self._job.world.waiting:
            self._come_in(self._joiner)
        elif self._loops > 1:
            # Of which loop a joiner would have to come into, it knows nothing.
            self.capability = lesser(self.capability, ResizeCapability.RELAUNCH)
        elif self._job.is_main:
            self.capability = ability_of(self._job, self._restart)

    def arrived(self) -> None:
        """Reports have begun. On rank 0 of processes that a relaunch has started: whoever was to leave has left."""
        if self._job.is_main:
            self.capability = least_ability(self._restart)
            self._line = LauncherLine.from_environment()
        number = self._restart.resized_for
        if number and self._restart.reports:
            before = self._restart.interrupted_at
            self._moving = (number, before)
            self._answer(number, before or 0.0, 0.0, Leavers())

    # -- orders, off the training thread ----------------------------------------------------------------------

    def ask(self, order: Any) -> None:
        """An order has come from the scheduler, or stands no more (None)."""
        if order is None:
            self._asked = None
            recruit, self._recruit = self._recruit, None
            if recruit is not None:
                recruit.stop()
            return
        number = int(order["id"])
        if number in (self.resized, self._restart.resized_for) or (
            self._moving and number == self._moving[0]
        ):
            return
        try:
            ask = ResizeRequest.parse(order)
            if ask.kind == "shrink" and set(ask.nodes) == set(self._job.world.places):
                # An earlier life of these processes has shrunk already, and died before it could say so.
                self.resized = number
                self._answer(number, self._restart.last_step_at, 0.0, Leavers())
                return
            self._object(ask)
            if ask.path == "resize" and self._meeting is None:
                self._meeting = Rendezvous.open()
            if ask.kind == "shrink":
                self._asked = ask
            elif ask.begins:
                self._enlist(ask)
            else:
                raise PolluxAgentError(
                    "these processes were started in the midst of it, and recruited nobody"
                )
        except PolluxAgentError as error:
            self.refuse(number, str(error))

    def _object(self, ask: ResizeRequest) -> None:
        """Raise PolluxAgentError where the order cannot be followed."""
        why = objection(ask, self._job.world, self.capability, resting=self._restart.resting)
        if why is not None:
            raise PolluxAgentError(why)

    def _enlist(self, ask: ResizeRequest) -> None:
        world, restart = self._job.world, self._restart
        assert self._meeting is not None
        if restart.directory is None:
            raise PolluxAgentError("expected a checkpoint directory, where joiners are told the way")
        added = len(ask.nodes) - world.nodes
        facts = {
            "per_node": world.per_node,
            "first": world.size,
            "size": world.size + added * world.per_node,
            "nodes": len(ask.nodes),
            "adaptive": restart.adaptive,
        }

        def ready() -> None:
            if self._recruit is recruit:
                self._asked = ask

        def failed(why: str) -> None:
            if self._recruit is recruit:
                self._recruit = None
            self.refuse(ask.number, why)

        recruit = self._recruit = Recruit(
            Wanted(ask.number, added, world.per_node),
            self._meeting,
            restart.directory,
            facts,
            self._same(),
            on_ready=ready,
            on_failure=failed,
        )
        recruit.start()

    def _same(self) -> dict[str, str]:
        """What has to be the same on all ranks, by its name."""
        return {**self._edition, "the model": fingerprint_of([self._job.module])}

    def refuse(self, number: int, why: str) -> None:
        """The order cannot be followed: the training goes on as it is, and the scheduler hears why."""
        logger.warning("move %d: not resized: %s", number, why)
        self.refused = {"id": number, "why": why[:300]}
        self._restart.wake()

    def report(self) -> dict[str, Any]:
        """This module's share of a report."""
        found = {
            "resize": self.capability.value if self.capability is not ResizeCapability.REQUEUE else None,
            "resized": self.resized or None,
            "resize_refused": self.refused,
            "resize_cost": self.cost if self.resized else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    # -- at a step's end --------------------------------------------------------------------------------------

    def wanted(self) -> int:
        """What rank 0 asks of all ranks now: the move to go through with, or 0."""
        if self._asked is None or self._acting is not None or self._answering:
            return 0
        self._acting, self._asked = self._asked, None
        return self._acting.number

    def put_off(self) -> None:
        """The decision came where no step has just ended: it is to come again."""
        if self._acting is not None:
            self._asked, self._acting = self._acting, None

    def after_step(self) -> None:
        """An optimizer step is over."""
        if self._moving is None:
            return
        (number, before), self._moving = self._moving, None
        if before:
            self.cost = max(self._restart.last_step_at - before, 0.0)
        self.resized = number
        self._restart.wake()

    def act(self, number: int) -> None:
        """All ranks go through with a move, after the same optimizer step; leavers do not return."""
        job, restart, exchange = self._job, self._restart, self._exchange
        stepper = job.stepper
        under_way = exchange.take()
        if job.is_main and under_way is not None and under_way.move:
            restart.ask_drain(under_way.move)
        for trained_model in stepper.trained_models:
            trained_model.leave_group()
        if job.device.type == "cuda":
            # What runs on in the groups' streams would be cut off with them.
            torch.cuda.synchronize(job.device)
        # First, as it may take a while: from the order on, leavers have seconds to end in.
        relaunches = self._acting is not None and self._acting.path == "relaunch"
        # One that is being written at this moment is as good as new, and would have to be waited for.
        relaunches, saves = exchange.gather((relaunches, relaunches or not restart.writing))[0]
        seconds = stepper.save(durable=relaunches) if saves else 0.0
        decided = self._order(number, seconds) if job.is_main else None
        told = exchange.gather(None if decided is None else asdict(decided))[0]
        self._acting = None
        if told is None:
            return
        order = ResizeDecision.parse(told)
        rank = job.world.rank
        if rank not in order.stay:
            self._leave(order)
        if order.relaunch:
            raise SystemExit(RELAUNCH_STATUS)
        before = (job.world, restart.last_step_at)
        self._move(order, order.stay.index(rank))
        self._moving = (order.number, before[1])
        if job.is_main:
            logger.info("resized in place from %d ranks to %d", before[0].size, order.size)
            if self._recruit is not None:
                self._recruit.close()
                self._recruit = None
            if not order.joiners:
                ranks = before[0].size - len(order.stay)
                leavers = Leavers(self._leaving(before[0], order), ranks, order.name)
                self._answer(order.number, before[1], seconds or 0.0, leavers)

    def _order(self, number: int, seconds: float | None) -> ResizeDecision | None:
        """On rank 0, the last moment at which anything is refused; `seconds` went into the checkpoint."""
        ask, job = self._acting, self._job
        if ask is None or ask.number != number:
            return None
        world, grows = job.world, ask.kind == "grow"
        recruit = self._recruit if grows else None
        try:
            self._object(ask)
            if ask.path == "relaunch" and seconds is None:
                raise PolluxAgentError("no checkpoint could be written")
            if grows and (recruit is None or not recruit.roll_call()):
                raise PolluxAgentError("not every joiner that was ready answers")
            stay = tuple(r for r, place in enumerate(world.places) if place in ask.nodes)
            joiners = 0 if recruit is None else recruit.wanted.ranks
            size = len(stay) + joiners
            choice = self._choice(size // world.per_node, size)
            meeting = self._meeting
            order = ResizeDecision(
                number,
                ask.path == "relaunch",
                self.generation + 1,
                stay,
                joiners,
                sum(rank >= world.size - world.lent for rank in stay) + joiners,
                world.per_node,
                choice.local_batch,
                choice.accumulation,
                *(("", 0, "") if meeting is None else (meeting.address, meeting.port, meeting.secret)),
            )
            if self._line is not None:
                leaving = self._leaving(world, order)
                self._line.announce(
                    number, "relaunch" if order.relaunch else "resize", leaving, lent=order.lent
                )
            if recruit is not None:
                recruit.go(asdict(order))
        except PolluxAgentError as error:
            if recruit is None:
                self.refuse(number, str(error))
            else:
                # In a thread: Slurm is asked to end the companion.
                threading.Thread(target=recruit.fail, args=(str(error),), daemon=True).start()
                self._recruit = None
            return None
        return order

    def _choice(self, nodes: int, gpus: int) -> BatchChoice:
        job = self._job
        if not job.adaptive:
            return initial_choice(job.limits, nodes, gpus, adaptive=False)
        return choose_on_arrival(
            job.limits, nodes, gpus, noise=job.noise_scale, params=job.params, size=job.batch_size
        )

    def _leaving(self, world: World, order: ResizeDecision) -> frozenset[str]:
        """Nodes of the job's own allocation that leave."""
        own = range(world.size - world.lent)
        return frozenset(world.places[rank] for rank in own) - {world.places[rank] for rank in order.stay}

    def _leave(self, order: ResizeDecision) -> None:
        """This rank's part is done. Its groups stay as they are: the script may still end them itself."""
        if not order.relaunch:
            meeting = self._meeting or Rendezvous.join(order.address, order.port, order.secret)
            # A peer that is gone would be a failure in groups that are not given up yet.
            until(lambda: meeting.count(f"{order.name}/free") >= len(order.stay), LEAVE_WAIT)
            meeting.count(f"{order.name}/left", 1)
        logger.info("rank %d leaves in move %d", self._job.rank, order.number)
        raise SystemExit(LEFT_STATUS)

    def _move(self, order: ResizeDecision, rank: int) -> None:
        """Form the new groups with the others, hand the state over where ranks come in, and settle in them."""
        job = self._job
        meeting = self._meeting = self._meeting or Rendezvous.join(order.address, order.port, order.secret)
        # A companion's node may fail, or its job be ended: the job's own ranks begin anew from the newest checkpoint.
        own = rank < order.size - order.lent
        RankLost.exit_status = RETRY_STATUS if order.lent and own else 1
        leave_groups()
        meeting.count(f"{order.name}/free", 1)
        world = meeting.form(
            job.world, order.name, rank, order.size, per_node=order.per_node, lent=order.lent
        )
        if order.joiners:
            state = job.stepper.whole() if rank == 0 else None
            state = hand_over(state, world, joiners=order.joiners)
            if state is not None:
                job.stepper.take_over(state)
        self.generation = order.generation
        job.world = world
        tell_environment(world)
        job.stepper.settle(world, order.choice)

    def _come_in(self, joiner: Joiner) -> None:
        self._meeting = joiner.meeting
        told = joiner.wait(self._same())
        order = ResizeDecision.parse(told)
        self._move(order, len(order.stay) + joiner.index)

    # -- acknowledging ----------------------------------------------------------------------------------------

    def _answer(self, number: int, last_step_at: float, seconds: float, leavers: Leavers) -> None:
        """Acknowledge in a thread, as soon as everybody who leaves has left; the training goes on meanwhile."""
        step = self._job.progress.optimizer_steps

        def answer() -> None:
            try:
                self._see_off(leavers)
                for _ in range(ANSWERS):
                    if self._restart.answer_resize(
                        number, seconds=seconds, step=step, last_step_at=last_step_at
                    ):
                        return
                logger.warning("move %d: nobody heard that it is done", number)
            finally:
                self._answering = False

        self._answering = True
        threading.Thread(target=answer, name="pollux-answer", daemon=True).start()

    def _see_off(self, leavers: Leavers) -> None:
        """Wait until the leavers have ended: on the job's own nodes the launchers see it, a companion's only say so."""
        if leavers.nodes and self._line is not None:
            missing = leavers.nodes - self._line.gone(leavers.nodes, GONE_WAIT)
            if missing:
                logger.warning("nodes that have not ended after %.0f s: %s", GONE_WAIT, ", ".join(missing))
        elif leavers.ranks and self._meeting is not None:
            meeting, name = self._meeting, f"{leavers.name}/left"
            until(lambda: meeting.count(name) >= leavers.ranks, GONE_WAIT)

    def close(self) -> None:
        """The training is over, and with it what was to be resized: joiners that are on their way are sent back."""
        recruit = self._recruit
        number = recruit.wanted.move if recruit is not None else self._asked and self._asked.number
        self.ask(None)
        if number:
            self.refuse(number, "the training is over")
