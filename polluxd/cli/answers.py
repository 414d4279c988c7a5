"""Where `polluxctl` reads from: the database, or polluxd's gateway.

Who may read polluxd.toml reads the database. Everybody else asks the gateway, with a munge credential.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from polluxd.config.config_file import DEFAULT_PATH
from polluxd.config.settings import PolicySettings
from polluxd.gateway.client import UserClient, user_client
from polluxd.site.slurm_checks import Slurm
from polluxd.store import HistoryPoint, Store

from . import access
from .explained import explained
from .table_rows import job_rows, status_row

JobRow = dict[str, Any]


class Source(Protocol):
    """What users and administrators alike may ask."""

    def jobs(self, *, ended: bool) -> list[JobRow]: ...

    def top(self) -> tuple[dict[str, Any], list[JobRow]]:
        """Return the status and the rows of the jobs that have not ended."""
        ...

    def explain(self, job: int) -> dict[str, Any]: ...

    def history(self, job: int, since: float) -> tuple[str, list[HistoryPoint]]:
        """Return the job's name and its reports since a POSIX time."""
        ...


class Database:
    """Reads the database."""

    def __init__(self, store: Store, defaults: PolicySettings) -> None:
        self._store = store
        self._defaults = defaults

    def jobs(self, *, ended: bool) -> list[JobRow]:
        return job_rows(self._store, ended=ended)

    def top(self) -> tuple[dict[str, Any], list[JobRow]]:
        return status_row(self._store), job_rows(self._store, ended=False)

    def explain(self, job: int) -> dict[str, Any]:
        return explained(self._store, job, self._defaults)

    def history(self, job: int, since: float) -> tuple[str, list[HistoryPoint]]:
        points = self._store.report_history(job, since=since)
        name = (
            next((view.name for view in self._store.jobs_view() if view.job_id == job), "") if points else ""
        )
        return name, points


class Answers:
    """Asks the gateway."""

    def __init__(self, client: UserClient) -> None:
        self._client = client

    def jobs(self, *, ended: bool) -> list[JobRow]:
        rows: list[JobRow] = self._client.ask("/v1/jobs", ended=ended)
        return rows

    def top(self) -> tuple[dict[str, Any], list[JobRow]]:
        found = self._client.ask("/v1/top")
        return found["status"], found["jobs"]

    def explain(self, job: int) -> dict[str, Any]:
        found: dict[str, Any] = self._client.ask(f"/v1/jobs/{job}/explain")
        return found

    def history(self, job: int, since: float) -> tuple[str, list[HistoryPoint]]:
        found = self._client.ask(f"/v1/jobs/{job}/history", since=since)
        return found["name"], [HistoryPoint(**point) for point in found["points"]]


def history_document(name: str, points: list[HistoryPoint]) -> dict[str, Any]:
    return {"name": name, "points": [asdict(point) for point in points]}


def source(config: Path | None) -> Source:
    """Return where to read. Raises ConfigError, SlurmError."""
    if may_read_database(config):
        return Database(*access.open_store(config))
    conf = os.environ.get("SLURM_CONF")
    return Answers(user_client(Slurm(Path(conf) if conf else None).ask("scontrol", "show", "config")))


def may_read_database(config: Path | None) -> bool:
    """Say whether this user may read polluxd's configuration."""
    return config is not None or os.access(DEFAULT_PATH, os.R_OK)
