"""The network interfaces of this node."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str | None:
    """The interface that holds an IPv4 address of this machine. In the form of GLOO_SOCKET_IFNAME. netdevice(7)."""
    try:
        wanted = socket.inet_aton(address)
    except OSError:
        return None
    if wanted[0] == 127:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(query.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            if answer[20:24] == wanted:
                return name
    return None
