"""Squared norms of the same parameters' gradients, twice in a step: before they are reduced, and after.

The preconditioner does not change between: it is laid out once, flat, for parameters one after the other, and kept
for the second time, as far as the workspace allows; a measurement is then three kernels for each run of parameters
however many there are in it. Beyond that `GradientNorms.of` goes through them in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pollux.precondition import CHUNK, GradientNorms, floor

KEPT = 2 * CHUNK
"""Elements of preconditioners kept at once: 16 MiB of float32, beside a copy of at most CHUNK elements."""


class _Run(NamedTuple):
    """Parameters of one group, measured together."""

    group: int
    params: list[Tensor]
    below: Tensor | None
    """What a gradient is divided by, along the flattened gradients; None: not kept."""
    square: float
    """Factor on the squared norm."""


class PairNorms:
    """Measures `.grad` of the same parameters twice: `first`, then `second`."""

    def __init__(self, norms: GradientNorms) -> None:
        self._norms = norms
        self._runs: list[_Run] = []

    def first(self, params: Sequence[Tensor]) -> Tensor:
        """Squared norm [groups] of the gradients of `params`, as far as they have one; no host synchronisation."""
        params, grads = _seen(params)
        if self._norms.moment is None:
            return self._norms.of(params, grads)
        self._runs = list(self._lay_out(params))
        return self._measure(params, grads)

    def second(self, params: Sequence[Tensor]) -> Tensor:
        """The same again, of what is there now: a parameter that only other ranks have used may have joined."""
        params, grads = _seen(params)
        if self._runs:
            seen = {param for run in self._runs for param in run.params}
            joined = [p for p in params if p not in seen]
            if joined:
                self._runs.append(_Run(0, joined, None, 1.0))
        found = self._measure(params, grads)
        self.forget()
        return found

    def forget(self) -> None:
        """Give the workspace back."""
        self._runs = []

    def _measure(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        if not self._runs:
            return self._norms.of(params, gradients)
        out = torch.zeros(self._norms.groups, dtype=torch.float32, device=params[0].device)
        for run in self._runs:
            grads = [p.grad for p in run.params if p.grad is not None]
            if run.below is None:
                out += self._norms.of(run.params, grads)
                continue
            seen = torch.cat([grad.reshape(-1) for grad in grads]).div_(run.below)
            out[run.group] += torch.dot(seen, seen) * run.square
            del seen  # before the next run's is made
        return out

    def _lay_out(self, params: Sequence[Tensor]) -> Iterator[_Run]:
        norms = self._norms
        runs: dict[int, list[tuple[Tensor, Tensor]]] = {}
        sizes: dict[int, int] = {}
        others: list[Tensor] = []
        kept = 0
        for param in params:
            group, moment = norms.group_of.get(param), norms.second_moment(param)
            if group is None or moment is None:
                continue  # another optimizer's, or never stepped so far: it has no say
            size = param.numel()
            alike = (
                moment.dtype == torch.float32 and param.grad is not None and param.grad.dtype == moment.dtype
            )
            if not alike or size > CHUNK or kept + size > KEPT:
                others.append(param)
                continue
            run = runs.setdefault(group, [])
            if run and sizes[group] + size > CHUNK:
                yield self._kept(group, run)
                run.clear()
            sizes[group] = size + (sizes[group] if run else 0)
            run.append((param, moment))
            kept += size
        for group, run in runs.items():
            yield self._kept(group, run)
        if others:
            yield _Run(0, others, None, 1.0)

    def _kept(self, group: int, run: Sequence[tuple[Tensor, Tensor]]) -> _Run:
        """With P = 1 / (sqrt(v) / c + eps): P g = c g / (sqrt(v) + c eps)."""
        rule = self._norms.step_rule(group)
        below = torch.cat([moment.reshape(-1) for _, moment in run]).sqrt_()
        floor(list(below.split([moment.numel() for _, moment in run])), rule)  # type: ignore[no-untyped-call]
        below.add_(rule.eps * rule.corrected)
        return _Run(group, [param for param, _ in run], below, rule.corrected**2)


def _seen(params: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[Tensor]]:
    """Those with a gradient (the very same sequence where that is all of them), and their gradients."""
    found = [p.grad for p in params]
    grads = [g for g in found if g is not None]
    if len(grads) < len(found):
        params = [p for p, g in zip(params, found, strict=True) if g is not None]
    return params, grads
