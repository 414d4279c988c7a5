"""Copy a training's state into the nodes' memory every few steps, and restore the newest copy after a loss.

A lost rank ends all ranks, and the launchers start new ones in the same allocation. What a killed process has copied is
still in its node's memory (`pollux.ranks.node_memory`). A plain training is copied by the first rank of each node: new
ranks take the newest step that any node holds, and nodes without it get it from one that has it. Under fully_shard each
rank copies its own shards: new ranks take the newest step that each of them holds. Otherwise the checkpoint's file
counts, as after any other restart.

The training waits for one copy in memory, and on a GPU for none: the transfer is queued behind the step, and a thread
completes the copy. The time from one copy to the next follows from the measured wait: all copies take 1 % of the time.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pollux.checkpoint.parts import as_written, fingerprint_of, shards_of
from pollux.errors import CheckpointError, StateError
from pollux.ranks.control import ControlExchange
from pollux.ranks.handover import hand_over
from pollux.ranks.node_memory import HEADER, NO_COPIES, Copy, NodeMemory, Slot
from pollux.ranks.plain_values import decode, encode
from pollux.ranks.sharding import is_sharded, local_part
from pollux.slurm_job.job_memory import RESERVE, memory_left, memory_limit
from pollux.training.training import Training

logger = logging.getLogger("pollux")

COST = 0.01
"""Share of the time that copies may take."""
_ALIGNED = 64
_SETTLED = 3
"""The number of the first copy into memory that was written before: fresh memory is slow."""


class MemoryTier:
    """One rank's copies of one training. Every rank calls each method alike, unless its docstring says otherwise."""

    def __init__(
        self,
        training: Training,
        memory: NodeMemory | None,
        share: float,
        key: str = "",
        *,
        files: bool = True,
    ) -> None:
        """`share`: of the node's memory, for the copies of all its ranks; 0 makes none.

        `key`: the training's name among those of its process. `files`: it writes checkpoints, too.
        """
        self._training, self._memory, self._share, self._key = training, memory, share, key
        self._files = files
        self.on = memory is not None and share > 0
        """This rank copies, or would if it were its node's first one."""
        self.copies = 0
        """Copies begun in this attempt."""
        self.lent_to: Callable[[], bool] = lambda: False
        """Whether the memory of the older copy serves to write a checkpoint."""
        self._own_tensors: dict[str, Tensor] = {}
        self._begun = -math.inf
        self._cost = 0.0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._shards: dict[str, Tensor] = {}
        """What `restore` has found of this rank's shards."""

    # -- copying ----------------------------------------------------------------------------------------------

    def due(self) -> bool:
        """On rank 0: whether the next copy is due."""
        if not self.on or (self._thread is not None and self._thread.is_alive()) or self.lent_to():
            return False
        return time.monotonic() - self._begun >= self._cost / COST

    def copy(
        self,
        parts: Mapping[str, Any],
        rest: dict[str, Any],
        begun: float,
        own: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Copy `parts` and `rest`, the other entries of a checkpoint, after the same step on all ranks.

        `begun`: when the training began to wait for it, by `time.monotonic`. `own`: as in a checkpoint of all ranks.
        """
        self._own_tensors = dict(own or {})
        self._begun = begun
        self.copies += 1
        if self.copies == 1 and self.on and self._writes:
            self.on = self._fits(parts, rest)
        if self.on and self._writes and not self.lent_to():
            try:
                self._write(parts, rest)
            except (OSError, ValueError, StateError) as error:
                # Other nodes go on copying: what they have may be enough after a loss.
                self.on = False
                logger.warning("no more copies of the state in this node's memory: %s", error)
        self._cost = time.monotonic() - begun
        if self.on and self.copies == _SETTLED and self._training.world.rank == 0:
            steps = max(round(self._cost / COST / max(self._training.step.seconds, 1e-9)), 1)
            logger.info(
                "the state is copied into the nodes' memory every %d steps, in %.1f ms",
                steps,
                1e3 * self._cost,
            )

    def begin(self) -> None:
        """The training makes steps: what the launcher and the next ranks are told is of this one."""
        if self._memory is not None:
            self.tell()
            if os.environ.get(NO_COPIES) and self.on:
                self.on = False
                self._free()
                if self._training.progress.optimizer_steps and not self._files:
                    self._memory.shared.restores = False  # a further start would begin from step 0

    def tell(self) -> None:
        """Have what the launcher is told be of this training, by one rank of each node."""
        if self._memory is not None and self._memory.local_rank == 0:
            self._memory.tell_of(self._key)

    def lend(self) -> None:
        """Free the older copy's memory while a checkpoint is written; the newer copy stays."""
        if self._memory is not None and self.on and self._writes:
            self.wait()
            self._memory.older().free()

    def forget(self) -> None:
        """Drop this rank's copies: new ranks take a file."""
        self.wait()
        self.on = False
        if self._memory is not None:
            self._free()
            self._memory.shared.restores, self._memory.shared.copied = False, 0

    def _free(self) -> None:
        assert self._memory is not None
        for slot in self._memory.slots[self._memory.local_rank]:
            slot.free()

    @property
    def sharded(self) -> bool:
        """Each rank copies its own shards."""
        return self._sharded_model is not None

    @property
    def _sharded_model(self) -> torch.nn.Module | None:
        model = self._training.models[0].module
        return model if is_sharded(model) else None

    @property
    def _writes(self) -> bool:
        return self._memory is not None and (self.sharded or self._memory.local_rank == 0)

    def _fits(self, parts: Mapping[str, Any], rest: dict[str, Any]) -> bool:
        """Whether two copies of the state fit into this rank's share of the node's memory; logs why not."""
        assert self._memory is not None
        tensors: list[Tensor] = []
        try:
            encode(self._state(parts, rest), tensors.append)
        except StateError as error:
            logger.warning("no copies of the state in memory: %s", error)
            return False
        needed = 2 * sum(tensor.nbytes for tensor in tensors)
        writers = len(self._memory.slots) if self.sharded else 1
        allowed, left = self._share * memory_limit() / writers, (memory_left() - RESERVE) / writers
        if needed > min(allowed, left):
            logger.warning(
                "no copies of the state in memory: two take %.2f GB of host memory, allowed are %.2f GB (%.0f %% of "
                "the job's on this node, POLLUX_MEMORY_SHARE), and of the job's memory %.2f GB are left for it. After "
                "a loss the job goes on from its newest checkpoint. Ask for more memory (--mem) to have copies",
                *(needed / 1e9, allowed / 1e9, 100 * self._share, max(left, 0.0) / 1e9),
            )
        return needed <= min(allowed, left)

    def _state(self, parts: Mapping[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
        """What one copy holds."""
        written = {name: as_written(part, sharded=self._sharded_model) for name, part in parts.items()}
        shards = {name: local_part(value) for name, value in (shards_of(written) | self._own_tensors).items()}
        world = self._training.world
        return {
            "key": self._key,
            "fingerprint": fingerprint_of([self._training.models[0].module]),
            "place": (world.rank, world.size) if self.sharded else None,
            "shards": shards,
            "state": {name: part.state_dict() for name, part in written.items()} | rest,
        }

    def _write(self, parts: Mapping[str, Any], rest: dict[str, Any]) -> None:
        assert self._memory is not None
        self.wait()
        step = self._training.progress.optimizer_steps
        tensors: list[Tensor] = []
        places: dict[tuple[Any, ...], int] = {}

        def put(tensor: Tensor) -> int:
            # Tied weights are copied once.
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if not tensor.numel() or key not in places:
                places[key] = len(tensors)
                tensors.append(tensor)
            return places[key]

        structure = encode(self._state(parts, rest), put)
        kinds: list[tuple[int, list[int], str]] = []
        size = HEADER
        for tensor in tensors:
            kinds.append((size, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
            size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        text = json.dumps([structure, kinds]).encode()
        slot = self._memory.older()
        memory = slot.room(size + len(text))
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if on_gpu:
            slot.pin()
        for tensor, (start, shape, _) in zip(tensors, kinds, strict=True):
            if tensor.numel():
                flat = whole[start : start + tensor.nbytes].view(tensor.dtype)
                flat.reshape(shape).copy_(tensor.detach(), non_blocking=True)
        if not on_gpu:
            self._complete(slot, step, size, text)
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()

        def complete() -> None:
            try:
                event.synchronize()
                self._complete(slot, step, size, text)
            except BaseException as error:  # the training thread logs it
                self._error = error

        self._thread = threading.Thread(target=complete, name="pollux-memory", daemon=True)
        self._thread.start()

    def _complete(self, slot: Slot, step: int, start: int, text: bytes) -> None:
        assert self._memory is not None
        slot.complete(step, start, text)
        self._memory.shared.copied = step

    def wait(self) -> None:
        """Wait for the copy under way. Any rank may call this alone."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            logger.warning("the state could not be copied into the node's memory: %s", error)

    # -- restoring --------------------------------------------------------------------------------------------

    def newest(self, exchange: ControlExchange) -> int | None:
        """The newest step that the ranks can restore from memory; None where there is none."""
        mine = [copy.step for copy, _ in self._own()]
        newest = self._memory is not None and self._memory.tells_of(self._key)
        saved = self._memory.shared.saved if newest and self._memory is not None else 0
        answers = exchange.gather((mine, saved, newest))
        found = [set(steps) for steps, _, _ in answers]
        whole = set.intersection(*found) if self.sharded else set.union(*found)
        step = max(whole, default=None)
        if step is None or step < max(saved for _, saved, _ in answers):
            return None
        # The script has gone on to another training since this copy: the last file of this one is newer.
        return step if any(newest for _, _, newest in answers) or not self._files else None

    def restore(self, exchange: ControlExchange, step: int) -> dict[str, Any]:
        """The state of a step that `newest` has found, on every rank. Raises CheckpointError on all ranks alike."""
        state: dict[str, Any] | None = None
        trouble = ""
        try:
            for copy, content in self._own():
                if copy.step == step:
                    found = _decoded(content, copy)
                    state, self._shards = found["state"], found["shards"]
                    break
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            trouble = f"the copy of step {step} in memory cannot be read: {error}"
        answers = exchange.gather((state is not None, trouble))
        troubles = [text for _, text in answers if text]
        if troubles:
            raise CheckpointError(troubles[0])
        has = [rank for rank, (held, _) in enumerate(answers) if held]
        lacks = [rank for rank, (held, _) in enumerate(answers) if not held]
        if lacks:
            world = self._training.world
            # `hand_over` sends without waiting for receivers, who copy what they get.
            got = hand_over(state if world.rank == has[0] else None, world, lacks, source=has[0])
            state = state if got is None else got
        assert state is not None
        return state

    def load(self, name: str, part: Any, state: Any) -> None:
        """Load one part of the restored state."""
        written = as_written(part, sharded=self._sharded_model)
        if not hasattr(written, "shards"):
            written.load_state_dict(state)
            return
        shards = written.template(state)
        for key, value in shards.items():
            local_part(value).copy_(self._shards[f"{name}.{key}"])
        written.load_state_dict(state, shards)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors of this rank alone from the restored state, by their names."""
        for name, tensor in tensors.items():
            tensor.copy_(self._shards[name])

    def restored(self) -> None:
        """All parts are loaded: forget what was read."""
        self._shards = {}

    def _own(self) -> list[tuple[Copy, Any]]:
        """Copies that this rank can read and that are this training's, newest first."""
        if self._memory is None or not self.on:
            return []
        world, found = self._training.world, []
        fingerprint = fingerprint_of([self._training.models[0].module])
        for copy in self._memory.copies(self._memory.local_rank if self.sharded else 0):
            try:
                content = json.loads(copy.text)
                head = _head(content)
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            place = (world.rank, world.size) if self.sharded else None
            if head == (self._key, fingerprint, place):
                found.append((copy, content))
        return found


def _head(content: Any) -> tuple[Any, Any, Any]:
    """The key, the fingerprint and the place of a copy, without its tensors."""
    (_, pairs, _), _ = content
    named = {key: value for key, value in pairs if key in ("key", "fingerprint", "place")}
    return named["key"], named["fingerprint"], decode(named["place"], _no_tensor)


def _no_tensor(place: Any) -> Tensor:
    raise ValueError(f"expected no tensor here, got {place!r:.80}")


def _decoded(content: Any, copy: Copy) -> dict[str, Any]:
    """What a copy holds, in memory of this process. Raises ValueError."""
    structure, kinds = content
    memory = torch.frombuffer(copy.slot.mapped(), dtype=torch.uint8)

    def get(number: Any) -> Tensor:
        start, shape, name = kinds[number]
        dtype = getattr(torch, name)
        size = math.prod(shape) * dtype.itemsize
        if start < HEADER or start + size > memory.numel() or min(shape, default=0) < 0:
            raise ValueError(f"a tensor of {size} bytes at {start} lies outside of the copy")
        # A copy: optimizers keep what they load, and the slot is written again.
        return memory[start : start + size].clone().view(dtype).reshape(shape)

    found: dict[str, Any] = decode(structure, get)
    return found
