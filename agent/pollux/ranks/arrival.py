"""Values on their way from a device to the host. Nothing waits for the work that was queued after them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Arrival:
    """A copy to the host, under way. On a CPU it is there at once."""

    def __init__(self, values: Tensor) -> None:
        self._event: Any = None
        self._host = values
        if values.is_cuda:
            # From pinned memory: a copy into pageable memory would wait for all work that is queued.
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(values.device))

    @property
    def here(self) -> bool:
        return self._event is None or bool(self._event.query())

    def read(self) -> Tensor:
        """Return the values on the host. Waits for them where they are not there yet."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
