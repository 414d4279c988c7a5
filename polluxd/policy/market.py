"""The price of a GPU, and the worth of each job's work at that price.

This is the objective of completion times.

To minimise the weighted sum of completion times, a plan is to maximise the sum of mu_j g_j(a_j), g_j the goodput of
job j on placement a_j. A job that buys its GPUs at price lambda until it ends pays at least

    mu_j = min over a of (h_j + lambda f_j |a|) / g_j(a)

per unit of work: h_j for each second that passes, and the price for each GPU that it holds. The discount f_j <= 1 says
how much cheaper those GPUs become as jobs end: the price falls from lambda now to lambda u_j at the job's end, u_j the
share of all h that is still unfinished then. f_j = sqrt(u_j) is the geometric mean of both. With f_j = u_j, as if all
was bought at the end, long jobs leave too much of their work for later: under new arrivals later is not that cheap.

A job that needs several GPUs at least cannot begin with one of them and buy the others later: it has them or waits. Its
least size has no discount, so such a job is never priced out by what the GPUs will cost later.

At the price that clears the market, the jobs' demands, argmax over a of mu_j g_j(a) - lambda |a|, add up to the
capacity. Related: heSRPT (Berg, Vesilo and Harchol-Balter, 2020), the special case of equal power-law speedups.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polluxd.model import SnapshotJob
from polluxd.policy.counts import owners
from polluxd.policy.owners import Group
from polluxd.policy.price import hull

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TAIL_WIDTH = 0.5
"""tau: how near to the longest predicted time a job counts to the tail, relative to that time."""
KAPPA_JOBS = 10.0
"""Jobs for which the tail counts `kappa` again. A constant would count for less, the more jobs there are."""
UNKNOWN = 1200.0
"""Seconds that a job is expected to take where no job has said how long it trains."""
WIDEST = 4.0
"""A job's least size has no discount up to this part of the GPUs: two jobs of half the cluster would leave none to the
others for as long as they run."""
TOGETHER = 2.0
"""The least sizes of all jobs have no discount up to this part of the GPUs together. Where they want all GPUs at any
price, the jobs that could do with one GPU would have none for hours."""
_ROUNDS = 60
"""Adjustments of the prices of several GPU types."""
_INDIFFERENCE = 0.1
"""For what a job is expected to get: alike jobs expect the same."""
_DECIDED = 0.02
"""For the price, which is to be near the one at which each job buys its best option alone."""
_DEAREST = 1e4
"""A price at which nothing but GPUs counts, relative to the sum of h per GPU."""


class MarketOptions(NamedTuple):
    """The options of every job.

    The arrays are by option [O], grouped by job: `start` [J + 1].
    """

    gpus: Ints
    goodput: Floats
    kind: Ints
    """GPU type by number; -1: none, or any."""
    start: Ints
    capacity: Ints
    """[types]: GPUs of each type; one where types make no difference."""
    groups: Sequence[Group] = ()
    """Ceilings; members by job number."""


class Market(NamedTuple):
    """The outcome of clearing the market."""

    price: Floats
    """[types]: worth of a GPU-second, in seconds of weighted completion time."""
    worth: Floats
    """[J]: mu, of a unit of goodput times a second."""
    seconds: Floats
    """[J]: predicted time to the end."""

    def of_types(self, types: Sequence[str]) -> dict[str, float]:
        """Return the prices by GPU type; "" where types make no difference."""
        return dict(zip(types or ("",), self.price.tolist(), strict=True))


def work(job: SnapshotJob) -> tuple[float, float]:
    """Return the work left and the work done, in M0-equivalent examples.

    The first is nan where the job has not said how long it trains, or has trained for longer than it said.
    """
    report = job.report
    if report is None:
        return float("nan"), 0.0
    known = report.target is not None and report.progress < report.target
    left = report.target - report.progress if known and report.target is not None else float("nan")
    return left * report.limits.initial, max(report.progress, 0.0) * report.limits.initial


HORIZON = 1200.0
"""Seconds over which a move has to pay at least."""


LEAST_LEFT = 0.001
"""Of the time of a job that waits, what counts as not lost to its moves."""


def paying_factors(
    jobs: Sequence[SnapshotJob], seconds: Floats, cost: Floats, owner: NDArray[np.int64], hysteresis: float
) -> Floats:
    """Return what a move leaves of an option's gain [O].

    It is max(H - c, 0) / H, over 1 + hysteresis.

    H = min(max(`HORIZON`, age / (moves + 1)), remaining time + c): a job is expected to stay on its next placement for
    as long as on the earlier ones. Where moves are dear, a job would otherwise stay for hours on a placement that
    another one beats by 20 %. `seconds` [J]: predicted time to the end; `cost` [O]: of the move that leads to the
    option. A job that never ran loses nothing by starting: its factor is 1. One that waits starts on GPUs that nobody
    else wants, however long its start takes.
    """
    stayed = np.array([max(job.age, 0.0) / (max(job.moves, 0) + 1) for job in jobs], dtype=np.float64)
    whole = np.minimum(np.maximum(HORIZON, stayed)[owner], seconds[owner] + cost)
    left = np.where(whole > 0, np.maximum(whole - cost, 0.0) / np.where(whole > 0, whole, 1.0), 1.0)
    left = np.maximum(left, np.array([0.0 if job.placement else LEAST_LEFT for job in jobs])[owner])
    started = np.array([job.started for job in jobs], dtype=np.bool_)[owner]
    return np.where(started, left / (1.0 + max(hysteresis, 0.0)), 1.0)


def clear(
    offers: MarketOptions,
    weight: Floats,
    work: Floats,
    done: Floats,
    kappa: float,
    limit: Floats | float = np.inf,
) -> Market:
    """Clear the market: find the prices, and the worth of every job's work.

    `weight` [J]: of each job in the mean. `work` [J]: remaining work in units of goodput times seconds; nan where it
    is not known: such a job is expected to take the median time of the others, or as long again as for the work that it
    has `done` [J], whichever is longer, and no longer than its time `limit` [J]. `kappa`: what the last job to end
    counts beyond its share of the mean, and as much again for each `KAPPA_JOBS` jobs, or their weights if less.
    """
    if weight.size == 0:
        return Market(np.zeros(offers.capacity.size), weight, weight)
    side = _OneType(offers) if offers.capacity.size == 1 else _Types(offers)
    price, rate = side.clear(weight, np.ones(weight.size), _INDIFFERENCE)
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.where(rate > 0, work / rate, np.nan)
        again = np.where(rate > 0, done / rate, 0.0)
    known = seconds[np.isfinite(seconds)]
    usual = median(known.tolist()) if known.size else UNKNOWN
    seconds = np.where(np.isfinite(seconds), seconds, np.minimum(np.maximum(again, usual), limit))
    jobs = min(float(weight.sum()), weight.size)
    cost = weight + kappa * (1.0 + jobs / KAPPA_JOBS) * _tail(seconds)
    discount = np.sqrt(_unfinished(seconds, cost))
    price, _ = side.clear(cost, discount, _DECIDED)
    return Market(price, side.worth(cost, discount, price), seconds)


def _tail(seconds: Floats) -> Floats:
    """[J], adding up to 1: how much each job is the last one to end."""
    last = np.exp((seconds / max(float(seconds.max()), 1e-9) - 1.0) / TAIL_WIDTH)
    return np.asarray(last / last.sum(), dtype=np.float64)


def _unfinished(seconds: Floats, cost: Floats) -> Floats:
    """Return u [J]: the share of all cost that ends no earlier than the job.

    Other jobs that end at the same time count half.
    """
    order = np.argsort(seconds, kind="stable")
    ends, number = np.unique(seconds, return_inverse=True)
    of_end = np.bincount(number.ravel(), weights=cost, minlength=ends.size)
    total = float(cost[order].sum())
    after = total - np.cumsum(of_end)
    return np.minimum((after + 0.5 * of_end)[number.ravel()] / total + 0.5 * cost / total, 1.0)


def _least(offers: MarketOptions) -> Floats:
    """Return the GPUs [J] that a job has to buy at once, at today's price.

    None where it also runs on one GPU.
    """
    least = np.minimum.reduceat(
        np.where(offers.gpus > 0, offers.gpus, np.iinfo(np.int64).max), offers.start[:-1]
    )
    gpus = float(offers.capacity.sum())
    at_once = np.where(least > 1, np.minimum(least, gpus / WIDEST), 0.0)
    return at_once / max(1.0, float(at_once.sum()) * TOGETHER / max(gpus, 1.0))


class _OneType:
    """Demand for GPUs of one kind: steps up each job's concave hull."""

    def __init__(self, offers: MarketOptions) -> None:
        start, jobs = offers.start, offers.start.size - 1
        job_of = owners(start)
        points = hull(offers.gpus, offers.goodput, job_of)
        owner = job_of[points]
        self._first = np.searchsorted(owner, np.arange(jobs))
        self._vertex = np.arange(owner.size) - self._first[owner]
        self._capacity = int(offers.capacity[0])
        self._gpus = np.zeros((jobs, int(self._vertex.max()) + 1))
        self._goodput = np.zeros_like(self._gpus)
        self._gpus[owner, self._vertex] = offers.gpus[points]
        self._goodput[owner, self._vertex] = offers.goodput[points]
        step = np.flatnonzero(owner[1:] == owner[:-1]) + 1
        self._owner, self._run = owner[step], np.diff(offers.gpus[points], prepend=0)[step]
        self._slope = np.diff(offers.goodput[points], prepend=0.0)[step] / self._run
        self._held = float(offers.gpus[points[self._first]].sum())
        self._groups = [(np.array(g.members, dtype=np.int64), g.ceiling) for g in offers.groups]
        self._least = _least(offers)
        self._inside = np.zeros(jobs)
        """[J]: the price within the ceilings that the job is under, where these are full."""

    def _price(self, limit: Floats, run: Floats, room: float) -> float:
        """The price at which steps with these limits find room."""
        order = np.argsort(-limit, kind="stable")
        broken = int(np.searchsorted(np.cumsum(run[order]), room, side="right"))
        return float(limit[order[broken]]) if broken < order.size else 0.0

    def clear(self, cost: Floats, discount: Floats, _: float) -> tuple[Floats, Floats]:
        """The market's price, and every job's goodput [J] at what it buys."""
        owner, run = self._owner, self._run
        own = self._goodput[owner] / self._slope[:, None] - self._dear(discount)[owner]
        with np.errstate(divide="ignore"):
            # The price up to which the job takes the step: where mu times the step's slope is the price.
            limit = cost[owner] / np.maximum(own.max(axis=1, initial=0.0), 0.0)
        limit = np.minimum(limit, _DEAREST * float(cost.sum()) / max(self._capacity, 1))
        self._inside = np.zeros(cost.size)
        for members, ceiling in self._groups:
            part = np.isin(owner, members)
            room = ceiling - float(self._gpus[members, 0].sum())
            inside = self._price(limit[part], run[part], room)
            self._inside[members] = np.maximum(self._inside[members], inside)
        open_to = limit > self._inside[owner]
        price = self._price(limit[open_to], run[open_to], self._capacity - self._held)
        bought = np.bincount(owner[limit > np.maximum(price, self._inside)[owner]], minlength=cost.size)
        # A job that buys nothing now would begin with the step that brings most per GPU.
        vertex = np.where((bought == 0) & (self._gpus[:, 0] == 0), 1, bought)
        vertex = np.minimum(vertex, self._gpus.shape[1] - 1)
        return np.array([price]), self._goodput[np.arange(cost.size), vertex]

    def _dear(self, discount: Floats) -> Floats:
        """[J, vertices]: GPUs, at a discount those that can be bought later."""
        least = np.minimum(self._least[:, None], self._gpus)
        return least + discount[:, None] * (self._gpus - least)

    def worth(self, cost: Floats, discount: Floats, price: Floats) -> Floats:
        """[J]: mu."""
        spent = cost[:, None] + np.maximum(price[0], self._inside)[:, None] * self._dear(discount)
        with np.errstate(divide="ignore"):
            least = np.where(self._goodput > 0, spent / self._goodput, np.inf).min(axis=1)
        return np.where(np.isfinite(least), least, 0.0)


