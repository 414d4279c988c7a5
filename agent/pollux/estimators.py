"""Where the gradients that a noise scale compares come from.

- Two ranks or more: each rank's accumulated gradient before DDP's reduction, and the mean after it: n = K,
  b = m (s + 1). Seen from the two ends of the backward pass (`ReductionEstimator`), or by a communication hook, where
  there is one of the user's or `.grad` is reduced in place (`HookEstimator`).
- One rank that accumulates: the micro-batches' gradients are compared with their mean (`AccumulationEstimator`):
  n = s + 1, b = m.
- One rank, one micro-batch: successive steps' gradients are differenced (`DifferencedEstimator`), a last resort: the
  drift of the true gradient between two steps counts as noise, so that `var` is too large by |drift|^2 / 2 and `sqr`
  too small by half of it.

All of them write two numbers per parameter group into a buffer on the device (`SampleBuffer`), which is read back
every few samples and without waiting for the device in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pollux.bucket_norms import BucketNorms, Measure
from pollux.noise_scale import NoiseAverages, SampleKind
from pollux.precondition import GradientNorms
from pollux.sharding import local_part


class SampleBuffer:
    """Rows of (local, total) squared norms on the device, [rows, 2 groups], read back together.

    `flush` starts the mean of the local parts over the ranks and the copy to the host; `collect` takes the result in
    at a later step, when both have long happened. Every rank must call them at the same steps.
    """

    def __init__(
        self,
        groups: int,
        device: torch.device,
        *,
        rows: int = 8,
        group: dist.ProcessGroup | None,
        parts: bool = False,
    ) -> None:
        self.groups = groups
        self.rows = rows
        self._group = group
        self._parts = parts
        """Each rank has its part of both squared norms, which add up; else its own gradient's and the total's."""
        self._device = device
        self._rows: list[Tensor] = []
        self._kinds: list[SampleKind] = []
        self._pending: tuple[Tensor, list[SampleKind], Any] | None = None

    @property
    def full(self) -> bool:
        return len(self._kinds) >= self.rows

    @property
    def empty(self) -> bool:
        """No samples wait to be read, and none are being read."""
        return self._pending is None and not self._kinds

    def add(self, kind: SampleKind, local: Tensor, total: Tensor) -> None:
        """Queue one sample (`local`, `total`: [groups] on the device); dropped where the buffer is full."""
        if self.full:
            return
        self._rows += (local, total)
        self._kinds.append(kind)

    def flush(self) -> None:
        """Start reading the rows back; nothing to do where there are none or a read is under way."""
        if not self._kinds or self._pending is not None:
            return
        kinds, self._kinds = self._kinds, []
        rows, self._rows = self._rows, []
        data = torch.cat(rows).to(self._device, torch.float32).view(len(kinds), 2 * self.groups)
        work = None
        if self._group is not None:
            # The totals are equal on all ranks: their mean is themselves, and one message carries all.
            if not self._parts:
                data.div_(dist.get_world_size(self._group))
            work = dist.all_reduce(data, group=self._group, async_op=True)
        self._pending = (data, kinds, work)

    def collect(self, averages: NoiseAverages, initial: float) -> bool:
        """Take the rows of the last flush into `averages`; True where there were any."""
        if self._pending is None:
            return False
        data, kinds, work = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        host = data.to("cpu", torch.float64).numpy()
        first = 0
        for kind, alike in groupby(kinds):
            rows = host[first : first + len(list(alike))]
            averages.add(kind, rows[:, : self.groups], rows[:, self.groups :], initial)
            first += len(rows)
        return True

    def clear(self) -> None:
        """Forget what was not read yet (the batch size or the ranks change)."""
        if self._pending is not None and self._pending[2] is not None:
            self._pending[2].wait()
        self._pending = None
        self._rows, self._kinds = [], []


CommunicationHook = tuple[object, Callable[[Any, Any], torch.futures.Future[Tensor]]]
"""As `DistributedDataParallel.register_comm_hook` takes it: its state, and the function."""


class HookEstimator:
    """Two ranks or more: the DDP communication hook, where `ReductionEstimator` cannot be.

    `.grad` afterwards is bit for bit what DDP without a hook gives: each bucket is multiplied by 1/K, then summed. On
    steps that are not measured nothing else happens.

    A user's own hook (`inner`: state and function, fp16 compression or PowerSGD say) does the reducing in its place.
    What it returns need not be the mean of what went in, so a measured step reduces a copy of each bucket too.
    """

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
        # PowerSGD goes on from a thread of the process group's; in one group its messages and ours would come in
        # another order on each rank.
        self._own_group = None if inner is None else dist.new_group()
        self._aside: list[Any] = []
        self._measuring = False
        self._local: list[Tensor] = []
        self._reduced: list[tuple[Measure, Tensor]] = []

    def begin(self, measuring: bool) -> None:
        """Before the synchronising pass: whether this one is measured (the same answer on every rank)."""
        self._measuring = measuring
        self._local, self._reduced, self._aside = [], [], []
        self._buckets.begin()

    def end(self) -> tuple[Tensor, Tensor] | None:
        """After it: (|g_b|^2 of this rank, |g_B|^2), each [groups] on the device; None where nothing was measured."""
        if not self._measuring:
            return None
        self._measuring = False
        for work in self._aside:
            work.wait()
        # The buckets still hold what was reduced: measured here, and not in a callback of each bucket's reduction, for
        # that would contend with the backward pass for the interpreter.
        totals = [measure(buffer) for measure, buffer in self._reduced]
        local, self._local, self._reduced, self._aside = self._local, [], [], []
        if not totals:
            return None
        return torch.stack(local).sum(0), torch.stack(totals).sum(0)

    def hook(self, group: dist.ProcessGroup | None, bucket: Any) -> torch.futures.Future[Tensor]:
        """The communication hook itself (`DistributedDataParallel.register_comm_hook`)."""
        buffer = bucket.buffer()
        measure: Measure | None = None
        if self._measuring:
            measure = self._buckets.measure(buffer, bucket.parameters(), bucket.gradients())
            self._local.append(measure(buffer))
        if bucket.is_last():
            self._on_ready()
        if self._inner is not None:
            if measure is not None:
                copy = buffer * (1.0 / self._size)
                self._aside.append(dist.all_reduce(copy, group=self._own_group, async_op=True))
                self._reduced.append((measure, copy))
            state, inner = self._inner
            return inner(state, bucket)
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
            torch._foreach_add_([a for a, _ in both], [g for _, g in both])
        for p, aside, grad in zip(self._params, self._aside, grads, strict=True):
            p.grad = grad if aside is None else aside
        self._aside = None

    def abandon(self) -> None:
        """A pass failed half-way: `.grad` gets back what it held."""
        if self._aside is not None:
            self._put_back([p.grad for p in self._params])

    def end(self) -> tuple[Tensor, Tensor] | None:
        """After the last pass: (mean |g_b|^2, |g_B|^2), each [groups] on the device."""
        if self._local is None or self._passes < 2:
            return None
        seen = [(p, p.grad) for p in self._params if p.grad is not None]
        total = self._norms.of([p for p, _ in seen], [g for _, g in seen])
        return self._local / self._passes, total


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

    def compare(self, unscale: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """(mean |g_b|^2, |g_B|^2) of the remembered gradient and this one; forgets it. None where they do not match."""
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
        torch._foreach_add_(old, new)
        return local, self._norms.of(params, old) / 4

    @property
    def holding(self) -> bool:
        return self._previous is not None

    def forget(self) -> None:
        self._previous = None
