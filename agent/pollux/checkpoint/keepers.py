"""Choose a job's newest checkpoint, and divide its writing over ranks.

Rank 0 decides which checkpoint is the newest intact one, and all ranks take it. Rank 0 writes a plain training to one
file (`FileKeeper`); all ranks write one under `fully_shard` (`ShardedKeeper`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pollux.checkpoint.background import BackgroundSaver, HostCopy
from pollux.checkpoint.checkpoint_store import CheckpointStore
from pollux.errors import CheckpointError, ForeignCheckpoint
from pollux.ranks.control import ControlExchange
from pollux.ranks.sharding import ShardedModel, ShardedOptimizer, is_sharded, local_part
from pollux.ranks.world import new_group
from pollux.training.script_record import COMPILED, PlainNames, plain_name

logger = logging.getLogger("pollux")


def fingerprint_of(models: Iterable[torch.nn.Module]) -> str:
    """Return a short text on the models' parameter names and shapes."""
    shapes = [[(plain_name(name), list(p.shape)) for name, p in model.named_parameters()] for model in models]
    size = sum(p.numel() for model in models for p in model.parameters())
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
    return f"{sum(map(len, shapes))} tensors of {size} parameters ({digest})"


def keeper_for(model: torch.nn.Module, directory: Path, size: int) -> Keeper:
    """The keeper for a model: every rank calls it alike."""
    if not is_sharded(model):
        return FileKeeper(CheckpointStore(directory))
    from pollux.checkpoint.sharded import ShardedStore  # noqa: PLC0415 - loads torch's sharding

    return ShardedKeeper(ShardedStore(directory, group=_group_of(size)))


def as_written(part: Any, *, sharded: bool) -> Any:
    """The part as a checkpoint holds it: under fully_shard, shards apart from the rest."""
    if sharded and isinstance(part, torch.nn.Module):
        return ShardedModel(part)
    if sharded and isinstance(part, torch.optim.Optimizer):
        return ShardedOptimizer(part)
    return part


def _group_of(size: int) -> dist.ProcessGroup | None:
    """Form a group of the keeper's own.

    Its thread writes while the ranks exchange decisions.
    """
    return new_group(backend="gloo") if size > 1 else None


