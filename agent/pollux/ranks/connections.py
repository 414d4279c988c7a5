"""Shut down the connections of gloo's process groups.

A rank in a collective notices a lost rank only if it is connected to this rank in the collective. It notices the loss
when its own peers close their connections. gloo has no call that closes them: a group closes its connections when
nothing refers to the group any more, and then waits for its threads, which may wait for the lost ranks. So the agent
remembers which sockets appear while groups are formed, and shuts these sockets down itself.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from pollux.ranks.torch_internals import process_groups

_made: set[tuple[int, int]] = set()
"""Descriptor and inode of each socket that appeared while the present groups were formed."""


@contextmanager
def forming_groups() -> Iterator[None]:
    """Remember the sockets that appear within."""
    before = _sockets()
    try:
        yield
    finally:
        _made.update(_sockets() - before)


def cut_groups(environ: Mapping[str, str] = os.environ) -> None:
    """Shut the groups' connections down; what waits for them fails."""
    store = environ.get("MASTER_PORT", "")
    for descriptor, _ in _made & _sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            ends = connection.getsockname(), connection.getpeername()  # OSError: it listens
            if store not in {str(end[1]) for end in ends if isinstance(end, tuple)}:
                connection.shutdown(socket.SHUT_RDWR)
    _made.clear()


def keep_groups() -> None:
    """Keep the present groups to the end of the process.

    gloo ends a group when nothing refers to it any more, and then waits for the group's threads. Of two reductions that
    ran when a rank was lost, the second one may wait on, although its connections are shut down: gloo has stopped
    reading them when the first one failed.
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
