"""Squared norms of gradients, per parameter group, seen through the optimizer's preconditioner.

Adam and its kin step along `P g` with `P = 1 / (sqrt(v_hat) + eps)`; the noise scale that says how much a larger
batch helps them is that of `P g` (the paper's PGNS). `P` is read from the optimizer's own state as it was before
the step: independent of the gradient that is measured. Nothing here writes to the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from pollux.ranks.sharding import local_part
from pollux.ranks.torch_internals import (
    foreach_add_,
    foreach_clamp_min_,
    foreach_div_,
    foreach_mul_,
    foreach_norm,
    foreach_reciprocal_,
    foreach_sqrt,
)

WARM_STEPS = 5
"""Steps before an Adam-like's second moment is taken for a preconditioner (model.md)."""

CHUNK = 1 << 21
"""Elements handled at once: 8 MiB of float32 per temporary keeps the workspace under 32 MiB."""


def second_moment_name(optimizer: Optimizer) -> str | None:
    """The state key of an Adam-like optimizer's second moment, by its class; None for SGD and unknown ones."""
    for cls in type(optimizer).__mro__:
        match cls.__name__:
            case "Adam" | "AdamW" | "NAdam" | "RAdam":
                return "exp_avg_sq"
            case "RMSprop":
                return "square_avg"
            case "Adagrad":
                return "sum"
    return None


class StepRule(NamedTuple):
    """How an Adam-like makes a preconditioner of its second moment v: 1 / (sqrt(v) / corrected + eps)."""

    corrected: float
    """Root of what of v's weights does not come from its start at zero."""
    newest: float
    """Weight of the newest squared gradient in v."""
    eps: float


def floor(roots: list[Tensor], rule: StepRule) -> None:
    """Raise elements of sqrt(v), one tensor per parameter, to the least that the optimizer can be taken to step by.

    An element that had next to no gradient so far (a dead unit, a pixel that is always blank) would step 1/eps far when
    it gets one, and outweigh all others in the averages for good. The optimizer does not step so far: its moment then
    holds `newest` of the present gradient's square too. As P must not depend on that gradient, the tensor's typical
    one stands for it; a tensor that never had any has no say.
    """
    sizes = tuple(root.numel() for root in roots)
    least = torch.stack(list(foreach_norm(roots, 2))) * _shares(sizes, rule.newest, roots[0].device)
    foreach_clamp_min_(roots, list(torch.where(least > 0, least, torch.inf).unbind()))


@lru_cache(maxsize=256)
def _shares(sizes: tuple[int, ...], newest: float, device: torch.device) -> Tensor:
    """From a tensor's norm to its floor, per tensor; kept on the device, as copying it there may wait for that."""
    return torch.tensor([(newest / size) ** 0.5 for size in sizes], dtype=torch.float32, device=device)


@lru_cache(maxsize=256)
def index_of(groups: tuple[int, ...], device: torch.device) -> Tensor:
    """Each tensor's parameter group, kept on the device as `_shares` are."""
    return torch.tensor(groups, device=device)


