"""A false Postgres."""

from __future__ import annotations

import contextlib
import socket
import struct

from contrib.attack.hands import run


def serve(host: str, seconds: float) -> None:
    """Ask for a password in clear, and print it. PostgreSQL manual, section 55.7."""
    listener = socket.create_server((host, 0))
    listener.settimeout(seconds)
    print(listener.getsockname()[1], flush=True)
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        connection.settimeout(5)
        size, code = struct.unpack("!II", connection.recv(8))
        if code in (80877103, 80877104):  # TLS or GSSAPI: no
            connection.sendall(b"N")
            size, _ = struct.unpack("!II", connection.recv(8))
        connection.recv(size - 8)
        connection.sendall(b"R" + struct.pack("!II", 8, 3))
        print(connection.recv(4096)[5:].rstrip(b"\0").decode(), flush=True)
        return
    print("nobody came", flush=True)


if __name__ == "__main__":
    run(serve)
