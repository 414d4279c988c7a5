"""Which connections to Postgres are safe enough for passwords and tokens."""

from __future__ import annotations

import os
from typing import Any

from sqlalchemy import URL

from polluxd.errors import ConfigError


def libpq_parameters(url: URL) -> dict[str, Any]:
    """The libpq connection parameters of a SQLAlchemy URL (PostgreSQL manual, section 34.1.2)."""
    return dict(url.translate_connect_args(username="user", database="dbname")) | dict(url.query)


def require_verified(url: URL) -> None:
    """Refuse a remote connection that does not verify the server.

    A connection within this machine needs no certificate.

    Raises:
        ConfigError: a host is neither a loopback address nor a socket, and sslmode is not verify-full.
    """
    parameters = {
        "host": os.environ.get("PGHOST"),
        "sslmode": os.environ.get("PGSSLMODE"),
    } | libpq_parameters(url)
    mode = parameters["sslmode"] or ""
    if mode == "verify-full":
        return
    named = f"{parameters['host'] or ''},{parameters.get('hostaddr') or ''}".split(",")
    remote = [host for host in named if not _is_here(host.strip())]
    if remote:
        raise ConfigError(
            f"database.url: sslmode is {mode or 'not set'} and the database is on {', '.join(remote)}: another machine "
            "could pose as the database; set sslmode=verify-full, and sslrootcert to the certificate of your authority"
        )


def _is_here(host: str) -> bool:
    return not host or host.startswith(("/", "@", "127.")) or host in ("localhost", "::1")