class Keeper(ABC):
    """The checkpoints of one job.

    All ranks call each method at the same point, unless its docstring says otherwise.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.saved: int | None = None
        """The optimizer step of the newest durable checkpoint, as far as this rank knows."""
        self.trouble = ""
        """Why the newest finished save failed; empty if it succeeded."""
        self.written = False
        """This attempt has written one."""
        self.seconds = 0.0
        """What the newest one that a thread wrote took."""
        self.store: Any
        self._saving: int | None = None

    def _durable(self, step: int | None) -> None:
        self.saved, self.written = step, True

    @abstractmethod
    def open(self, exchange: ControlExchange) -> dict[str, Any] | None:
        """The newest intact checkpoint's state, shards not among it.

        None where there is none.

        Raises CheckpointError (and ForeignCheckpoint) on all ranks alike.
        """

    @abstractmethod
    def load(self, name: str, part: Any, state: Any) -> None:
        """Load one part of the opened checkpoint."""

    @abstractmethod
    def save(
        self,
        parts: Mapping[str, Any],
        rest: Callable[[], dict[str, Any]],
        meta: dict[str, Any],
        *,
        rank: int,
        durable: bool,
    ) -> None:
        """Write a checkpoint; unless `durable`, while the training goes on.

        Raises CheckpointError.
        """

    @abstractmethod
    def prepare(self, parts: Mapping[str, Any], *, rank: int) -> None:
        """Make the memory that a background `save` copies these parts into.

        Fresh memory is slow to fill.
        """

    @abstractmethod
    def settle(self) -> None:
        """Wait for a checkpoint that is being written.

        If it failed, the error is logged, once. Any rank may call this alone.
        """

    @property
    @abstractmethod
    def busy(self) -> bool:
        """One is being written."""

    def part(self, part: Any) -> Any:
        """The part as this keeper writes it."""
        compiled = isinstance(part, torch.nn.Module) and any(
            COMPILED in name for name, _ in part.named_modules()
        )
        return PlainNames(part) if compiled else part


class FileKeeper(Keeper):
    """Rank 0 writes one file, every rank reads it."""

    def __init__(self, store: CheckpointStore) -> None:
        super().__init__(store.directory)
        self.store = store
        self._saver: BackgroundSaver | None = None

    def open(self, exchange: ControlExchange) -> dict[str, Any] | None:
        name: str | None = None
        trouble: CheckpointError | None = None
        if exchange.rank == 0:
            try:
                found = self.store.newest()
                name = None if found is None else found[0].name
                if found is None and any(self.directory.glob("checkpoint-*.shards")):
                    raise ForeignCheckpoint(
                        f"{self.directory} holds checkpoints of a model under fully_shard: apply it to this one, or "
                        "use another checkpoint directory"
                    )
            except CheckpointError as error:
                trouble = error
        foreign = isinstance(trouble, ForeignCheckpoint)
        name, told, foreign = exchange.gather((name, None if trouble is None else str(trouble), foreign))[0]
        if told is not None:
            raise ForeignCheckpoint(told) if foreign else CheckpointError(told)
        if name is None:
            return None
        state: dict[str, Any] | None = None
        why: str | None = None
        try:
            state = self.store.load(self.directory / name)[0]
        except CheckpointError as error:
            why = str(error)
        troubles = [found for found in exchange.gather(why) if found is not None]
        if troubles:
            raise CheckpointError(
                f"rank 0 found {name} intact, but not every rank can read it: the checkpoint directory must lie on a "
                f"file system that all nodes share. {troubles[0]}"
            )
        return state

    def load(self, name: str, part: Any, state: Any) -> None:
        part.load_state_dict(state)

    def save(
        self,
        parts: Mapping[str, Any],
        rest: Callable[[], dict[str, Any]],
        meta: dict[str, Any],
        *,
        rank: int,
        durable: bool,
    ) -> None:
        if rank:
            return
        state = {name: part.state_dict() for name, part in parts.items()} | rest()
        self.settle()
        if durable:
            self.store.save(state, meta=meta)
            self._durable(meta["optimizer_steps"])
        else:
            self._saver = self._saver or BackgroundSaver(self.store)
            self._saver.save(state, meta=meta)
            self._saving = meta["optimizer_steps"]

    def prepare(self, parts: Mapping[str, Any], *, rank: int) -> None:
        if rank:
            return
        self._saver = self._saver or BackgroundSaver(self.store)
        if not self._saver.busy:
            self._saver.prepare({name: part.state_dict() for name, part in parts.items()})

    def settle(self) -> None:
        if self._saver is None or self._saving is None:
            return
        try:
            written = self._saver.wait()
            self.seconds = 0.0 if written is None else written.seconds
            self._durable(self._saving)
            self.trouble = ""
        except CheckpointError as error:
            logger.error("%s", error)
            self.trouble = str(error)
        self._saving = None

    @property
    def busy(self) -> bool:
        return self._saver is not None and self._saver.busy


class ShardedKeeper(Keeper):
    """All ranks write, and read, their shards; rank 0 the rest."""

    def __init__(self, store: Any) -> None:
        super().__init__(store.directory)
        self.store = store
        self._opened: Path | None = None
        self._copies = HostCopy()
        self._shards: dict[str, Any] = {}
        """Copies of this rank's shards, whose memory is used again."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def change_ranks(self, size: int) -> None:
        """Go on among all `size` ranks of new process groups, after `settle`."""
        self.store.change_group(_group_of(size))
        self._shards = {}

    def part(self, part: Any) -> Any:
        return as_written(part, sharded=True)

    def open(self, exchange: ControlExchange) -> dict[str, Any] | None:
        self._opened = self.store.newest()
        if self._opened is None:
            if exchange.gather(any(self.directory.glob("checkpoint-*.pt")))[0]:
                raise ForeignCheckpoint(
                    f"{self.directory} holds checkpoints of a model without fully_shard; use another directory"
                )
            return None
        state: dict[str, Any] = self.store.read_rest(self._opened)[0]
        return state

    def load(self, name: str, part: Any, state: Any) -> None:
        if not hasattr(part, "shards"):
            part.load_state_dict(state)
            return
        shards = part.template(state)
        if shards and self._opened is not None:
            named = {f"{name}.{key}": value for key, value in shards.items()}
            self.store.read_shards(self._opened, named)
        part.load_state_dict(state, shards)

    def save(
        self,
        parts: Mapping[str, Any],
        rest: Callable[[], dict[str, Any]],
        meta: dict[str, Any],
        *,
        rank: int,
        durable: bool,
    ) -> None:
        self.settle()
        shards = _shards_of(parts)
        state = {name: part.state_dict() for name, part in parts.items()} | rest() if rank == 0 else {}
        step = meta["optimizer_steps"]
        if durable:
            self.store.save(shards, state, meta=meta)
            self._durable(step)
            return
        copies = self._copied(shards)
        state = self._copies.take(state)
        self._copies.await_transfers()

        def write() -> None:
            begun = time.monotonic()
            try:
                self.store.save(copies, state, meta=meta)
                self.seconds = time.monotonic() - begun
            except BaseException as error:  # whatever it is, the training thread must hear of it
                self._error = error

        self._saving = step
        # Not a daemon: a script that ends waits for its last checkpoint to be on disk.
        self._thread = threading.Thread(target=write, name="pollux-checkpoint")
        self._thread.start()

    def prepare(self, parts: Mapping[str, Any], *, rank: int) -> None:
        self._copied(_shards_of(parts))
        if rank == 0:
            self._copies.prepare({name: part.state_dict() for name, part in parts.items()})

    def _copied(self, shards: Mapping[str, Any]) -> dict[str, Any]:
        kept, self._shards = self._shards, {}
        for name, value in shards.items():
            copy = kept.get(name)
            if copy is None or _layout(copy) != _layout(value):
                copy = value.detach().cpu() if value.is_cuda else value.detach().clone()
            else:
                local_part(copy).copy_(local_part(value))
            self._shards[name] = copy
        return dict(self._shards)

    def settle(self) -> None:
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is None:
            self._durable(self._saving)
            self.trouble = ""
        else:
            logger.error("%s", error)
            self.trouble = str(error)
        self._saving = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()


def _shards_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, part in parts.items()
        if hasattr(part, "shards")
        for key, value in part.shards().items()
    }


def _layout(shard: Any) -> tuple[Any, ...]:
    """What two DTensors must share for one to be copied into the other."""
    return shard.shape, shard.dtype, shard.placements, shard.device_mesh, local_part(shard).shape
