"""Squared norms of preconditioned gradients, per parameter group.

Adam and its relatives step along `P g` with `P = 1 / (sqrt(v_hat) + eps)`. The noise scale of `P g` (the paper's PGNS)
says how much a larger batch helps them. `pollux.optimizers` reads `P` from the optimizer's own state before the step,
so that `P` is independent of the measured gradient. Nothing here writes to the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.optim import Optimizer

from pollux.optimizers.families import CHOSEN, UNKNOWN, Family, StepRule, recognise
from pollux.ranks.sharding import local_part
from pollux.ranks.torch_internals import (
    foreach_add_,
    foreach_clamp_min_,
    foreach_div_,
    foreach_mul_,
    foreach_reciprocal_,
    foreach_sqrt,
    norms_of,
)

WARM_STEPS = 5
"""Optimizer steps before a state's second moment is taken for a preconditioner (model.md)."""

CHUNK = 1 << 21
"""Elements handled at once: 8 MiB of float32 per temporary keeps the workspace under 32 MiB."""


def floor(roots: list[Tensor], rule: StepRule) -> None:
    """Raise elements of sqrt(v) to the least that the optimizer divides by.

    `roots` has one tensor per parameter. An element without a gradient so far (a dead unit, a blank pixel) would step
    1/eps far at its first one and dominate the averages. The optimizer does not: v then holds `newest` of that
    gradient's square, too. P must not depend on it, so the tensor's typical gradient stands for it, if it had any.
    """
    sizes = tuple(root.numel() for root in roots)
    least = norms_of(roots).mul_(_shares(sizes, roots[0].device)).mul_(rule.newest**0.5)
    foreach_clamp_min_(roots, list(torch.where(least > 0, least, torch.inf).unbind()))


