"""Squared norms of the same gradients before and after their reduction.

After the reduction all ranks hold the same gradients: each rank measures its share of the parameters, and reading the
samples adds the parts up.

The preconditioner does not change in between. It is computed once for a run of parameters, and kept for the second
measurement, as far as the workspace allows: a run then takes three operations for any number of parameters. Beyond the
workspace, `GradientNorms.of` measures parameters in chunks.

Where steps are measured one soon after the other, the next ones use the same preconditioner until `LAG` of the
optimizer's averages is new. An older preconditioner is as independent of the measured gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pollux.noise.precondition import CHUNK, GradientNorms, floor
from pollux.noise.samples import Squares
from pollux.ranks.torch_internals import foreach_add_, foreach_div, foreach_sqrt, norms_of

_CALL = 20_000
"""Elements that a CPU processes in about the time of one more tensor."""

KEPT = 2 * CHUNK
"""Elements of preconditioners kept at once: 16 MiB of float32, beside a copy of at most CHUNK elements."""

LAG = 0.01
"""Share of the averages that may be newer than the preconditioner: about ten steps of Adam."""


class _Run(NamedTuple):
    """Parameters of one group, measured together."""

    group: int
    own: bool
    """In this rank's share."""
    params: list[Tensor]
    below: list[Tensor] | None
    """Divisors of the gradients; None: not kept."""
    factor: float
    """Factor of the norm."""


class PairNorms:
    """Measure the same parameters' `.grad` twice: `first`, then `second`. Neither synchronises with the host."""

    def __init__(
        self, norms: GradientNorms, params: Sequence[Tensor], *, rank: int = 0, ranks: int = 1
    ) -> None:
        """Select this rank's share of `params`, as `rank` of `ranks`. All ranks list `params` in the same order."""
        self._norms = norms
        self._all = [(p, norms.group_of[p]) for p in params if p in norms.group_of]
        """Parameters, each with its group."""
        self._share = _share([p.numel() for p, _ in self._all], rank, ranks)
        self._own = [pair for i, pair in enumerate(self._all) if i in self._share]
        self._runs: list[_Run] = []
        self._used: list[bool] = []
        """Which parameters had a gradient when the preconditioner was laid out."""
        self._laid_at = self._measured_at = 0
        """Optimizer steps taken by then, and by the last measurement."""
        self._again = False
        """Whether measurements are so close together that the next one can use the same preconditioner."""

    def first(self) -> Squares:
        """Return the squared norms of all gradients."""
        if not self._norms.preconditioned:
            return _plain(self._all)
        used, steps = [p.grad is not None for p, _ in self._all], self._norms.steps
        if not self._runs or used != self._used or not self._close(self._laid_at):
            self._runs = []  # before the next ones are allocated
            self._runs, self._used, self._laid_at = list(self._lay_out()), used, steps
        self._again, self._measured_at = self._close(self._measured_at), steps
        return self._measure(self._runs)

    def _close(self, then: int) -> bool:
        """Tell whether P from after `then` optimizer steps is new enough."""
        norms = self._norms
        if not norms.families:
            return False
        newest = max(1 / max(norms.steps, 1), *(norms.step_rule(i).newest for i in range(norms.groups)))
        return abs(norms.steps - then) * newest <= LAG

    def second(self) -> Squares:
        """Return the squared norms of this rank's share; the ranks' parts add up."""
        if not self._norms.preconditioned:
            return _plain(self._own)
        runs = [run for run in self._runs if run.own]
        now = [p for p, _ in self._own if p.grad is not None]
        if len(now) > sum(self._used[i] for i in self._share):
            # Only other ranks have used it.
            before = {p for run in runs for p in run.params}
            runs.append(_Run(0, True, [p for p in now if p not in before], None, 1.0))
        found = self._measure(runs)
        if not self._again:
            self.forget()
        return found

    def forget(self) -> None:
        """Release the workspace."""
        self._runs = []

    def _measure(self, runs: Sequence[_Run]) -> Squares:
        found: list[Tensor] = []
        places: list[int] = []
        rest: Tensor | None = None
        for run in runs:
            grads = [p.grad for p in run.params if p.grad is not None]
            if run.below is None:
                more = self._norms.of(run.params, grads)
                rest = more if rest is None else rest + more
                continue
            seen = foreach_div(grads, run.below)
            found.append(norms_of(seen).mul_(run.factor))
            places += [run.group] * len(grads)
            del seen  # before the next run allocates its own
        return Squares(torch.cat(found) if found else None, tuple(places), rest)

    def _lay_out(self) -> Iterator[_Run]:
        norms = self._norms
        runs: dict[tuple[int, bool], list[tuple[Tensor, Tensor]]] = {}
        sizes: dict[tuple[int, bool], int] = {}
        others: dict[bool, list[Tensor]] = {}
        kept = 0
        for i, (param, group) in enumerate(self._all):
            grad, own = param.grad, i in self._share
            moment = None if grad is None else norms.second_moment(param)
            if grad is None or moment is None:
                continue  # the optimizer has never stepped this parameter: it does not count
            size, key = param.numel(), (group, own)
            alike = moment.dtype == torch.float32 and grad.dtype == moment.dtype
            if not alike or size > CHUNK or kept + size > KEPT:
                others.setdefault(own, []).append(param)
                continue
            run = runs.setdefault(key, [])
            if run and sizes[key] + size > CHUNK:
                yield self._kept(*key, run)
                run.clear()
            sizes[key] = size + (sizes[key] if run else 0)
            run.append((param, moment))
            kept += size
        for key, run in runs.items():
            yield self._kept(*key, run)
        for own, params in others.items():
            yield _Run(0, own, params, None, 1.0)

    def _kept(self, group: int, own: bool, run: Sequence[tuple[Tensor, Tensor]]) -> _Run:
        """With P = 1 / (sqrt(v) / c + eps): P g = c g / (sqrt(v) + c eps)."""
        rule = self._norms.step_rule(group)
        below = list(foreach_sqrt([moment for _, moment in run]))
        floor(below, rule)
        foreach_add_(below, rule.eps * rule.corrected)
        return _Run(group, own, [param for param, _ in run], below, rule.corrected)


def _plain(pairs: Sequence[tuple[Tensor, int]]) -> Squares:
    seen = [(p.grad, group) for p, group in pairs if p.grad is not None]
    if not seen:
        return Squares(None, ())
    return Squares(norms_of([grad for grad, _ in seen]), tuple(group for _, group in seen))


def _share(sizes: Sequence[int], rank: int, ranks: int) -> set[int]:
    """Return the indices of the parameters that `rank` measures.

    The largest parameters come first; each goes to the rank with the fewest elements so far.
    """
    load = [0] * ranks
    share = set()
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = min(range(ranks), key=load.__getitem__)
        load[least] += sizes[i] + _CALL
        if least == rank:
            share.add(i)
    return share
