"""Sources of the gradients that a noise scale compares.

- Two ranks or more: each rank's accumulated gradient before DDP's reduction, and the mean after it: n = K,
  b = m (s + 1). `ReductionEstimator` (`reduction.py`) sees both at the ends of the backward pass.
- One rank that accumulates: the micro-batches' gradients are compared with their mean (`AccumulationEstimator`):
  n = s + 1, b = m.
- One rank, one micro-batch: successive steps' gradients are differenced (`DifferencedEstimator`), as a last resort.
  The drift of the true gradient between two steps counts as noise: `var` is too large by |drift|^2 / 2 and `sqr` too
  small by half of it.

Each puts its squared norms into a buffer on the device (`samples.py`), which is read every few seconds. Nothing waits
for the device in between. A measured step takes the same number of operations however many parameters there are: each
works on a list of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pollux.noise.precondition import GradientNorms
from pollux.noise.samples import Squares, added
from pollux.ranks.sharding import local_part
from pollux.ranks.torch_internals import foreach_add_, foreach_div_, foreach_mul


class AccumulationEstimator:
    """One rank, s >= 1: each micro-batch's own gradient against their mean.

    On a measured step this sets `.grad` aside before each backward pass and adds it afterwards, in autograd's order:
    the user sees the same sum, without a copy of the gradient.
    """

    def __init__(self, norms: GradientNorms, params: Sequence[torch.nn.Parameter]) -> None:
        self._norms = norms
        self._params = list(params)
        self._aside: list[Tensor | None] | None = None
        self._local: Tensor | None = None
        self._passes = 0

    def begin_group(self) -> None:
        self._local, self._passes = None, 0

    def before_backward(self) -> None:
        """Set `.grad` aside."""
        self._aside = [p.grad for p in self._params]
        for p in self._params:
            p.grad = None

    def after_backward(self, share: float) -> None:
        """Measure the new gradient, of a loss times `share`, and restore the sum."""
        assert self._aside is not None
        grads = [p.grad for p in self._params]
        seen = [(p, g) for p, g in zip(self._params, grads, strict=True) if g is not None]
        if seen:
            norm = self._norms.of([p for p, _ in seen], [g for _, g in seen]) / share**2
            self._local = norm if self._local is None else self._local + norm
        self._passes += 1
        self._put_back(grads)

    def _put_back(self, grads: Sequence[Tensor | None]) -> None:
        assert self._aside is not None
        both = [(a, g) for a, g in zip(self._aside, grads, strict=True) if a is not None and g is not None]
        if both:
            foreach_add_([a for a, _ in both], [g for _, g in both])
        for p, aside, grad in zip(self._params, self._aside, grads, strict=True):
            p.grad = grad if aside is None else aside
        self._aside = None

    def zeroed(self) -> None:
        """Drop the gradients set aside: the script zeroed its own in a pass."""
        if self._aside is not None:
            self._aside = [None] * len(self._params)

    def abandon(self) -> None:
        """Restore `.grad` after a pass that failed."""
        if self._aside is not None:
            self._put_back([p.grad for p in self._params])

    def end(self) -> tuple[Squares, Squares] | None:
        """Return the mean |g_b|^2 and |g_B|^2, after the last pass."""
        if self._local is None or self._passes < 2:
            return None
        seen = [(p, p.grad) for p in self._params if p.grad is not None]
        total = self._norms.of([p for p, _ in seen], [g for _, g in seen])
        return added(self._local / self._passes), added(total)


class DifferencedEstimator:
    """One rank, one pass per step: successive steps' gradients. Holds one copy of the gradient."""

    def __init__(self, norms: GradientNorms, params: Sequence[torch.nn.Parameter]) -> None:
        self._norms = norms
        self._params = list(params)
        self.kept: list[tuple[Tensor, Tensor]] | None = None
        """The parameters and gradients of the step before; None: the next one begins a pair."""

    @torch.no_grad()
    def end(self, unscale: Tensor | None) -> tuple[Squares, Squares] | None:
        """Return mean |g_b|^2 and |g_B|^2 of the kept gradient and this one, and forget the kept one.

        Where none is kept, keep this one; None then, and where the two do not match. `unscale` is AMP's inverse loss
        scale.
        """
        previous, self.kept = self.kept, None
        if previous is None:
            seen = [(p, local_part(p.grad)) for p in self._params if p.grad is not None]
            if seen:
                copies = foreach_mul([grad for _, grad in seen], 1.0 if unscale is None else unscale)
                self.kept = [(p, copy) for (p, _), copy in zip(seen, copies, strict=True)]
            return None
        params = [p for p, _ in previous]
        new = [local_part(p.grad) for p in params if p.grad is not None]
        if len(new) < len(params):
            return None
        old = [g for _, g in previous]
        before, now = self._norms.of(params, old), self._norms.of(params, new)
        if unscale is not None:
            # In the units of this step's scaled gradients, which are only read.
            foreach_div_(old, unscale)
            now = now * unscale**2
        foreach_add_(old, new)
        both = self._norms.of(params, old)
        return added((before + now) / 2), added((both if unscale is None else both * unscale**2) / 4)

    def forget(self) -> None:
        self.kept = None
