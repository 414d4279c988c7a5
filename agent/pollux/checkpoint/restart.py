"""What outlives a process: checkpoints, the line to the scheduler, and what a restart cost."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from pollux.checkpoint import training_state
from pollux.checkpoint.checkpointer import (
    FruitlessRestarts,
    Keeper,
    ShardedKeeper,
    fingerprint_of,
    keeper_for,
)
from pollux.checkpoint.file import check_state
from pollux.data.place import ElasticData
from pollux.errors import CheckpointError
from pollux.goodput import ThroughputParams
from pollux.ranks.control import ControlExchange
from pollux.ranks.world import World
from pollux.scheduler.draining import DRAIN_WAIT, Draining
from pollux.slurm_job.environment import Times, checkpoint_directory, number, stands_alone, yes
from pollux.slurm_job.ticket import Ticket, read_ticket
from pollux.tuning.knowledge import Introduction, LastAttempt

if TYPE_CHECKING:
    from pollux.scheduler.publisher import Publisher

logger = logging.getLogger("pollux")

MAX_FRUITLESS = 10
"""Automatic restarts in a row that may end without a new checkpoint."""

CHECKPOINT_INTERVAL = 300.0
"""Seconds between periodic checkpoints."""

STATE_VERSION = 1


class Restart(Draining):
    """This job's checkpoints and its line to the scheduler, on every rank."""

    def __init__(
        self,
        world: World,
        checkpoint_dir: str | os.PathLike[str] | None,
        *,
        seed: int,
        times: Times,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        super().__init__(number(environ, "POLLUX_DRAIN_WAIT", DRAIN_WAIT))
        self.world = world
        self.seed = seed
        self.times = times
        self.known: LastAttempt | None = None
        """What the checkpoint's attempt knew when it ended; None where there is no checkpoint."""
        self.cost: float | None = None
        """Seconds from the last step before the newest restart to the first step after it."""
        self.ticket: Ticket | None = read_ticket()
        self.alone = stands_alone(self.ticket, environ)
        """No scheduler is near: what the GPUs here can do is all there is to adapt to."""
        self.adaptive = yes(environ.get("POLLUX_ADAPTIVE"), self.ticket is not None or self.alone)
        self._environ = environ
        directory = checkpoint_directory(checkpoint_dir, environ)
        self.directory = directory
        """Where this job's checkpoints are; None without any."""
        self._keeper: Keeper | None = None
        self._restarts: FruitlessRestarts | None = None
        self._interval = number(environ, "POLLUX_CHECKPOINT_INTERVAL", CHECKPOINT_INTERVAL)
        self._saved_at = time.monotonic()
        self._state: dict[str, Any] | None = None
        self._random: tuple[list[dict[str, Any]], int] | None = None
        """The checkpoint's, by rank, and its optimizer step; until the loop begins."""
        self._begun = False
        self._publisher: Publisher | None = None
        self._stop_watching: Callable[[], None] | None = None
        self._last_step_at = 0.0
        self.resized_for = int(number(environ, "POLLUX_RESIZED", 0))
        """The newest resize that these processes were started for, or after; 0: none."""
        self._interrupted_at: float | None = None

    # -- starting ---------------------------------------------------------------------------------------------

    def restore(self, parts: Mapping[str, Any], exchange: ControlExchange) -> None:
        """Load the newest checkpoint, if there is one, into `parts` (by name, with `load_state_dict`), on every rank.

        Raises StateError where a part's state holds an object that a checkpoint cannot hold. Raises, on every rank,
        CheckpointError where it cannot be read everywhere or does not fit the objects,
        ForeignCheckpoint where it is another model's, RestartLoop where restarts come to nothing.
        """
        if self.directory is not None:
            for name, part in parts.items():
                if not isinstance(part, torch.nn.Module | torch.optim.Optimizer):
                    # Now, and not at the first save, hours later.
                    check_state(part.state_dict(), name)
        state = None
        if self.directory is not None and self.world.waiting:
            # Its state comes from rank 0, and any attempt that it counts would be rank 0's.
            self._keeper = keeper_for(parts["model"], self.directory, 1)
        elif self.directory is not None:
            most = int(number(self._environ, "POLLUX_FRUITLESS_RESTARTS", MAX_FRUITLESS))
            self._restarts = FruitlessRestarts(self.directory, most, self._environ)
            self._restarts.begin(exchange)
            self._keeper = keeper_for(parts["model"], self.directory, self.world.size)
            self._keeper.store.fingerprint = fingerprint_of([parts["model"]])
            state = self._keeper.open(exchange)
        self.times.restored_at = time.time()
        if state is None or self._keeper is None:
            return
        if state.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"expected a checkpoint of version {STATE_VERSION}, found {state.get('version')!r}"
            )
        for name, part in parts.items():
            self._load(name, part, state)
        steps = self._take(state)
        self._interrupted_at = state["last_step_at"] or None
        self._keeper.saved = steps
        self._state = state
        self.times.restored_at = time.time()
        if self.world.rank == 0:
            logger.info("restored the checkpoint of optimizer step %d", steps)

    def _take(self, state: Mapping[str, Any]) -> int:
        """What is no part's own; returns the optimizer step."""
        steps = int(state["progress"]["optimizer_steps"])
        self._random = (state["rng"], steps)
        params = state["params"]
        self.known = LastAttempt(state["batch_size"], None if params is None else ThroughputParams(*params))
        return steps

    def state(self, parts: Mapping[str, Any], data: ElasticData, known: LastAttempt) -> dict[str, Any]:
        """What a checkpoint written now would hold, but for the ranks' random numbers: for ranks that come in."""
        return {name: part.state_dict() for name, part in parts.items()} | self._rest([], data, known)

    def take_over(self, parts: Mapping[str, Any], data: ElasticData, state: Mapping[str, Any]) -> None:
        """On a rank that comes in: go on from rank 0's `state`, as from a checkpoint. Raises CheckpointError."""
        for name, part in parts.items():
            self._load(name, part, state)
        self._take(state)
        data.load_state_dict(state["loader"])

    def restore_more(self, parts: Mapping[str, Any]) -> None:
        """Load further parts of the checkpoint that `restore` has opened; before the loader. Raises CheckpointError."""
        for name, part in parts.items():
            if part is not None and self._state is not None:
                self._load(name, part, self._state)

    def _load(self, name: str, part: Any, state: Mapping[str, Any]) -> None:
        assert self._keeper is not None
        if name not in state:
            logger.warning("the checkpoint holds no state for %r: it starts anew", name)
            return
        try:
            self._keeper.load(name, self._keeper.part(part), state[name])
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint's {name} does not fit this script's: {error}. Restore the script that wrote "
                "it, or train into another checkpoint directory"
            ) from error

    def begin_training(self) -> None:
        """The loop begins: from here on random numbers are the checkpoint's, or each rank's own.

        Not before: what a script draws on its way to the loop (a split of its data) is to be the same on every rank and
        at every attempt.
        """
        if not self._begun:
            self._begun = True
            if self._random is None:
                training_state.tell_ranks_apart(self.world.rank, self.seed)
            else:
                states, steps = self._random
                training_state.restore_rng(states, self.world.rank, self.seed, steps, self.world.device)
                self._random = None

    def restore_loader(self, data: ElasticData) -> None:
        """Take the data up where the checkpoint left it."""
        if self._state is not None:
            data.load_state_dict(self._state["loader"])
            self._state = None  # it holds a second copy of the model

    def publish(
        self,
        collect: Callable[[], dict[str, Any]],
        introduction: Introduction | None = None,
        on_resize: Callable[[Any], None] | None = None,
    ) -> None:
        """Begin to report to the scheduler and to hear from it; only rank 0 of a Pollux job does."""
        if self.ticket is None:
            return
        if self.world.rank == 0:
            from pollux.scheduler.publisher import Publisher  # noqa: PLC0415 - loads the database driver

            interval = self.ticket.publish_interval_s
            publisher = Publisher(
                self.ticket,
                collect,
                self.ask_drain,
                on_resize,
                interval_s=interval,
                introduction=introduction,
            )
            publisher.start()
            self._publisher = publisher
        from pollux.slurm_job.wake_signal import watch  # noqa: PLC0415

        self._stop_watching = watch(self._publisher.wake if self._publisher is not None else _ignore)
        # A script that ends has made its last step: its last report says so.
        atexit.register(self.close)

    # -- in the loop ------------------------------------------------------------------------------------------

    def wanted(self) -> tuple[int, bool]:
        """What rank 0 asks of all ranks now: (move to drain for or 0, whether a checkpoint is due)."""
        if self._keeper is not None and not self._keeper.busy:
            self._keeper.settle()
            self._note_checkpoint()
        move, self._drain = self._drain, 0
        if move in self._drained:
            move = 0
        due = self._keeper is not None and time.monotonic() - self._saved_at >= self._interval
        if due:
            self._saved_at = time.monotonic()
        return move, due

    def after_step(self, parts: Callable[[], Mapping[str, Any]]) -> None:
        """An optimizer step is over; `parts` is as `save` takes them."""
        self._last_step_at = time.time()
        if self.times.first_step_at is None:
            self.times.first_step_at = self._last_step_at
            if self._interrupted_at is not None:
                self.cost = max(self._last_step_at - self._interrupted_at, 0.0)
            if self._publisher is not None:
                self._publisher.wake()
            keeper = self._keeper
            if keeper is not None:
                # The first step has made the optimizer's state: from here on it is known how large a copy is.
                large = {n: p for n, p in parts().items() if n.endswith(("model", "optimizer"))}
                keeper.prepare({n: keeper.part(p) for n, p in large.items()}, rank=self.world.rank)

    def save(
        self,
        parts: Mapping[str, Any],
        data: ElasticData,
        exchange: ControlExchange,
        known: LastAttempt,
        *,
        durable: bool,
    ) -> float | None:
        """Write a checkpoint; every rank calls it after the same step. Seconds it took on rank 0, None where it failed.

        `durable` waits until it is on disk; else only until it is copied, and a thread writes it. A checkpoint that
        cannot be written is logged: the earlier one stands, and training goes on.
        """
        keeper = self._keeper
        if keeper is None:
            return None
        models = [part for name, part in parts.items() if name.endswith("model")]
        mine = (training_state.rng_state(self.world.device), all(map(training_state.is_finite, models)))
        answers = exchange.gather(mine)
        self._saved_at = started = time.monotonic()
        if not all(finite for _, finite in answers):
            if self.world.rank == 0:
                logger.error("the model's parameters are not finite: no checkpoint, the earlier ones stand")
            return None
        steps = parts["progress"].optimizer_steps

        def rest() -> dict[str, Any]:
            return self._rest([rng for rng, _ in answers], data, known)

        meta = {"optimizer_steps": steps, "world_size": self.world.size}
        kept = {name: keeper.part(part) for name, part in parts.items()}
        try:
            keeper.save(kept, rest, meta, rank=self.world.rank, durable=durable)
        except CheckpointError as error:
            logger.error("%s", error)
            return None
        self._note_checkpoint()
        self._saved_at = time.monotonic()
        return self._saved_at - started

    def _rest(self, rng: list[dict[str, Any]], data: ElasticData, known: LastAttempt) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "rng": rng,
            "loader": data.state_dict(),
            "batch_size": known.batch_size,
            "params": None if known.params is None else list(known.params),
            "last_step_at": self._last_step_at,
        }

    @property
    def _saved(self) -> int | None:
        """The optimizer step of the newest durable checkpoint."""
        return None if self._keeper is None else self._keeper.saved

    def _note_checkpoint(self) -> None:
        if self._restarts is not None and self._keeper is not None and self._keeper.written:
            self._restarts.checkpointed()

    # -- ending -----------------------------------------------------------------------------------------------

    def finish(
        self, parts: Mapping[str, Any], data: ElasticData, exchange: ControlExchange, known: LastAttempt
    ) -> None:
        """The training loop is over: a last checkpoint, so that a restart repeats no step of it."""
        if self._keeper is None or self.save(parts, data, exchange, known, durable=True) is not None:
            self.rest()

    def keeps(self, step: int) -> bool:
        """Whether this rank knows of a checkpoint of that optimizer step; one under way is awaited."""
        if self._keeper is not None:
            self._keeper.settle()
        return self._saved == step

    @property
    def interrupted_at(self) -> float | None:
        """When the last optimizer step before the newest restart was over; None where there was none."""
        return self._interrupted_at

    @property
    def writing(self) -> bool:
        """A checkpoint is being written beside the training."""
        return self._keeper is not None and self._keeper.busy

    @property
    def sharded(self) -> bool:
        """No rank can write a checkpoint alone."""
        return isinstance(self._keeper, ShardedKeeper)

    @property
    def checkpointed(self) -> bool:
        return self._saved is not None

    def report(self) -> dict[str, Any]:
        """This module's share of a report."""
        # What a relaunch has cost is told as a resize's: a requeue costs more.
        cost = None if self.resized_for else self.cost
        return {"checkpointed": self.checkpointed, "times": asdict(self.times), "restart_cost": cost}

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._stop_watching is not None:
            self._stop_watching()
            self._stop_watching = None
        if self._publisher is not None:
            self._publisher.close()


def _ignore() -> None:
    """USR1 on ranks that talk to nobody."""
