"""Bound one GPU's batch by the GPU's memory.

While memory suffices, the batch grows no further than the peak so far lets expect to fit. Each time a batch has run out
of memory, half of it becomes the bound. Checkpoints hold it, and the scheduler sees it in the report's limits. If a
rank has to exit before the next checkpoint, it writes the bound to a file beside the checkpoints.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pollux.errors import BatchError
from pollux.goodput import BatchLimits
from pollux.private_folder import read_private, write_durably

logger = logging.getLogger("pollux")

FILE = "memory-bounds.json"

USABLE = 0.9
"""Share of the free memory that a larger batch may be expected to fill: the allocator leaves gaps."""

_PHRASES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that a device, or the host, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)


class MemoryBounds:
    """The largest batch per GPU, by type of GPU, where one has failed. A part of the checkpoint."""

    def __init__(self, device: torch.device, directory: Path | None, gpu_type: str = "") -> None:
        self.gpu_type = gpu_type or device.type
        self._device = device
        self.directory = directory
        self._bounds: dict[str, int] = {}
        self._allowed: int | None = None
        """The most examples per pass that the user allows; None before the loader is made."""

    @property
    def bound(self) -> int | None:
        """The most examples per pass on this rank's type of GPU. None where none has failed."""
        return self._bounds.get(self.gpu_type)

    def most_within(self, limits: BatchLimits, local_batch: int) -> int:
        """The most examples per pass that `limits` allow, and this GPU is expected to hold.

        `local_batch` examples have been trained. All memory in use is taken to grow with the batch, so the estimate is
        too low rather than too high. A device that does not count its memory (a CPU) sets no bound.
        """
        if self._device.type != "cuda":
            return limits.local_max
        free, _ = torch.cuda.mem_get_info(self._device)
        available = free + torch.cuda.memory_reserved(self._device)
        expected = int(
            local_batch * USABLE * available / max(torch.cuda.max_memory_allocated(self._device), 1)
        )
        return min(limits.local_max, max(expected, local_batch))

    def within(self, limits: BatchLimits, gather: Callable[[object], list[object]]) -> BatchLimits:
        """`limits` with the lowest bound that any rank knows; every rank calls it.

        Raises BatchError where the user's least batch per GPU is above it.
        """
        self._read()
        self._allowed = limits.local_max
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

    def by_type(self, limits: BatchLimits) -> dict[str, int]:
        """The most examples per pass by type of GPU; "": on types without a bound. Empty where none has one."""
        bounds = self.state_dict()
        if not bounds:
            return bounds
        # Without a bound here, `limits` grow by what has been trained, on other types too.
        most = limits.local_max if self.gpu_type not in bounds or self._allowed is None else self._allowed
        return {"": most} | {gpu_type: min(most, bound) for gpu_type, bound in bounds.items()}

    def lower(self, bound: int) -> None:
        """Keep a new bound for this rank's type of GPU, in the file too."""
        self._bounds[self.gpu_type] = bound
        if self.directory is None:
            return
        self._read()
        text = json.dumps(self.state_dict()).encode()
        try:
            # Ranks with equal batches run out of memory together, and are ended at the first one's exit.
            mark = f".{secrets.token_hex(4)}"
            write_durably(self.directory / FILE, lambda file: file.write(text), mark=mark)
        except OSError as error:
            logger.error("the bound on the batch per GPU could not be kept in %s: %s", self.directory, error)

    def _read(self) -> None:
        """Read the bound of a rank that had to exit before the next checkpoint."""
        if self.directory is None:
            return
        try:
            self.load_state_dict(json.loads(read_private(self.directory / FILE)))
        except FileNotFoundError:
            return
        except (OSError, ValueError, AttributeError, TypeError) as error:
            logger.warning("ignored %s: %s", self.directory / FILE, error)

    def state_dict(self) -> dict[str, int]:
        return dict(self._bounds)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add the bounds of `state`. Of two for the same type the lower one counts."""
        for gpu_type, bound in state.items():
            if isinstance(bound, int) and bound > 0:
                self._bounds[gpu_type] = min(bound, self._bounds.get(gpu_type, bound))
