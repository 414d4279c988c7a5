"""Running out of memory, caught once per type of GPU and turned into a bound on the batch of one GPU.

The bound is half of what failed. It stays with the checkpoints, and the scheduler sees it in the report's limits.

- One rank: the step is taken again from its first sample, in smaller passes. Nothing of it was used yet, so no sample
  is lost or repeated.
- Several ranks: the others wait in an all-reduce that the failed rank cannot join in the same order, so the processes
  start again: the bound is written beside the checkpoints, the rank exits with RETRY_STATUS, and `pollux run` (or
  torchrun with --max-restarts) starts all ranks from the newest checkpoint. Model and data both go back to it, so that
  here too each sample counts once. Without a checkpoint directory the error is raised as it came.

Memory that runs out at the bound is an error: the bound cannot be what is wrong.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from pollux.checkpoint.private_folder import write_durably
from pollux.errors import RETRY_STATUS, BatchError, PolluxAgentError
from pollux.goodput import BatchLimits

if TYPE_CHECKING:
    from pollux.loop.stepper import Stepper

logger = logging.getLogger("pollux")

FILE = "memory-bounds.json"

_PHRASES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


class OutOfMemory(PolluxAgentError):
    """A rank ran out of GPU memory; started again, all ranks use a smaller batch per GPU."""

    exit_status = RETRY_STATUS


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that a device, or the host, has no memory left for what was asked."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)


class MemoryBounds:
    """The largest batch per GPU, by type of GPU, where one has failed. A part of the checkpoint."""

    def __init__(self, device: torch.device, directory: Path | None, gpu_type: str = "") -> None:
        self.gpu_type = gpu_type or device.type
        self._directory = directory
        self._bounds: dict[str, int] = {}

    @property
    def bound(self) -> int | None:
        """The most examples per pass on this rank's type of GPU; None where none has failed."""
        return self._bounds.get(self.gpu_type)

    def within(self, limits: BatchLimits, gather: Callable[[object], list[object]]) -> BatchLimits:
        """`limits` with the lowest bound that any rank knows; every rank calls it.

        Raises BatchError where the user's least batch per GPU is above it.
        """
        self._read()
        known = [b for b in gather(self.bound) if isinstance(b, int)]
        if not known:
            return limits
        bound = min(known)
        self._bounds[self.gpu_type] = bound
        if bound < limits.local_min:
            raise BatchError(
                f"{2 * bound} examples per GPU did not fit into the memory of {self.gpu_type}, and per_gpu allows no "
                f"fewer than {limits.local_min}: lower it to {bound} or less"
            )
        return replace(limits, local_max=min(limits.local_max, bound))

    def caught(self, error: BaseException, stepper: Stepper) -> bool:
        """A pass of `stepper` has failed with `error`. True: its step will be taken again, in smaller passes.

        Raises OutOfMemory where all ranks have to start again. False: the error is nothing that a bound could mend.
        """
        if not is_out_of_memory(error):
            return False
        if stepper.failed:
            return True  # another model's pass over the same batch, which is given up already
        if stepper.group is None or self.bound is not None:
            return False
        failed, limits = stepper.group.local_batch, stepper.limits
        bound = failed // 2
        if bound < limits.local_min:
            return False
        # One rank that others have left is wrapped still, and a wrapper's pass cannot be broken off half-way.
        wrapped = isinstance(stepper.trained_models[0].model, DistributedDataParallel)
        alone = not stepper.meter.distributed and not wrapped
        if not alone and self._directory is None:
            return False
        self._bounds[self.gpu_type] = bound
        self._write()
        message = f"{failed} examples per GPU do not fit into the memory of {self.gpu_type}: {bound} at most from here"
        if not alone:
            raise OutOfMemory(f"{message}; all ranks start again from the newest checkpoint") from error
        logger.warning("%s; the step is taken again", message)
        stepper.retry(replace(limits, local_max=min(limits.local_max, bound)))
        return True

    def _read(self) -> None:
        """Take in what a rank has left that had to exit before the next checkpoint."""
        if self._directory is None:
            return
        try:
            self.load_state_dict(json.loads((self._directory / FILE).read_text()))
        except FileNotFoundError:
            return
        except (OSError, ValueError, AttributeError, TypeError) as error:
            logger.warning("%s passed over: %s", self._directory / FILE, error)

    def _write(self) -> None:
        if self._directory is None:
            return
        self._read()
        text = json.dumps(self.state_dict()).encode()
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Ranks with equal batches run out of memory together, and are ended at the first one's exit.
            mark = f".{secrets.token_hex(4)}"
            write_durably(self._directory / FILE, lambda file: file.write(text), mark=mark)
        except OSError as error:
            logger.error("the bound on the batch per GPU could not be kept in %s: %s", self._directory, error)

    def state_dict(self) -> dict[str, int]:
        return dict(self._bounds)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add the bounds of `state`; of two for the same type the lower one counts."""
        for gpu_type, bound in state.items():
            if isinstance(bound, int) and bound > 0:
                self._bounds[gpu_type] = min(bound, self._bounds.get(gpu_type, bound))
