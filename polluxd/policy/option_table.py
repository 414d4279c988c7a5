"""The options of each job and their worth, for solver and placement.

Options of all jobs lie in flat arrays, job after job, so that goodput, speedup and utility come from one
vectorised pass over jobs and configurations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from pollux.goodput import Goodput, optimize_pairs, pack
from polluxd.config.settings import PolicySettings
from polluxd.model import SnapshotJob
from polluxd.policy import market, objective
from polluxd.policy.counts import owners
from polluxd.policy.domains import Domain, Layout
from polluxd.policy.feasible import Caps, is_pinned, why_no_batch
from polluxd.policy.listing import GPUS, KIND, NODES, RACKS, Cache, Listing, list_jobs
from polluxd.policy.owners import Group, groups, weights, with_shares, within_owner
from polluxd.policy.shapes import OVER_RACKS, Shape
from polluxd.policy.worth import FairShare, Rated, by_price, by_share, slowdowns

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_PARKING = 1e-10  # relative cost of parking a running job: settles ties, and nothing else
_FEW = 200
UNMEASURED_SCALING = 0.8
"""The goodput of a job without a fit is assumed to be its GPUs to this power. If jobs wait, each then begins with few
GPUs. A linear assumption would value it the same to give a whole node to one job. Any power from 0.7 to 0.9 works."""
_MOST_SPEEDUP = 1e9  # more than any cluster has GPUs: only an absurd fit gives more, and it must not overflow


@dataclass(frozen=True)
class OptionTable:
    """Options of the jobs that take part.

    `start` [J + 1] delimits each job's options in the arrays of [O].

    A job's first option is to have no GPUs. A pinned job has only one option: its present placement.
    """

    jobs: tuple[SnapshotJob, ...]
    shares: tuple[FairShare, ...]
    gpus_per_node: int
    start: Ints
    nodes: Ints
    per_node: Ints
    kind: Ints
    """[O]: number of the GPU type in `types`; -1: any."""
    racks: Ints
    """[O]: `ANYWHERE`, `ONE_RACK` or `OVER_RACKS`."""
    types: tuple[str, ...]
    """GPU types that are told apart; none where they make no difference."""
    goodput: Floats
    batch_size: Ints
    speedup: Floats
    rating: Floats
    """[O]: the objective's x where the job does not move: speedup over the GPUs per node."""
    kept: Bools
    """[O]: the shape that the job holds now, where it can stay as it is."""
    factor: Floats
    """[O]: what a move multiplies the option's speedup by."""
    pinned: Bools
    """[J]: the job keeps what it holds."""
    fair: Floats
    """[J]: goodput at the fair share."""
    weight: Floats
    """[J], averaging 1 over the snapshot's jobs."""
    market: market.Market | None
    """Prices, where completion time is the objective."""
    stay: Floats
    """[O]: utility of the option where the job does not move."""
    move: Floats
    """[O]: utility where it does."""
    groups: tuple[Group, ...]
    """Ceilings and guarantees; members by job number."""
    layout: Layout
    caps: Caps
    absent: tuple[tuple[SnapshotJob, str], ...]
    """Jobs that cannot be given anything, and why."""

    @cached_property
    def gpus(self) -> Ints:
        return self.nodes * self.per_node

    @cached_property
    def owner(self) -> Ints:
        """[O]: the job's number."""
        return owners(self.start)

    @cached_property
    def value(self) -> Floats:
        """Utility [O] for the count solver: a present shape stays in place."""
        return np.where(self.kept, self.stay, self.move)

    def options(self, j: int) -> range:
        return range(int(self.start[j]), int(self.start[j + 1]))

    def shape(self, option: int) -> Shape:
        kind = int(self.kind[option])
        return Shape(
            int(self.nodes[option]),
            int(self.per_node[option]),
            None if kind < 0 else self.types[kind],
            int(self.racks[option]),
        )

    def x(self, options: Ints, moved: Bools) -> Floats:
        """[J]: the objective's x of one option per job, given which jobs move."""
        x = self.rating[options]
        return np.where(moved, x * self.factor[options], x)


