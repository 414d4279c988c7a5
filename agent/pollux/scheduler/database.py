"""A job's connection to Pollux' database.

The job calls functions by name, with bounded waits. No message holds a secret. The connection is asynchronous
(psycopg2), because libpq's blocking calls do not return when a server freezes. Only one thread at a time may use it.
"""

from __future__ import annotations

import contextlib
import select
import time
from typing import Any

import psycopg2
import psycopg2.extensions
from psycopg2.extensions import POLL_OK, POLL_READ

from pollux.scheduler.transport import InsecureConnection, require_verified
from pollux.slurm_job.ticket import Ticket
from pollux.version import __version__

_OVER = ("PX401", "PX409")  # token refused, attempt over
_REFUSED = ("PX422", "PX429")  # makes no sense, too often


class DatabaseAway(Exception):
    """The database did not answer, or cannot serve this job yet.

    Try again later.
    """


class TicketOver(Exception):
    """The database will never accept this ticket.

    The token is refused, or the attempt is over.
    """


class PayloadRefused(Exception):
    """The database refused this payload; it may accept the next one."""


class JobDatabase:
    """Call database functions with the credentials of `ticket`.

    Connect when needed, and again after a fault.

    Args:
        answer_s: longest wait for a connection or an answer; above the server's own limit of 5 s for agents [s].
    """

    def __init__(self, ticket: Ticket, *, answer_s: float = 8.0) -> None:
        self._ticket = ticket
        self._answer_s = answer_s
        self._connection: Any = None

    def publish(self, payload: str) -> Any:
        """Store a report (JSON text); return the instructions."""
        return self._heard(self._call("pollux.publish_v1(%s, %s, %s, %s, %s, %s::pg_catalog.jsonb)", payload))

    def instructions(self) -> Any:
        """Return {"drain": move id or None, "resize": order or None}."""
        return self._heard(self._call("pollux.instructions_v1(%s, %s, %s, %s, %s)"))

    def acknowledge(self, move_id: int, payload: str) -> bool:
        """Report that a move's checkpoint is durable.

        Return True if the move counts on the checkpoint.
        """
        statement = "pollux.acknowledge_v1(%s, %s, %s, %s, %s, %s, %s::pg_catalog.jsonb)"
        return bool(self._call(statement, move_id, payload))

    def prior(self, fingerprint: str, gpu_type: str) -> Any:
        """Return what earlier runs of this training measured, or None.

        The runs are the same user's. Later runs receive what this attempt measures. `fingerprint`: 16 to 64 hexadecimal
        digits.
        """
        return self._call("pollux.prior_v1(%s, %s, %s, %s, %s, %s, %s)", fingerprint, gpu_type)

    def _heard(self, answer: Any) -> Any:
        """Return `answer`; disconnect if the database is short of connections.

        The next call connects again.
        """
        if isinstance(answer, dict) and answer.get("leave"):
            self.close()
        return answer

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg2.Error):
                self._connection.close()
            self._connection = None

    def _call(self, function: str, *more: object) -> Any:
        """Raises DatabaseAway, TicketOver or PayloadRefused."""
        t = self._ticket
        try:
            if self._connection is None:
                self._connect()
            with self._connection.cursor() as cursor:
                cursor.execute(f"SELECT {function}", (t.cluster, t.job_id, t.attempt, t.uid, t.token, *more))
                self._wait()
                return cursor.fetchone()[0]
        except (psycopg2.Error, OSError) as error:
            code = getattr(error, "pgcode", None)
            if code in _REFUSED:
                raise PayloadRefused(self._scrubbed(error)) from None
            self.close()
            if code in _OVER:
                raise TicketOver(self._scrubbed(error)) from None
            raise DatabaseAway(self._scrubbed(error)) from None

    def _connect(self) -> None:
        try:
            given = psycopg2.extensions.parse_dsn(self._ticket.dsn)
        except psycopg2.ProgrammingError:
            # libpq's message quotes the string with its password.
            raise TicketOver("the ticket's dsn is not a libpq connection string") from None
        words = {
            "application_name": f"pollux {__version__} job {self._ticket.job_id}",
            **{"keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3"},
            # Encryption by GSSAPI would take the place of TLS, and verifies no certificate.
            "gssencmode": "disable",
            **given,
        }
        try:
            require_verified(words)
        except InsecureConnection as error:
            raise TicketOver(f"the ticket's dsn: {error}") from None
        self._connection = psycopg2.connect(async_=True, **words)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + self._answer_s
        while (state := self._connection.poll()) != POLL_OK:
            poller = select.poll()
            poller.register(
                self._connection.fileno(), select.POLLIN if state == POLL_READ else select.POLLOUT
            )
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise psycopg2.OperationalError(f"no answer within {self._answer_s:g} s")

    def _scrubbed(self, error: BaseException) -> str:
        """Return the error's text on one line, without secrets."""
        text = " ".join(str(error).split("\nCONTEXT:")[0].split())
        secrets = [self._ticket.token, self._ticket.dsn]
        with contextlib.suppress(psycopg2.Error):
            secrets.append(psycopg2.extensions.parse_dsn(self._ticket.dsn).get("password", ""))
        for secret in filter(None, secrets):
            text = text.replace(secret, "***")
        return text
