"""The jobs of a decision, the configurations to evaluate, and what is kept of both from one decision to the next.

The entry of a job depends on its request, its placement, the sizes at which it was measured, and the nodes. A job's
goodput table depends only on its fit, its noise scale, its batch limits and the listed shapes. While these inputs are
equal, entry and table are equal bit for bit, so the cache never changes a plan.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polluxd.config.settings import PolicySettings
from polluxd.model import JobSpec, Node, Placement, Report, SnapshotJob
from polluxd.policy import worth
from polluxd.policy.domains import Domain, gpu_types
from polluxd.policy.feasible import NOTHING, Caps, FeasibleShapes, is_pinned
from polluxd.policy.shapes import ONE_RACK, OVER_RACKS, Shape

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NODES, GPUS, KIND, RACKS, KEPT, SHARE = range(6)
"""Rows of a block of configurations [6, C]: nodes; GPUs; number of the GPU type, -1 for any; racks as in `Shape`;
whether the job holds exactly this placement and may keep it; whether the row is the job's fair share (one per GPU type
that makes a difference) and not an option."""

_FairShareOf = tuple[int, int, int]


class Terms(NamedTuple):
    """The inputs of a job's goodput table.

    Equal inputs mean the same configurations.
    """

    share: worth.FairShare
    shapes: tuple[Shape, ...]
    types: tuple[str, ...]
    roomiest: int


_NO_TERMS = Terms(worth.FairShare(0, 0), (), (), -1)


@dataclass(slots=True)
class JobOptions:
    """One job's entry; the fields down to `report` are what it depends on."""

    offers: FeasibleShapes
    spec: JobSpec
    partition: str
    placement: Placement
    pinned: bool
    gives_back: bool
    most: int
    """The most GPUs that its measurements justify."""
    by_rack: bool
    report: Report | None
    """The newest report that `most` and `by_rack` follow from."""
    shapes: tuple[Shape, ...]
    """Its options; none: nothing can be offered."""
    stays: bool
    """Whether it may keep what it holds, or holds nothing."""
    now: Shape
    why: str
    """Why nothing can be offered to it."""
    share_of: _FairShareOf = (-1, -1, -1)
    """GPUs, jobs and GPUs per node of the domain that its fair share was computed for; -1: none yet."""
    terms: Terms = _NO_TERMS
    block: Ints = field(default_factory=lambda: np.zeros((6, 0), dtype=np.int64))
    """[6, C]: its configurations, the fair share first."""

    def holds(self, offers: FeasibleShapes, caps: Caps, job: SnapshotJob) -> bool:
        """Whether the entry is still good for the job."""
        # Compare tuples: Python then skips elements that are the same object.
        mine = self.offers, self.spec, self.partition, self.placement, self.pinned, self.gives_back
        if mine != (offers, job.spec, job.partition, job.placement, job.pinned, job.gives_back):
            return False
        if self.most != caps.of(job):
            return False
        if self.report is job.report:
            return True
        self.report = job.report
        return self.by_rack == offers.by_rack(job)


@dataclass(frozen=True, slots=True)
class Listing:
    """Jobs with their entries, before any option is valued."""

    jobs: list[SnapshotJob]
    entries: list[JobOptions]
    absent: list[tuple[SnapshotJob, str]]
    """Jobs that cannot be given anything, and why."""
    offers: FeasibleShapes
    terms: list[Terms]
    shares: list[worth.FairShare]
    block: Ints
    """[6, C]: all jobs' configurations, job after job."""
    lengths: Ints
    """[J]: how many each has."""


def list_jobs(
    domain: Domain, offers: FeasibleShapes, caps: Caps, known: MutableMapping[int, JobOptions]
) -> Listing:
    """List the domain's jobs; reuse entries of `known` that still hold.

    `known` is by job id, and gets the new entries.
    """
    stale = [
        job
        for job in domain.jobs
        if (entry := known.get(job.job_id)) is None or not entry.holds(offers, caps, job)
    ]
    known.update((job.job_id, _entry(offers, caps, job)) for job in stale)
    jobs = list(domain.jobs)
    entries = [known[job.job_id] for job in jobs]
    absent: list[tuple[SnapshotJob, str]] = []
    if any([entry.why for entry in entries]):
        absent = [(job, e.why) for job, e in zip(jobs, entries, strict=True) if not e.shapes]
        # There is no other placement for such a job, so it keeps its own.
        jobs = [
            replace(job, pinned=True, pin_reason=e.why) if e.why else job
            for job, e in zip(jobs, entries, strict=True)
            if e.shapes
        ]
        entries = [e for e in entries if e.shapes]
    share_of = (domain.capacity, len(jobs), domain.gpus_per_node)
    for job, entry in zip(jobs, entries, strict=True):
        if entry.share_of != share_of:
            entry.share_of = share_of
            wanted = Terms(worth.fair_share(*share_of, job), entry.shapes, offers.types, offers.roomiest)
            if entry.terms != wanted:
                entry.terms, entry.block = wanted, _block(entry, wanted)
    terms = [entry.terms for entry in entries]
    blocks = [entry.block for entry in entries]
    return Listing(
        jobs,
        entries,
        absent,
        offers,
        terms,
        [own.share for own in terms],
        np.concatenate(blocks, axis=1) if blocks else np.zeros((6, 0), dtype=np.int64),
        np.array([own.shape[1] for own in blocks], dtype=np.int64),
    )


def _entry(offers: FeasibleShapes, caps: Caps, job: SnapshotJob) -> JobOptions:
    now = offers.present(job)
    shapes: tuple[Shape, ...] = (now,)
    stays, why = True, ""
    if not is_pinned(job):
        stays = offers.may_stay(job)
        found = offers.shapes(job, caps.of(job), stays=stays)
        if found:
            shapes, stays = (NOTHING, *found), stays or not job.placement
        else:
            why = offers.why_none(job)
            shapes, stays = ((now,), True) if job.placement else ((), False)
    return JobOptions(
        offers,
        job.spec,
        job.partition,
        job.placement,
        job.pinned,
        job.gives_back,
        caps.of(job),
        offers.by_rack(job),
        job.report,
        shapes,
        stays,
        now,
        why,
    )


def _block(entry: JobOptions, terms: Terms) -> Ints:
    share, types = terms.share, terms.types
    # The share is packed into one rack, where one is large enough.
    racks = OVER_RACKS if 0 < terms.roomiest < share.nodes else ONE_RACK
    rows = [(share.nodes, share.gpus, k, racks, 0, 1) for k in (range(len(types)) if types else (-1,))]
    rows += [
        (
            shape.nodes,
            shape.nodes * shape.per_node,
            types.index(shape.gpu_type) if shape.gpu_type in types else -1,
            shape.racks,
            int(entry.stays and shape == entry.now),
            0,
        )
        for shape in terms.shapes
    ]
    return np.array(rows, dtype=np.int64).T


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
            and (old.local_max_by_type, old.gpu_type) == (new.local_max_by_type, new.gpu_type)
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
        self._ids: Set[int] = set()
        self.hits = 0
        """Jobs of the last decision whose table was still good."""
        self.misses = 0

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
        kept: tuple[dict[int, Any], ...] = (self._tables, self.listed)
        for gone in self._ids - job_ids:
            for known in kept:
                known.pop(gone, None)
        self._ids = job_ids
