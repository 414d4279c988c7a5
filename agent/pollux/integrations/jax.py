"""Train a JAX model with the agent: JAX makes gradients and Optax updates; ranks, data and checkpoints are the agent's.

    model = JaxModel(loss, params)  # loss(params, *batch) -> mean loss, a pure function
    optimizer = Optax(model, optax.adam, learning_rate=1e-3)
    job = pollux.attach(model, optimizer)
    for _ in job.epochs(10):
        for images, labels in loader:
            job.step(lambda: job.model(images, labels))
    accuracy(model.params, ...)

Each rank is a process with one JAX device. All parameters are one vector in torch's memory, which JAX reads in place
(DLPack). DistributedDataParallel averages its gradients, so that the agent measures, resizes and saves this training as
any other. JAX compiles the loss once for each number of examples in a pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from jax.flatten_util import ravel_pytree
from torch import Tensor, nn

from pollux.errors import PolluxAgentError

MIRRORED = {
    ("ScaleByAdamState", "mu"): "exp_avg",
    ("ScaleByAdamState", "nu"): "exp_avg_sq",
    ("ScaleByRmsState", "nu"): "square_avg",
    ("TraceState", "trace"): "momentum_buffer",
}
"""Optax' names of averages, and torch's, by which the agent recognises the optimizer."""


class JaxModel(nn.Module):
    """The parameters of a JAX model, and its loss.

    `forward(*batch)` returns the mean loss over the examples of `batch`, whose tensors JAX reads in place.

    Args:
        loss: a pure function (params, *batch) -> mean loss. With an argument `key` it gets a fresh JAX key in each
            pass, for dropout. With an argument `state` it gets the state, and returns (mean loss, new state).
        params: a pytree of floating-point arrays of one type.
        state: a pytree of further arrays that the loss changes, such as batch statistics.
        device: of the parameters; by default torch's "cuda" where JAX has a GPU, else "cpu".

    Raises:
        PolluxAgentError: arrays that are not of one floating-point type.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        params: Any,
        *,
        state: Any = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        types = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
        if len(types) != 1 or not jnp.issubdtype(next(iter(types)), jnp.floating):
            raise PolluxAgentError(
                f"expected parameters of one floating-point type, got {', '.join(sorted(types)) or 'none'}: cast them, "
                "and give what is not trained as `state`"
            )
        vector, self.unravel = ravel_pytree(params)
        place = device or ("cuda" if jax.default_backend() == "gpu" else "cpu")
        self.vector = nn.Parameter(as_tensor(vector).clone().to(place))
        leaves, self._structure = jax.tree.flatten(state)
        self._leaves = [f"state_{number}" for number in range(len(leaves))]
        self._kinds = [_kind(leaf) for leaf in leaves]
        for name, leaf in zip(self._leaves, leaves, strict=True):
            self.register_buffer(name, as_tensor(_signed(leaf)).clone().to(place))
        given = inspect.signature(loss).parameters
        self._keyed = "key" in given
        self._stateful = "state" in given

        def mean(
            vector: jax.Array, batch: tuple[Any, ...], options: Mapping[str, Any]
        ) -> tuple[jax.Array, Any]:
            found = loss(self.unravel(vector), *batch, **options)
            value, state = found if self._stateful else (found, None)
            return value, jax.tree.leaves(state)

        self._mean = jax.jit(mean)
        self._gradient = jax.jit(jax.value_and_grad(mean, has_aux=True))

    @property
    def params(self) -> Any:
        """The present parameters, as a pytree of their own."""
        return self.unravel(jnp.array(as_array(self.vector), copy=True))

    @property
    def state(self) -> Any:
        """The present state, as a pytree of its own."""
        return jax.tree.unflatten(
            self._structure, [jnp.array(leaf, copy=True) for leaf in self._state_leaves()]
        )

    def _state_leaves(self) -> list[jax.Array]:
        pairs = zip(self._leaves, self._kinds, strict=True)
        return [_unsigned(as_array(getattr(self, name)), kind) for name, kind in pairs]

    @torch.no_grad()
    def assign_state(self, state: Any) -> None:
        """Replace the state by another one of the same structure."""
        for name, leaf in zip(self._leaves, jax.tree.leaves(state), strict=True):
            getattr(self, name).copy_(as_tensor(_signed(leaf)))

    def forward(self, *batch: Any) -> Tensor:
        arrays = jax.tree.map(lambda part: as_array(part) if isinstance(part, Tensor) else part, batch)
        if torch.is_grad_enabled():
            loss: Tensor = _Loss.apply(self, arrays, self.vector)  # type: ignore[no-untyped-call]
            return loss
        value, _ = self._mean(as_array(self.vector), arrays, self._options())
        return as_tensor(value)

    def gradient(self, vector: Tensor, arrays: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        """Return the loss and its gradient, and keep the new state if the module is in training mode."""
        (value, leaves), gradient = self._gradient(as_array(vector), arrays, self._options())
        if self.training:
            self.assign_state(leaves)
        return value, gradient

    def _options(self) -> dict[str, Any]:
        """Return the arguments of the next pass that the loss asks for. The key follows torch's random numbers."""
        found: dict[str, Any] = {}
        if self._keyed:
            found["key"] = jax.random.key(int(torch.randint(2**31, ())))
        if self._stateful:
            found["state"] = jax.tree.unflatten(self._structure, self._state_leaves())
        return found


class _Loss(torch.autograd.Function):
    """JAX's loss, whose gradient is made with it."""

    @staticmethod
    def forward(ctx: Any, model: JaxModel, arrays: tuple[Any, ...], vector: Tensor) -> Tensor:
        value, gradient = model.gradient(vector, arrays)
        ctx.gradient = as_tensor(gradient)
        return as_tensor(value)

    @staticmethod
    def backward(ctx: Any, *scale: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.gradient * scale[0]


class Optax(torch.optim.Optimizer):
    """An Optax optimizer of a JaxModel, as torch's optimizers are used.

    Its learning rate is `param_groups[0]["lr"]`: torch's schedulers set it, and the agent scales it with the batch.

    Args:
        factory: makes the transformation from keyword arguments, such as `optax.adamw`.
        learning_rate: a number.
        options: further arguments of `factory`.

    Raises:
        PolluxAgentError: a schedule in the place of a number.
    """

    def __init__(
        self,
        model: JaxModel,
        factory: Callable[..., optax.GradientTransformation],
        *,
        learning_rate: float,
        **options: Any,
    ) -> None:
        if callable(learning_rate):
            raise PolluxAgentError(
                "expected a number as learning_rate, got an Optax schedule: make a scheduler of "
                "torch.optim.lr_scheduler for this optimizer, and pass it to pollux.attach"
            )
        self._transformation = optax.inject_hyperparams(factory)(learning_rate=learning_rate, **options)
        state = self._transformation.init(model.params)
        # As the state of later steps, without weak types and on a device: else the second step is compiled again.
        place = as_array(model.vector).device
        self._state = jax.tree.map(lambda x: jax.device_put(jnp.array(x, jnp.result_type(x)), place), state)
        numbers = {
            name: float(value) for name, value in self._state.hyperparams.items() if jnp.ndim(value) == 0
        }
        group: dict[str, Any] = {"params": [model.vector], "lr": numbers["learning_rate"]}
        if {"b1", "b2"} <= numbers.keys():
            group["betas"] = (numbers["b1"], numbers["b2"])
        if "decay" in numbers:
            group["alpha"] = numbers["decay"]
        group |= {name: numbers[name] for name in ("eps", "weight_decay", "momentum") if name in numbers}
        # By these options the agent recognises SGD, which need not have a state.
        plain = {"lr": 0.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
        super().__init__([group], plain if factory is optax.sgd else {"lr": 0.0})

        def update(gradient: jax.Array, state: Any, vector: jax.Array, numbers: Mapping[str, float]) -> Any:
            old = state.hyperparams
            state = state._replace(
                hyperparams={
                    k: jnp.asarray(numbers[k], old[k].dtype) if k in numbers else old[k] for k in old
                }
            )
            params = model.unravel(vector)
            changes, state = self._transformation.update(model.unravel(gradient), state, params)
            averages = {name: ravel_pytree(tree)[0] for name, tree in _averages(state, _shapes(params))}
            return ravel_pytree(optax.apply_updates(params, changes))[0], state, averages

        self._update = jax.jit(update)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by their gradient, if there is one."""
        loss = closure() if closure is not None else None
        (group,) = self.param_groups
        (vector,) = group["params"]
        if vector.grad is None:
            return loss
        numbers = {"learning_rate": float(group["lr"])}
        if "betas" in group:
            numbers["b1"], numbers["b2"] = group["betas"]
        if "alpha" in group:
            numbers["decay"] = group["alpha"]
        numbers |= {name: group[name] for name in ("eps", "weight_decay", "momentum") if group.get(name)}
        new, self._state, averages = self._update(
            as_array(vector.grad), self._state, as_array(vector), numbers
        )
        vector.copy_(as_tensor(new))
        self.state[vector] = {name: as_tensor(average) for name, average in averages.items()}
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return torch's groups, and the leaves of Optax' state in its order."""
        groups = [
            {k: v for k, v in group.items() if k != "params"} | {"params": [0]} for group in self.param_groups
        ]
        leaves = [as_tensor(jnp.asarray(leaf)).clone() for leaf in jax.tree.leaves(self._state)]
        return {"state": {"leaves": leaves}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state of the same optimizer. Raises ValueError for another one."""
        leaves, structure = jax.tree.flatten(self._state)
        found = [jnp.array(as_array(leaf), copy=True) for leaf in state_dict["state"].get("leaves", [])]
        wanted = [jnp.shape(leaf) for leaf in leaves]
        if [leaf.shape for leaf in found] != wanted:
            raise ValueError(
                f"expected the state of this Optax optimizer, of {len(wanted)} arrays, got {len(found)} arrays or "
                "other shapes"
            )
        self._state = jax.tree.unflatten(structure, found)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})


def _signed(leaf: Any) -> jax.Array:
    """Return an array of a type that ranks can send each other: keys and unsigned integers as signed ones."""
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.issubdtype(array.dtype, jnp.unsignedinteger) and array.dtype.itemsize > 1:
        array = jax.lax.bitcast_convert_type(array, f"int{8 * array.dtype.itemsize}")
    if str(array.dtype) in ("int16", "complex64", "complex128"):
        raise PolluxAgentError(
            f"expected state of floats, bools and integers of 32 bits, got an array of {array.dtype}"
        )
    return array


def _kind(leaf: Any) -> Any:
    """Return the type of an array, or how a key draws."""
    array = jnp.asarray(leaf)
    return jax.random.key_impl(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array.dtype


def _unsigned(array: jax.Array, kind: Any) -> jax.Array:
    """Undo `_signed`, for a leaf of this `_kind`."""
    if not isinstance(kind, jnp.dtype):
        key: jax.Array = jax.random.wrap_key_data(jax.lax.bitcast_convert_type(array, jnp.uint32), impl=kind)
        return key
    if jnp.issubdtype(kind, jnp.unsignedinteger) and kind.itemsize > 1:
        array = jax.lax.bitcast_convert_type(array, kind)
    return array


def _shapes(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
    return jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]


def _averages(state: Any, shapes: tuple[Any, list[tuple[int, ...]]]) -> Iterator[tuple[str, Any]]:
    """Yield each part of Optax' state that has the parameters' shapes, by torch's name where it has one."""
    if isinstance(state, tuple):
        fields = getattr(state, "_fields", range(len(state)))
        for field, part in zip(fields, state, strict=True):
            if field != "hyperparams" and _shapes(part) == shapes:
                own = f"{type(state).__name__}.{field}"
                yield MIRRORED.get((type(state).__name__, str(field)), own), part
            else:
                yield from _averages(part, shapes)


def as_array(tensor: Tensor) -> jax.Array:
    """Return a tensor's memory as a JAX array. Integers of 64 bits, which JAX has not by default, become 32 bits."""
    tensor = tensor.detach()
    if tensor.dtype is torch.int64 and not jax.config.values["jax_enable_x64"]:
        tensor = tensor.to(torch.int32)
    found: jax.Array = jax.dlpack.from_dlpack(tensor.contiguous())
    return found


def as_tensor(array: jax.Array) -> Tensor:
    """Return a JAX array's memory as a tensor.

    On a CPU this waits for JAX, so that nothing writes to memory that JAX still reads. On a GPU streams keep the order.
    """
    if jax.default_backend() == "cpu":
        array.block_until_ready()
    found: Tensor = torch.utils.dlpack.from_dlpack(array)
    return found
