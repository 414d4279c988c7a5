"""Notice weights that a script loads over those of a restored checkpoint."""

from __future__ import annotations

import torch

from pollux.errors import LoopMistake
from pollux.loop.divergence import bit_sums
from pollux.ranks.sharding import local_part


class RestoredParameters:
    """A model's parameters as `attach` restored them, until the loop begins.

    Tensors count the writes to them, so no element is read a second time unless there was one.
    """

    def __init__(self, module: torch.nn.Module, step: int) -> None:
        self._step = step
        self._params = dict(module.named_parameters())
        self._versions = self._counts()
        self._sums = self._checksums()

    def check(self) -> None:
        """Raise LoopMistake where a parameter is another one now."""
        if self._counts() == self._versions:
            return
        now = zip(self._params, self._checksums().tolist(), self._sums.tolist(), strict=True)
        changed = next((name for name, mine, theirs in now if mine != theirs), None)
        if changed is not None:
            raise LoopMistake(
                f"{changed} was changed between `attach`, which restored optimizer step {self._step}, and the loop: "
                "the training would go on from other weights than its checkpoint's. Load weights before `attach`"
            )

    def _counts(self) -> list[int]:
        return [p._version for p in self._params.values()]

    def _checksums(self) -> torch.Tensor:
        return bit_sums([local_part(param.detach()) for param in self._params.values()])
