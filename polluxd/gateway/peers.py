"""Who a client is before it shows anything: a name that costs something.

All of 127.0.0.0/8 belongs to every user of this machine, and a /64 to any host with IPv6. So a client on this machine
is named by the user of its socket, and one elsewhere by its address, of IPv6 by the /64. The kernel tells whose a
socket is (sock_diag(7), which `ss -e` asks, too).
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from typing import Any

_SOCK_DIAG = 4
"""NETLINK_SOCK_DIAG of <linux/netlink.h>."""
_BY_FAMILY = 20
"""SOCK_DIAG_BY_FAMILY of <linux/sock_diag.h>."""
_REQUEST = 1
"""NLM_F_REQUEST."""
_HEAD = struct.Struct("=IHHII")
"""nlmsghdr."""
_UID_AT = _HEAD.size + 4 + 48 + 12
"""idiag_uid of an inet_diag_msg; idiag_inode follows."""
_ANY = 0xFFFFFFFF


class Peers:
    """Names clients; one question to the kernel for each."""

    def __init__(self) -> None:
        self._kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG)
        self._kernel.settimeout(1.0)
        self._number = 0

    def close(self) -> None:
        self._kernel.close()

    def name(self, accepted: socket.socket, peer: Any) -> str:
        """Return the name of the client of a connection."""
        here = accepted.getsockname()
        theirs, ours = _plain(peer[0]), _plain(here[0])
        uid = self.uid_of(theirs, peer[1], ours, here[1])
        if uid is not None:
            return f"uid {uid}"
        if theirs.is_loopback:
            return "loopback"
        return str(ipaddress.ip_network((theirs, 64), strict=False) if theirs.version == 6 else theirs)

    def uid_of(self, theirs: Any, port: int, ours: Any, our_port: int) -> int | None:
        """Return the user of a socket of this machine; None: there is none, or the kernel does not tell."""
        self._number = (self._number + 1) % _ANY
        family = socket.AF_INET if theirs.version == 4 else socket.AF_INET6
        ends = theirs.packed.ljust(16, b"\0") + ours.packed.ljust(16, b"\0")
        wanted = (
            struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, _ANY)
            + struct.pack("!HH", port, our_port)
            + ends
        )
        wanted += struct.pack("=III", 0, _ANY, _ANY)
        try:
            self._kernel.send(
                _HEAD.pack(_HEAD.size + len(wanted), _BY_FAMILY, _REQUEST, self._number, 0) + wanted
            )
            while True:
                answer = self._kernel.recv(4096)
                _, kind, _, number, _ = _HEAD.unpack_from(answer)
                if number == self._number:
                    break
        except OSError:
            return None
        if kind != _BY_FAMILY:
            return None
        uid, inode = struct.unpack_from("=II", answer, _UID_AT)
        # A socket that its process has closed belongs to nobody: the kernel has uid 0 for it.
        return uid if inode else None


def _plain(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address
