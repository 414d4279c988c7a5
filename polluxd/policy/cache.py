"""Keep goodput tables and offered shapes from one decision to the next.

A job's table depends only on its fit, its noise scale, its batch limits and the listed shapes. While these inputs are
equal, the table is equal bit for bit, so the cache never changes a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polluxd.config.settings import PolicySettings
from polluxd.model import Node, Report, Snapshot, SnapshotJob
from polluxd.policy import sanity
from polluxd.policy.domains import Domain, gpu_types
from polluxd.policy.feasible import FeasibleShapes
from polluxd.policy.listing import JobOptions, Listing, Terms

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Evaluate = Callable[[Sequence[int]], tuple[Floats, Ints]]
"""Goodput and batch size of all configurations of some jobs, given by number, job after job."""


class _Table:
    """Goodput and batch size of one job's configurations.

    The table is good while its inputs stay the same.
    """

    __slots__ = ("adaptive", "found", "report", "terms")

    def __init__(self, job: SnapshotJob, terms: Terms) -> None:
        self.terms, self.report, self.adaptive = terms, job.report, job.spec.adaptive
        self.found: Floats = np.zeros((2, 0))
        """[2, C]: goodput and batch size."""

    def holds(self, job: SnapshotJob, terms: Terms) -> bool:
        old, new = self.report, job.report
        if self.adaptive != job.spec.adaptive or (self.terms is not terms and self.terms != terms):
            return False
        if old is new:
            return True
        if old is None or new is None:
            return False
        # Most fields that differ between two reports have no effect on the goodput.
        return (
            old.params == new.params
            and old.noise == new.noise
            and old.limits == new.limits
            and old.params_by_type == new.params_by_type
        )


class Cache:
    """Kept from decision to decision, and passed to `decide`.

    Not for several threads at once.
    """

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}
        self._offers: dict[str, tuple[tuple[Node, ...], tuple[object, ...], FeasibleShapes]] = {}
        self.listed: dict[int, JobOptions] = {}
        """What each job may be given, and the configurations that this means."""
        self._sound: dict[int, Report | None] = {}
        self._ids: Set[int] = set()
        self.hits = 0
        """Jobs of the last decision whose table was still good."""
        self.misses = 0

    def believable(self, snapshot: Snapshot) -> tuple[Snapshot, dict[int, str]]:
        """As `sanity.believable`, but check each sound report once only."""
        sound = self._sound
        jobs = snapshot.jobs
        doubtful = tuple(j for j in jobs if sound.get(j.job_id) is not j.report)
        times = [
            j.weight + j.age + j.lost_seconds + j.move_cost + (j.waiting or 0.0) + (j.time_limit or 0.0)
            for j in jobs
        ]
        if not isfinite(sum(times)):
            doubtful = jobs
        if not doubtful:
            return snapshot, {}
        checked, notes = sanity.believable(replace(snapshot, jobs=doubtful))
        sound.update((j.job_id, j.report) for j in doubtful if j.job_id not in notes)
        if notes:
            kept = {j.job_id: j for j in checked.jobs}
            snapshot = replace(snapshot, jobs=tuple(kept.get(j.job_id, j) for j in snapshot.jobs))
        return snapshot, notes

    def offers(self, domain: Domain, settings: PolicySettings) -> FeasibleShapes:
        """Return what the domain's nodes offer; look again if a node changed."""
        name = domain.nodes[0].name if domain.nodes else ""
        rules = (settings.partial_nodes, settings.gpu_counts, gpu_types(domain))
        known = self._offers.get(name)
        if known is not None and known[1] == rules and known[0] == domain.nodes:
            return known[2]
        found = FeasibleShapes(domain, settings)
        self._offers[name] = domain.nodes, rules, found
        return found

    def tables(self, listing: Listing, evaluate: Evaluate) -> tuple[Floats, Ints]:
        """Goodput and batch size of every configuration, job after job.

        Only the jobs whose table is not known are passed to `evaluate`.
        """
        known = self._tables
        fresh = [
            j
            for j, (job, terms) in enumerate(zip(listing.jobs, listing.terms, strict=True))
            if (table := known.get(job.job_id)) is None or not table.holds(job, terms)
        ]
        for j in fresh:
            known[listing.jobs[j].job_id] = _Table(listing.jobs[j], listing.terms[j])
        tables = [known[job.job_id] for job in listing.jobs]
        self.hits += len(tables) - len(fresh)
        self.misses += len(fresh)
        if fresh:
            goodput, batch = evaluate(fresh)
            both = np.stack([goodput, batch.astype(np.float64)])
            ends = np.cumsum(listing.lengths[fresh]).tolist()
            for j, begin, end in zip(fresh, [0, *ends[:-1]], ends, strict=True):
                # A view would keep the tables of all these jobs in memory until the last of the jobs has ended.
                tables[j].found = both[:, begin:end].copy()
            if len(fresh) == len(tables):
                return goodput, batch
        if not tables:
            return np.zeros(0), np.zeros(0, dtype=np.int64)
        goodput, sizes = np.concatenate([table.found for table in tables], axis=1)
        return goodput, sizes.astype(np.int64)

    def begin(self, job_ids: Set[int]) -> None:
        """Start a decision over these jobs, and forget all other jobs."""
        self.hits = self.misses = 0
        kept: tuple[dict[int, Any], ...] = (self._tables, self._sound, self.listed)
        for gone in self._ids - job_ids:
            for known in kept:
                known.pop(gone, None)
        self._ids = job_ids
