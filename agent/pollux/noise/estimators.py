"""Where the gradients that a noise scale compares come from.

- Two ranks or more: each rank's accumulated gradient before DDP's reduction, and the mean after it: n = K,
  b = m (s + 1). Seen from the two ends of the backward pass (`ReductionEstimator`), or by a communication hook, where
  there is one of the user's or `.grad` is reduced in place (`HookEstimator`).
- One rank that accumulates: the micro-batches' gradients are compared with their mean (`AccumulationEstimator`):
  n = s + 1, b = m.
- One rank, one micro-batch: successive steps' gradients are differenced (`DifferencedEstimator`), a last resort: the
  drift of the true gradient between two steps counts as noise, so that `var` is too large by |drift|^2 / 2 and `sqr`
  too small by half of it.

All of them give two numbers per parameter group into a buffer on the device (`samples.py`), which is read back every
few seconds; nothing waits for the device in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pollux.noise.bucket_norms import BucketNorms, Measure
from pollux.noise.precondition import GradientNorms
from pollux.noise.samples import Squares, added
from pollux.noise.uncompressed_norms import UncompressedSums
from pollux.ranks.sharding import local_part
from pollux.ranks.torch_internals import foreach_add_

CommunicationHook = tuple[object, Callable[[Any, Any], torch.futures.Future[Tensor]]]
"""As `DistributedDataParallel.register_comm_hook` takes it: its state, and the function."""


class HookEstimator:
    """Two ranks or more: the DDP communication hook, where `ReductionEstimator` cannot be.

    `.grad` afterwards is bit for bit what DDP without a hook gives: each bucket is multiplied by 1/K, then summed. On
    steps that are not measured nothing else happens.

    A user's own hook (`inner`: state and function, fp16 compression or PowerSGD say) does the reducing in its place.
    What it returns need not be the mean of what went in, so a measured step adds the gradients up beside it too.
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
        self._buckets = BucketNorms(norms)
        self._size = world_size
        self._on_ready = on_ready
        self._inner = inner
        self._beside = None if inner is None else UncompressedSums(norms, world_size)
        self._measuring = False
        self.reductions = 0
        """Since the step began; what is seen is the ranks' own gradients only at the first."""
        self._local: list[Tensor] = []
        self._total: list[Tensor] = []
        self._reduced: list[tuple[Measure, Tensor]] = []

    def begin(self, measuring: bool, *, first: bool = True) -> None:
        """Before the synchronising pass: whether this one is measured (the same answer on every rank).

        `first`: none of the step's passes has been reduced before.
        """
        self._measuring = measuring
        self.reductions = 0 if first else self.reductions
        self._local, self._total, self._reduced = [], [], []
        self._buckets.begin()

    def end(self) -> tuple[Squares, Squares] | None:
        """After it: |g_b|^2 of this rank, and |g_B|^2; None where nothing was measured."""
        if not self._measuring:
            return None
        self._measuring = False
        # The buckets still hold what was reduced: measured here, and not in a callback of each bucket's reduction, for
        # that would contend with the backward pass for the interpreter.
        totals = self._total + [measure(buffer) for measure, buffer in self._reduced]
        local, self._local, self._total, self._reduced = self._local, [], [], []
        if not totals:
            return None
        return added(torch.stack(local).sum(0)), added(torch.stack(totals).sum(0))

    def hook(self, group: dist.ProcessGroup | None, bucket: Any) -> torch.futures.Future[Tensor]:
        """The communication hook itself (`DistributedDataParallel.register_comm_hook`)."""
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
        measure: Measure | None = None
        if self._measuring:
            measure = self._buckets.measure(buffer, bucket.parameters(), bucket.gradients())
            self._local.append(measure(buffer))
        buffer.mul_(1.0 / self._size)
        if measure is not None:
            self._reduced.append((measure, buffer))
        future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
        answer: torch.futures.Future[Tensor] = future.then(_first)
        return answer

    # DDP compares a hook's annotations with classes, and postponed ones are strings: it accepts none at all.
    hook.__annotations__.clear()


def _first(finished: torch.futures.Future[list[Tensor]]) -> Tensor:
    return finished.value()[0]


class AccumulationEstimator:
    """One rank, s >= 1: each micro-batch's own gradient against their mean.

    On a measured step `.grad` is set aside before each backward pass and added up by us afterwards, in the order in
    which autograd would have: the sum that the user sees is the same, without a copy of the gradient.
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
        """Measure the new gradient (of a loss multiplied by `share`) and put the sum back."""
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

    def abandon(self) -> None:
        """A pass failed half-way: `.grad` gets back what it held."""
        if self._aside is not None:
            self._put_back([p.grad for p in self._params])

    def end(self) -> tuple[Squares, Squares] | None:
        """After the last pass: the mean |g_b|^2, and |g_B|^2."""
        if self._local is None or self._passes < 2:
            return None
        seen = [(p, p.grad) for p in self._params if p.grad is not None]
        total = self._norms.of([p for p, _ in seen], [g for _, g in seen])
        return added(self._local / self._passes), added(total)


class DifferencedEstimator:
    """One rank, one pass per step: this step's gradient against the previous one's. Holds one copy of the gradient."""

    def __init__(self, norms: GradientNorms, params: Sequence[torch.nn.Parameter]) -> None:
        self._norms = norms
        self._params = list(params)
        self._previous: list[tuple[Tensor, Tensor]] | None = None

    def keep(self, unscale: Tensor | None) -> None:
        """Remember this step's gradient (times `unscale`, AMP's inverse loss scale) for the next to compare with."""
        seen = [(p, p.grad) for p in self._params if p.grad is not None]
        self._previous = [
            (p, local_part(g) * unscale if unscale is not None else local_part(g.detach()).clone())
            for p, g in seen
        ]

    def compare(self, unscale: Tensor | None) -> tuple[Squares, Squares] | None:
        """Mean |g_b|^2 and |g_B|^2 of the remembered gradient and this one; forgets it. None where they mismatch."""
        previous, self._previous = self._previous, None
        if not previous:
            return None
        params = [p for p, _ in previous]
        if any(p.grad is None for p in params):
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
