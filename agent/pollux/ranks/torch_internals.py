"""Every private or undocumented torch API that the agent uses.

Each use was checked with all releases in `CHECKED`, unless its docstring names fewer. `make test-torch-versions` runs
the agent's unit tests with the oldest and the newest of them; add a release once these tests pass with it. If torch
lacks an API, the function of this module that uses it raises UnsupportedTorch.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pollux.errors import UnsupportedTorch

ReduceScatterObserver = Callable[[Tensor, dist.ProcessGroup, Any], None]
"""Function of the unreduced gradient, process group and operation."""
CHECKED = ("2.6", "2.13", "2.14")
"""The releases of torch that the uses below were checked with."""


def internal(owner: Any, path: str) -> Any:
    """Return the attribute at a dotted path. Raises UnsupportedTorch."""
    try:
        return reduce(getattr, path.split("."), owner)
    except AttributeError as error:
        name = getattr(owner, "__name__", type(owner).__qualname__)
        raise UnsupportedTorch(
            f"torch {torch.__version__} has no {name}.{path}, which the agent uses. The agent is checked with torch "
            f"{', '.join(CHECKED)}: install one of these releases"
        ) from error


# One kernel for many small tensors, as in torch's own optimizers.
_foreach_norm: Callable[..., list[Tensor]] = internal(torch, "_foreach_norm")
foreach_sqrt: Callable[..., list[Tensor]] = internal(torch, "_foreach_sqrt")
foreach_add_: Callable[..., None] = internal(torch, "_foreach_add_")
foreach_mul: Callable[..., list[Tensor]] = internal(torch, "_foreach_mul")
foreach_mul_: Callable[..., None] = internal(torch, "_foreach_mul_")
foreach_div: Callable[..., list[Tensor]] = internal(torch, "_foreach_div")
foreach_div_: Callable[..., None] = internal(torch, "_foreach_div_")
foreach_reciprocal_: Callable[..., None] = internal(torch, "_foreach_reciprocal_")
foreach_clamp_min_: Callable[..., None] = internal(torch, "_foreach_clamp_min_")


def norms_of(tensors: Sequence[Tensor], order: int = 2) -> Tensor:
    """Return each tensor's norm, float32 [n], by a few operations for all of them."""
    # float64 is not narrowed by itself.
    wide = [tensor.float() if tensor.dtype == torch.float64 else tensor for tensor in tensors]
    return torch.stack(list(_foreach_norm(wide, order, torch.float32)))


call_after_backward: Callable[[Callable[[], None]], None] = internal(
    torch.autograd, "Variable._execution_engine.queue_callback"
)
"""Ask the autograd engine, in a backward pass, for a call at its end. DDP asks for its reduction in the same way."""


for _owner, _path in (
    (dist.distributed_c10d, "_world.pg_map"),
    (DistributedDataParallel, "_remove_autograd_hooks"),
    (DistributedDataParallel, "register_comm_hook"),
):
    internal(_owner, _path)  # at import, and not in the middle of a training


def pin_memory(batch: Any) -> Any:
    """Return a nested batch with its tensors in pinned memory."""
    from torch.utils.data import _utils  # noqa: PLC0415 - loaded with the user's first loader

    return internal(_utils, "pin_memory.pin_memory")(batch)


# -- process groups ---------------------------------------------------------------------------------------------------


def process_groups() -> dict[dist.ProcessGroup, Any]:
    """Return the process groups that this process is in, each with its store."""
    return {group: store for group, (_, store) in internal(dist.distributed_c10d, "_world.pg_map").items()}


