"""Two ranks or more, DDP as it is: gradients are seen before and after its reduction, without a hook of its own.

A communication hook in Python is called for every bucket of every step, and its futures come back through the
interpreter; that costs 1 % of a short step where nothing is measured. Here one hook on one parameter is all that
such a step pays for: on the one whose gradient was the last to be there, it tells the timer. In a measured step it
also asks the autograd engine to call back at the end of the backward pass. The engine calls in the order of asking,
and DDP asks later, when its last bucket is full: so `.grad` still holds this rank's own gradient at the first call
(DDP reduces copies), and at a second, asked for in the first, what DDP has put there.

Not for `gradient_as_bucket_view`, where `.grad` is reduced in place, nor for `static_graph`, whose first step asks in
another order, nor for a hook of the user's: these have `HookEstimator`.
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
    """n = K gradients of one reduction, seen at the ends of the backward pass by `rank` of the `ranks`."""

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
        """`reduces` says, in a pass, whether it ends in a reduction: not under `no_sync`.

        `varies`: a pass need not use all parameters, nor the same ones on all ranks (`find_unused_parameters`).
        """
        self._params = [p for p in params if p.requires_grad]
        self._pair = PairNorms(norms, self._params, rank=rank, ranks=ranks)
        self._on_ready = on_ready
        self._reduces = reduces
        self._varies = varies
        self.reductions = 0
        """Since the step began; what is seen is the ranks' own gradients only at the first."""
        self._handles: list[Any] = []
        self._open = self._measuring = self._asked = False
        self._reached: torch.nn.Parameter | None = None
        self._found: tuple[Squares, Squares] | None = None
        self._watch(self._params)

    def begin(self, measuring: bool, *, first: bool = True) -> None:
        """Before the synchronising pass: whether this one is measured (the same answer on every rank).

        `first`: none of the step's passes has been reduced before.
        """
        self._open, self._measuring, self._asked = True, measuring, False
        self.reductions = 0 if first else self.reductions
        self._reached, self._found = None, None
        if measuring and self._varies and len(self._handles) < len(self._params):
            # A rank whose last one is not used this time would be without a sample that the others read together.
            self._watch(self._params)

    def passed(self) -> None:
        """After it: the parameter whose gradient came last is the one to watch from now on."""
        if not self._open:
            return
        self._open = False
        if self._reached is None:
            self._watch(self._params)  # it was not used this time: look for the last one anew
        elif len(self._handles) > 1:
            self._watch([self._reached])

    def end(self) -> tuple[Squares, Squares] | None:
        """After it: |g_b|^2 of this rank, and its part of |g_B|^2; None where nothing was measured."""
        found, self._found, self._measuring = self._found, None, False
        return found

    def abandon(self) -> None:
        """The pass failed half-way."""
        self._open = self._measuring = False
        self._found = None
        self._pair.forget()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        self._watch([])

    def _watch(self, params: Sequence[torch.nn.Parameter]) -> None:
        for handle in self._handles:
            handle.remove()
        hook = self._accumulated
        self._handles = [p.register_post_accumulate_grad_hook(hook) for p in params]  # type: ignore[no-untyped-call]

    def _accumulated(self, param: Tensor) -> None:
        """A watched parameter's gradient is there: the last one's call is the last."""
        if not self._open:
            return
        self._reached = param  # type: ignore[assignment]
        self._on_ready()
        if self._measuring and not self._asked and self._reduces():
            self._asked = True
            self.reductions += 1
            call_after_backward(self._before_reduction)

    def _before_reduction(self) -> None:
        # Where passes are nested (checkpointed activations) the inner ones end here too: the last call holds all.
        self._asked = False
        local = _detached(self._pair.first)
        call_after_backward(lambda: self._after_reduction(local))

    def _after_reduction(self, local: Squares) -> None:
        self._found = (local, _detached(self._pair.second))


def _detached(measure: Callable[[], Squares]) -> Squares:
    """Without a graph, of gradients that have one (`create_graph`) too."""
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)  # as `no_grad`, which costs three times as much in a step
    try:
        return measure()
    finally:
        torch.set_grad_enabled(before)
