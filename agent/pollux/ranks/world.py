"""This process's place among the ranks of its job."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from pollux.errors import LaunchError, RankLost
from pollux.ranks.gathering import gather_values
from pollux.ranks.torch_internals import process_groups
from pollux.slurm_job.allocation import node_name

CONTROL_TIMEOUT = timedelta(minutes=30)
_TAG = 0x706F6C78
"""Of a message that nobody sends."""


@dataclass(frozen=True)
class World:
    """Ranks, nodes and the device of this one."""

    rank: int
    size: int
    nodes: int
    device: torch.device
    control: dist.ProcessGroup | None
    """A gloo group of all ranks, for the control exchange; None with one rank."""
    racks: int = 1
    """Leaf switches of Slurm's topology that the nodes hang on; 1 where it has none."""
    places: tuple[str, ...] = ()
    """Each rank's node, by Slurm's name."""
    lent: int = 0
    """Ranks that a companion job lends; they are the last ones."""
    own: bool = True
    """Its process groups are the agent's own, and not the user's."""
    waiting: bool = False
    """True on a joiner that waits: its process group holds this rank alone until the job's ranks take it in."""

    @property
    def distributed(self) -> bool:
        return self.size > 1

    @property
    def per_node(self) -> int:
        """Ranks on each node."""
        return self.size // self.nodes


def join(device: torch.device, environ: Mapping[str, str] = os.environ) -> World:
    """Join the ranks that the environment names (by `pollux run` or torchrun); stay alone without it.

    A process group that the user has initialised is used as it is. Raises LaunchError where the environment
    contradicts itself, RankLost where another rank does not come or leaves.
    """
    own = meet(device, environ)
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size < 2:
        return World(0, 1, 1, device, None, places=(node_name(environ),), own=own)
    per_node = _number(environ, "LOCAL_WORLD_SIZE", size)
    if size % per_node:
        raise LaunchError(
            f"expected the same number of ranks on each node, got {size} ranks with {per_node} on this one"
        )
    control = new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    try:
        racks, places = where(control, environ)
    except RuntimeError as error:
        raise RankLost(f"a rank left while {size} ranks told each other their nodes: {error}") from error
    return World(dist.get_rank(), size, size // per_node, device, control, racks, places, own=own)


def meet(device: torch.device, environ: Mapping[str, str] = os.environ) -> bool:
    """Form the default process group, unless there is one; return whether it is the agent's. Raises as `join`."""
    if dist.is_initialized():
        return is_own()
    size = _number(environ, "WORLD_SIZE", 1)
    if size < 2:
        # One rank alone needs neither a store nor a port, which another job might hold.
        return True
    _check(environ, size)
    try:
        with own_group():
            dist.init_process_group(backend_for(device))
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RankLost(
            f"expected {size} ranks to meet at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']}: {error}. Is one "
            "missing, or does another job hold the port?"
        ) from error
    return True


def new_group(**options: Any) -> dist.ProcessGroup:
    """Form another group of all ranks; every rank calls it. Raises RankLost where one of them leaves."""
    try:
        made: dist.ProcessGroup = dist.new_group(**options)
        return made
    except (dist.DistError, RuntimeError) as error:
        raise RankLost(f"a rank left while the ranks formed a process group: {error}") from error


@contextmanager
def own_group() -> Iterator[None]:
    """Count a default group that is formed within as the agent's own.

    The agent may end it and form it again: nothing else may refer to it.
    """
    if dist.is_initialized():
        yield
        return
    yield
    if dist.is_initialized():
        _end_at_exit()
        _met.add(dist.group.WORLD)


@functools.cache
def _end_at_exit() -> None:
    atexit.register(_end_groups)


def _end_groups() -> None:
    """End the agent's own groups before the interpreter ends.

    gloo's threads may still free tensors of the last collective. Where the interpreter ends at the same time, such a
    thread aborts the process, and a training that is complete seems to have failed (pytorch issue 190489).
    """
    if not is_own():
        return
    for group in process_groups():
        # Where a wait times out, gloo closes the group's connections, and fails the collectives that wait for them.
        with suppress(RuntimeError, ValueError):  # which is wanted, or a group without gloo
            nothing = dist.irecv(torch.empty(1), group=group, tag=_TAG)
            if nothing is not None:
                nothing.wait(timedelta(milliseconds=1))
    if getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
    elif dist.get_backend() == dist.Backend.GLOO:
        keep_groups()


def keep_groups() -> None:
    """Keep the present groups to the end of the process.

    gloo ends a group that nothing refers to, and waits for its threads. One of them may wait on, although its
    connections are closed: gloo tells a collective nothing of that whose message is half read, or not written yet.
    """
    for group in process_groups():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def is_own() -> bool:
    """Whether the default group is there, and the agent's own."""
    return dist.is_initialized() and dist.group.WORLD in _met


_met: weakref.WeakSet[Any] = weakref.WeakSet()
"""Default groups that were formed in `own_group`; one that was left is not kept."""


def backend_for(device: torch.device) -> str:
    """The backend of the process group that gradients are reduced in. Raises LaunchError.

    POLLUX_BACKEND=gloo is for tests alone, where ranks share a GPU, which NCCL before 2.30 refuses.
    """
    chosen = os.environ.get("POLLUX_BACKEND") or "nccl"
    if chosen not in ("nccl", "gloo"):
        raise LaunchError(f"expected POLLUX_BACKEND to be nccl or gloo, got {chosen!r}")
    return chosen if device.type == "cuda" else "gloo"


def backend_of_default_group() -> str:
    """The backend that the default group was formed with.

    It may be one for each type of device, as in "cpu:gloo,cuda:nccl".
    """
    backend: str = dist.get_backend()
    return dist.get_backend_config() if backend == dist.Backend.UNDEFINED else backend


def where(control: dist.ProcessGroup, environ: Mapping[str, str] = os.environ) -> tuple[int, tuple[str, ...]]:
    """Count the ranks' racks, and name each rank's node. All ranks call it.

    Slurm tells each rank its place. Of topology/tree it is "core.rack1.node7".
    """
    address = environ.get("SLURM_TOPOLOGY_ADDR", "")
    mine = address.split(".")[-2] if address.count(".") >= 1 else ""
    found = gather_values((mine, node_name(environ)), control)
    return len({rack for rack, _ in found}), tuple(str(node) for _, node in found)


def print_lost_ranks_in_one_line(rank: int) -> None:
    """Print an uncaught RankLost as one line. The output of the rank that failed first shows the cause."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, RankLost):
            print(f"pollux: rank {rank} ends: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def _check(environ: Mapping[str, str], size: int) -> None:
    """Raise LaunchError where ranks are announced that cannot meet."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise LaunchError(
            f"expected {', '.join(missing)} beside WORLD_SIZE={size}: start the script by `pollux run` or torchrun, or "
            "unset WORLD_SIZE to train on one GPU"
        )
    if environ["RANK"] not in map(str, range(size)):
        raise LaunchError(
            f"expected RANK to be from 0 to {size - 1} (WORLD_SIZE={size}), got {environ['RANK']!r}"
        )


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not text.strip().isdecimal() or int(text) < 1:
        raise LaunchError(f"expected {name} to be a whole number from 1, got {text!r}")
    return int(text)
