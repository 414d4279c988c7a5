"""The noise scale of a model under FSDP2, seen at its reduce-scatter.

n = K gradients of b = m (s + 1) examples, as under DDP. A rank holds a shard of the result, and of an Adam-like's
second moments, so it computes its part of both squared norms; `SampleBuffer` adds the parts up, once a reading. With a
preconditioner the ranks' squares are reduced, shard by shard, to the rank that holds the moments:

    sum_i |P g_i|^2 = sum_j P_j^2 sum_i g_ij^2          i: ranks, j: elements of this rank's shard

`.grad` is only read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pollux.noise.precondition import CHUNK, GradientNorms
from pollux.noise.samples import Squares, added
from pollux.ranks.sharding import local_part, sharded_modules
from pollux.ranks.torch_internals import FsdpUnit, fsdp_units, norms_of

logger = logging.getLogger("pollux")

_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Its name from torch 2.13 on, or its earlier name."""


MOST_RUNS = 32
"""A unit is measured in about so many runs at most: a run's workspace, a chunk, grows with very large units."""


class _ShardSlice(NamedTuple):
    """A run of elements of one parameter's shard."""

    param: Tensor
    start: int
    """Within the shard."""
    stop: int
    column: int
    """Begin within the unit's shards."""


class ReduceScatterEstimator:
    """Two ranks or more under `fully_shard`, HSDP included.

    Plain averages over the ranks only: neither with a divisor of the user's, nor with gradients reduced in float16,
    which torch scales on the way.
    """

    parts = (True, True)
    reductions = 1
    """Not used in loops that do not show where a step begins."""

    def __init__(self, norms: GradientNorms, model: torch.nn.Module, ranks: int) -> None:
        self._norms = norms
        self._size = ranks
        self._measuring = False
        self._spoiled = False
        self._warned = False
        self._local: list[Tensor] = []
        self.units: list[_Unit] = []
        self._trained = {p for p in model.parameters() if p.requires_grad}
        self._counts_all = all(p in norms.group_of for p in self._trained)
        """No parameter is another optimizer's."""
        self.copies = 1
        for module in sharded_modules(model):
            found = list(fsdp_units(module))
            if len(found) != 1:
                continue  # the module itself holds no parameter
            self.copies = ranks // found[0].shards
            unit = _Unit(found[0])
            self.units.append(unit)
            found[0].observe(partial(self.see, unit))

    def begin(self, measuring: bool, *, first: bool = True) -> None:
        """Begin the step's synchronising pass; `measuring` is equal on all ranks."""
        self._measuring, self._spoiled, self._local = measuring, False, []

    @torch.no_grad()
    def end(self) -> tuple[Squares, Squares] | None:
        """Return this rank's parts of the mean |g_b|^2 and of |g_B|^2. None without a measurement."""
        if not self._measuring:
            return None
        self._measuring = False
        for unit in self.units:
            unit.used = [p for p in unit.params if p.grad is not None]
        if self._spoiled or not self._local:
            return None
        local = torch.stack(self._local).sum(0) / self._size
        seen = [(p, p.grad) for p in self._trained if p.grad is not None]
        total = self._norms.of([p for p, _ in seen], [g for _, g in seen])
        self._local = []
        return added(local), added(total / self.copies)

    @torch.no_grad()
    def see(self, unit: _Unit, gradient: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        """See a unit's gradient, [ranks x columns], before its reduction."""
        if not self._measuring or self._spoiled:
            return
        if (
            op != dist.ReduceOp.AVG
            or unit.torch_unit.divisor is not None
            or gradient.device != unit.device  # its shards lie on the CPU
        ):
            self._give_up()
            return
        size = dist.get_world_size(group)
        rows = gradient.view(size, -1)
        if self._counts_all and not self._norms.preconditioned and self._norms.groups == 1:
            found = norms_of(torch.split(gradient.view(-1), CHUNK))
            out = torch.dot(found, found).reshape(1)
        else:
            layout = unit.layout(rows.shape[1])
            if layout is None:
                self._spoiled = (
                    True  # the pass's end shows which parameters the buffer holds: measure the next one
                )
                return
            most = max(CHUNK, gradient.numel() // MOST_RUNS) // size
            runs = [self._of_run(unit, run, rows, group) for run in _runs(layout, max(most, 1))]
            out = torch.stack(runs).sum(0)
        if out.is_cuda:
            out.record_stream(torch.cuda.default_stream(out.device))
        self._local.append(out)

    def _of_run(self, unit: _Unit, run: list[_ShardSlice], rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return this rank's part of the mean |g_b|^2 times the ranks, [groups], of one run of parameters."""
        first, end = run[0].column, run[-1].column + run[-1].stop - run[-1].start
        squares = rows[:, first:end].to(torch.float32).square()
        if self._norms.preconditioned:
            summed = torch.empty(end - first, dtype=torch.float32, device=rows.device)
            _reduce_scatter(summed, squares.view(-1), group=group)
            squares = summed[None]
        # The root of the ranks' summed squares, as a gradient, has the wanted preconditioned norm.
        roots = squares.sum(0).sqrt_()
        if not self._norms.preconditioned:
            # Columns of all ranks' shards: what is padding in one row is a gradient in another one.
            pieces = roots.split([one.stop - one.start for one in run])  # type: ignore[no-untyped-call]
            return self._norms.of([one.param for one in run], pieces)
        # Each piece, then the padding behind this rank's shard.
        ends = [max(min(one.stop, unit.elements[one.param]), one.start) for one in run]
        sizes = [n for one, end in zip(run, ends, strict=True) for n in (end - one.start, one.stop - end)]
        parts = list(zip(run, roots.split(sizes)[::2], strict=True))  # type: ignore[no-untyped-call]
        whole = [(one.param, part) for one, part in parts if part.numel() == unit.elements[one.param]]
        cut = [(one, part) for one, part in parts if part.numel() < unit.elements[one.param]]
        found = [self._norms.of_flat(one.param, part, one.start) for one, part in cut]
        if whole:
            found.append(self._norms.of([param for param, _ in whole], [part for _, part in whole]))
        return torch.stack(found).sum(0)

    def _give_up(self) -> None:
        self._spoiled = True
        if not self._warned:
            self._warned = True
            logger.warning(
                "gradients are reduced in another way than by their average (float16, or a divisor of the user's), or "
                "their shards lie on the CPU: the noise scale is not measured"
            )


class _Unit:
    """Parameters that are reduced together, in the order of the buffer."""

    def __init__(self, torch_unit: FsdpUnit) -> None:
        self.torch_unit = torch_unit
        self.params = torch_unit.params
        self._columns = dict(zip(torch_unit.params, torch_unit.columns, strict=True))
        shards = [local_part(p.detach()) for p in torch_unit.params]
        self.elements = {p: shard.numel() for p, shard in zip(torch_unit.params, shards, strict=True)}
        """Of this rank's shards, without their padding."""
        self.device = shards[0].device
        self.used: list[Tensor] = list(self.params)
        """Parameters that had a gradient in the last measured pass."""

    def layout(self, columns: int) -> list[_ShardSlice] | None:
        """Return each parameter's place in a shard of `columns`; None if unknown."""
        for params in (self.params, self.used):
            if sum(self._columns[p] for p in params) == columns:
                parts, column = [], 0
                for param in params:
                    parts.append(_ShardSlice(param, 0, self._columns[param], column))
                    column += self._columns[param]
                return parts
        return None


def _runs(parts: list[_ShardSlice], most: int) -> Iterator[list[_ShardSlice]]:
    """Yield runs of at most `most` elements; larger parts are cut."""
    run: list[_ShardSlice] = []
    size = 0
    for param, begin, end, column in parts:
        for start in range(begin, end, most):
            piece = _ShardSlice(param, start, min(start + most, end), column + start - begin)
            if run and size + piece.stop - piece.start > most:
                yield run
                run, size = [], 0
            run.append(piece)
            size += piece.stop - piece.start
    if run:
        yield run
