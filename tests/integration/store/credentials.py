"""Tokens, roles and passwords as slurm_hooks/prolog makes them."""

from __future__ import annotations

import hashlib
import hmac
import time

from contrib.devcluster.postgres import DevPostgres

SECRET = b"a secret for tests only, 32 bytes"


def mac(secret: bytes, message: str) -> str:
    return hmac.new(secret, message.encode(), hashlib.sha256).hexdigest()


def token(
    cluster: str, job_id: int, attempt: int, uid: int, secret: bytes = SECRET, *, made_at: float | None = None
) -> str:
    """As the prolog makes it."""
    at = int(time.time() if made_at is None else made_at)
    return f"{at}.{mac(secret, f'{cluster}:{job_id}:{attempt}:{uid}:{at}')}"


def login(postgres: DevPostgres, cluster: str, uid: int, secret: bytes = SECRET) -> str:
    """The connection string of a user's ticket, as the prolog makes it."""
    role = f"pollux_{cluster}_{uid}_{mac(secret, 'role')[:4]}"
    return f"{postgres.agent_dsn} user={role} password={mac(secret, f'password:{role}')}"
