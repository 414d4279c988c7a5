"""A false gateway, and an agent that asks it.

python -m contrib.attack.hands.false_gateway serve HOST PORT SECONDS [CERTIFICATE KEY]    print what a client sends
python -m contrib.attack.hands.false_gateway agent URL JOB                                ask for a token of a job
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
import time
from collections.abc import Sequence


def serve(host: str, port: int, seconds: float, tls: Sequence[str]) -> None:
    """Take connections until a request has come; print it as JSON."""
    listener = socket.create_server((host, port))
    print(listener.getsockname()[1], flush=True)
    end, received = time.monotonic() + seconds, b""
    while b"\r\n\r\n{" not in received and (left := end - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(3)
            if tls:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(*tls)
                connection = context.wrap_socket(connection, server_side=True)
            with contextlib.suppress(TimeoutError):
                while data := connection.recv(4096):
                    received += data
            connection.close()
    print(json.dumps(received.decode("latin-1")), flush=True)


def agent(url: str, job_id: int) -> None:
    """Ask once, as the launcher of a job does."""
    from pollux.scheduler import credentials, gateway  # noqa: PLC0415 - the false gateway needs them not
    from pollux.slurm_job.access import GatewayAccess  # noqa: PLC0415 - as above
    from pollux.slurm_job.allocation import munge_socket  # noqa: PLC0415 - as above

    access = GatewayAccess((url,), "", job_id, 0)
    try:
        credentials.ask_for_grant(access, gateway.Gateway([url]), munge_socket())
        print("has a token", flush=True)
    except gateway.GatewayError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


def main() -> None:
    what, *words = sys.argv[1:]
    if what == "serve":
        serve(words[0], int(words[1]), float(words[2]), words[3:])
    else:
        agent(words[0], int(words[1]))


if __name__ == "__main__":
    main()
