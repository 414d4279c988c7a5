"""A job's connection to Pollux' database: its functions by name, each wait bounded, no secret in any message.

It is psycopg2's asynchronous kind, because libpq's blocking calls cannot be bounded when a server freezes. One thread
at a time.
"""

from __future__ import annotations

import contextlib
import select
import time
from typing import Any

import psycopg2
import psycopg2.extensions
from psycopg2.extensions import POLL_OK, POLL_READ

from pollux.slurm_job.ticket import Ticket

_OVER = ("PX401", "PX409")  # token refused, attempt over
_BAD_PAYLOAD = "PX422"


class DatabaseAway(Exception):
    """No answer, or none that helps: worth another try later."""


class TicketOver(Exception):
    """The database will never accept this ticket: the token is refused, or the attempt is over."""


class PayloadRefused(Exception):
    """The database refused what was sent, and would take something better."""


class JobDatabase:
    """Calls functions with the credentials of `ticket`; connects when needed, and again after a fault."""

    def __init__(self, ticket: Ticket, *, answer_s: float = 8.0) -> None:
        """`answer_s`: longest wait for a connection or an answer; above the server's own 5 s limit for agents."""
        self._ticket = ticket
        self._answer_s = answer_s
        self._connection: Any = None

    def publish(self, payload: str) -> Any:
        """Store a report (JSON text); returns the instructions."""
        return self._call("pollux.publish_v1(%s, %s, %s, %s, %s, %s::jsonb)", payload)

    def instructions(self) -> Any:
        """{"drain": move id or None}"""
        return self._call("pollux.instructions_v1(%s, %s, %s, %s, %s)")

    def acknowledge(self, move_id: int, payload: str) -> bool:
        """True when the move counts on the checkpoint."""
        statement = "pollux.acknowledge_v1(%s, %s, %s, %s, %s, %s, %s::jsonb)"
        return bool(self._call(statement, move_id, payload))

    def prior(self, fingerprint: str, gpu_type: str) -> Any:
        """What the same user's earlier runs of this fingerprint have measured on GPUs of this type, or None.

        It also lets later runs know what this attempt measures. `fingerprint`: 16 to 64 hexadecimal digits.
        """
        return self._call("pollux.prior_v1(%s, %s, %s, %s, %s, %s, %s)", fingerprint, gpu_type)

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
            if code == _BAD_PAYLOAD:
                raise PayloadRefused(self._scrubbed(error)) from None
            self.close()
            if code in _OVER:
                raise TicketOver(self._scrubbed(error)) from None
            raise DatabaseAway(self._scrubbed(error)) from None

    def _connect(self) -> None:
        try:
            given = psycopg2.extensions.parse_dsn(self._ticket.dsn)
        except psycopg2.ProgrammingError:
            # libpq's message quotes the string, password and all.
            raise TicketOver("the ticket's dsn is not a libpq connection string") from None
        words = {
            "application_name": f"pollux job {self._ticket.job_id}",
            **{"keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3"},
            **given,
        }
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
        """The error's text without anything secret, on one line."""
        text = " ".join(str(error).split("\nCONTEXT:")[0].split())
        secrets = [self._ticket.token, self._ticket.dsn]
        with contextlib.suppress(psycopg2.Error):
            secrets.append(psycopg2.extensions.parse_dsn(self._ticket.dsn).get("password", ""))
        for secret in filter(None, secrets):
            text = text.replace(secret, "***")
        return text