class GradientNorms:
    """Squared norms [groups] of gradients of the optimizer's parameters, preconditioned where it is Adam-like."""

    def __init__(self, optimizer: Optimizer, *, preconditioned: bool = True) -> None:
        self.optimizer = optimizer
        self.moment = second_moment_name(optimizer) if preconditioned else None
        self.steps = 0
        """Optimizer steps taken; the session counts them, for reading `state["step"]` may wait for the device."""
        self.groups: int = len(optimizer.param_groups)
        """Parameter groups when this was made. One that the user adds later is not measured: all buffers, on all
        ranks, have their length."""
        self.group_of = {
            p: i
            for i, group in enumerate(optimizer.param_groups)
            for p in group["params"]
            if not p.is_complex()
        }
        self._size: int = sum(local_part(p).numel() for p in self.group_of)

    @property
    def warm(self) -> bool:
        """False while an Adam-like's second moment says too little: gradients seen until then do not count."""
        return self.moment is None or self.steps >= WARM_STEPS

    @property
    def size(self) -> int:
        """Parameters on this rank, counted one by one."""
        return self._size

    def leave_out(self, params: Iterable[Tensor]) -> None:
        """These are not measured: their gradients are sparse, and others each time."""
        for param in params:
            self.group_of.pop(param, None)

    def count_from_state(self) -> None:
        """Take the number of steps from the optimizer's state: the user may have restored it."""
        for state in self.optimizer.state.values():
            if "step" in state:
                self.steps = max(self.steps, int(state["step"]))
                return

    def of(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
        """Squared norm per parameter group, float32 [groups], on the gradients' device; no host synchronisation."""
        device = local_part(grads[0]).device if grads else torch.device("cpu")
        if self.moment is None:
            return self._plain(params, grads, device)
        out = torch.zeros(self.groups, dtype=torch.float32, device=device)
        for group, pieces, moments in self._chunks(params, grads):
            seen = self._preconditioned(pieces, moments, group)
            norms = torch.stack(list(foreach_norm(seen, 2, torch.float32)))
            out[group] += torch.dot(norms, norms)
            del seen  # before the next chunk's is made
        return out

    def _plain(self, params: Sequence[Tensor], grads: Sequence[Tensor], device: torch.device) -> Tensor:
        """Without a preconditioner nothing needs a workspace, nor cutting."""
        pairs = [(g, self.group_of[p]) for p, g in zip(params, grads, strict=True) if p in self.group_of]
        grads, groups = [g for g, _ in pairs], tuple(group for _, group in pairs)
        if not grads:
            return torch.zeros(self.groups, dtype=torch.float32, device=device)
        norms = torch.stack(list(foreach_norm(list(map(local_part, grads)), 2, torch.float32)))
        if self.groups == 1:
            return torch.dot(norms, norms).reshape(1)
        out = torch.zeros(self.groups, dtype=torch.float32, device=device)
        return out.index_add_(0, index_of(groups, device), norms * norms)

    def of_flat(self, param: Tensor, piece: Tensor, start: int) -> Tensor:
        """As `of`, for a run of elements of one parameter from `start` on, flattened; of its shard where it is sharded.

        Beyond the shard's end there is only padding. At most CHUNK elements.
        """
        out = torch.zeros(self.groups, dtype=torch.float32, device=piece.device)
        group = self.group_of.get(param)
        if group is None or piece.numel() == 0:
            return out
        if self.moment is not None:
            moment = self.second_moment(param)
            if moment is None:
                return out
            flat = moment.reshape(-1)
            part = flat[start : start + piece.numel()]
            if part.numel() == 0:
                return out
            typical = flat.sum(dtype=torch.float32).div_(flat.numel()).sqrt_()
            piece = self._preconditioned([piece[: part.numel()]], [part], group, typical)[0]
        norm = torch.linalg.vector_norm(piece, dtype=torch.float32)
        out[group] = norm * norm
        return out

    def _preconditioned(
        self, grads: list[Tensor], moments: list[Tensor], group: int, typical: Tensor | None = None
    ) -> list[Tensor]:
        """P g. `typical`: the root mean square of the gradient so far, where `moments` are a part of a tensor's."""
        rule = self.step_rule(group)
        roots = list(foreach_sqrt([v.to(torch.float32) for v in moments]))
        if typical is None:
            floor(roots, rule)
        else:
            least = typical * rule.newest**0.5
            foreach_clamp_min_(roots, [torch.where(least > 0, least, torch.inf)] * len(roots))
        foreach_div_(roots, rule.corrected)
        foreach_add_(roots, rule.eps)
        foreach_reciprocal_(roots)
        foreach_mul_(roots, grads)  # in place: one chunk of workspace, and not two
        return roots

    def step_rule(self, group: int) -> StepRule:
        """How the present second moments of a parameter group become its preconditioner."""
        options = self.optimizer.param_groups[group]
        eps = float(options["eps"])
        if "betas" not in options:  # RMSprop and Adagrad do not correct for the average's start at zero
            return StepRule(1.0, 1.0 - float(options.get("alpha", 0.0)), eps)
        beta2 = float(options["betas"][1])
        return StepRule((1.0 - beta2 ** max(self.steps, 1)) ** 0.5, 1.0 - beta2, eps)

    def _chunks(
        self, params: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> Iterator[tuple[int, list[Tensor], list[Tensor]]]:
        """Runs of (group, gradients, second moments) of at most CHUNK elements each."""
        by_group: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for param, whole_grad in zip(params, grads, strict=True):
            group, grad, moment = self.group_of.get(param), local_part(whole_grad), self.second_moment(param)
            # One that this optimizer does not train, or has never stepped so far (unused until now), has no say.
            if group is not None and moment is not None and grad.numel():
                by_group.setdefault(group, []).append((grad, moment))
        for group, pairs in by_group.items():
            pieces: list[Tensor] = []
            moments: list[Tensor] = []
            size = 0
            for grad, whole in pairs:
                for piece, moment in _pieces(grad, whole):
                    if pieces and size + piece.numel() > CHUNK:
                        yield group, pieces, moments
                        pieces, moments, size = [], [], 0
                    pieces.append(piece)
                    moments.append(moment)
                    size += piece.numel()
            if pieces:
                yield group, pieces, moments

    def second_moment(self, param: Tensor) -> Tensor | None:
        """What the optimizer holds of a parameter's squared gradients (its shard); None before its first step."""
        if self.moment is None:
            return None
        state = self.optimizer.state.get(param)
        if not state:
            return None
        moment: Tensor | None = state.get(
            "max_exp_avg_sq", state.get(self.moment)
        )  # AMSGrad steps by the maximum
        return None if moment is None else local_part(moment)


def _pieces(grad: Tensor, moment: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of at most CHUNK elements of two tensors alike, cut along the first axes as far as that takes."""
    if grad.numel() <= CHUNK:
        yield grad, moment
        return
    rows = CHUNK * grad.shape[0] // grad.numel()
    if not rows:
        for row, its in zip(grad, moment, strict=True):
            yield from _pieces(row, its)
        return
    for i in range(0, grad.shape[0], rows):
        yield grad[i : i + rows], moment[i : i + rows]