def build(
    domain: Domain, settings: PolicySettings, mean_weight: float = 1.0, cache: Cache | None = None
) -> OptionTable:
    """Build the options of one domain.

    Weights are relative to `mean_weight`. Goodput tables that `cache` knows are not computed again.

    Jobs that cannot be given anything now are left out, with the reason.
    """
    cache = Cache() if cache is None else cache
    caps = Caps(domain, settings)
    listing = list_jobs(domain, cache.offers(domain, settings), caps, cache.listed)
    size, count, types = domain.gpus_per_node, len(listing.jobs), listing.offers.types
    nodes, gpus, kind, racks, held, shared = listing.block
    owner, is_share = np.repeat(np.arange(count), listing.lengths), shared > 0
    goodput, batch = cache.tables(listing, partial(_evaluate, listing, owner))
    kept, stays = held > 0, np.array([e.stays for e in listing.entries], dtype=np.bool_)

    pinned = np.array([is_pinned(j) for j in listing.jobs], dtype=np.bool_)
    begin = np.cumsum(listing.lengths) - listing.lengths
    best = np.maximum.reduceat(np.where(is_share, 0.0, goodput), begin) if count else np.zeros(0)
    hopeless = ~pinned & (best <= 0)
    # A running job without any feasible batch size keeps its placement: its agent knows better.
    holds = np.array([bool(j.placement.nodes) for j in listing.jobs], dtype=np.bool_)
    stuck = hopeless & stays & holds
    gone = hopeless & ~stuck
    why = {
        j: why_no_batch(listing.jobs[j], listing.entries[j].shapes) for j in np.flatnonzero(hopeless).tolist()
    }
    offered = (gpus == 0) | (goodput > 0) | pinned[owner]
    row = np.flatnonzero(~is_share & ~gone[owner] & np.where(stuck[owner], kept, offered))
    present_jobs = np.flatnonzero(~gone).tolist()
    jobs = tuple(
        [
            replace(listing.jobs[j], pinned=True, pin_reason=why[j]) if j in why else listing.jobs[j]
            for j in present_jobs
        ]
        if why
        else listing.jobs
    )
    job_of = (np.cumsum(~gone) - 1)[owner[row]]
    start = np.searchsorted(job_of, np.arange(len(jobs) + 1))
    fair = _fair_goodput(goodput, listing, _mix(domain, types), begin)
    with np.errstate(over="ignore"):
        speedup = np.minimum((goodput / fair[owner])[row], _MOST_SPEEDUP)
    weight = weights(jobs, settings) / mean_weight
    if settings.waiting_power:
        slower = slowdowns(jobs, fair[~gone]) ** settings.waiting_power
        weight = within_owner(weight, slower, jobs, settings.fairness_per)
    within = with_shares(jobs, settings, domain.capacity)
    limited = groups(jobs, within, domain.capacity, domain.limits)
    rated = Rated(
        jobs, start, nodes[row], gpus[row], kind[row], goodput[row], speedup / size, kept[row], job_of
    )
    if objective.is_priced(settings):
        valued = by_price(rated, weight, settings, limited, _capacity(domain, types))
    else:
        valued = by_share(rated, weight, settings, limited, domain.capacity)
    stay, move, factor = valued.stay, valued.move, valued.factor
    # Of equal plans, prefer the one that parks no job.
    parked = _PARKING * holds[~gone] * (np.maximum.reduceat(np.abs(stay), start[:-1]) if jobs else 0.0)
    nothing = (gpus[row] == 0) * parked[job_of]
    return OptionTable(
        jobs=jobs,
        shares=tuple(listing.shares[j] for j in present_jobs),
        gpus_per_node=size,
        start=start,
        nodes=nodes[row],
        per_node=gpus[row] // np.maximum(nodes[row], 1),
        kind=kind[row],
        racks=racks[row],
        types=types,
        goodput=goodput[row],
        batch_size=batch[row],
        speedup=speedup,
        rating=rated.x,
        kept=kept[row],
        factor=factor,
        pinned=(pinned | hopeless)[~gone],
        fair=fair[~gone],
        weight=valued.weight,
        market=valued.market,
        stay=stay - nothing,
        move=move - nothing,
        groups=limited,
        layout=listing.offers.layout,
        caps=caps,
        absent=(*listing.absent, *((listing.jobs[j], why[j]) for j in np.flatnonzero(gone).tolist())),
    )


def _capacity(domain: Domain, types: tuple[str, ...]) -> Ints:
    """GPUs of each type that is told apart; of all together where none is."""
    if not types:
        return np.array([domain.capacity], dtype=np.int64)
    return np.array([sum(n.capacity for n in domain.nodes if n.gpu_type == t) for t in types], np.int64)