@lru_cache(maxsize=256)
def _shares(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the factor from each tensor's norm to its mean, kept on the device: a copy there may wait for it."""
    return torch.tensor([max(size, 1) ** -0.5 for size in sizes], dtype=torch.float32, device=device)


@lru_cache(maxsize=256)
def index_of(groups: tuple[int, ...], device: torch.device) -> Tensor:
    """Return each tensor's parameter group, kept on the device as `_shares`."""
    return torch.tensor(groups, device=device)


class GradientNorms:
    """Squared norms [groups] of gradients, as the optimizer scales them.

    The gradients are those of the optimizer's parameters, preconditioned as the optimizer steps. `chosen`: the script
    names a learning-rate rule. The gradients of an optimizer that is not understood are then measured without a
    preconditioner.
    """

    def __init__(self, optimizer: Optimizer, *, chosen: bool = False) -> None:
        self.optimizer = optimizer
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
        self._chosen = chosen
        self._typical: dict[Tensor, tuple[int, Tensor]] = {}
        """Root mean square of the gradient so far, after so many steps, of parameters that are measured in parts."""
        self._views: dict[Tensor, tuple[Tensor, Tensor]] = {}
        """Moments that the optimizer keeps, each with its flat view."""
        self._families: tuple[Family, ...] | None = None

    @property
    def families(self) -> tuple[Family, ...]:
        """Each parameter group's family; empty until the optimizer's state tells."""
        if self._families is None:
            found = recognise(self.optimizer, stepped=self.steps > 0)
            if found is not None and self._chosen:
                found = tuple(CHOSEN if family is UNKNOWN else family for family in found)
            self._families = found
        return self._families or ()

    @property
    def understood(self) -> bool:
        """False if an optimizer is not understood. Its gradients are not measured."""
        return all(family.understood for family in self.families)

    @property
    def preconditioned(self) -> bool:
        """Whether gradients are measured preconditioned.

        Also True while the state does not tell the family yet: no gradient counts then.
        """
        return not self.families or any(family.preconditioned for family in self.families)

    @property
    def warm(self) -> bool:
        """False while the optimizer's state says too little. Gradients seen until then do not count."""
        families = self.families
        if not families or not self.understood:
            return False
        return self.steps >= WARM_STEPS or not self.preconditioned

    def leave_out(self, params: Iterable[Tensor]) -> None:
        """Stop measuring parameters whose gradients are sparse. A sparse gradient has other rows at each step."""
        for param in params:
            self.group_of.pop(param, None)

    def count_from_state(self) -> None:
        """Read the number of steps from the optimizer's state. The user may have restored that state."""
        groups = self.optimizer.param_groups
        counts = [group[key] for group in groups for key in ("step", "k") if key in group]
        counts += [next((s["step"] for s in self.optimizer.state.values() if "step" in s), 0)]
        self.steps = max(self.steps, *map(int, counts))

    def of(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
        """Return the squared norm per parameter group, float32 [groups].

        A gradient has its parameter's local shape, or is flat. The result is on the gradients' device. Nothing
        synchronises with the host. Each chunk takes the same number of operations, however many parameters are in it.
        """
        device = local_part(grads[0]).device if grads else torch.device("cpu")
        if not self.preconditioned:
            return self._plain(params, grads, device)
        out = torch.zeros(self.groups, dtype=torch.float32, device=device)
        for group, pieces, seconds in self._chunks(params, grads):
            seen = self._preconditioned(pieces, seconds, group)
            norms = norms_of(seen)
            out[group] += torch.dot(norms, norms)
            del seen  # before the next chunk's is made
        return out

    def _plain(self, params: Sequence[Tensor], grads: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the squared norms of plain gradients, without a workspace."""
        pairs = [(g, self.group_of[p]) for p, g in zip(params, grads, strict=True) if p in self.group_of]
        grads, groups = [g for g, _ in pairs], tuple(group for _, group in pairs)
        if not grads:
            return torch.zeros(self.groups, dtype=torch.float32, device=device)
        norms = norms_of(list(map(local_part, grads)))
        if self.groups == 1:
            return torch.dot(norms, norms).reshape(1)
        out = torch.zeros(self.groups, dtype=torch.float32, device=device)
        return out.index_add_(0, index_of(groups, device), norms * norms)

    def of_flat(self, param: Tensor, piece: Tensor, start: int) -> Tensor:
        """Return what `of` does, for a flat run of elements of one parameter.

        `piece` starts at element `start` of the flattened parameter, or of its local shard if it is sharded. Elements
        beyond the end of the shard are padding. `piece` has at most CHUNK elements.
        """
        out = torch.zeros(self.groups, dtype=torch.float32, device=piece.device)
        group = self.group_of.get(param)
        if group is None or piece.numel() == 0:
            return out
        if self.preconditioned:
            moment = self.second_moment(param)
            if moment is None:
                return out
            flat = self._flat(param, moment)
            part = flat[start : start + piece.numel()]
            if part.numel() == 0:
                return out
            steps, typical = self._typical.get(param, (-1, None))
            if steps != self.steps or typical is None:
                typical = flat.sum(dtype=torch.float32).div_(flat.numel()).sqrt_()
                self._typical[param] = self.steps, typical
            piece = self._preconditioned([piece[: part.numel()]], [part], group, typical)[0]
        norm = torch.linalg.vector_norm(piece, dtype=torch.float32)
        out[group] = norm * norm
        return out

    def _preconditioned(
        self, grads: list[Tensor], moments: list[Tensor], group: int, typical: Tensor | None = None
    ) -> list[Tensor]:
        """Return P g.

        `typical` is the root mean square of the gradient so far. It is given if `moments` are only a part of a
        tensor's.
        """
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
        """Return how a group's present second moments become P."""
        family = self.families[group]
        return family.step_rule(self.optimizer.param_groups[group], self.steps)

    def _chunks(
        self, params: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> Iterator[tuple[int, list[Tensor], list[Tensor]]]:
        """Yield runs of at most CHUNK elements: group, gradients, second moments."""
        by_group: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for param, whole_grad in zip(params, grads, strict=True):
            group, grad = self.group_of.get(param), local_part(whole_grad)
            if group is not None and grad.numel():
                by_group.setdefault(group, []).append((param, grad))
        for group, pairs in by_group.items():
            pieces: list[Tensor] = []
            seconds: list[Tensor] = []
            size = 0
            for param, grad in pairs:
                whole = self.second_moment(param)
                if whole is None:
                    continue  # the optimizer has never stepped this parameter
                if whole.shape != grad.shape:
                    whole = self._flat(param, whole)
                for piece, moment in _pieces(grad, whole):
                    if pieces and size + piece.numel() > CHUNK:
                        yield group, pieces, seconds
                        pieces, seconds, size = [], [], 0
                    pieces.append(piece)
                    seconds.append(moment)
                    size += piece.numel()
            if pieces:
                yield group, pieces, seconds

    def _flat(self, param: Tensor, moment: Tensor) -> Tensor:
        """Return a moment flat. The view of a tensor that the optimizer keeps is kept, too: a view is an operation."""
        known = self._views.get(param)
        if known is None or known[0] is not moment:
            known = moment, moment.reshape(-1)
            if any(
                local_part(v) is moment for v in self.optimizer.state[param].values() if isinstance(v, Tensor)
            ):
                self._views[param] = known
        return known[1]

    def second_moment(self, param: Tensor) -> Tensor | None:
        """Return v of the local part of a parameter.

        It is the optimizer's own tensor, or one derived from its state. A derived one takes a float32 copy of the
        parameter as workspace. Return None before the optimizer first steps the parameter.
        """
        group = self.group_of.get(param)
        state = self.optimizer.state.get(param)
        if group is None or not state or not self.families:
            return None
        family = self.families[group]
        if family.moment is None:
            # Plain gradients, beside groups that are preconditioned, have v = 1.
            return torch.ones((), device=param.device).expand(local_part(param).shape)
        return family.moment(state, param, self.optimizer.param_groups[group])


def _pieces(grad: Tensor, moment: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield matching parts of two tensors of the same shape.

    A part has at most CHUNK elements. The tensors are cut along as few of the first axes as needed.
    """
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
