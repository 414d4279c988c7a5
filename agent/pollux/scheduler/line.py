"""Connect rank 0 of a Pollux job to the scheduler."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pollux.slurm_job.access import GatewayAccess
from pollux.tuning.knowledge import Introduction

if TYPE_CHECKING:
    from pollux.scheduler.publisher import Publisher


@dataclass(frozen=True)
class Receipt:
    """The checkpoint that answers an order. Its fields are those of the acknowledgement."""

    step: int
    """Its optimizer step."""
    checkpoint_s: float
    """Seconds that it took."""
    last_step_at: float
    """When the last optimizer step in it was over; POSIX seconds."""


class SchedulerLine:
    """Reports, acknowledgements and orders of one job."""

    def __init__(self, access: GatewayAccess | None) -> None:
        self.access = access
        self.publisher: Publisher | None = None
        """On rank 0 of a Pollux job."""

    def open(
        self,
        collect: Callable[[], dict[str, Any]],
        drain: Callable[[int], None],
        resize: Callable[[Mapping[str, Any] | None], None],
        introduction: Introduction | None,
    ) -> None:
        """Begin to report and to receive orders, on rank 0. See `Publisher`."""
        if self.access is not None:
            from pollux.scheduler.publisher import Publisher  # noqa: PLC0415 - loads ssl and http.client

            self.publisher = Publisher(self.access, collect, drain, resize, introduction=introduction)
            self.publisher.start()
            # A script that ends has made its last step: its last report says so.
            atexit.register(self.close)

    @property
    def connected(self) -> bool:
        """This rank talks to the scheduler."""
        return self.publisher is not None

    def wake(self) -> None:
        """Report now, because the scheduler waits for this news."""
        if self.publisher is not None:
            self.publisher.wake()

    def acknowledge(self, move: int, receipt: Receipt, stopped_at: float) -> bool:
        """Answer an order. This may take a while.

        Returns False if the move is over, or if nobody receives the answer.
        """
        if self.publisher is None:
            return False
        return self.publisher.acknowledge(move, asdict(receipt) | {"stopped_at": stopped_at})

    def close(self) -> None:
        """End the reports; the last one is sent first."""
        atexit.unregister(self.close)
        if self.publisher is not None:
            self.publisher.close()
