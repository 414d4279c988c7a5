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
    """Adam's v; AMSGrad's maximum."""
    return stored(state, "max_exp_avg_sq", "exp_avg_sq", "state2")


def rmsprop(state: State, param: Tensor, group: Group) -> Tensor | None:
    """RMSprop's mean square, less the squared mean where it is centered."""
    square, mean = stored(state, "square_avg"), stored(state, "grad_avg")
    if square is None or mean is None:
        return square
    return square.float().addcmul(mean.float(), mean.float(), value=-1.0).clamp_(min=0.0)


def adagrad(state: State, param: Tensor, group: Group) -> Tensor | None:
    """Adagrad's sum of squares."""
    return stored(state, "sum")


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
    row, col = stored(state, "row_var"), stored(state, "col_var")
    if row is not None and col is not None:
        # In the tensors' own precision the mean of many small rows would be lost.
        row, col = row.float(), col.float()
        square: Tensor | None = row * col / row.mean(dim=-2, keepdim=True).clamp(min=1e-30)
    else:
        square = stored(state, "variance")
    if square is None:
        return None
    least = float(group["eps"][1])
    return square.float() / mean_square(local_part(param.detach())).clamp(min=least**2)


def per_tensor(state: State, param: Tensor, group: Group) -> Tensor | None:
    """Return one v for the whole tensor: the mean square of its momentum.

    For optimizers whose steps have the same size whatever the size of the gradient.
    """
    mean = stored(state, "momentum_buffer")
    return None if mean is None else mean_square(mean).expand(mean.shape)


def mean_square(tensor: Tensor) -> Tensor:
    """The mean of the squares, a float32 scalar on the device."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return norm.square().div_(max(tensor.numel(), 1))
