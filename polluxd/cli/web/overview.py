"""The cluster now and over the last hours, as one document: what the live page shows beside the jobs.

It names no job, no account and no user.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from polluxd.store import Store

from ..report.drawings import thinned

PERIOD_S = 6 * 3600.0
MOST_JOBS = 5000
"""The newest jobs that are counted."""
SAMPLES = 72
"""Decisions of the period whose nodes and jobs are counted."""
_REST = 20.0
"""What took a second to read is read again after so many: reading costs less than 5 % of a core."""
_LEAST_S = 1.0
_MOST_KEPT = 64


class RestingReader:
    """Keeps what was read for `_REST` times as long as reading it took; one thread reads at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[object, tuple[float, Any]] = {}

    def read(self, key: object, ask: Callable[[], Any]) -> Any:
        """Return what `ask` returned not long ago, or ask."""
        with self._lock:
            due, value = self._kept.pop(key, (float("-inf"), None))
            begun = self._clock()
            if begun >= due:
                value = ask()
                ended = self._clock()
                due = ended + max(_LEAST_S, _REST * (ended - begun))
            self._kept[key] = due, value  # the newest last
            while len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            return value


class Overview:
    """Reads the cluster from the database."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reader = RestingReader()
        self._samples: list[dict[str, Any]] = []

    def read(self) -> dict[str, Any]:
        """Return the document."""
        document: dict[str, Any] = self._reader.read("", lambda: self._read(time.time()))
        return document

    def _read(self, now: float) -> dict[str, Any]:
        store = self._store
        views = store.jobs_view(since=now - PERIOD_S, most=MOST_JOBS)
        present = (v.submitted_at for v in views if v.ended_at is None or v.ended_at > now - PERIOD_S)
        since = max(now - PERIOD_S, min(present, default=now - PERIOD_S))
        # The newest sample once more: its stretch of time may have a later decision by now.
        begin = self._samples[-1]["at"] - 1e-3 if self._samples else since
        known = [sample for sample in self._samples if since <= sample["at"] < begin]
        self._samples = known + store.cluster_over_time(begin, max((now - since) / SAMPLES, 1.0))
        newest = store.newest_snapshot()
        lost = sorted((c["planned_at"], c["total_s"]) for c in store.move_costs() if c["planned_at"] >= since)
        totals = accumulate(seconds for _, seconds in lost)
        return {
            "at": now,
            "since": since,
            "nodes": [_node(node) for node in newest[1]["nodes"]] if newest else [],
            "use": {
                name: thinned(_steps(self._samples, name)) for name in ("held", "waiting", "plain", "idle")
            },
            "speedup": _steps(self._samples, "speedup"),
            "lost": [(at, total) for (at, _), total in zip(lost, totals, strict=True)],
        }


def _node(node: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": node["name"],
        "gpus": node["gpus"],
        "type": node.get("gpu_type", ""),
        "plain": node.get("foreign_gpus", 0),
        "up": node.get("schedulable", True),
    }


def _steps(samples: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return a value over time: GPUs held by Pollux jobs, by plain jobs, idle, waited for; or the mean speedup."""
    known = ({**s, "idle": max(s["gpus"] - s["plain"] - s["held"], 0)} for s in samples)
    return [(sample["at"], sample[name]) for sample in known if sample[name] is not None]
