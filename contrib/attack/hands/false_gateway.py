"""A false gateway, and an agent that asks it."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time

from contrib.attack.hands import run


def serve(host: str, port: int, seconds: float, certificate: str = "", key: str = "") -> str:
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
    from pollux.scheduler import credentials, gateway  # noqa: PLC0415 - the false gateway needs them not
    from pollux.slurm_job.access import GatewayAccess  # noqa: PLC0415 - as above
    from pollux.slurm_job.allocation import munge_socket  # noqa: PLC0415 - as above

    access = GatewayAccess((url,), "", job_id, 0)
    try:
        credentials.ask_for_grant(access, gateway.Gateway([url]), munge_socket())
    except gateway.GatewayError as error:
        return f"{type(error).__name__}: {error}"
    return "has a token"


if __name__ == "__main__":
    run(serve, agent)
