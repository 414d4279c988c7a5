"""Connections that never hang, and database errors as polluxd's.

A frozen server (or a network that swallows packets) answers nothing, not even the server-side statement
timeout. psycopg2's wait callback bounds every wait on the connections made here, and on no other.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import psycopg2
import psycopg2.extensions
from psycopg2.extensions import POLL_OK, POLL_READ, POLL_WRITE
from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from polluxd.errors import ConfigError, LeaderLost, StoreError, StoreRejected, StoreUnavailable
from polluxd.store.transport import libpq_parameters, require_verified

_FENCED = "PX001"
_RETRY_CLASSES = (
    "08",  # connection
    "40",  # serialisation failure, deadlock
    "53",  # too many connections, out of memory, disk full
    "57",  # statement timeout, shutdown, starting up
    "55",  # lock timeout
)
_GRACE_S = 2.0
"""Seconds beyond the server-side statement timeout after which a silent server counts as frozen."""


class BoundedConnection(psycopg2.extensions.connection):  # type: ignore[misc] # psycopg2 has no types
    """A psycopg2 connection whose waits end (see `_bounded_wait`)."""

    answer_within_s = 60.0


def _bounded_wait(connection: Any) -> None:
    """Wait for the server, for at most `connection.answer_within_s` seconds.

    Without that attribute on the connection, the wait has no limit. Raises psycopg2.OperationalError when the time is
    up.
    """
    limit = getattr(connection, "answer_within_s", None)
    deadline = None if limit is None else time.monotonic() + limit
    while (state := connection.poll()) != POLL_OK:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise psycopg2.OperationalError(f"no answer from the server within {limit:g} s")
        poller = select.poll()
        poller.register(connection.fileno(), {POLL_READ: select.POLLIN, POLL_WRITE: select.POLLOUT}[state])
        poller.poll(None if left is None else left * 1000)


class Connector:
    """Opens connections to one database, all bounded in time.

    Raises:
        ConfigError: the URL is not a Postgres URL, or names another machine without `sslmode=verify-full`.
    """

    def __init__(self, url: str | URL, *, connect_timeout: float, statement_timeout: float) -> None:
        try:
            self.url = make_url(url)
        except ArgumentError:
            # SQLAlchemy's own message repeats the URL with its password.
            raise ConfigError(
                "expected a database URL such as postgresql://pollux_daemon@host/pollux, got something else"
            ) from None
        if self.url.get_backend_name() != "postgresql":
            raise ConfigError(f"expected a postgresql:// database URL, got {self.url.get_backend_name()}://")
        require_verified(self.url)
        self.failed: Callable[[str], None] = lambda kind: None
        """Called with `unavailable`, `rejected` or `lead_lost` for each transaction that fails; in any thread."""
        self.connect_timeout = connect_timeout
        self.statement_timeout = statement_timeout
        psycopg2.extensions.set_wait_callback(_bounded_wait)

    @cached_property
    def place(self) -> str:
        """Where it connects, without the password."""
        return self.url.set(drivername="postgresql").render_as_string(hide_password=True)

    def open(self) -> Any:
        """A new psycopg2 connection. Raises psycopg2.Error."""
        connect_s = self.connect_timeout

        class Connecting(BoundedConnection):
            answer_within_s = connect_s

        parameters = libpq_parameters(self.url)
        connection = psycopg2.connect(
            connection_factory=Connecting,
            **{
                "application_name": "polluxd",
                "connect_timeout": max(2, round(connect_s)),
                # Both ends notice a cut cable within seconds.
                **dict(keepalives=1, keepalives_idle=5, keepalives_interval=2, keepalives_count=3),
                # Types and functions of Postgres' own come first, whatever other schemas hold.
                "options": f"-c search_path=pg_catalog,pg_temp -c lock_timeout={round(self.statement_timeout * 500)}"
                f" -c statement_timeout={round(self.statement_timeout * 1000)}"
                " -c tcp_keepalives_idle=5 -c tcp_keepalives_interval=2 -c tcp_keepalives_count=3"
                f" -c idle_in_transaction_session_timeout={round(self.statement_timeout * 4000)}",
                **parameters,
            },
        )
        connection.answer_within_s = self.statement_timeout + _GRACE_S
        return connection

    def engine(self) -> Engine:
        """A small pool; a connection that died is replaced when it is taken."""
        return create_engine(
            "postgresql+psycopg2://",
            creator=self.open,
            pool_size=3,
            max_overflow=4,
            pool_timeout=self.connect_timeout,
            pool_pre_ping=True,
        )


@contextlib.contextmanager
def our_errors(place: str, failed: Callable[[str], None] = lambda kind: None) -> Iterator[None]:
    """Translate errors of psycopg2 and SQLAlchemy into StoreErrors.

    The body then raises StoreUnavailable, StoreRejected or LeaderLost, and calls `failed` (`Connector.failed`).
    """
    try:
        yield
    except (psycopg2.Error, SQLAlchemyError) as error:
        cause = error.orig if isinstance(error, DBAPIError) else None
        ours = translated(cause or error, place)
        failed(_KINDS[type(ours)])
        raise ours from error


_KINDS = {StoreUnavailable: "unavailable", StoreRejected: "rejected", LeaderLost: "lead_lost"}


def translated(error: BaseException, place: str) -> StoreError | LeaderLost:
    """Our error for a database error at `place`."""
    code = getattr(error, "pgcode", None)
    text = getattr(getattr(error, "diag", None), "message_primary", None) or str(error).strip()
    if code == _FENCED:
        return LeaderLost(text)
    if code in ("3F000", "42P01"):  # no such schema or table
        return StoreRejected(
            f"{place} has no Pollux schema of this version ({text}): run `polluxctl db upgrade`"
        )
    lost = code is None and isinstance(error, psycopg2.OperationalError | psycopg2.InterfaceError)
    if lost or (code or "").startswith(_RETRY_CLASSES) or isinstance(error, TimeoutError):
        return StoreUnavailable(
            f"{place} does not answer: {text}; running jobs are untouched, polluxd tries again next cycle"
        )
    if code is None and isinstance(error, SQLAlchemyError) and not isinstance(error, DBAPIError):
        return StoreUnavailable(f"{place}: no free connection: {text}")
    return StoreRejected(f"{place} refused: {text}" + (f" [{code}]" if code else ""))
