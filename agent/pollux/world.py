"""This process's place among the ranks of its job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pollux.errors import LaunchError, RankLost

CONTROL_TIMEOUT = timedelta(minutes=30)


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

    @property
    def distributed(self) -> bool:
        return self.size > 1


def join(device: torch.device, environ: Mapping[str, str] = os.environ) -> World:
    """Join the ranks that the environment names (as `pollux run` and torchrun set it); alone without it.

    A process group that the user has initialised is used as it is. Raises LaunchError where the environment
    contradicts itself.
    """
    if not dist.is_available():
        return World(0, 1, 1, device, None)
    if not dist.is_initialized():
        size = _number(environ, "WORLD_SIZE", 1)
        if size < 2:
            # One rank needs nobody to talk to: neither a store nor a port that another job might hold.
            return World(0, 1, 1, device, None)
        _check(environ, size)
        try:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        except (dist.DistError, ValueError) as error:
            raise RankLost(
                f"expected {size} ranks to meet at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']}: {error}. Is one "
                "missing, or does another job hold the port?"
            ) from error
    rank, size = dist.get_rank(), dist.get_world_size()
    if size < 2:
        return World(rank, size, 1, device, None)
    per_node = _number(environ, "LOCAL_WORLD_SIZE", size)
    if size % per_node:
        raise LaunchError(
            f"expected the same number of ranks on each node, got {size} ranks with {per_node} on this one"
        )
    control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    return World(rank, size, size // per_node, device, control, _racks(control, environ))


def _racks(control: dist.ProcessGroup, environ: Mapping[str, str]) -> int:
    """How many racks the ranks are in, by what Slurm told each of them (topology/tree: "core.rack1.node7")."""
    address = environ.get("SLURM_TOPOLOGY_ADDR", "")
    mine = address.split(".")[-2] if address.count(".") >= 1 else ""
    names: list[str | None] = [None] * dist.get_world_size(control)
    dist.all_gather_object(names, mine, group=control)
    return len(set(names))


def _check(environ: Mapping[str, str], size: int) -> None:
    """Raise LaunchError where several ranks are announced, and not all that they need to meet."""
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
    text = environ.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise LaunchError(f"expected {name} to be a whole number from 1, got {text!r}")
    return value
