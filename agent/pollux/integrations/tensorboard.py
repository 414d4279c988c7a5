"""TensorBoard scalars of a job, written by rank 0 as it trains.

job = pollux.attach(model, optimizer)
loader = job.loader(...)
board = Board(job, "runs/mine")
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pollux.errors import PolluxAgentError
from pollux.integrations.scalars import EveryStep

if TYPE_CHECKING:
    from pollux.loop.session import Job


class Board(EveryStep):
    """Writes `scalars(job)` after every `every`-th optimizer step.

    `to` is a directory or your own SummaryWriter. In a directory, the board removes the points that an earlier attempt
    wrote after the checkpoint from which this attempt started, so that no part of a curve appears twice. Make the board
    after `job.loader`. Raises PolluxAgentError if TensorBoard is missing.
    """

    def __init__(self, job: Job, to: str | os.PathLike[str] | Any, *, every: int = 10) -> None:
        super().__init__(job, every)
        self._own = isinstance(to, str | os.PathLike)
        self.writer: Any = None
        """The SummaryWriter; None on ranks other than 0."""
        if job.is_main:
            self.writer = _writer(os.fspath(to), self._step + 1) if self._own else to

    def _write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write no more; a writer that was passed in stays open."""
        super().close()
        if self.writer is not None and self._own:
            self.writer.close()


def _writer(directory: str, purge_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - needs the extra
    except ImportError as error:
        raise PolluxAgentError(
            "TensorBoard is not installed here: install it, or this package's extra `tensorboard`"
        ) from error
    return SummaryWriter(directory, purge_step=purge_step)
