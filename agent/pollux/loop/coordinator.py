"""Coordinate the ranks between two optimizer steps.

Rank 0 makes one decision for all ranks (`_decide`): a batch size, a drain, a checkpoint, a resize, the noise scale.
`ControlExchange` sends the decision to all ranks. Every rank acts on it (`_act`) one exchange later.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from pollux.checkpoint.checkpointer import Checkpointer
from pollux.errors import RankLost
from pollux.loop.divergence import FIRST_STEPS, as_left, check_data, check_equal, check_first
from pollux.loop.endings import MARGIN, Endings, Reason
from pollux.loop.finite import FiniteCheck
from pollux.loop.left_alone import Places
from pollux.loop.notices import in_words, moves, notice, restored, summary
from pollux.loop.regroup import Regrouping
from pollux.loop.report import report_of
from pollux.loop.restored_parameters import RestoredParameters
from pollux.loop.same_training import say_other_command
from pollux.noise.measuring import interval_of
from pollux.ranks.control import ControlExchange, Decision
from pollux.ranks.node_memory import node_memory
from pollux.resize.groups import Groups
from pollux.resize.joining import Joiner
from pollux.resize.resizer import Resizer
from pollux.scheduler.drains import Drains
from pollux.scheduler.line import Receipt, SchedulerLine
from pollux.slurm_job.attempt import Attempt
from pollux.training.tracked_run import take_up
from pollux.training.trained_model import TrainedModel
from pollux.training.training import Training
from pollux.tuning.knowledge import Introduction

logger = logging.getLogger("pollux")

STOP_WAIT = timedelta(seconds=60)
"""For the other ranks, where a training is closed before its end."""


class Coordinator:
    """Has the ranks of one training act together."""

    def __init__(self, training: Training, attempt: Attempt, joiner: Joiner | None) -> None:
        self.training, self.attempt = training, attempt
        self.exchange = ControlExchange(training.world.control, training.models[0].norms.groups)
        self.checkpointer = Checkpointer(training, attempt)
        self.line = SchedulerLine(attempt.access)
        self.drains = Drains(self.line, attempt.settings.drain_wait)
        self.groups = Groups()
        self.resizer = Resizer(training, attempt, self.line, self.groups)
        self._regrouping = Regrouping(training, self.exchange, self.checkpointer, self.groups)
        self.endings = Endings(main=lambda: self._main, margin=self._margin)
        self.joiner = joiner
        self._loops = 0
        self.places = Places(training, attempt.settings.patience)
        self._readied = (0, 0)
        """The move that a checkpoint was requested for, and the number of checkpoints begun before."""
        self.restored: list[RestoredParameters] = []
        """Of each model, from its restore to the first loop."""
        self._finite = FiniteCheck()
        self.told: dict[str, Any] = {}
        """On rank 0: what an optional room adds to the report."""
        self.closed = False
        """The script has closed its job, and no error was under way."""
        self.is_left = False
        """The loop over the epochs was left, and no step was made since."""

    @property
    def _main(self) -> bool:
        return self.training.world.rank == 0

    def _margin(self) -> float:
        """Seconds before the time limit at which the last save has to begin."""
        return MARGIN + 2.0 * (self.checkpointer.slowest + self.training.step.seconds)

    # -- the training begins ----------------------------------------------------------------------------------

    def restore(self) -> None:
        """Load the newest checkpoint; see `Checkpointer.restore`."""
        self.checkpointer.restore(self.exchange)
        progress = self.training.progress
        for sentence in take_up(self.training.models[0].record.tracked) if self._main else ():
            notice(sentence)
        if self._main and progress.optimizer_steps:
            where = f"checkpoint in {self.attempt.directory}"
            restored("copy in memory" if self.checkpointer.from_memory else where, progress)
            if not progress.finished:
                last = self.checkpointer.last_attempt
                say_other_command(self.training, self.attempt.directory, None if last is None else last.gpus)
        self.resizer.interrupted(self.checkpointer.interrupted_at)

    def keep_restored(self, model: TrainedModel) -> None:
        """A model is restored and wrapped: its script may change it no more."""
        steps = self.training.progress.optimizer_steps
        if not steps:
            return
        self.restored.append(RestoredParameters(model.module, steps))
        replaced = model.record.restored
        if replaced and self._main:
            more = f", and {len(replaced) - 4} more" if len(replaced) > 4 else ""
            notice(f"as in the checkpoint, not as in the script: {'; '.join(replaced[:4])}{more}")

    def open(self, introduction: Introduction | None) -> None:
        """Begin to report to the scheduler and to receive its orders; the data is there."""
        check_data(self.training.data, self.exchange)
        if self._main:
            self.resizer.prepare()
            self.line.open(self.report, self.drains.order, self.order_resize, introduction)
        self.resizer.acknowledge_earlier()

    def order_resize(self, terms: Mapping[str, Any] | None) -> None:
        """On rank 0, in any thread: the scheduler's order to resize, unchecked. None: no order stands any more."""
        if terms is None:
            self.resizer.withdraw()
        else:
            self.resizer.order(terms, resting=self.drains.resting)

    def begin_loop(self) -> None:
        """A loop over the epochs begins; a joiner joins here."""
        self._loops += 1
        if self._loops == 1:
            self.resizer.watch_calls()
        if self.joiner is not None and self.training.world.waiting:
            self._regrouping.join(self.joiner, self.resizer.same())
            self.places = Places(self.training, self.attempt.settings.patience)
            return
        if self._main:
            self.resizer.begin_loop(self._loops)

    def tell_launcher(self) -> None:
        """Rank 0 comes here before any rank can make a step: whatever is lost then, new ranks may start."""
        if self._main:
            self.checkpointer.memory.tell()
            self._note_restorable(self.checkpointer.keeps or self.checkpointer.memory.on)

    @staticmethod
    def _note_restorable(restores: bool) -> None:
        """On rank 0: tell the launcher whether new ranks would go on with the training after a loss."""
        memory = node_memory()
        if memory is not None:
            memory.shared.restores = restores

    def begin_epoch(self) -> None:
        """Begin an epoch. A training that counted as finished (fewer epochs, a first of several loops) goes on."""
        self.training.progress.finished = False
        self.drains.train_on()
        if self._main:
            self._finite.look(self.training.models[0].module, self.training.progress.optimizer_steps)

    def enter(self) -> None:
        """The loop over the loader begins."""
        self.training.begin_epoch()
        while self.restored:
            self.restored.pop(0).check()
        self.checkpointer.begin_training()
        self.endings.begin()
        if self.places.steps:
            with self.places.waiting(self.exchange):  # an order may have come since the last step
                self.poll(resizes=True)
        self.training.pause()

    # -- between two steps ------------------------------------------------------------------------------------

    def train_on(self) -> None:
        """The optimizer steps after the loop over the epochs was left."""
        self.is_left = False
        self.drains.train_on()

    def after_step(self) -> None:
        """Note an optimizer step; after the first ones compare the ranks."""
        training, times = self.training, self.attempt.times
        before, training.last_step_at = training.last_step_at, time.time()
        if before:
            training.progress.gpu_seconds += max(training.last_step_at - before, 0.0) * training.world.size
        if times.first_step_at is None:
            times.first_step_at = training.last_step_at
            self.checkpointer.after_first_step()
            self.line.wake()
        self.places.after_step()
        if self.places.steps <= FIRST_STEPS[-1]:
            check_first(training, self.exchange, self.places.steps)
        if self.resizer.first_step_of:
            self.resizer.after_step()

    def quiet(self) -> int:
        """Return how many coming steps bring no decision and no check of the ranks."""
        early = self.places.steps <= FIRST_STEPS[-1] or self.resizer.first_step_of
        return 0 if early else self.exchange.quiet()

    def after_plain_step(self) -> None:
        """Count one of the steps that `quiet` has promised. The next other one tells the time of all."""
        self.training.step.entered = 0
        self.places.steps += 1
        self.exchange.countdown -= 1

    def exchange_decisions(self, *, last: bool) -> None:
        """Send rank 0's decision if one is due, and act on the one before.

        Do neither after the `last` step of an epoch: a restart from there would begin with the script's code after the
        loop, which may read variables of its body. The next loop begins with the decision (`enter`).
        """
        if last and not self.training.ends_epochs:
            return
        if self._finite.looks:
            self._finite.tell()
        decision = self.exchange.step(self._decide)
        if decision is not None:
            self._act(decision)

    def poll(self, *, resizes: bool = False) -> None:
        """Act on rank 0's present decision, at once and on all ranks.

        `resizes`: whether ranks may leave and join here. They may not in an evaluation.
        """
        move = 0
        for decision in filter(None, (self.exchange.take(), self.exchange.agree(self._decide()))):
            move = move or decision.resize
            self._act(replace(decision, resize=0))
        if move:
            self.resize(move) if resizes else self.resizer.put_off()

    def _decide(self) -> Decision:
        """Return rank 0's decision; other ranks' results are not used."""
        if not self._main:
            return self._placed(Decision())
        training, seconds = self.training, self.training.step.seconds
        choice, advisor = None, training.advisor
        if advisor is not None:
            choice, advisor.proposal = advisor.proposal, None
            if choice is not None:
                most = training.memory.most_within(training.limits, training.choice.local_batch)
                if choice.local_batch > most:
                    # Chosen before memory ran out, or more than the GPU is expected to hold.
                    choice, advisor.limits = None, replace(training.limits, local_max=most)
        drain, resize = self.drains.wanted(), self.resizer.offer()
        checkpoint = self.checkpointer.due()
        if resize and self.checkpointer.sharded:
            resize, asks = self._ready(resize)
            checkpoint = checkpoint or asks
        interval = self.attempt.settings.exchange_interval
        measure_every = training.models[0].measure_every
        next_exchange = min(round(interval / seconds), 50) if seconds > 0 else 1
        if next_exchange == 0 and not interval:
            next_exchange = 1
        decision = Decision(
            move=drain,
            resize=resize,
            checkpoint=checkpoint,
            copy=bool(self.places.steps) and self.checkpointer.memory.due(),
            sampling=measure_every
            or interval_of([m.meter for m in training.models], training.timer.cost.interval),
            end=self.endings.wanted,
            next_exchange=next_exchange,
            noise=tuple(scale for model in training.models for scale in model.measured()),
        )
        return self._placed(decision if choice is None else decision.with_choice(choice))

    def _placed(self, decision: Decision) -> Decision:
        """Return the decision of the next exchange with this rank's place: the ranks compare theirs."""
        self.places.exchanges += 1
        data, epoch = self.training.data, self.training.progress.epoch
        return replace(decision, epoch=epoch, sample=data.position, length=data.known_length)

    def _ready(self, move: int) -> tuple[int, bool]:
        """On rank 0: return the move if its checkpoint is on disk, else 0.

        Also returns whether to begin a checkpoint. All ranks write it while the training goes on. While they change
        their groups, they could not.
        """
        checkpointer, asks = self.checkpointer, False
        if self._readied[0] != move:
            asks = not checkpointer.writing
            self._readied = move, checkpointer.begun - (not asks)
        if checkpointer.writing or checkpointer.begun <= self._readied[1]:
            self.resizer.put_off()
            return 0, asks
        return move, False

    def _act(self, decision: Decision) -> None:
        """Follow rank 0, on every rank after the same step."""
        training = self.training
        training.step.alike = 0
        noise = list(decision.noise)
        read_every = 1 + round(
            self.attempt.settings.exchanges_per_reading * max(decision.next_exchange - 1, 0)
        )
        for model in training.models:
            own, noise = noise[: model.norms.groups], noise[model.norms.groups :]
            model.agree(own, decision.sampling, read_every)
        if 0 < decision.local_batch <= training.limits.local_max:
            training.choice = decision.choice
            training.widen()
            for model in training.models:
                model.meter.reset_batch()
            training.timer.cool()
            if self._main:
                size = training.world.size
                notice(
                    in_words(training.choice, size),
                    event="batch-size",
                    batch_size=training.batch_size,
                    gpus=size,
                )
        if decision.end:
            reason, seconds = Reason(decision.end), self.save(durable=True)
            # All ranks wait for rank 0: when the first rank ends, Slurm may end the others.
            seconds, wait = self.exchange.gather((seconds, self.endings.left_to_slurm(reason)))[0]
            self.endings.end(reason, training.progress.optimizer_steps, seconds, wait=wait)
        if decision.move or decision.checkpoint:
            seconds = self.save(durable=bool(decision.move))
            if decision.move:
                self._drain(decision.move, seconds)
            training.pause()
        if decision.copy:
            self.checkpointer.copy(self.exchange)
            if self._main:
                self._note_restorable(self.checkpointer.keeps or self.checkpointer.memory.on)
            training.pause()
        if decision.resize:
            self.resize(decision.resize)

    def _drain(self, move: int, seconds: float | None) -> None:
        tied = self.training.tied  # the move may be one to another number of ranks
        receipt = None if tied else self.checkpointer.receipt(seconds)
        if self._main and receipt is None:
            self.resizer.refuse(move, tied or self.checkpointer.trouble or "no checkpoint could be written")
        elif self._main:
            moves(self.training.progress.optimizer_steps)
        with self.endings.off():
            self.drains.drain(move, receipt, self.exchange)

    def resize(self, move: int) -> None:
        check_equal(self.training, self.exchange)
        self._keep_drain(self.exchange.take())
        self._regrouping.move(move, self.resizer)
        if self.training.world.control is not self.places.group:
            self.places.close()
            # From 0, as on joiners: all ranks compare their parameters after the same steps.
            self.places = Places(self.training, self.attempt.settings.patience)

    def _keep_drain(self, decision: Decision | None) -> None:
        """On rank 0: order the drain of a decision again that ranks never got."""
        if self._main and decision is not None and decision.move:
            self.drains.order(decision.move)

    def save(self, *, durable: bool, compares: bool = True) -> float | None:
        """A checkpoint of ranks that are equal, on all of them after the same step; see `Checkpointer.save`."""
        if compares:
            check_equal(self.training, self.exchange)
        return self.checkpointer.save(self.exchange, durable=durable)

    # -- the training ends ------------------------------------------------------------------------------------

    def left(self) -> None:
        """The loop over the epochs was left: rank 0 answers an order to drain by a checkpoint that it writes alone."""
        self.is_left = True
        if self._main and not self.checkpointer.sharded:
            self.drains.rest(self._save_alone)
            self._keep_drain(self.exchange.under_way)

    def _save_alone(self) -> Receipt | None:
        return self.checkpointer.receipt(self.checkpointer.save(ControlExchange(None, 0), durable=True))

    def _saved(self) -> Receipt | None:
        return self.checkpointer.receipt(0.0)

    def finish(self) -> None:
        """End the training: compare the ranks, and write the last checkpoint."""
        progress = self.training.progress
        if progress.finished:
            self.drains.rest(self._saved)  # as its checkpoint says: this attempt had nothing left to train
            return
        progress.finished = True
        if self._main:
            notice(summary(self.training), event="finished", step=progress.optimizer_steps)
        if self._main:
            self._finite.look(self.training.models[0].module, progress.optimizer_steps)
        self._finite.tell(waits=True)
        try:
            with self.places.waiting(self.exchange):
                self.exchange.agree(self._placed(Decision()))
            self._end()
        except RankLost as error:
            if self.checkpointer.keeps:
                raise
            logger.warning("the ranks were not compared at the end: %s", error)
        self.endings.close()  # from here on the script has nothing that the agent could save

    def stop(self) -> None:
        """Save the training since the newest checkpoint, before the end.

        Every rank calls it. A restart goes on from this checkpoint.
        """
        progress = self.training.progress
        if progress.finished or self.attempt.directory is None:
            return
        if sys.exc_info()[0] is not None:
            return  # an error is under way: the other ranks may not come, and the state may be half made
        try:
            self.exchange.barrier(STOP_WAIT)
            kept = self.checkpointer.holds(progress.optimizer_steps)
            found = self.exchange.gather((kept, as_left(self.training)))
            self._end(kept=found[0][0], compares=all(left for _, left in found))
        except RankLost as error:
            logger.warning("no last checkpoint: %s", error)

    def _end(self, *, kept: bool = False, compares: bool = True) -> None:
        """`kept`: there is a checkpoint of the last step. `compares`: the ranks should be equal."""
        decision = self.exchange.take()
        # A last checkpoint, so that a restart repeats no step of it. Without a folder the ranks are only compared.
        if kept or self.save(durable=True, compares=compares) is not None or not self.checkpointer.keeps:
            self.drains.rest(self._saved)
        # The ranks will exchange no more: the last checkpoint answers an order that was on its way to them.
        self._keep_drain(decision)

    def close(self) -> None:
        """End the reports and the resizes. The last checkpoint is written before, by `stop`."""
        self.closed = sys.exc_info()[0] is None
        self.places.close()
        self.exchange.take()
        self.endings.close()
        if self._main:
            self._note_restorable(False)
        self.line.close()

    def report(self) -> dict[str, Any]:
        """The report to the scheduler. Called off the main thread: it reads plain attributes only."""
        parts: tuple[Mapping[str, Any], ...] = (
            report_of(self.training),
            self.checkpointer.report(),
            self.resizer.report(),
            self.told,
        )
        return {name: value for part in parts for name, value in part.items()}
