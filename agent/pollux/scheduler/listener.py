"""Who listens on a port of this machine.

A gateway on a loopback address has no certificate. While it is down, any user of the machine could listen on its port
and receive tokens. So a client looks at the owner of the listening socket before it sends anything.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LISTEN = "0A"  # TCP_LISTEN of Linux
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOGIN_DEFS = Path("/etc/login.defs")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class UntrustedListener(OSError):
    """Another user, or nobody, listens on the port."""


def require_trusted_listener(
    address: str,
    port: int,
    tables: tuple[Path, ...] = _TABLES,
    login_defs: Path = _LOGIN_DEFS,
    *,
    client: tuple[str, int] | None = None,
) -> None:
    """Refuse a port of this machine on which another user listens, or has taken a connection from the end `client`.

    Root, system accounts and this user may listen. Raises UntrustedListener.

    A listener may close once it has taken a connection, and another one come in its place. A connection that nobody has
    taken ends with its listener. Tables have listeners first, so one of the two is seen.
    """
    peer = _plain(ipaddress.ip_address(address))
    mine = None if client is None else (_plain(ipaddress.ip_address(client[0])), client[1])
    sockets = list(_sockets(port, tables))
    owners = [s.uid for s in sockets if s.state == _LISTEN and (s.local == peer or s.local.is_unspecified)]
    takers = [s.uid for s in sockets if (s.local, s.remote) == (peer, mine)]
    first = first_user(login_defs)
    strangers = [uid for uid in (*owners, *takers) if uid >= first and uid != os.getuid()]
    if strangers:
        raise UntrustedListener(
            f"uid {strangers[0]} listens on port {port} of this machine, expected a system account"
        )
    if not owners:
        raise UntrustedListener(f"no process of this machine listens on port {port}")


def first_user(login_defs: Path = _LOGIN_DEFS) -> int:
    """Return the least uid that may be a user's: below are the system's. login.defs(5); 1000 where it says nothing."""
    try:
        text = login_defs.read_text(errors="replace")
    except OSError:
        return 1000
    found = dict(re.findall(r"^\s*(UID_MIN|SYS_UID_MAX)\s+(\d+)\s*$", text, re.MULTILINE))
    least = int(found.get("UID_MIN", 1000))
    return min(least, int(found.get("SYS_UID_MAX", least - 1)) + 1)


class _Socket(NamedTuple):
    state: str
    local: Address
    remote: tuple[Address, int]
    uid: int


def _sockets(port: int, tables: tuple[Path, ...]) -> Iterator[_Socket]:
    """Yield the sockets of a port. proc(5)."""
    for table in tables:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            host, _, number = fields[1].rpartition(":")
            if int(number, 16) == port:
                far, _, there = fields[2].rpartition(":")
                yield _Socket(fields[3], _decoded(host), (_decoded(far), int(there, 16)), int(fields[7]))


def _decoded(text: str) -> Address:
    """Decode an address: words of 32 bits in the machine's order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    raw = b"".join(word.to_bytes(4, "little") for word in words)
    return _plain(ipaddress.ip_address(raw))


def _plain(address: Address) -> Address:
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address
