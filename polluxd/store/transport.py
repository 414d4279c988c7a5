"""Which connections to Postgres are safe enough for passwords and tokens."""

from __future__ import annotations

from collections.abc import Mapping


class InsecureConnection(ValueError):
    """The connection string lets somebody on the network pose as the database."""


def require_verified(parameters: Mapping[str, str | None]) -> None:
    """Refuse a remote connection that does not verify the server.

    A connection within this machine needs no certificate.

    Args:
        parameters: libpq connection parameters (PostgreSQL manual, section 34.1.2).

    Raises:
        InsecureConnection: a host is neither a loopback address nor a socket, and sslmode is not verify-full.
    """
    mode = parameters.get("sslmode") or ""
    if mode == "verify-full":
        return
    named = f"{parameters.get('host') or ''},{parameters.get('hostaddr') or ''}".split(",")
    remote = [host for host in named if not _is_here(host.strip())]
    if remote:
        raise InsecureConnection(
            f"sslmode is {mode or 'not set'} and the database is on {', '.join(remote)}: another machine could pose as "
            "the database; set sslmode=verify-full, and sslrootcert to the certificate of your authority"
        )


def _is_here(host: str) -> bool:
    return not host or host.startswith(("/", "@", "127.")) or host in ("localhost", "::1")