class _Types:
    """Jobs' demands for GPUs of several types, a price each."""

    def __init__(self, offers: MarketOptions) -> None:
        self._offers = offers
        self._owner = owners(offers.start)
        self._typed = (offers.gpus > 0) & (offers.kind >= 0)
        self._kind = np.where(self._typed, offers.kind, 0)
        self._gpus = offers.gpus.astype(np.float64)
        self._now = np.minimum(_least(offers)[self._owner] / np.maximum(offers.gpus, 1), 1.0)
        """[O]: part of the option's GPUs that is bought at today's price."""
        self._inverse = np.where(offers.goodput > 0, 1.0 / np.maximum(offers.goodput, 1e-300), np.inf)

    def _paid(self, price: Floats) -> Floats:
        """[O]"""
        return np.asarray(np.where(self._typed, price[self._kind], price.mean()) * self._gpus)

    def worth(self, cost: Floats, discount: Floats, price: Floats) -> Floats:
        """[J]: mu."""
        return self._worth(cost[self._owner], self._later(discount), self._paid(price))

    def _later(self, discount: Floats) -> Floats:
        """[O]: share of today's price that the option's GPUs cost on average."""
        return np.asarray(discount[self._owner] * (1.0 - self._now) + self._now)

    def _worth(self, cost: Floats, later: Floats, paid: Floats) -> Floats:
        """[J]: as `worth`; the arguments are by option [O]."""
        least = np.minimum.reduceat((cost + later * paid) * self._inverse, self._offers.start[:-1])
        return np.where(np.isfinite(least), least, 0.0)

    def clear(self, cost: Floats, discount: Floats, indifference: float) -> tuple[Floats, Floats]:
        """Find a price per type, and every job's goodput [J] at what it buys.

        Prices follow demand in smaller and smaller steps. Of two jobs that are alike and could each use all GPUs of a
        type, only chance would say which one buys them; the other would seem to take far longer, weigh more, and get
        them at the next decision. So a job buys options in shares (a logit), most where its work is cheapest.
        `indifference`: of what its time costs, the loss at which it buys an option by a factor of e less.
        """
        offers, types = self._offers, self._offers.capacity.size
        room = np.maximum(offers.capacity, 1)
        price = np.full(types, float(cost.sum()) / float(room.sum()))
        owner, start, later = self._owner, offers.start[:-1], self._later(discount)
        share, each = np.zeros(owner.size), cost[owner]
        softness = np.maximum(indifference * each, 1e-300)
        typed_gpus = np.where(self._typed, self._gpus, 0.0)
        for turn in range(_ROUNDS):
            paid = self._paid(price)
            net = self._worth(each, later, paid)[owner] * offers.goodput - paid
            share = np.exp((net - np.maximum.reduceat(net, start)[owner]) / softness)
            share /= np.add.reduceat(share, start)[owner]
            wanted = np.bincount(self._kind, weights=share * typed_gpus, minlength=types)
            excess = np.clip((wanted - offers.capacity) / room, -1.0, 1.0)
            price = price * np.exp(excess * 1.5 / (1.0 + 0.2 * turn))
        return price, np.add.reduceat(share * offers.goodput, start)
