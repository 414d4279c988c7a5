"""Restore a job's newest checkpoint, and write new ones beside the training.

Rank 0 writes a plain training, all ranks write one under `fully_shard`, each its shards.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from pollux.checkpoint.checkpoint_store import ALONE, CheckpointStore
from pollux.checkpoint.host_copy import HostCopy, size_of
from pollux.checkpoint.parts import as_written, shards_of
from pollux.errors import CheckpointError
from pollux.ranks.control import ControlExchange
from pollux.ranks.sharding import is_sharded
from pollux.ranks.world import new_group
from pollux.slurm_job.job_memory import RESERVE, memory_left

logger = logging.getLogger("pollux")

SMALL = 512_000_000
"""Bytes of a state for which fresh memory costs the training about a fifth of a second in each checkpoint."""


class CheckpointWriter:
    """The checkpoints of one job. All ranks call each method alike, unless its docstring says otherwise."""

    def __init__(self, model: torch.nn.Module, directory: Path, size: int) -> None:
        """`size`: the number of ranks."""
        self.sharded = is_sharded(model)
        """All ranks write a checkpoint, each its shards."""
        self._model = model if self.sharded else None
        self.store = CheckpointStore(directory, sharded=self.sharded)
        self.saved: int | None = None
        """The optimizer step of the newest durable checkpoint, as far as this rank knows."""
        self.trouble = ""
        """Why the newest finished save failed; empty if it succeeded."""
        self.written = False
        """This attempt has written one."""
        self.seconds = 0.0
        """What the newest one that a thread wrote took."""
        self.copies = HostCopy()
        self._beside = True
        """There is memory for a copy, from which a thread writes."""
        self.small = False
        """The copy is made for each checkpoint by itself, in place of a copy in the node's memory."""
        self._opened: Path | None = None
        self._thread: threading.Thread | None = None
        self._step: int | None = None
        """The optimizer step of the checkpoint that the thread writes."""
        self._error: CheckpointError | None = None
        self.change_ranks(size)

    def change_ranks(self, size: int) -> None:
        """Go on among all `size` ranks of new process groups, after `wait`."""
        # A group of its own: the thread writes while the ranks exchange decisions.
        self._writers = ControlExchange(new_group(backend="gloo"), 0) if self.sharded and size > 1 else ALONE

    # -- reading ----------------------------------------------------------------------------------------------

    def open(self, exchange: ControlExchange) -> dict[str, Any] | None:
        """Return the newest intact checkpoint's state, shards not among it; None where there is none.

        Raises CheckpointError (and ForeignCheckpoint) on all ranks alike.
        """
        self._opened = self.store.newest(exchange)
        if self._opened is None:
            return None
        state: dict[str, Any] = {}
        trouble = ""
        try:
            state, _ = self.store.read(self._opened)
        except CheckpointError as error:
            trouble = str(error)
        troubles = [text for text in exchange.gather(trouble) if text]
        if troubles:
            raise CheckpointError(troubles[0])
        return state

    def load(self, name: str, part: Any, state: Any) -> None:
        """Load one part of the opened checkpoint."""
        written = self._as_written(part)
        if not hasattr(written, "shards"):
            written.load_state_dict(state)
            return
        shards = written.template(state)
        if shards and self._opened is not None:
            named = {f"{name}.{key}": value for key, value in shards.items()}
            self.store.read_shards(self._opened, named, self._writers)
        written.load_state_dict(state, shards)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load tensors of this rank alone from the opened checkpoint, by their names. May be called by some ranks."""
        if tensors and self._opened is not None:
            self.store.read_shards(self._opened, dict(tensors), ALONE)

    # -- writing ----------------------------------------------------------------------------------------------

    def save(
        self,
        parts: Mapping[str, Any],
        rest: Callable[[], dict[str, Any]],
        meta: dict[str, Any],
        *,
        rank: int,
        durable: bool,
        own: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Write a checkpoint of `parts` and the entries that `rest` makes.

        `own`: where all ranks write, this rank's tensors beside its shards. Unless `durable`, a thread writes it while
        the training goes on. Raises CheckpointError.
        """
        if rank and not self.sharded:
            return
        self.wait()
        state, shards = self._divided(parts, rank)
        shards |= own or {}
        if rank == 0:
            state |= rest()
        step = meta["optimizer_steps"]
        if durable or not self._beside:
            self.store.save(state, shards, meta=meta, exchange=self._writers)
            self.saved, self.written = step, True
            return
        copies = self.copies.take({"state": state, "shards": shards})

        def write() -> None:
            begun = time.monotonic()
            self.copies.await_transfers()
            self.store.save(copies["state"], copies["shards"], meta=meta, exchange=self._writers)
            if self.small:
                copies.clear()
                self.copies.release()
            self.seconds = time.monotonic() - begun

        self._step = step
        self._start(write)

    def prepare(self, parts: Mapping[str, Any], *, rank: int) -> None:
        """Make the memory that a save beside the training copies these parts into. Fresh memory is slow to fill."""
        if self.busy or (rank and not self.sharded):
            return
        state, shards = self._divided(parts, rank)
        needed, left = size_of((state, shards)), memory_left() - RESERVE
        self._beside = needed <= left
        if not self._beside:
            logger.warning(
                "the training waits while a checkpoint is written: a copy of %.2f GB does not fit into the job's "
                "memory on this node, where %.2f GB are left for it. Ask for more memory (--mem)",
                *(needed / 1e9, max(left, 0) / 1e9),
            )
            return
        self.small = needed <= SMALL
        if self.small:
            return
        self.copies.prepare({"shards": shards})
        self._start(lambda: self.copies.prepare({"state": state}))

    def wait(self) -> None:
        """Wait for a checkpoint that is being written; log why it failed. Any rank may call this alone."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        step, self._step = self._step, None
        if error is not None:
            logger.error("%s", error)
            self.trouble = str(error)
        elif step is not None:
            self.saved, self.written, self.trouble = step, True, ""

    @property
    def busy(self) -> bool:
        """One is being written, or memory is being made."""
        return self._thread is not None and self._thread.is_alive()

    def state(self, part: Any) -> Any:
        """Return the state of a part without its shards."""
        return self._as_written(part).state_dict()

    def _as_written(self, part: Any) -> Any:
        return as_written(part, sharded=self._model)

    def _divided(self, parts: Mapping[str, Any], rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the parts' state, which rank 0 writes, and this rank's shards."""
        written = {name: self._as_written(part) for name, part in parts.items()}
        state = {name: part.state_dict() for name, part in written.items()} if rank == 0 else {}
        return state, shards_of(written)

    def _start(self, body: Callable[[], None]) -> None:
        self.wait()

        def guarded() -> None:
            try:
                body()
            except CheckpointError as error:
                self._error = error
            except Exception as error:  # whatever it is, it must reach the training thread
                logger.exception("checkpoint in the background")
                self._error = CheckpointError(
                    f"no checkpoint could be written{self.store.standing()} ({error!r})"
                )

        # Not a daemon: a script that ends waits for its last checkpoint to be on disk.
        self._thread = threading.Thread(target=guarded, name="pollux-checkpoint")
        self._thread.start()
