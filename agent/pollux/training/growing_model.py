"""Wrap a model for its ranks. Ranks may leave, and others may join.

A script keeps a reference to the object that it trains with, so this object has to stay the same at every number of
ranks. On one rank the wrapper only calls the model, which costs 3 to 6 us per pass. DistributedDataParallel on one rank
would keep a second copy of the gradients, and cost 38 % of a step of 0.9 ms. With further ranks the wrapper becomes a
DistributedDataParallel.

An evaluation, without gradients and in eval mode, calls the model alone. DistributedDataParallel would send rank 0's
buffers to all ranks in it, and a rank that evaluates alone would wait for the others.

For the script the wrapper behaves like the model itself: it has the model's attributes, and its state has the model's
names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from pollux.ranks.torch_internals import release, rewrap


class GrowingModel(DistributedDataParallel):
    """Call the model, and reduce its gradients unless `alone`."""

    def __init__(self, module: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)
        self.alone = True
        """No other rank trains this model."""
        self.module = module
        self.training = module.training
        # Of DistributedDataParallel, for scripts that use `no_sync`.
        self.require_backward_grad_sync, self.static_graph = True, False

    def spread(self, options: Mapping[str, Any], *, send: bool = False) -> None:
        """Go on among the ranks of the default group.

        `options` are DistributedDataParallel's. `send`: rank 0's parameters and buffers go to all ranks. Without it
        they have to be equal already.
        """
        rewrap(self, self.module, options, send=send)
        self.alone = False

    def retire(self) -> None:
        """Go on alone: the other ranks have left."""
        if not self.alone:
            release(self)
        self.alone = True

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the model."""
        module: Any = self._modules["module"]  # `self.module` costs 1 us
        if self.alone or not (module.training or torch.is_grad_enabled()):
            return module(*inputs, **options)
        return super().forward(*inputs, **options)  # type: ignore[no-untyped-call]

    # -- as the model itself ----------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise  # a copy in the making
            return getattr(self.module, name)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """The model's state, under the model's names."""
        return self.module.state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """Load the model's state, under the model's names."""
        return self.module.load_state_dict(*args, **options)

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The model's parameters, under the model's names."""
        model: torch.nn.Module = self.module
        return model.named_parameters(*args, **options)

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's buffers, under the model's names."""
        model: torch.nn.Module = self.module
        return model.named_buffers(*args, **options)

    def __getstate__(self) -> dict[str, Any]:
        if self.alone:
            return self.__dict__.copy()
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["alone"]:
            torch.nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        else:
            super().__setstate__(state)  # type: ignore[no-untyped-call]