def _mix(domain: Domain, types: tuple[str, ...]) -> Floats:
    """Return each type's part of the capacity, which a fair share mirrors."""
    if not types:
        return np.ones(1)
    found = _capacity(domain, types).astype(np.float64)
    return found / found.sum() if found.sum() > 0 else np.full(found.size, 1.0 / found.size)


def _evaluate(listing: Listing, owner: Ints, fresh: Sequence[int]) -> tuple[Floats, Ints]:
    """Evaluate all configurations of some jobs, given by number.

    Returns goodput and batch size, job after job.
    """
    number = np.full(len(listing.jobs), -1, dtype=np.int64)
    number[fresh] = np.arange(len(fresh))
    wanted = np.flatnonzero(number[owner] >= 0)
    return best_sizes(
        [listing.jobs[j] for j in fresh],
        listing.offers.types,
        listing.block[:, wanted],
        number[owner[wanted]],
    )


def best_sizes(
    jobs: Sequence[SnapshotJob], types: tuple[str, ...], block: Ints, owner: Ints
) -> tuple[Floats, Ints]:
    """Find the best goodput and its batch size per configuration.

    A job without a fit is taken to scale as `UNMEASURED_SCALING` says.

    Jobs whose fit and limits are the same share one evaluation.
    """
    nodes, gpus, kind, racks = block[[NODES, GPUS, KIND, RACKS]]
    known: dict[object, int] = {}
    functions: list[Goodput] = []
    # Per job: the function on any type, then on each that is told apart.
    function_of = np.full((len(jobs), 1 + len(types)), -1, dtype=np.int64)
    batch_of = np.zeros(len(jobs), dtype=np.int64)
    for j, job in enumerate(jobs):
        report = job.report
        if report is None:
            continue
        batch_of[j] = report.limits.initial
        if report.params is None:
            continue
        for column, gpu_type in enumerate((report.gpu_type, *types)):
            fit = report.params_by_type.get(gpu_type, report.params) if column else report.params
            key = (fit, report.noise, report.limits_on(gpu_type), job.spec.adaptive)
            if key not in known:
                known[key] = len(functions)
                functions.append(Goodput(*key))
            function_of[j, column] = known[key]
    function = function_of[owner, kind + 1]
    goodput = gpus.astype(np.float64) ** UNMEASURED_SCALING
    batch = np.where(gpus > 0, batch_of[owner], 0)
    fitted = np.flatnonzero((function >= 0) & (gpus > 0))
    if fitted.size:
        # To find equal configurations among a few takes longer than to evaluate them twice.
        first, back = np.arange(fitted.size), np.arange(fitted.size)
        if fitted.size > _FEW:
            # Function, nodes, whether they lie in several racks, and GPUs as one number: quick to sort and compare.
            spread = 2 * nodes[fitted] + (racks[fitted] == OVER_RACKS)
            wide, most = int(spread.max()) + 1, int(gpus[fitted].max()) + 1
            alike = (function[fitted] * wide + spread) * most + gpus[fitted]
            _, first, back = np.unique(alike, return_index=True, return_inverse=True)
        one = fitted[first]
        afar = 1 + (racks[one] == OVER_RACKS)
        found = optimize_pairs(pack(functions), function[one], nodes[one], gpus[one], afar)
        goodput[fitted], batch[fitted] = found.goodput[back.ravel()], found.batch_size[back.ravel()]
    return goodput, batch


def _fair_goodput(goodput: Floats, listing: Listing, mix: Floats, begin: Ints) -> Floats:
    """Return the goodput [J] on the fair share.

    With several GPU types it is the mean over the types, weighted as the cluster has them. If batch limits forbid a
    placement of this size, it is the goodput of the largest possible one within the share, or else of the smallest
    possible one. A job that can run nowhere gets infinity, so its speedup is 0. `begin` [J]: where each job's
    configurations begin.
    """
    shares = begin[:, None] + np.arange(mix.size)
    fair = goodput[shares] @ mix if mix.size > 1 else goodput[begin]
    gpus = listing.block[GPUS]
    for j in np.flatnonzero(fair <= 0).tolist():
        own = slice(int(begin[j]) + mix.size, int(begin[j] + listing.lengths[j]))
        inside = float(goodput[own][gpus[own] <= gpus[begin[j]]].max(initial=0.0))
        fair[j] = inside if inside > 0 else float(goodput[own][goodput[own] > 0].min(initial=np.inf))
    return fair