def abort_nccl() -> None:
    """End NCCL's communicators of all groups, the newest first, without a wait for other ranks.

    Every rank must have finished the groups' collectives. `destroy_process_group` alone waits until all ranks of a
    group call it. Releases of torch whose groups have no `abort` still wait.
    """
    for group in reversed(process_groups()):
        if "nccl" in dist.get_backend_config(group):
            getattr(group, "abort", lambda: None)()


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set how long the collectives of a group may take; None: the default."""
    # Public from torch 2.14 on, where a call of the former name warns.
    public = getattr(dist, "set_timeout", None)
    (public or internal(dist.distributed_c10d, "_set_pg_timeout"))(timeout, group)


def gloo_timeout_changes() -> bool:
    """Tell whether `set_group_timeout` has an effect on a gloo group.

    In torch 2.6 it has none: the collectives keep the timeout that the group was formed with.
    """
    return hasattr(getattr(dist, "ProcessGroupGloo", None), "set_timeout")


# -- DistributedDataParallel ------------------------------------------------------------------------------------------

_KEPT = ("training", *(name for name in vars(torch.nn.Module()) if "hook" in name))
"""Attributes that a script may have set on the wrapper, and that a module's `__init__` resets."""


def reduces_gradients(wrapper: DistributedDataParallel) -> bool:
    """Tell whether a backward pass ends in a reduction; not under `no_sync`."""
    reduces: bool = internal(wrapper, "require_backward_grad_sync")
    return reduces


def nodes(loss: Tensor) -> Iterator[str]:
    """Yield the names of the operations in the graph of a tensor."""
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
            yield node.name()


def expect_backward(wrapper: DistributedDataParallel, outputs: Sequence[Tensor]) -> None:
    """Prepare for a backward pass of `outputs`, as a forward pass does."""
    if reduces_gradients(wrapper):
        internal(wrapper, "reducer").prepare_for_backward(list(outputs))


def rewrap(
    wrapper: DistributedDataParallel,
    module: torch.nn.Module,
    options: Mapping[str, Any],
    *,
    send: bool = False,
) -> None:
    """Move a wrapper to the present default group; the object stays the same.

    Unless rank 0's `module` is to be sent, it must be equal on all ranks. The script's hooks on the wrapper stay.
    """
    kept = {name: wrapper.__dict__[name] for name in _KEPT if name in wrapper.__dict__}
    if "reducer" in wrapper.__dict__:
        # The old reducer goes before the new one: their hooks hang on the same parameters.
        release(wrapper)
    given = dict(options)
    if "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters:
        given["init_sync"] = send  # torch 2.6 lacks it, and broadcasts rank 0's equal parameters
    with warnings.catch_warnings():
        # The option of all releases in `CHECKED`. torch 2.13 has another name for it, and another meaning beside it.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        DistributedDataParallel.__init__(wrapper, module, **given)
    wrapper.__dict__.update(kept)


def release(wrapper: DistributedDataParallel) -> None:
    """Take a wrapper's reducer off the model's parameters."""
    internal(wrapper, "_remove_autograd_hooks")()
    internal(wrapper, "reducer")
    del wrapper.reducer
    wrapper.logger = None  # it holds the reducer, and with it a copy of the gradients


# -- fully_shard (FSDP2) ----------------------------------------------------------------------------------------------


