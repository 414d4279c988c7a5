"""`polluxd gateway`: what ordinary users may know.

A user sees the own jobs in full, and of other users' jobs what squeue shows: nothing, where PrivateData of slurm.conf
names jobs.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from polluxd.config.settings import PolicySettings
from polluxd.errors import PolluxError, SlurmError
from polluxd.store import JobView, Store

from .answers import history_document
from .explained import MOST_JOBS, explained, unknown
from .output import jsonable
from .table_rows import job_row, status_row
from .web.overview import Overview

log = logging.getLogger(__name__)

SHOWN_OF_OTHERS = frozenset(
    [
        "job_id",
        "name",
        "user",
        "account",
        "partition",
        "state",
        "gpus",
        "nodes",
        "submitted_at",
        "started_at",
        "ended_at",
        "age_s",
        "attempt",
    ]
)
"""Keys of a job's row that squeue shows of everybody's jobs."""
_FRESH_S = 2.0
"""Age up to which one reading of the jobs serves several requests."""
_PRIVACY_S = 60.0
"""Time between two looks at PrivateData."""
_STATUS = ("cluster", "mode", "paused", "decided_at")


class Answering:
    """Answers questions of users from the database.

    Args:
        show_config: text of `scontrol show config`; raises SlurmError.
    """

    def __init__(self, store: Store, defaults: PolicySettings, show_config: Callable[[], str]) -> None:
        self._store = store
        self._defaults = defaults
        self._show_config = show_config
        self._overview = Overview(store)
        self._lock = threading.Lock()
        self._views: tuple[float, list[JobView], Mapping[int, float]] = (float("-inf"), [], {})
        self._private, self._private_at = {"all"}, float("-inf")

    def jobs(self, uid: int, *, ended: bool) -> Any:
        return jsonable(self._jobs(uid, ended=ended))

    def top(self, uid: int) -> Any:
        whole = status_row(self._store)
        status = {key: whole[key] for key in _STATUS}
        return jsonable({"status": status, "jobs": self._jobs(uid, ended=False)})

    def cluster(self, uid: int) -> Any:
        """What `top` tells, and the cluster over time; to administrators also accounts and users."""
        overview = self._overview.read(whole=uid == 0) | {"hidden": uid != 0 and self._hidden()}
        if uid != 0 and self._hidden("nodes"):
            overview["nodes"] = []
        return jsonable({**self.top(uid), "overview": overview})

    def explain(self, uid: int, job: int) -> Any:
        """Raises PolluxError: the job is another user's, or unknown."""
        self._own(job, uid)
        return jsonable(explained(self._store, job, self._defaults, to_owner=uid != 0, most_jobs=MOST_JOBS))

    def history(self, uid: int, job: int, since: float) -> Any:
        """Raises PolluxError: the job is another user's, or unknown."""
        name = self._own(job, uid).name
        return jsonable(history_document(name, self._store.report_history(job, since=since)))

    def _own(self, job: int, uid: int) -> JobView:
        """Return the asking user's job. Raises PolluxError."""
        found = self._store.explain(job)
        if found is None:
            raise unknown(job)
        if uid not in (0, found.job.uid):
            if self._hidden():
                raise unknown(job)  # a different message would tell which numbers are jobs
            raise PolluxError(f"job {job} is another user's: ask about your own jobs (`polluxctl jobs`)")
        return found.job

    def _jobs(self, uid: int, *, ended: bool) -> list[dict[str, Any]]:
        now = time.time()
        hidden = self._hidden()
        views, lost = self._read()
        rows = []
        for view in views:
            if view.ended_at is not None and not (ended and uid in (0, view.uid)):
                continue
            if uid in (0, view.uid):
                rows.append(job_row(view, lost.get(view.job_id, 0.0), now))
            elif not hidden:
                rows.append(_as_squeue_shows(view, now))
        return sorted(rows, key=lambda row: (row["ended_at"] is not None, row["job_id"]))

    def _read(self) -> tuple[list[JobView], Mapping[int, float]]:
        with self._lock:
            return self._reread()

    def _reread(self) -> tuple[list[JobView], Mapping[int, float]]:
        at, views, lost = self._views
        if time.monotonic() - at > _FRESH_S:
            views, lost = self._store.jobs_view(), {}
            for cost in self._store.move_costs():
                lost[cost["job_id"]] = lost.get(cost["job_id"], 0.0) + cost["total_s"]
            self._views = (time.monotonic(), views, lost)
        return views, lost

    def _hidden(self, what: str = "jobs") -> bool:
        """Say whether users' jobs are hidden from each other, or nodes from users.

        Until Slurm has said so, they are.
        """
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
    return {key: value if key in SHOWN_OF_OTHERS else None for key, value in row.items()} | {
        "reason": f"Slurm: {view.slurm_reason}" if waits else ""
    }
