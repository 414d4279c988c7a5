"""Sources of the gradients that a noise scale compares.

- Two ranks or more: each rank's accumulated gradient before DDP's reduction, and the mean after it: n = K,
  b = m (s + 1). `ReductionEstimator` sees both at the ends of the backward pass. `HookEstimator`, a communication
  hook, serves where the user has a hook or `.grad` is reduced in place.
- One rank that accumulates: the micro-batches' gradients are compared with their mean (`AccumulationEstimator`):
  n = s + 1, b = m.
- One rank, one micro-batch: successive steps' gradients are differenced (`DifferencedEstimator`), as a last resort.
  The drift of the true gradient between two steps counts as noise: `var` is too large by |drift|^2 / 2 and `sqr` too
  small by half of it.

Each puts two numbers per parameter group into a buffer on the device (`samples.py`), which is read every few seconds.
Nothing waits for the device in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pollux.noise.precondition import GradientNorms
from pollux.noise.samples import Squares, added
from pollux.noise.uncompressed_norms import UncompressedSums
from pollux.ranks.sharding import local_part
from pollux.ranks.torch_internals import foreach_add_

CommunicationHook = tuple[object, Callable[[Any, Any], torch.futures.Future[Tensor]]]
"""State and function, as for `DistributedDataParallel.register_comm_hook`."""


class HookEstimator:
    """Two ranks or more: a DDP communication hook.

    `.grad` is bit for bit what DDP without a hook gives: each bucket is multiplied by 1/K, then summed. Steps that are
    not measured cost nothing more.

    A user's own hook (`inner`: state and function, for instance fp16 compression or PowerSGD) reduces in its place. Its
    result need not be the mean of its input, so a measured step sums the gradients as well.
    """

    parts = (False, False)

    def __init__(
        self,
        norms: GradientNorms,
        world_size: int,
        *,
        on_ready: Callable[[], None],
        inner: CommunicationHook | None = None,
    ) -> None:
        self._norms = norms
        self._size = world_size
        self._on_ready = on_ready
        self._inner = inner
        self._beside = None if inner is None else UncompressedSums(norms, world_size)
        self._measuring = False
        self.reductions = 0
        """Reductions since the step began; only the first one takes the ranks' own gradients in."""
        self._local: list[Tensor] = []
        self._total: list[Tensor] = []
        self._reduced: list[tuple[list[Tensor], list[Tensor]]] = []
        """Parameters and gradients of the buckets."""

    def begin(self, measuring: bool, *, first: bool = True) -> None:
        """Begin the synchronising pass; `measuring` is equal on all ranks.

        `first`: no earlier pass of the step was reduced.
        """
        self._measuring = measuring
        self.reductions = 0 if first else self.reductions
        self._local, self._total, self._reduced = [], [], []

    def end(self) -> tuple[Squares, Squares] | None:
        """Return |g_b|^2 of this rank and |g_B|^2; None without a measurement."""
        if not self._measuring:
            return None
        self._measuring = False
        # The buckets still hold the reduced gradients. A callback of each bucket's reduction would contend with the
        # backward pass for the interpreter, so they are measured here.
        totals = self._total + [self._norms.of(params, grads) for params, grads in self._reduced]
        local, self._local, self._total, self._reduced = self._local, [], [], []
        if not totals:
            return None
        return added(torch.stack(local).sum(0)), added(torch.stack(totals).sum(0))

    def hook(self, group: dist.ProcessGroup | None, bucket: Any) -> torch.futures.Future[Tensor]:
        """The hook for `DistributedDataParallel.register_comm_hook`."""
        if bucket.is_last():
            self._on_ready()
            self.reductions += 1
        if self._inner is not None:
            if self._measuring and self._beside is not None:
                local, total = self._beside.measure(bucket)
                self._local.append(local)
                self._total.append(total)
            state, inner = self._inner
            return inner(state, bucket)
        buffer = bucket.buffer()
        if self._measuring:
            params, grads = bucket.parameters(), bucket.gradients()
            self._local.append(self._norms.of(params, grads))
            self._reduced.append((params, grads))
        buffer.mul_(1.0 / self._size)
        future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
        answer: torch.futures.Future[Tensor] = future.then(_first)
        return answer

    # DDP compares a hook's annotations with classes; postponed annotations are strings, so the hook has none.
    hook.__annotations__.clear()


def _first(finished: torch.futures.Future[list[Tensor]]) -> Tensor:
    return finished.value()[0]


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
        self._previous: list[tuple[Tensor, Tensor]] | None = None

    def end(self, unscale: Tensor | None) -> tuple[Squares, Squares] | None:
        """Return mean |g_b|^2 and |g_B|^2 of the kept gradient and this one, and forget the kept one.

        Where none is kept, keep this one; None then, and where the two do not match. `unscale` is AMP's inverse loss
        scale.
        """
        previous, self._previous = self._previous, None
        if previous is None:
            seen = [(p, p.grad) for p in self._params if p.grad is not None]
            self._previous = [
                (p, local_part(g) * unscale if unscale is not None else local_part(g.detach()).clone())
                for p, g in seen
            ]
            return None
        params = [p for p, _ in previous]
        if not params or any(p.grad is None for p in params):
            return None
        old = [g for _, g in previous]
        new = [
            local_part(p.grad) * unscale if unscale is not None else local_part(p.grad.detach())
            for p in params
            if p.grad is not None
        ]
        local = (self._norms.of(params, old) + self._norms.of(params, new)) / 2
        foreach_add_(old, new)
        return added(local), added(self._norms.of(params, old) / 4)

    @property
    def holding(self) -> bool:
        return self._previous is not None

    def forget(self) -> None:
        self._previous = None