class FsdpUnit:
    """Parameters that `fully_shard` gathers and reduces together.

    Checked with torch 2.13 and 2.14. Older releases name these attributes differently.
    """

    def __init__(self, module: Any, group: Any) -> None:
        self._module, self._group = module, group
        self.key = id(group)
        """A number of the unit: modules that are sharded together share it."""
        self.members: list[int] = internal(group, "mesh_info.mesh").mesh.flatten().tolist()
        """The ranks of the unit's mesh."""
        parameters = internal(group, "fsdp_params")
        self.params: list[Tensor] = [internal(p, "sharded_param") for p in parameters]
        """The shards, in the order in which they lie in the buffer of the reduction."""
        self.columns = [int(internal(p, "padded_sharded_param_size").numel()) for p in parameters]
        """Elements that each shard takes in that buffer."""

    @property
    def shards(self) -> int:
        """Number of parts of each parameter; under HSDP fewer than `members`."""
        return int(internal(self._group, "mesh_info.shard_mesh_size"))

    @property
    def divisor(self) -> float | None:
        """The user's own divisor of the summed gradient. None stands for the number of ranks."""
        found: float | None = internal(self._group, "gradient_divide_factor")
        return found

    def observe(self, see: ReduceScatterObserver) -> None:
        """Call `see` with the input of each reduce-scatter of the unit."""
        inner = internal(self._group, "_reduce_scatter_comm")
        internal(self._module, "set_custom_reduce_scatter")(_ObservedReduceScatter(inner, see))

    def obstacle(self) -> str | None:
        """Why `reshard` cannot change the unit's ranks; None where it can."""
        group = self._group
        mesh, after = internal(group, "mesh_info"), internal(group, "post_forward_mesh_info")
        parameters = internal(group, "fsdp_params")
        if internal(mesh, "mesh.ndim") != 1 or getattr(mesh, "is_spmd_mesh", False):
            return "its ranks form a mesh of more than one dimension"
        if after is not None and after != mesh:
            return "reshard_after_forward names a number of ranks"
        if any(internal(p, "is_dtensor") or internal(p, "fsdp_placement").dim for p in parameters):
            return "its parameters are sharded along other axes than the first"
        if any(internal(p, "offload_to_cpu") for p in parameters):
            return "its shards lie on the CPU"
        if any(type(internal(p, "sharded_param._local_tensor")) is not Tensor for p in parameters):
            return "its shards are tensors of a class of their own"
        if any(tuple(inspect.signature(type(p)).parameters) != _FSDP_PARAMETER for p in parameters):
            return f"torch {torch.__version__} makes shards in a way that the agent does not know"
        gathers, reduces = internal(group, "_all_gather_comm"), internal(group, "_reduce_scatter_comm")
        if isinstance(reduces, _ObservedReduceScatter):
            reduces = reduces.inner
        kinds = type(gathers).__name__, type(reduces).__name__
        if kinds != ("DefaultAllGather", "DefaultReduceScatter") or getattr(
            mesh, "reduce_scatter_process_group", None
        ):
            return "its shards are gathered or reduced in the script's own way"
        return None

    def reshard(self, mesh_info: Any, shards: Sequence[Tensor]) -> None:
        """Shard the unit over the ranks of another mesh.

        `mesh_info` is of `mesh_of_all_ranks`. `shards` has this rank's part of each parameter, flat, and padded with
        zeros to the length of the longest part. The parameters stay the same objects. Gradients become zero.
        """
        group = self._group
        internal(group, "reshard")()
        after = None if internal(group, "post_forward_mesh_info") is None else mesh_info
        parameters = zip(internal(group, "fsdp_params"), shards, strict=True)
        group.fsdp_params = [self._resharded(old, mesh_info, after, flat) for old, flat in parameters]
        group.mesh_info, group.post_forward_mesh_info = mesh_info, after
        internal(group, "_init_mp_dtypes")()
        reduces = internal(group, "_reduce_scatter_comm")
        if isinstance(reduces, _ObservedReduceScatter):
            group._reduce_scatter_comm = reduces.inner

    def _resharded(self, old: Any, mesh_info: Any, after: Any, flat: Tensor) -> Any:
        """Return torch's record of a parameter under another mesh.

        torch computes the sizes from a parameter without memory. The record then gets the script's parameter.
        """
        param = internal(old, "sharded_param")
        blank = torch.nn.Parameter(
            torch.empty(internal(old, "_orig_size"), dtype=param.dtype, device="meta"),
            requires_grad=param.requires_grad,
        )
        new = type(old)(
            blank,
            internal(old, "_module_info"),
            mesh_info,
            after,
            internal(old, "device"),
            None,
            internal(old, "mp_policy"),
            internal(self._group, "offload_policy"),
        )
        internal(old, "_post_load_hook_handle").remove()
        rows = flat.view(internal(new, "padded_sharded_param_size"))[: internal(new, "sharded_size")[0]]
        had_gradient, param.grad = param.grad is not None, None
        param._local_tensor, param._spec = rows, internal(new, "sharded_param._spec")
        if had_gradient:
            param.grad = torch.zeros_like(param, requires_grad=False)
        new.sharded_param, new._sharded_param_data = param, flat
        new._param_fqn = internal(old, "_param_fqn")
        internal(new, "_setattr_on_modules")(param)
        return new


