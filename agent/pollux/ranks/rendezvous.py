"""Where the ranks of a job meet anew: a store in rank 0's process, and the process groups that they form over it.

Rank 0's process outlives every resize in place, so it holds the store. Whoever comes in proves by the secret that its
keys begin with that it is of this job: a file of mode 0600 carries it to the joiners, the old groups to the others.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pollux.errors import RankLost
from pollux.ranks.torch_internals import set_group_timeout, tcp_store
from pollux.ranks.world import CONTROL_TIMEOUT, World, backend_for, node_name, where
from pollux.slurm_job.allocation import node_address
from pollux.slurm_job.network import interface_of

FORM_WAIT = timedelta(seconds=60)
"""For the others to come while groups are formed; a rank that died meanwhile is else waited for half an hour."""

POLL = 0.005
"""Seconds between two looks into the store."""


class Rendezvous:
    """The store, as one rank holds it: keys and values are text, under the meeting's secret."""

    def __init__(self, address: str, port: int, secret: str, store: Any) -> None:
        self.address, self.port, self.secret = address, port, secret
        self._store = store

    @classmethod
    def open(cls, environ: MutableMapping[str, str] = os.environ) -> Rendezvous:
        """On rank 0: the store, on a free port of this node. Raises RankLost where it cannot be opened."""
        address = own_address(environ)
        try:
            store = tcp_store(address, 0, serves=True, timeout=FORM_WAIT)
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise RankLost(
                f"no store can be opened for the ranks to meet in at {address}: {error}"
            ) from error
        return cls(address, store.port, secrets.token_hex(16), store)

    @classmethod
    def join(cls, address: str, port: int, secret: str) -> Rendezvous:
        """On the other ranks. Raises RankLost where rank 0 does not answer."""
        try:
            store = tcp_store(address, port, serves=False, timeout=FORM_WAIT)
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise RankLost(f"rank 0 is not found at {address}, port {port}: {error}") from error
        return cls(address, port, secret, store)

    def tell(self, key: str, value: Any) -> None:
        """Leave a value (of JSON) for the others. Raises RankLost."""
        self._asking(lambda: self._store.set(self._key(key), json.dumps(value)))

    def heard(self, key: str) -> Any:
        """What was left under the key; None where nothing was yet. Raises RankLost."""

        def look() -> Any:
            name = self._key(key)
            return json.loads(self._store.get(name)) if self._store.check([name]) else None

        return self._asking(look)

    def count(self, key: str, more: int = 0) -> int:
        """Count up, and return the count. Raises RankLost."""
        return int(self._asking(lambda: self._store.add(self._key(key), more)))

    def _key(self, key: str) -> str:
        return f"{self.secret}/{key}"

    def _asking(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except (dist.DistError, RuntimeError) as error:
            raise RankLost(f"the store in rank 0's process does not answer: {error}") from error

    def form(self, old: World, name: str, rank: int, size: int, *, per_node: int, lent: int) -> World:
        """Form the process groups of `size` ranks, after `leave_groups`; `name` is this generation's alone.

        Raises RankLost where the others do not come.
        """
        device = old.device
        reach(self.address, self.port)
        store = dist.PrefixStore(self._key(name), self._store)  # type: ignore[attr-defined]
        try:
            dist.init_process_group(
                backend_for(device), store=store, rank=rank, world_size=size, timeout=FORM_WAIT
            )
            control = dist.new_group(backend="gloo", timeout=FORM_WAIT) if size > 1 else None
            racks, places = where(control) if control is not None else (1, (node_name(),))
            _be_patient(control)
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise RankLost(f"{size} ranks were to form their process groups anew: {error}") from error
        return replace(
            old,
            rank=rank,
            size=size,
            nodes=max(size // per_node, 1),
            control=control,
            racks=racks,
            places=places,
            lent=lent,
            waiting=False,
        )


def leave_groups() -> None:
    """Give up the present process groups; nothing may be under way in them."""
    if dist.is_initialized():
        dist.destroy_process_group()


def alone(device: torch.device) -> None:
    """Form a process group of this rank alone, so that a model can be wrapped before the others are there."""
    dist.init_process_group(backend_for(device), store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def tell_environment(world: World, environ: MutableMapping[str, str] = os.environ) -> None:
    """What a launcher would tell this rank of its place, for what the script reads from there."""
    environ["RANK"], environ["WORLD_SIZE"] = str(world.rank), str(world.size)
    environ["GROUP_RANK"], environ["GROUP_WORLD_SIZE"] = str(world.rank // world.per_node), str(world.nodes)


def _be_patient(control: dist.ProcessGroup | None) -> None:
    """From here on collectives may take as long as in groups made at a start: ranks read data, and evaluate."""
    gloo = dist.get_backend() == "gloo"
    set_group_timeout(timedelta(minutes=30 if gloo else 10))
    if control is not None:
        set_group_timeout(CONTROL_TIMEOUT, control)


def own_address(environ: MutableMapping[str, str] = os.environ) -> str:
    """Where other nodes reach this one, as an IPv4 address.

    With one node the launcher has told no address beyond the loopback one: then Slurm's, by the node's name.
    """
    told = environ.get("MASTER_ADDR", "")
    if environ.get("SLURM_JOB_ID") and (not told or told == "localhost" or told.startswith("127.")):
        told = node_address(node_name(environ))
    try:
        return socket.gethostbyname(told or "127.0.0.1")
    except OSError as error:
        raise RankLost(f"this node's address {told!r} cannot be resolved: {error}") from error


def reach(address: str, port: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have gloo use the interface that leads to rank 0, where it was told to use the loopback one."""
    if environ.get("GLOO_SOCKET_IFNAME", "lo") != "lo":
        return
    try:
        with socket.create_connection((address, port), timeout=10) as line:
            mine = line.getsockname()[0]
    except OSError as error:
        raise RankLost(f"rank 0 is not reached at {address}, port {port}: {error}") from error
    interface = interface_of(mine)
    if interface is not None:
        environ["GLOO_SOCKET_IFNAME"] = interface


def until(done: Callable[[], bool], seconds: float) -> bool:
    """Look again and again until it is done; False where it was not in time."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= end:
            return False
        time.sleep(POLL)
    return True
