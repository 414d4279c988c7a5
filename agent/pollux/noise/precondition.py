"""Squared norms of gradients, per parameter group, seen through the optimizer's preconditioner.

Adam and its kin step along `P g` with `P = 1 / (sqrt(v_hat) + eps)`. The noise scale that says how much a larger batch
helps them is the noise scale of `P g` (the paper's PGNS). `pollux.optimizers` reads `P` from the optimizer's own state
as it was before the step: independent of the gradient that is measured. Nothing here writes to the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.optim import Optimizer

from pollux.optimizers import moments
from pollux.optimizers.families import CHOSEN, UNKNOWN, Family, StepRule, recognise
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
"""Optimizer steps before a state's second moment is taken for a preconditioner (model.md)."""

CHUNK = 1 << 21
"""Elements handled at once: 8 MiB of float32 per temporary keeps the workspace under 32 MiB."""


def floor(roots: list[Tensor], rule: StepRule) -> None:
    """Raise elements of sqrt(v), one tensor per parameter, to the least that the optimizer divides by.

    An element that had next to no gradient so far (a dead unit, a pixel that is always blank) would step 1/eps far at
    its first gradient and dominate the averages. The optimizer does not step so far: v then holds `newest` of the
    present gradient's square too. P must not depend on that gradient, so the tensor's typical gradient stands for it.
    A tensor that never had a gradient does not count.
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
    """Squared norms [groups] of gradients of the optimizer's parameters, preconditioned as the optimizer steps.

    `chosen`: the script names a learning-rate rule, so that gradients of an optimizer that is not understood are
    measured as they are.
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
        self._size: int = sum(local_part(p).numel() for p in self.group_of)
        self._chosen = chosen
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
        """False where an optimizer is not understood: its gradients are not measured."""
        return all(family.understood for family in self.families)

    @property
    def preconditioned(self) -> bool:
        """True while the state does not tell, too: nothing counts then."""
        return not self.families or any(family.preconditioned for family in self.families)

    @property
    def warm(self) -> bool:
        """False while the optimizer's state says too little: gradients seen until then do not count."""
        families = self.families
        if not families or not self.understood:
            return False
        return self.steps >= WARM_STEPS or not self.preconditioned

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
        groups = self.optimizer.param_groups
        counts = [group[key] for group in groups for key in ("step", "k") if key in group]
        counts += [next((s["step"] for s in self.optimizer.state.values() if "step" in s), 0)]
        self.steps = max(self.steps, *map(int, counts))

    def of(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
        """Squared norm per parameter group, float32 [groups], on the gradients' device; no host synchronisation."""
        device = local_part(grads[0]).device if grads else torch.device("cpu")
        if not self.preconditioned:
            return self._plain(params, grads, device)
        out = torch.zeros(self.groups, dtype=torch.float32, device=device)
        for group, pieces, seconds in self._chunks(params, grads):
            seen = self._preconditioned(pieces, seconds, group) if seconds else pieces
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
        if self.preconditioned:
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
        family = self.families[group]
        return family.step_rule(self.optimizer.param_groups[group], self.steps)

    def _chunks(
        self, params: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> Iterator[tuple[int, list[Tensor], list[Tensor]]]:
        """Runs of (group, gradients, second moments) of at most CHUNK elements each; no moments: v is 1."""
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
                if self.turned(param):
                    yield from self._turned(group, param, grad)
                    continue
                whole = self.second_moment(param)
                if whole is None:
                    continue  # the optimizer has never stepped it: it does not count
                for piece, moment in _pieces(grad, whole):
                    if pieces and size + piece.numel() > CHUNK:
                        yield group, pieces, seconds
                        pieces, seconds, size = [], [], 0
                    pieces.append(piece)
                    seconds.append(moment)
                    size += piece.numel()
            if pieces:
                yield group, pieces, seconds

    def turned(self, param: Tensor) -> bool:
        """Whether P mixes the elements of the parameter's gradient, which is then measured as a whole."""
        group = self.group_of.get(param)
        families = self.families
        return group is not None and bool(families) and families[group].matrices is not None

    def _turned(
        self, group: int, param: Tensor, grad: Tensor
    ) -> Iterator[tuple[int, list[Tensor], list[Tensor]]]:
        """One whole gradient multiplied by the family's matrices; the workspace is a few times its size."""
        family, state = self.families[group], self.optimizer.state.get(param)
        if not state or family.matrices is None:
            return
        matrices = family.matrices(state)
        if family.moment is None and not matrices:
            return
        moment = self.second_moment(param)
        yield group, [moments.along_axes(grad, matrices)], [] if moment is None else [moment]

    def second_moment(self, param: Tensor) -> Tensor | None:
        """v of the local part of a parameter: the optimizer's own tensor, or one derived from its state.

        None before the optimizer first steps it. A derived one takes a float32 copy of the parameter as workspace.
        """
        group = self.group_of.get(param)
        state = self.optimizer.state.get(param)
        if group is None or not state or not self.families:
            return None
        family = self.families[group]
        if family.moment is None:
            return None if family.matrices is not None else moments.none(state, param, {})
        return family.moment(state, param, self.optimizer.param_groups[group])


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
