"""Let the ranks of a job meet again after a resize: a store, and process groups formed over it.

The store is in rank 0's process. Each client proves that it knows the store's secret. Joining ranks get the secret from
a file of mode 0600, all other ranks over the old process groups.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, MutableMapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pollux.errors import RankLost
from pollux.ranks.links import HANDSHAKE_S, NoAnswer
from pollux.ranks.rank_store import NoValue, RemoteStore, Server
from pollux.ranks.torch_internals import abort_nccl, gloo_timeout_changes, set_group_timeout
from pollux.ranks.world import CONTROL_TIMEOUT, World, backend_for, own_group, where
from pollux.slurm_job.allocation import node_address, node_name
from pollux.slurm_job.network import interface_of

FORM_WAIT = timedelta(seconds=60)
"""Longest wait for other ranks while groups are formed [s]. Otherwise ranks would wait half an hour for a dead one."""
POLL = 0.005
"""Seconds between two looks into the store."""


class Rendezvous:
    """The store, as one rank holds it. Values are JSON."""

    def __init__(self, address: str, port: int, secret: str, store: Any) -> None:
        self.address, self.port, self.secret = address, port, secret
        self._store = store
        """torch's own store on rank 0, and a RemoteStore on the others."""

    @classmethod
    def open(cls, environ: MutableMapping[str, str] = os.environ) -> Rendezvous:
        """On rank 0: a store in this process. Raises RankLost where it cannot be opened."""
        address, secret = own_address(environ), secrets.token_hex(32)
        try:
            server = Server(secret.encode())
        except OSError as error:
            raise RankLost(
                f"no store can be opened on {address} for the ranks to meet in: {error}"
            ) from error
        return cls(address, server.port, secret, server.values)

    @classmethod
    def join(cls, address: str, port: int, secret: str) -> Rendezvous:
        """On the other ranks. Raises RankLost where the store does not answer."""
        try:
            return cls(address, port, secret, RemoteStore(address, port, secret.encode(), HANDSHAKE_S))
        except NoAnswer as error:
            raise RankLost(f"the store of the ranks is not found at {address}: {error}") from error

    def tell(self, key: str, value: Any) -> None:
        """Leave a value (of JSON) for the others. Raises RankLost."""
        self._store.set(key, json.dumps(value))

    def value(self, key: str) -> Any:
        """The value under the key; None where there is none yet. Raises RankLost."""
        if not self._store.check([key]):
            return None
        text = self._store.get(key)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RankLost(f"expected JSON in the store, got {text!r:.100}") from error

    def count(self, key: str, more: int = 0) -> int:
        """Count up, and return the count. Raises RankLost."""
        return int(self._store.add(key, more))

    def awaited(self, key: str) -> Any:
        """Wait for the value under the key, and return it. Raises RankLost where the store is gone."""
        while (found := self.value(key)) is None:
            with suppress(NoValue):
                self._store.wait([key], FORM_WAIT)
        return found

    def form(
        self,
        old: World,
        name: str,
        rank: int,
        size: int,
        *,
        per_node: int,
        lent: int,
        backend: str | None = None,
    ) -> World:
        """Form the process groups of `size` ranks, after `leave_groups`. Raises RankLost where others do not come.

        `name` is this generation's alone. `backend` is the default group's; None: the device's.
        """
        device = old.device
        self._choose_interface()
        self._store.set_timeout(FORM_WAIT)
        store = dist.PrefixStore(name, self._store)
        if device.type == "cuda":
            # NCCL's monitor would query the store from a separate thread, also while the interpreter ends.
            os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
        try:
            wait = FORM_WAIT
            if not gloo_timeout_changes():
                self._await_all(name, size)
                wait = CONTROL_TIMEOUT
            with own_group() if old.own else nullcontext():
                dist.init_process_group(
                    backend or backend_for(device), store=store, rank=rank, world_size=size, timeout=wait
                )
            control = dist.new_group(backend="gloo", timeout=wait) if size > 1 else None
            racks, places = where(control) if control is not None else (1, (node_name(),))
            # In the training, ranks may read data or evaluate for a long time: as long as in a start's groups.
            set_group_timeout(timedelta(minutes=10 if device.type == "cuda" else 30))
            if control is not None:
                set_group_timeout(CONTROL_TIMEOUT, control)
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise RankLost(f"{size} ranks were to form their process groups: {error}") from error
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

    def _await_all(self, name: str, size: int) -> None:
        """Wait until all ranks are about to form their groups. Raises RankLost where they do not come."""
        if self.count(f"{name}/forming", 1) == size:
            self.tell(f"{name}/all-form", True)
        self._store.wait([f"{name}/all-form"], FORM_WAIT)

    def _choose_interface(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Set the interface that leads to rank 0 for gloo.

        A job that began on one node has set the loopback interface.
        """
        if environ.get("GLOO_SOCKET_IFNAME", "lo") != "lo":
            return
        interface = interface_of(getattr(self._store, "here", self.address))
        if interface is not None:
            environ["GLOO_SOCKET_IFNAME"] = interface


def leave_groups() -> None:
    """Destroy the present process groups; no collective may be under way on any rank."""
    if dist.is_initialized():
        abort_nccl()
        dist.destroy_process_group()


def alone(device: torch.device) -> None:
    """Form a process group of this rank alone. A model can then be wrapped before the others are there."""
    dist.init_process_group(backend_for(device), store=dist.HashStore(), rank=0, world_size=1)


def tell_environment(world: World, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment variables that a launcher sets for a rank. Scripts read them."""
    environ["RANK"], environ["WORLD_SIZE"] = str(world.rank), str(world.size)
    environ["GROUP_RANK"], environ["GROUP_WORLD_SIZE"] = str(world.rank // world.per_node), str(world.nodes)


def own_address(environ: MutableMapping[str, str] = os.environ) -> str:
    """Where other nodes reach this one, as an IPv4 address.

    With one node, the launcher has given only the loopback address. Then take Slurm's address of the node's name.
    """
    address = environ.get("MASTER_ADDR", "")
    if environ.get("SLURM_JOB_ID") and (not address or address == "localhost" or address.startswith("127.")):
        address = node_address(node_name(environ))
    try:
        return socket.gethostbyname(address or "127.0.0.1")
    except OSError as error:
        raise RankLost(f"this node's address {address!r} cannot be resolved: {error}") from error


def until(done: Callable[[], bool], seconds: float) -> bool:
    """Poll until the condition holds; return False at the time limit."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= end:
            return False
        time.sleep(POLL)
    return True
