"""Read second moments of optimizers, in each library's own layout.

Every function takes the state of one parameter, the parameter and its group. It returns `v` of the parameter's local
shape, so that the optimizer divides an element of the gradient by about sqrt(v). It returns None before the first step.
Nothing here waits for the device or writes to the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pollux.ranks.sharding import local_part

State = Mapping[str, Any]
Group = Mapping[str, Any]


def stored(state: State, *keys: str) -> Tensor | None:
    """Return the state's first tensor among `keys`, in floating point. Quantized states are decoded."""
    for key in keys:
        value = state.get(key)
        if not isinstance(value, Tensor):
            continue
        part = local_part(value)
        if f"qmap{key[-1]}" in state:
            return blockwise(part, state[f"qmap{key[-1]}"], state[f"absmax{key[-1]}"])
        if type(part) not in (Tensor, torch.nn.Parameter):
            return part.dequantize()  # torchao's 8-bit, 4-bit and fp8 states
        return part
    return None


def blockwise(codes: Tensor, values: Tensor, largest: Tensor) -> Tensor:
    """Decode a block-wise 8-bit state (Dettmers et al., 2022).

    Each element is its value in the table times the largest value of its block.
    """
    flat = values[codes.reshape(-1).long()]
    per_block = -(-flat.numel() // largest.numel())
    size = 1 << (per_block - 1).bit_length()  # blocks are powers of two, and only the last one is short
    return flat.mul_(largest.repeat_interleave(size)[: flat.numel()]).view(codes.shape)


def adam(state: State, param: Tensor, group: Group) -> Tensor | None:
    """Adam's v; AMSGrad's maximum; AdaBelief's variance."""
    return stored(state, "max_exp_avg_sq", "max_exp_avg_var", "exp_avg_sq", "exp_avg_var", "state2")


def rmsprop(state: State, param: Tensor, group: Group) -> Tensor | None:
    """RMSprop's mean square, less the squared mean where it is centered."""
    square, mean = stored(state, "square_avg", "state1"), stored(state, "grad_avg")
    if square is None or mean is None:
        return square
    return square.float().addcmul(mean.float(), mean.float(), value=-1.0).clamp_(min=0.0)


def adagrad(state: State, param: Tensor, group: Group) -> Tensor | None:
    """Adagrad's sum of squares."""
    return stored(state, "sum", "state1")


def adadelta(state: State, param: Tensor, group: Group) -> Tensor | None:
    """Return (mean squared gradient + eps) / (mean squared step + eps).

    Adadelta divides by sqrt(v + eps) and multiplies by sqrt(mean squared step + eps).
    """
    square, steps = stored(state, "square_avg"), stored(state, "acc_delta")
    if square is None or steps is None:
        return None
    eps = float(group["eps"])
    return (square.float() + eps).div_(steps.float() + eps)


def adamax(state: State, param: Tensor, group: Group) -> Tensor | None:
    """Adamax divides by its infinity norm u: v = u^2."""
    norm = stored(state, "exp_inf")
    return None if norm is None else norm.float().square()


def adafactor(state: State, param: Tensor, group: Group) -> Tensor | None:
    """Return Adafactor's factored v, over the square of its step size.

    Adafactor derives the step size from the parameter's scale.
    """
    row, col = stored(state, "row_var", "exp_avg_sq_row"), stored(state, "col_var", "exp_avg_sq_col")
    if row is not None and col is not None:
        if "exp_avg_sq_row" in state:  # these are without the reduced axis
            row, col = row.unsqueeze(-1), col.unsqueeze(-2)
        # In the tensors' own precision the mean of many small rows would be lost.
        row, col = row.float(), col.float()
        square: Tensor | None = row * col / row.mean(dim=-2, keepdim=True).clamp(min=1e-30)
    else:
        square = stored(state, "variance", "exp_avg_sq")
    if square is None or not group.get("scale_parameter", True):
        return square
    eps = group["eps"]
    least = float(eps[1] if isinstance(eps, tuple | list) else group["eps2"])
    return square.float() / mean_square(local_part(param.detach())).clamp(min=least**2)


def lamb(state: State, param: Tensor, group: Group) -> Tensor | None:
    """Return the square of LAMB's denominator over its trust ratio.

    The denominator is Adam's. The trust ratio of a tensor is |w| / |update| (You et al., 2020).
    """
    square, mean = adam(state, param, group), stored(state, "exp_avg", "state1")
    if square is None or mean is None:
        return None
    below = square.float().sqrt().add_(float(group["eps"]))
    update = mean.float() / below
    if group.get("weight_decay"):
        update.add_(local_part(param.detach()).float(), alpha=float(group["weight_decay"]))
    return below.div_(_trust(local_part(param.detach()), update)).square_()


def per_tensor(state: State, param: Tensor, group: Group) -> Tensor | None:
    """Return one v for the whole tensor: the mean square of its momentum.

    For optimizers whose steps have the same size whatever the size of the gradient.
    """
    mean = stored(state, "exp_avg", "momentum_buffer", "state1")
    return None if mean is None else mean_square(mean).expand(mean.shape)


def lars(state: State, param: Tensor, group: Group) -> Tensor | None:
    """Return one v for the whole tensor: (|momentum| / |w|)^2.

    LARS makes steps proportional to the size of the weights |w|.
    """
    mean = stored(state, "momentum_buffer", "state1")
    if mean is None:
        return None
    return _trust(local_part(param.detach()), mean).pow(-2).expand(mean.shape)


def mean_square(tensor: Tensor) -> Tensor:
    """The mean of the squares, a float32 scalar on the device."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return norm.square().div_(max(tensor.numel(), 1))


def _trust(weights: Tensor, update: Tensor) -> Tensor:
    """|w| / |update|, and 1 where either is zero."""
    w = torch.linalg.vector_norm(weights, dtype=torch.float32)
    u = torch.linalg.vector_norm(update, dtype=torch.float32)
    return torch.where((w > 0) & (u > 0), w / u.clamp(min=1e-30), 1.0)


def rotation(state: State) -> list[Tensor | None]:
    """Return SOAP's eigenvectors by axis; None for an axis without any. P acts on Q_0' g Q_1 (Vyas et al., 2024)."""
    return [q if isinstance(q, Tensor) else None for q in state.get("Q") or []]


def inverse_roots(state: State) -> list[Tensor | None]:
    """Return Shampoo's inverse roots by axis (Gupta et al., 2018). They are all of its P."""
    found: list[Tensor | None] = []
    while (
        root := state.get(f"inv_pre_cond_{len(found)}", state.get(f"inv_precond_{len(found)}"))
    ) is not None:
        found.append(root)
    return found


def along_axes(tensor: Tensor, matrices: list[Tensor | None]) -> Tensor:
    """Multiply each axis, from the left, by its matrix transposed."""
    out = tensor.float()
    for axis, matrix in enumerate(matrices):
        if matrix is not None:
            out = torch.tensordot(out, matrix.float(), dims=([axis], [0])).movedim(-1, axis)
    return out
