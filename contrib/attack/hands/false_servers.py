"""A false gateway and a false Postgres, and an agent that asks a gateway. What a server prints first is its port."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import time

from contrib.attack.hands import run


def gateway(host: str, port: int, seconds: float, certificate: str = "", key: str = "") -> str:
    """Take connections until a request has come; return it as JSON."""
    listener = socket.create_server((host, port))
    print(listener.getsockname()[1], flush=True)
    end, received = time.monotonic() + seconds, b""
    while b"\r\n\r\n{" not in received and (left := end - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(3)
            if certificate:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(certificate, key)
                connection = context.wrap_socket(connection, server_side=True)
            with contextlib.suppress(TimeoutError):
                while data := connection.recv(4096):
                    received += data
            connection.close()
    return json.dumps(received.decode("latin-1"))


def agent(url: str, job_id: int) -> str:
    """Ask once, as the launcher of a job does."""
    from pollux.scheduler import credentials  # noqa: PLC0415 - the false servers need them not
    from pollux.scheduler.gateway import Gateway, GatewayError  # noqa: PLC0415 - as above
    from pollux.slurm_job.access import GatewayAccess  # noqa: PLC0415 - as above
    from pollux.slurm_job.allocation import munge_socket  # noqa: PLC0415 - as above

    access = GatewayAccess((url,), "", job_id, 0)
    try:
        credentials.ask_for_grant(access, Gateway([url]), munge_socket())
    except GatewayError as error:
        return f"{type(error).__name__}: {error}"
    return "has a token"


def postgres(host: str, seconds: float) -> str:
    """Ask for a password in clear; return it. PostgreSQL manual, section 55.7."""
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
        return connection.recv(4096)[5:].rstrip(b"\0").decode()
    return "nobody came"


if __name__ == "__main__":
    run(gateway, agent, postgres)
