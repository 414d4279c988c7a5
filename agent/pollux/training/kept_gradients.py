"""Notice gradients that a script changes between two passes of a step.

The agent ignores `optimizer.zero_grad()` there. It cannot ignore `model.zero_grad()`, or a loss of another model that
reaches the parameters. Without this check the step would be wrong, and nobody would notice.
"""

from __future__ import annotations

from enum import Enum

from torch import Tensor
from torch.optim import Optimizer

from pollux.ranks.sharding import local_part


class Change(Enum):
    """The change of the gradients since the pass before."""

    NONE = "as they were"
    ZEROED = "gone, or zero"
    OTHER = "changed"


class KeptGradients:
    """One gradient of an optimizer, from the end of a pass to the next one.

    Tensors count the writes to them, so no element is read unless there was one.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._param: Tensor | None = None
        self._grad: Tensor | None = None
        self._version = 0

    def note(self) -> None:
        """Note the first gradient as it is at a pass's end."""
        if self._param is None or self._param.grad is None:
            params = (p for group in self._optimizer.param_groups for p in group["params"])
            self._param = next((p for p in params if p.grad is not None), None)
        self._grad = None if self._param is None else self._param.grad
        self._version = 0 if self._grad is None else self._grad._version

    def mark(self, *, first: bool) -> tuple[Tensor | None, int]:
        """Return what tells later whether a backward pass has come. `first`: no pass of the step is over."""
        if first:
            self._grad = None
        grad = None if self._param is None else self._param.grad
        return grad, 0 if grad is None else grad._version

    def same(self, mark: tuple[Tensor | None, int]) -> bool:
        """Tell whether no gradient has come since `mark`."""
        grad, version = mark
        if grad is None or self._param is None:
            return all(p.grad is None for group in self._optimizer.param_groups for p in group["params"])
        return self._param.grad is grad and grad._version == version

    def change(self) -> Change:
        """Tell what has happened to the noted gradient."""
        noted, self._grad = self._grad, None
        if noted is None or self._param is None:
            return Change.NONE
        grad = self._param.grad
        if grad is noted and grad._version == self._version:
            return Change.NONE
        return Change.OTHER if grad is not None and bool(local_part(grad).any()) else Change.ZEROED