_FSDP_PARAMETER = (
    "param",
    "module_info",
    "mesh_info",
    "post_forward_mesh_info",
    "device",
    "shard_placement_fn",
    "mp_policy",
    "offload_policy",
)
"""Parameters of the constructor that `FsdpUnit.reshard` calls, in torch 2.13 and 2.14."""


def mesh_of_all_ranks(device: torch.device, size: int, name: str) -> Any:
    """Return what `FsdpUnit.reshard` takes; every rank calls it alike.

    `name` is of no mesh before: torch caches results by a mesh's size and name, and takes equal ones for the same.
    """
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - loads torch's sharding
    from torch.distributed.fsdp._fully_shard import _fsdp_common  # noqa: PLC0415

    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=(name,))
    return internal(_fsdp_common, "FSDPMeshInfo")(mesh, shard_mesh_dim=0)


def shard_as(shard: Any, rows: Tensor, param: Any) -> None:
    """Let a DTensor hold `rows`, sharded over the ranks of `param`. The object stays the same."""
    spec = replace(internal(param, "_spec"), tensor_meta=internal(shard, "_spec.tensor_meta"))
    shard._local_tensor, shard._spec = rows, spec


class _ObservedReduceScatter:
    """A reduce-scatter of fully_shard that shows its input first. The inner reduce-scatter is torch's or the user's."""

    def __init__(self, inner: Any, see: ReduceScatterObserver) -> None:
        self.inner, self._see = inner, see

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        allocated: Tensor = self.inner.allocate(size, dtype=dtype, device=device)
        return allocated

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._see(input_tensor, group, op)
        work: dist.Work | None = self.inner(output_tensor, input_tensor, group, op, async_op)
        return work


def fsdp_units(module: Any) -> Iterator[FsdpUnit]:
    """Yield the parameter groups of a module under `fully_shard`."""
    for group in internal(internal(module, "_get_fsdp_state")(), "_fsdp_param_groups"):
        yield FsdpUnit(module, group)


# -- mixed precision, optimizers, schedulers, torch.compile -----------------------------------------------------------


def loss_scale(scaler: Any) -> Tensor | None:
    """Return an AMP scaler's scale on its device; None before its first use.

    The public `get_scale` waits for the device.
    """
    found: Tensor | None = _of_scaler(scaler, "_scale")
    return found


def scaler_steps(scaler: Any) -> object:
    """Return an object that an AMP scaler replaces in each `update`."""
    return _of_scaler(scaler, "_per_optimizer_states")


def _of_scaler(scaler: Any, name: str) -> Any:
    """Return an attribute; a scaler that is not torch's may lack it."""
    return internal(scaler, name) if isinstance(scaler, torch.amp.GradScaler) else getattr(scaler, name, None)


def skips_step(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a fused optimizer under AMP will skip its step.

    The scaler sets `found_inf` on the optimizer during the call.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def scheduler_calls(scheduler: Any) -> int:
    """Return how often a scheduler's `step` was called. A scheduler of the user's own may have `last_epoch` only."""
    return int(getattr(scheduler, "_step_count", getattr(scheduler, "last_epoch", 0)))


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside one that `torch.compile` has made."""
    inner: torch.nn.Module = getattr(model, "_orig_mod", model)
    return inner


def is_compiled(model: torch.nn.Module) -> bool:
    """Tell whether `torch.compile(model)` or `model.compile()` made it."""
    return uncompiled(model) is not model or getattr(model, "_compiled_call_impl", None) is not None
