"""Read the ticket that a node's prolog leaves for a Pollux job.

The ticket holds the database's address and the job's token.
"""

from __future__ import annotations

import json
import logging
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_LARGEST = 65536  # bytes; a ticket has some 400


@dataclass(frozen=True, slots=True)
class Ticket:
    """Credentials of one attempt of one job; its repr shows no secret."""

    cluster: str
    job_id: int
    attempt: int
    """Slurm's restart count."""
    uid: int
    token: str = field(repr=False)
    dsn: str = field(repr=False)
    """libpq connection string of role `pollux_agent`."""
    publish_interval_s: float = 30.0
    gpu_type: str = ""
    """Slurm's name for the type of this node's GPUs; empty if Slurm has none."""


class Unusable(Exception):
    """A private file, such as a ticket, is not usable."""


def read_ticket(environ: Mapping[str, str] | None = None) -> Ticket | None:
    """Read the ticket in POLLUX_TICKET_DIR; None outside a Pollux job.

    A ticket that is not usable (another user's, open to others, of an earlier attempt, garbled) leads to a warning and
    to None: the training runs on as a plain one.
    """
    environ = os.environ if environ is None else environ
    folder, job_id, node = (
        environ.get(name) for name in ("POLLUX_TICKET_DIR", "SLURM_JOB_ID", "SLURMD_NODENAME")
    )
    if not folder or not job_id or not node:
        return None
    # The second file exists if Slurm started this attempt without its prolog (see slurm_hooks/prolog).
    paths = [Path(folder) / f"{job_id}.{node}{kind}" for kind in (".json", ".next.json")]
    for path in paths:
        try:
            return _usable(read_private(path), job_id, environ.get("SLURM_RESTART_COUNT"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, Unusable) as error:
            _refuse(path, error)
            return None
    log.warning("this is a Pollux job, but it has no ticket at %s; training goes on without Pollux", paths[0])
    return None


def _usable(text: str, job_id: str, attempt: str | None) -> Ticket:
    ticket = _parse(text)
    if str(ticket.job_id) != job_id:
        raise Unusable(f"it is of job {ticket.job_id}, this is job {job_id}")
    # Slurm leaves the count unset in a first attempt.
    if not attempt or ticket.attempt == int(attempt):
        return ticket
    later = json.loads(text).get("later")
    token = later.get(attempt) if isinstance(later, dict) else None
    if not isinstance(token, str):
        raise Unusable(f"it is of attempt {ticket.attempt}, this is attempt {attempt}")
    return replace(ticket, attempt=int(attempt), token=token)


def _refuse(path: Path, error: Exception) -> None:
    log.warning("the Pollux ticket %s is not usable: %s; training goes on without Pollux", path, error)


def read_private(path: Path) -> str:
    """Read a file that only this user can write; others' could mislead.

    Raises OSError and Unusable.
    """
    # O_NOFOLLOW and O_NONBLOCK: another user may have put a link or a pipe there.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise Unusable("expected a regular file")
        if facts.st_uid not in (os.geteuid(), 0):
            raise Unusable(f"it belongs to uid {facts.st_uid}, expected {os.geteuid()}")
        if facts.st_mode & 0o077:
            raise Unusable(f"expected mode 0600, its mode is {stat.S_IMODE(facts.st_mode):04o}")
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise Unusable(f"expected at most {_LARGEST} bytes")
    return content.decode()


def _parse(text: str) -> Ticket:
    try:
        document: Any = json.loads(text)
    except json.JSONDecodeError as error:
        # The message of this error has line and column, and no part of the text.
        raise Unusable(f"not JSON: {error}") from None
    except RecursionError:
        raise Unusable("expected a JSON object, got brackets nested too deep to read") from None
    if not isinstance(document, dict):
        raise Unusable("expected a JSON object")

    def take(name: str, kind: type, what: str) -> Any:
        value = document.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise Unusable(f"{name} must be {what}")
        return value

    interval = float(take("publish_interval_s", int | float, "a number of seconds"))  # type: ignore[arg-type]
    if not math.isfinite(interval) or interval <= 0:
        raise Unusable("publish_interval_s must be above 0")
    return Ticket(
        cluster=take("cluster", str, "text"),
        job_id=take("job_id", int, "a whole number"),
        attempt=take("attempt", int, "a whole number"),
        uid=take("uid", int, "a whole number"),
        token=take("token", str, "text"),
        dsn=take("dsn", str, "text"),
        publish_interval_s=interval,
        gpu_type=_gpu_type(document),
    )


def _gpu_type(document: dict[str, Any]) -> str:
    """Return the GPU type; tickets of older prologs lack it."""
    value = document.get("gpu_type", "")
    if not isinstance(value, str) or len(value) > 64 or not (value.isprintable()):
        raise Unusable("gpu_type must be text of at most 64 printable characters")
    return value
