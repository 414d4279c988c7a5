"""The cluster now and over the last hours, as one document: what the live page shows beside the jobs.

It names no job. Accounts and users are in it for administrators alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from polluxd.store import Store

from ..report.drawings import at_time, thinned
from ..report.figures import Figures, figures, held_and_waiting

PERIOD_S = 6 * 3600.0
MOST_JOBS = 5000
"""The newest jobs that are counted."""
SAMPLES = 72
"""Decisions of the period whose nodes are counted."""
_REST = 20.0
"""What took a second to read is read again after so many: reading costs less than 5 % of a core."""
_LEAST_S = 1.0
_MOST_KEPT = 64
_OF_OWNERS = ("accounts", "users")


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

    def read(self, *, whole: bool) -> dict[str, Any]:
        """Return the document; without `whole`, without accounts and users."""
        document: dict[str, Any] = self._reader.read("", lambda: self._read(time.time()))
        return {key: value for key, value in document.items() if whole or key not in _OF_OWNERS}

    def _read(self, now: float) -> dict[str, Any]:
        store = self._store
        views = store.jobs_view(since=now - PERIOD_S, most=MOST_JOBS)
        present = (v.submitted_at for v in views if v.ended_at is None or v.ended_at > now - PERIOD_S)
        since = max(now - PERIOD_S, min(present, default=now - PERIOD_S))
        # The newest sample once more: its stretch of time may have a later decision by now.
        begin = self._samples[-1]["at"] - 1e-3 if self._samples else since
        known = [sample for sample in self._samples if since <= sample["at"] < begin]
        self._samples = known + store.cluster_over_time(begin, max((now - since) / SAMPLES, 1.0))
        costs = store.move_costs()
        found = figures(
            store.cluster,
            since,
            now,
            views=views,
            moves=store.moves(),
            costs=costs,
            speedups=store.mean_speedups(since, now),
        )
        newest = store.newest_snapshot()
        lost = sorted((c["planned_at"], c["total_s"]) for c in costs if c["planned_at"] >= found.since)
        totals = accumulate(seconds for _, seconds in lost)
        return {
            "at": now,
            "since": found.since,
            "nodes": [_node(node) for node in newest[1]["nodes"]] if newest else [],
            "use": _use(found, self._samples),
            "speedup": [(s["at"], s["speedup"]) for s in self._samples if s["speedup"] is not None],
            "lost": [(at, total) for (at, _), total in zip(lost, totals, strict=True)],
            "paths": found.paths,
            "accounts": found.accounts,
            "users": found.users,
        }


def _node(node: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": node["name"],
        "gpus": node["gpus"],
        "type": node.get("gpu_type", ""),
        "plain": node.get("foreign_gpus", 0),
        "up": node.get("schedulable", True),
    }


def _use(found: Figures, samples: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return GPUs over time: held by Pollux jobs, by plain jobs, idle, waited for."""
    curves = held_and_waiting(found)
    plain = [(sample["at"], sample["plain"]) for sample in samples]
    gpus = [(sample["at"], sample["gpus"]) for sample in samples]
    times = sorted({at for steps in (curves["held"], plain) for at, _ in steps})
    idle = [
        (at, max(at_time(gpus, at) - at_time(plain, at) - at_time(curves["held"], at), 0.0)) for at in times
    ]
    return {name: thinned(steps) for name, steps in {**curves, "plain": plain, "idle": idle}.items()}
