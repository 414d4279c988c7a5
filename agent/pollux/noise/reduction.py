"""Two ranks or more: see gradients before and after DDP's own reduction.

DDP calls a communication hook in Python for every bucket of every step, and its futures return through the interpreter;
this costs 1 % of a short step without a measurement. Instead, such a step pays for one hook on one parameter: the
parameter whose gradient came last tells the timer. In a measured step this hook also asks the autograd engine for a
call at the end of the backward pass. The engine calls in the order of asking, and DDP asks later, when its last bucket
is full. At the first call, `.grad` still holds this rank's own gradient (DDP reduces copies). A second call, asked for
in the first, sees DDP's result.

`gradient_as_bucket_view` reduces `.grad` in place, and a user's own communication hook need not give a mean: nothing is
measured there. Nor is the first step of `static_graph`, in which DDP asks in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pollux.noise.pair_norms import PairNorms
from pollux.noise.precondition import GradientNorms
from pollux.noise.samples import Squares
from pollux.ranks.torch_internals import call_after_backward


class ReductionEstimator:
    """n = K gradients of one reduction, seen by `rank` of the `ranks`."""

    parts = (False, True)
    """The mean gradient is the same on all ranks: each measures its share of the parameters."""

    def __init__(
        self,
        norms: GradientNorms,
        params: Sequence[torch.nn.Parameter],
        *,
        rank: int,
        ranks: int,
        reduces: Callable[[], bool],
        varies: bool = False,
        on_ready: Callable[[], None],
    ) -> None:
        """`reduces` tells, in a pass, whether it ends in a reduction.

        `varies`: a pass need not use all parameters, nor the same ones on all ranks (`find_unused_parameters`).
        """
        self._params = [p for p in params if p.requires_grad]
        self._pair = PairNorms(norms, self._params, rank=rank, ranks=ranks)
        self._on_ready = on_ready
        self._reduces = reduces
        self._varies = varies
        self.reductions = 0
        """Reductions since the step began; only the first one takes the ranks' own gradients in."""
        self._handles: list[Any] = []
        self._open = self._measuring = self._asked = False
        self._reached: torch.nn.Parameter | None = None
        self._found: tuple[Squares, Squares] | None = None
        self._watch(self._params)

    def begin(self, measuring: bool, *, first: bool = True) -> None:
        """Begin the synchronising pass; `measuring` is equal on all ranks.

        `first`: no earlier pass of the step was reduced.
        """
        self._open, self._measuring, self._asked = True, measuring, False
        self.reductions = 0 if first else self.reductions
        self._reached, self._found = None, None
        if measuring and self._varies and len(self._handles) < len(self._params):
            # A rank that does not use its watched parameter this time would miss a sample that the other ranks read.
            self._watch(self._params)

    def passed(self) -> None:
        """End the pass; watch the parameter whose gradient came last."""
        if not self._open:
            return
        self._open = False
        if self._reached is None:
            self._watch(self._params)  # not used this time: look for the last one again
        elif len(self._handles) > 1:
            self._watch([self._reached])

    def end(self) -> tuple[Squares, Squares] | None:
        """Return |g_b|^2 of this rank and its part of |g_B|^2; None: not measured."""
        found, self._found, self._measuring = self._found, None, False
        return found

    def abandon(self) -> None:
        """Forget a pass that failed."""
        self._open = self._measuring = False
        self._found = None
        self._pair.forget()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._watch([])

    def _watch(self, params: Sequence[torch.nn.Parameter]) -> None:
        for handle in self._handles:
            handle.remove()
        hook = self._accumulated
        self._handles = [p.register_post_accumulate_grad_hook(hook) for p in params]  # type: ignore[no-untyped-call]

    def _accumulated(self, param: Tensor) -> None:
        """Note a watched parameter's gradient; the last call is the last gradient."""
        if not self._open:
            return
        self._reached = param  # type: ignore[assignment]
        self._on_ready()
        if self._measuring and not self._asked and self._reduces():
            self._asked = True
            self.reductions += 1
            call_after_backward(self._before_reduction)

    def _before_reduction(self) -> None:
        # Nested passes (checkpointed activations) end here, too: the last call sees all gradients.
        self._asked = False
        local = _detached(self._pair.first)
        call_after_backward(lambda: self._after_reduction(local))

    def _after_reduction(self, local: Squares) -> None:
        self._found = (local, _detached(self._pair.second))


def _detached(measure: Callable[[], Squares]) -> Squares:
    """Measure without a graph, even if gradients have one (`create_graph`)."""
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)  # as `no_grad`, which costs three times as much in a step
    try:
        return measure()
    finally:
        torch.set_grad_enabled(before)
