"""Where `polluxctl` reads from: the database, or polluxd's gateway.

Who may read polluxd.toml reads the database. Everybody else asks the gateway, with a munge credential.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
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
from .preview import previewed
from .setting_words import Given
from .table_rows import job_rows, status_row
from .web.overview import Overview

JobRow = dict[str, Any]


class Source(Protocol):
    """What users and administrators alike may ask."""

    def jobs(self, *, ended: bool) -> list[JobRow]: ...

    def top(self) -> tuple[dict[str, Any], list[JobRow]]:
        """Return the status and the rows of the jobs that have not ended."""
        ...

    def cluster(self) -> dict[str, Any]:
        """Return `status` and `jobs` as `top` does, and the `overview` of nodes, use and moves."""
        ...

    def explain(self, job: int) -> dict[str, Any]: ...

    def history(self, job: int, since: float) -> tuple[str, list[HistoryPoint]]:
        """Return the job's name and its reports since a POSIX time."""
        ...


class Database:
    """Reads the database.

    Args:
        most_jobs: see `explained`.
    """

    def __init__(self, store: Store, defaults: PolicySettings, most_jobs: int | None = None) -> None:
        self._most_jobs = most_jobs
        self._store = store
        self._defaults = defaults
        self._overview = Overview(store)

    def jobs(self, *, ended: bool) -> list[JobRow]:
        return job_rows(self._store, ended=ended)

    def top(self) -> tuple[dict[str, Any], list[JobRow]]:
        return status_row(self._store), job_rows(self._store, ended=False)

    def cluster(self) -> dict[str, Any]:
        status, jobs = self.top()
        overview = self._overview.read(whole=True) | {"hidden": False}
        return {"status": status, "jobs": jobs, "overview": overview}

    def settings(self) -> PolicySettings:
        return self._store.settings(self._defaults)

    def preview(self, options: Mapping[str, Given | None]) -> dict[str, Any]:
        """Return what changed settings would bring each job. Raises ConfigError, PolluxError."""
        return previewed(self._store, self._defaults, options)

    def explain(self, job: int) -> dict[str, Any]:
        return explained(self._store, job, self._defaults, most_jobs=self._most_jobs)

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

    def cluster(self) -> dict[str, Any]:
        found: dict[str, Any] = self._client.ask("/v1/cluster")
        return found

    def explain(self, job: int) -> dict[str, Any]:
        found: dict[str, Any] = self._client.ask(f"/v1/jobs/{job}/explain")
        return found

    def history(self, job: int, since: float) -> tuple[str, list[HistoryPoint]]:
        found = self._client.ask(f"/v1/jobs/{job}/history", since=since)
        return found["name"], [HistoryPoint(**point) for point in found["points"]]


def history_document(name: str, points: list[HistoryPoint]) -> dict[str, Any]:
    return {"name": name, "points": [asdict(point) for point in points]}


def source(config: Path | None, most_jobs: int | None = None) -> Source:
    """Return where to read. Raises ConfigError, SlurmError."""
    if may_read_database(config):
        return Database(*access.open_store(config), most_jobs)
    conf = os.environ.get("SLURM_CONF")
    return Answers(user_client(Slurm(Path(conf) if conf else None).ask("scontrol", "show", "config")))


def whose(user: str | None, config: Path | None) -> str | None:
    """Return whose jobs to list; None: everybody's. Ordinary users see their own, unless they name another or `all`."""
    if user is None and not may_read_database(config):
        return getpass.getuser()
    return None if user == "all" else user


def may_read_database(config: Path | None) -> bool:
    """Say whether this user may read polluxd's configuration."""
    return config is not None or os.access(DEFAULT_PATH, os.R_OK)
