"""What `polluxctl` may know of the database: who asks decides.

A user sees the own jobs in full, and of other users' jobs what squeue shows: nothing, where PrivateData of slurm.conf
names jobs. User 0 sees all. `polluxd gateway` answers ordinary users; `polluxctl` of administrators asks as user 0.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polluxd.config.settings import PolicySettings
from polluxd.errors import PolluxError, SlurmError
from polluxd.gateway.client import user_client
from polluxd.slurm.configuration import Slurm
from polluxd.store import JobExplanation, JobView, Store

from . import access
from .explained import explained
from .forecast import foretold
from .output import jsonable
from .table_rows import job_order, job_row, lost_seconds, status_row
from .web.overview import Overview, RestingReader

log = logging.getLogger(__name__)

SHOWN_OF_OTHERS = (
    "job_id", "name", "user", "account", "partition", "state", "gpus", "nodes", "submitted_at", "started_at",
    "ended_at", "age_s", "attempt",
)  # fmt: skip
"""Keys of a job's row that squeue shows of everybody's jobs."""
_MOST_OWN = 2000
"""Jobs of a user in an answer with those that have ended: the newest."""
_LONGEST_NAME = 64
"""Characters of another user's job name in an answer."""
_PRIVACY_S = 60.0
"""Time between two looks at PrivateData."""
_ENDED_S, _ENDED_JOBS = 86400.0, 100
"""How long the cluster's page lists a job after its end, and how many of them at most."""
_STATUS = ("cluster", "mode", "paused", "decided_at")


class Answering:
    """Answers questions from the database, as JSON has it.

    Args:
        show_config: text of `scontrol show config`; raises SlurmError.
    """

    def __init__(
        self,
        store: Store,
        defaults: PolicySettings,
        show_config: Callable[[], str] = str,
    ) -> None:
        self._store = store
        self._defaults = defaults
        self._show_config = show_config
        self._overview = Overview(store)
        self._reader = RestingReader()
        self._private, self._private_at = {"all"}, float("-inf")

    def jobs(self, uid: int, *, ended: bool) -> Any:
        return jsonable(self._jobs(uid, ended=ended))

    def top(self, uid: int) -> Any:
        """Return the status, and the jobs that have not ended."""
        status = status_row(self._store)
        if uid != 0:
            status = {key: status[key] for key in _STATUS}
        return jsonable({"status": status, "jobs": self._jobs(uid, ended=False)})

    def cluster(self, uid: int) -> Any:
        """What `top` tells, the jobs that ended of late, and the cluster over time."""
        overview = self._overview.read() | {"hidden": self._hidden(uid)}
        if self._hidden(uid, "nodes"):
            overview["nodes"] = []
        since = time.time() - _ENDED_S
        ended = [row for row in self._jobs(uid, ended=True) if (row["ended_at"] or 0.0) > since]
        ended = sorted(ended, key=lambda row: -row["ended_at"])[:_ENDED_JOBS]
        return jsonable({**self.top(uid), "overview": overview, "ended": ended})

    def explain(self, uid: int, job: int) -> Any:
        """Raises PolluxError: the job is another user's, or unknown."""
        return jsonable(explained(self._store, self._own(job, uid), self._defaults, to_owner=uid != 0))

    def history(self, uid: int, job: int, since: float) -> Any:
        """Return the name of a job and its reports since a POSIX time.

        Raises PolluxError: the job is another user's, or unknown.
        """
        name = self._own(job, uid).job.name
        points = self._store.report_history(job, since=since)
        return jsonable({"name": name, "points": [asdict(point) for point in points]})

    def _own(self, job: int, uid: int) -> JobExplanation:
        """Return what is known of the asking user's job. Raises PolluxError."""
        found = self._store.explain(job)
        others = found is not None and uid not in (0, found.job.uid)
        # Another message on a hidden job would tell which numbers are jobs.
        if found is None or others:
            hidden = self._hidden(uid)
            if hidden:
                raise PolluxError(
                    f"job {job} is another user's, which PrivateData in slurm.conf hides from you, or not known to "
                    "polluxd: it has no #POLLUX line, or polluxd has not looked since it was submitted"
                )
        if found is None:
            raise PolluxError(
                f"job {job} is not known to polluxd: it has no #POLLUX line, or polluxd has not looked since it was "
                "submitted (`squeue` shows all jobs)"
            )
        if others:
            raise PolluxError(f"job {job} is another user's: ask about your own jobs (`polluxctl jobs`)")
        return found

    def _jobs(self, uid: int, *, ended: bool) -> list[dict[str, Any]]:
        now, hidden = time.time(), self._hidden(uid)
        store = self._store
        # A user may have submitted and cancelled any number of jobs: nobody else's question reads them.
        views, lost = self._reader.read(
            "jobs", lambda: (store.jobs_view(ended=False), lost_seconds(store, ended=False))
        )
        if ended and uid == 0:
            views, lost = store.jobs_view(), lost_seconds(store)
        elif ended:
            own = store.jobs_view(uid=uid, most=_MOST_OWN)
            views = [*own, *(view for view in views if view.uid != uid)]
            lost = self._reader.read("lost", lambda: lost_seconds(store))
        told = foretold.of_jobs(self._reader.read("forecasts", store.forecasts), now)
        rows = []
        for view in views:
            if uid in (0, view.uid):
                ends = foretold.row(None if view.ended_at is not None else told.get(view.job_id))
                rows.append(job_row(view, lost.get(view.job_id, 0.0), now) | ends)
            elif not hidden:
                rows.append(_as_squeue_shows(view, now))
        return sorted(rows, key=job_order)

    def _hidden(self, uid: int, what: str = "jobs") -> bool:
        """Say whether others' jobs, or the nodes, are hidden from a user. Until Slurm has said so, they are."""
        if uid == 0:
            return False
        if time.monotonic() - self._private_at > _PRIVACY_S:
            try:
                found = re.search(r"^PrivateData\s+= (.*)$", self._show_config(), re.MULTILINE)
                words = re.split(r"[,\s]+", found[1].lower()) if found else ["all"]
                self._private, self._private_at = set(words), time.monotonic()
            except SlurmError as error:
                log.warning("PrivateData is not known: %s", error)
        return bool({what, "all"} & self._private)


def _as_squeue_shows(view: JobView, now: float) -> dict[str, Any]:
    row = job_row(view, 0.0, now)
    waits = view.state == "PENDING" and view.slurm_reason not in ("", "None")
    shown = {key: value if key in SHOWN_OF_OTHERS else None for key, value in row.items()}
    reason = f"Slurm: {view.slurm_reason}" if waits else ""
    return shown | foretold.row(None) | {"name": view.name[:_LONGEST_NAME], "reason": reason}


Ask = Callable[..., Any]
"""Asks a question, the name of a method of `Answering`, about what follows: `ask("explain", 1234)`."""


def source(config: Path | None) -> Ask:
    """Return where to ask: who may read polluxd.toml the database, everybody else the gateway, by a munge credential.

    Raises ConfigError, SlurmError.
    """
    if access.may_read_database(config):
        return as_root(Answering(*access.open_store(config)))
    client = user_client(Slurm().ask("scontrol", "show", "config"))

    def ask(question: str, job: int | None = None, **words: Any) -> Any:
        return client.ask(f"/v1/{question}" if job is None else f"/v1/jobs/{job}/{question}", **words)

    return ask


def as_root(answering: Answering) -> Ask:
    return lambda question, *about, **words: getattr(answering, question)(0, *about, **words)
