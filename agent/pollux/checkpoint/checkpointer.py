"""Checkpoints of one training, on every rank: restore and write."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pollux.checkpoint import training_state
from pollux.checkpoint.file import check_state
from pollux.checkpoint.fruitless import FruitlessRestarts
from pollux.checkpoint.memory_tier import MemoryTier
from pollux.checkpoint.parts import fingerprint_of
from pollux.checkpoint.rank_state import RankState
from pollux.checkpoint.writer import CheckpointWriter
from pollux.data.place import ElasticData
from pollux.errors import CheckpointError, StateError
from pollux.goodput import ThroughputParams
from pollux.ranks.control import ControlExchange
from pollux.ranks.node_memory import node_memory
from pollux.scheduler.line import Receipt
from pollux.slurm_job.attempt import Attempt
from pollux.training.script_record import CHANGED, advice
from pollux.training.training import Training
from pollux.tuning.knowledge import LastAttempt

logger = logging.getLogger("pollux")

STATE_VERSION = 1

TRIAL_S = 30.0
"""Seconds until the first periodic checkpoint. It is early, so that a problem with checkpoints shows early."""


class Checkpointer:
    """Saves and restores one training. Every rank calls it alike, unless a method says otherwise."""

    def __init__(self, training: Training, attempt: Attempt) -> None:
        self.last_attempt: LastAttempt | None = None
        """The state of the batch-size search in the checkpoint; None without a checkpoint."""
        self.interrupted_at: float | None = None
        """When the last optimizer step before the newest restart ended; None without a restart."""
        self._training, self._attempt = training, attempt
        self.writer: CheckpointWriter | None = None
        self.restarts: FruitlessRestarts | None = None
        self._saved_at = time.monotonic()
        self._state: dict[str, Any] | None = None
        share, files = attempt.settings.memory_share, attempt.directory is not None
        self.memory = MemoryTier(training, node_memory(), share, attempt.key, files=files)
        self.from_memory = False
        """The state was restored from the nodes' memory, not from a file."""
        self._random: tuple[list[dict[str, Any]], int] | None = None
        """The checkpoint's random numbers, by rank, and its optimizer step; until the loop begins."""
        self._ranks = RankState(training)
        self._told_structure = False
        self._begun = False
        self._tried = False
        """A periodic checkpoint was begun in this attempt."""
        self.slowest = 0.0
        """The most seconds that a checkpoint of this attempt took to be on disk."""
        self.trouble = ""
        """Why the newest checkpoint could not be written; empty where it could."""
        self.begun = 0
        """Checkpoints begun in this attempt."""

    # -- starting ---------------------------------------------------------------------------------------------

    def restore(self, exchange: ControlExchange) -> None:
        """Load the newest checkpoint into the training, if there is one.

        Raises StateError if a part's state holds an object that a checkpoint cannot hold. Raises on every rank:
        CheckpointError if some rank cannot read the checkpoint or it does not fit the objects, ForeignCheckpoint if it
        belongs to another model, RestartLoop if too many restarts in a row made no new checkpoint.
        """
        state = None
        training, attempt = self._training, self._attempt
        if attempt.directory is not None:
            for name, part in training.parts().items():
                if not isinstance(part, torch.nn.Module | torch.optim.Optimizer):
                    # Now, and not at the first save, hours later.
                    check_state(part.state_dict(), name)
        world, model = training.world, training.models[0].module
        if attempt.directory is not None and world.waiting:
            # A joiner gets its state from rank 0, and rank 0 counts the attempts.
            self.writer = CheckpointWriter(model, attempt.directory, 1)
        elif attempt.directory is not None:
            self.restarts = FruitlessRestarts(attempt.directory, int(attempt.settings.fruitless_restarts))
            self.restarts.begin(exchange)
            self.keep_name()
            self.writer = CheckpointWriter(model, attempt.directory, world.size)
            self.writer.store.fingerprint = fingerprint_of([model])
            self.writer.store.difference = partial(training.models[0].record.difference, part="script")
            if world.rank == 0 and (trouble := self.writer.store.trouble()):
                logger.error("%s", trouble)  # now, and not at the first save, minutes later
                self.trouble = self.writer.trouble = trouble
        if not world.waiting:
            state = self._newest(exchange)
        attempt.times.restored_at = time.time()
        if state is None:
            return
        if state.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"expected a checkpoint of version {STATE_VERSION}, found {state.get('version')!r}"
            )
        self._load(training.parts(), state)
        steps = self._take(state)
        self.interrupted_at = state["last_step_at"] or None
        self._note_restored(steps)
        self._state = state
        attempt.times.restored_at = time.time()

    def keep_name(self, *, over: bool = False) -> None:
        """On rank 0: leave in the folder where the script attaches this training, and whether it has closed it."""
        if self._training.world.rank == 0 and self._attempt.directory is not None:
            self._attempt.training.keep(self._attempt.directory, over=over)

    def _note_restored(self, steps: int) -> None:
        """Tell the next start what stands, unless restarts are of a later training of the script."""
        memory = node_memory()
        if self._training.progress.finished:
            if self.restarts is not None:
                self.restarts.checkpointed()
        elif memory is not None and not self.from_memory:
            self.memory.begin()
            memory.shared.saved = steps
        if self.writer is not None:
            self.writer.saved = (memory.shared.saved or None) if self.from_memory and memory else steps

    def _newest(self, exchange: ControlExchange) -> dict[str, Any] | None:
        """The newest state in the nodes' memory, else in a file; None where there is none."""
        step = self.memory.newest(exchange)
        if step is not None:
            try:
                state = self.memory.restore(exchange, step)
            except CheckpointError as error:
                logger.warning("%s; the newest file counts instead", error)
            else:
                self.from_memory = True
                return state
        return None if self.writer is None else self.writer.open(exchange)

    def restore_more(self, parts: Mapping[str, Any]) -> None:
        """Load further parts of the checkpoint that `restore` opened. Before the loader. Raises CheckpointError."""
        if self._state is not None:
            self._load({name: part for name, part in parts.items() if part is not None}, self._state)

    def restore_loader(self, data: ElasticData) -> None:
        """Take the data up where the checkpoint left it."""
        if self._state is not None:
            data.load_state_dict(self._state["loader"])
            self._state = None  # it holds a second copy of the model
            self.memory.restored()

    def begin_training(self) -> None:
        """Begin the loop: take the checkpoint's random numbers, or own ones.

        Not earlier: random numbers that a script draws before the loop (for a split of its data) must be the same on
        every rank and in every attempt.
        """
        self.check_structure()
        if self._begun:
            return
        self._begun = True
        self._ranks.begin()
        self.memory.begin()
        if self.from_memory and not self.memory.on:
            self._saved_at = -math.inf  # a file soon: what was restored is nowhere else
        if self._random is None:
            training_state.tell_ranks_apart(self._training.world.rank, self._attempt.seed)
        self.restore_random()

    def restore_random(self) -> None:
        """Take the checkpoint's random numbers. What a script draws after an ended training is then as it was."""
        if self._random is not None:
            (states, steps), world = self._random, self._training.world
            training_state.restore_rng(states, world.rank, self._attempt.seed, steps, world.device)
        self._random = None

    # -- ranks that come in -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """A checkpoint's content now, without random numbers, for joiners. Without shards, too."""
        parts, writer = self._training.parts(), self.writer
        states = {
            name: part.state_dict() if writer is None else writer.state(part) for name, part in parts.items()
        }
        return states | self._rest([])

    def take_over(self, state: Mapping[str, Any]) -> None:
        """On a joiner: go on from rank 0's `state`. Raises CheckpointError."""
        self._load(self._training.parts(), state)
        self._ranks.join(state)
        self._take(state)
        self._training.data.load_state_dict(state["loader"])

    def leave_group(self) -> None:
        """Before the process groups end: wait for a checkpoint of all ranks."""
        if self.writer is not None and self.sharded:
            self.writer.wait()
            self._note_checkpoint()
            self.trouble = self.writer.trouble or self.trouble

    def change_ranks(self) -> None:
        """Go on among the ranks of new process groups; every rank calls it."""
        if self.writer is not None and self.sharded:
            self.writer.change_ranks(dist.get_world_size())

    def _take(self, state: Mapping[str, Any]) -> int:
        """Take the entries of `state` that belong to no part. Return its optimizer step."""
        steps = int(state["progress"]["optimizer_steps"])
        self._random = (state["rng"], steps)
        params = state["params"]
        self.last_attempt = LastAttempt(
            state["batch_size"], None if params is None else ThroughputParams(*params), len(state["rng"])
        )
        return steps

    def _load(self, parts: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        for name, part in parts.items():
            if name not in state:
                logger.warning("the checkpoint holds no state for %r: it starts from its beginning", name)
                continue
            source: Any = self.memory if self.from_memory else self.writer
            try:
                own = state.get("own", [])
                source.load(name, part, self._ranks.restored(name, part, state[name], own, source.fill))
            except (RuntimeError, KeyError, ValueError, TypeError) as error:
                raise CheckpointError(
                    f"the checkpoint's {name} does not fit this script's: {error}. {advice(name, state)}, or train "
                    "into another checkpoint directory"
                ) from error

    # -- in the loop ------------------------------------------------------------------------------------------

    def due(self) -> bool:
        """On rank 0: whether a periodic checkpoint is due. Notes one that has become durable."""
        writer = self.writer
        if writer is None:
            return False
        if not writer.busy:
            writer.wait()
            self._note_checkpoint()
            self.trouble = writer.trouble
            self.slowest = max(self.slowest, writer.seconds)
        interval = self._attempt.settings.checkpoint_interval
        if not self._tried:
            interval = min(interval, TRIAL_S)
        due = time.monotonic() - self._saved_at >= interval
        if due:
            self._saved_at, self._tried = time.monotonic(), True
        return due

    def after_first_step(self) -> None:
        """This attempt's first optimizer step is over."""
        if (writer := self.writer) is not None:
            # The first step has made the optimizer's state, so the size of a copy is known from here on.
            parts = self._training.parts().items()
            large = {name: part for name, part in parts if name.endswith(("model", "optimizer"))}
            writer.prepare(large, rank=self._training.world.rank)

    def save(self, exchange: ControlExchange, *, durable: bool) -> float | None:
        """Write a checkpoint; every rank calls it after the same step.

        Seconds it took on rank 0, None where it failed.

        With `durable`, wait until the checkpoint is on disk. Otherwise wait only for the copy, and a thread writes it.
        If the checkpoint cannot be written, the error is logged, the earlier checkpoint stays, and the training goes
        on.
        """
        writer = self.writer
        self.begun += 1
        if writer is None:
            return None
        world, parts = self._training.world, self._training.parts()
        self.check_structure()
        try:
            parts, every, own = self._ranks.divide(exchange, parts, sharded=writer.sharded)
        except StateError as error:
            logger.error("no checkpoint: %s", error)
            self.trouble = writer.trouble = str(error)
            return None
        rest = self._gathered(exchange, parts, every)
        self._saved_at = started = time.monotonic()
        if rest is None:
            if world.rank == 0:
                stands = "there is none" if self.saved is None else f"the one of step {self.saved} stands"
                logger.error("the model's parameters are not finite: no checkpoint is written, %s", stands)
            self.trouble = writer.trouble = "the model's parameters are not finite"
            return None
        progress = self._training.progress
        meta = {
            "optimizer_steps": progress.optimizer_steps,
            "examples": progress.examples,
            "world_size": world.size,
        }
        if writer.small and not durable:
            self.memory.lend()
            self.memory.lent_to = lambda: writer.busy
        try:
            writer.save(parts, rest, meta, rank=world.rank, durable=durable, own=own)
        except CheckpointError as error:
            logger.error("%s", error)
            self.trouble = writer.trouble = str(error)
            return None
        if durable:
            writer.trouble = ""
        self.trouble = writer.trouble
        self._note_checkpoint()
        self._saved_at = time.monotonic()
        if durable:
            self.slowest = max(self.slowest, self._saved_at - started)
        return self._saved_at - started

    def _gathered(
        self, exchange: ControlExchange, parts: Mapping[str, Any], own: list[Any]
    ) -> Callable[[], dict[str, Any]] | None:
        """What makes a checkpoint's entries that belong to no part; None where parameters are not finite.

        `own`: what each rank has apart.
        """
        models = [part for name, part in parts.items() if name.endswith("model")]
        finite = all(map(training_state.is_finite, models))
        random = training_state.rng_state(self._training.world.device)
        answers = exchange.gather((random, finite))
        if not all(finite for _, finite in answers):
            return None

        return lambda: self._rest([rng for rng, _ in answers]) | ({"own": own} if own else {})

    def check_structure(self) -> None:
        """Warn once of a model that a restart of its script could not read."""
        if self._told_structure or self._training.world.rank:
            return
        changed = next(filter(None, (model.record.changed() for model in self._training.models)), "")
        if changed:
            self._told_structure = True
            logger.warning("the model has changed since `attach` (%s): %s", changed, CHANGED)

    def copy(self, exchange: ControlExchange) -> None:
        """Copy the state into the nodes' memory; every rank calls it after the same step."""
        begun, parts = time.monotonic(), self._training.parts()
        try:
            parts, every, own = self._ranks.divide(exchange, parts, sharded=self.memory.sharded)
        except StateError as error:
            logger.warning("no copies of the state in memory: %s", error)
            self.memory.on = False
            return
        rest = self._gathered(exchange, parts, every)
        if rest is not None:
            self.memory.copy(parts, rest(), begun, own)

    def _rest(self, rng: list[dict[str, Any]]) -> dict[str, Any]:
        """The entries of a checkpoint that belong to no part."""
        now = self._training.last_attempt()
        return {
            "version": STATE_VERSION,
            "rng": rng,
            "loader": self._training.data.state_dict(),
            "batch_size": now.batch_size,
            "params": None if now.params is None else list(now.params),
            "last_step_at": self._training.last_step_at,
        }

    def _note_checkpoint(self) -> None:
        if self.restarts is not None and self.writer is not None and self.writer.written:
            self.restarts.checkpointed()
            if (memory := node_memory()) is not None and self.saved is not None:
                memory.shared.saved = self.saved

    # -- what stands ------------------------------------------------------------------------------------------

    @property
    def saved(self) -> int | None:
        """The optimizer step of the newest durable checkpoint this rank knows."""
        return None if self.writer is None else self.writer.saved

    def receipt(self, seconds: float | None) -> Receipt | None:
        """The newest durable checkpoint, which took so many seconds. None without one, or where it failed (None)."""
        if self._attempt.unshared:
            self.trouble = f"the next attempt would not see the checkpoints: {self._attempt.unshared}"
            return None
        if seconds is None or self.saved is None:
            return None
        return Receipt(self.saved, seconds, self._training.last_step_at)

    def holds(self, step: int) -> bool:
        """Whether this rank knows of a checkpoint of that optimizer step. Waits for one that is being written."""
        if self.writer is not None:
            self.writer.wait()
        return self.saved == step

    @property
    def keeps(self) -> bool:
        """Checkpoints are written at all."""
        return self.writer is not None

    @property
    def writing(self) -> bool:
        """A checkpoint is being written beside the training."""
        return self.writer is not None and self.writer.busy

    @property
    def sharded(self) -> bool:
        """All ranks write a checkpoint, each its shards."""
        return self.writer is not None and self.writer.sharded

    def report(self) -> dict[str, Any]:
        """The checkpoints' share of a report."""
        return {
            "checkpointed": self.saved is not None and not self._attempt.unshared,
            "times": asdict(self._attempt.times),
            "immovable": self.immovable,
        }

    @property
    def immovable(self) -> str | None:
        """Why no order to move can be followed: each ends in a checkpoint, also one within the allocation."""
        return self.trouble or (None if self.writer is not None else "it has no folder for checkpoints")
