"""End the connections of gloo's process groups before a process ends.

A rank in a collective notices a lost rank only if it is connected to this rank in the collective. It notices the loss
when its own peers close their connections. gloo has no call for that. So the agent remembers which sockets appear while
groups are formed, and ends this rank's side of each connection itself.

The agent leaves the connections open until all remaining ranks have noticed the loss. gloo loses a message that a rank
writes to a closed connection before it has read the connection's end: the collective that sends the message never ends,
also when all connections are closed later.

Then gloo closes the connections, not the agent. A message may be half read when its collective has failed: gloo reads
no further, and its thread polls the socket without pause, on a whole core. When a wait in a group times out, gloo
closes all connections of the group, and fails the collectives that wait for them.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from pollux.ranks.torch_internals import process_groups

_made: set[tuple[int, int]] = set()
"""Descriptor and inode of each socket that appeared while the present groups were formed."""

_TAG = 0x706F6C78
"""Of a message that nobody sends."""


@contextmanager
def forming_groups() -> Iterator[None]:
    """Remember the sockets that appear within."""
    before = _sockets()
    try:
        yield
    finally:
        _made.update(_sockets() - before)


def tell_peers(environ: Mapping[str, str] = os.environ) -> None:
    """Tell the peers in the groups that nothing more comes from this rank.

    What waits for it there fails.
    """
    store = environ.get("MASTER_PORT", "")
    for descriptor, _ in _made & _sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            ends = connection.getsockname(), connection.getpeername()  # OSError: it listens
            if store not in {str(end[1]) for end in ends if isinstance(end, tuple)}:
                connection.shutdown(socket.SHUT_WR)
    _made.clear()


def close_groups() -> None:
    """Close the connections of all groups; what waits for them fails."""
    for group in process_groups():
        # RuntimeError is what is wanted, or a group without gloo.
        with suppress(RuntimeError, ValueError):
            nothing = dist.irecv(torch.empty(1), group=group, tag=_TAG)
            if nothing is not None:
                nothing.wait(timedelta(milliseconds=1))


def keep_groups() -> None:
    """Keep the present groups to the end of the process.

    gloo ends a group when nothing refers to it any more, and then waits for the group's threads. One of them may wait
    on, although its connections are closed: gloo tells a collective nothing of that whose message it has half read, or
    not written yet.
    """
    for group in process_groups():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _sockets() -> set[tuple[int, int]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found
