"""Notice parameters that are not finite, without a wait for the device."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from pollux.ranks.arrival import Arrival
from pollux.ranks.sharding import local_part
from pollux.ranks.torch_internals import norms_of

logger = logging.getLogger("pollux")


class FiniteCheck:
    """Looks at this rank's parameters now and then, and warns once that the training has failed."""

    def __init__(self) -> None:
        self.looks: tuple[Arrival, int] | None = None
        """The result of the last look, until it is read, and the optimizer steps before it."""
        self._failed = False

    def look(self, model: torch.nn.Module, step: int) -> None:
        """Begin to look at the parameters after optimizer step `step`. `tell` reads what was found."""
        if not self._failed:
            self.tell(waits=True)  # an earlier look, whose result is long there
            self.looks = Arrival(all_finite(model)), step
            self.tell()

    def tell(self, *, waits: bool = False) -> None:
        """Warn where the last look has found numbers that are not finite. `waits`: for its result."""
        if self.looks is None or not (waits or self.looks[0].here):
            return
        (found, step), self.looks = self.looks, None
        if not bool(found.read()) and not self._failed:
            self._failed = True
            logger.error(
                "the model's parameters are not finite after optimizer step %d: the training has failed. Look for the "
                "first loss that is not finite, and leave such a batch out by job.skip()",
                step,
            )


@torch.no_grad()
def all_finite(model: torch.nn.Module) -> Tensor:
    """Return on the device whether all of this rank's parameters are finite, by a few operations for all of them."""
    parts = [local_part(p) for p in model.parameters() if p.is_floating_point()]
    # A sum of magnitudes is finite where each of them is. No release of torch sums floats of 8 bits.
    wide = [part if part.itemsize > 1 else part.float() for part in parts if part.numel()]
    if not wide:
        return torch.ones((), dtype=torch.bool)
    return norms_of(wide, 1).isfinite().all()
