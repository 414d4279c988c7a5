"""Choose counts where GPU types or racks differ, by an integer program.

HiGHS solves it. As in Sia (SOSP 2023), each GPU type has one row of capacity.

    maximise sum value[o] x[o]     each job one option, GPUs of each type within its capacity, limits of groups

An option that must lie within one rack is divided among the racks that could hold it, x[o] = sum_r y[o, r]. Each rack
has rows for its GPUs and for the nodes that its spanning jobs may have.

A limit on branch-and-bound nodes bounds the work, so that a replay is exact; a clock is the last resort. The dual
bound is valid at any end of the search. With many jobs, a linear relaxation bounds the program, and the program decides
only the jobs at the margin of the relaxation as integers. The relaxation has few rows, and so few fractional jobs. If
the search finds no plan in time, these jobs are rounded down, so every plan stays within the capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array, hstack, vstack

from polluxd.policy.counts import frontiers, owners
from polluxd.policy.owners import NO_CEILING, Group
from polluxd.policy.price import Priced, hull

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NODES = 200
"""Branch-and-bound nodes at most."""
SECONDS = 20.0
"""Time limit of the search [s]. Only a single relaxation that takes this long can reach it."""
GAP = 1e-6
"""Relative distance to the bound at which the search ends."""
EQUAL = 1e-6
"""HiGHS treats objectives this close as equal (absolute gap and tolerance). Its bound may be wrong by as much."""
LARGE = 6_000
"""With more options, HiGHS solves the relaxation over all jobs, and the program only over the jobs at its margin."""
CORE_JOBS, CORE_OPTIONS = 150, 3_000
"""Most jobs at the margin that take part in the program, and most options of these jobs together."""
FEW_ROWS, MOST_COLUMNS = 16, 300
"""The relaxation is solved by columns up to so many rows of capacity and limits, and with so many columns."""
CUTS = (1, 2, 3)
"""Families of cuts on what racks of one kind can hold: halves, thirds and quarters of a rack."""
_ROUNDING = 1e-9
_FINER = 4.0
"""The search is repeated without large losses if that makes the largest loss smaller by this factor."""
_WHOLE = 1 - 1e-4
"""An option with at least this share counts as taken."""


@dataclass(frozen=True)
class Pools:
    """The pools of GPUs: which one each option uses (`of_option` [O]; -1: it needs no GPU), and each capacity."""

    of_option: Ints
    capacity: Sequence[int]
    racks: Racks | None = None
    """Racks, where some job tells them apart."""


@dataclass(frozen=True)
class Racks:
    """What the racks hold, for the options that span nodes.

    A job that spans nodes shares no node with another such job. One column stands for `many` racks with the same number
    of open nodes. Its rows limit the options by the sum of these racks, and cuts exclude some options that no
    packing of the racks can hold. This is a relaxation. The size of the program does not depend on the number of racks.
    """

    within: NDArray[np.bool_]
    """[O]: whether the option must lie within one rack."""
    nodes: Ints
    """[O]: nodes that the option takes for itself; 0 for one on a single node or on none."""
    gpus: Ints
    """[pools, racks]: GPUs free, of all racks of the column."""
    open: Ints
    """[pools, racks]: nodes that a spanning job could be given, of each rack of the column."""
    many: Ints
    """[racks]"""


def solve(
    gpus: Ints, value: Floats, start: Ints, pools: Pools, groups: Sequence[Group], *, nodes: int = NODES
) -> Priced:
    """Choose one option per job, of largest total value; with a bound.

    The choice keeps within the pools and the limits of the groups. It is as `price.solve`, with a pool of GPUs for
    every type. Guarantees that no choice can keep are left out.
    """
    jobs = start.size - 1
    if jobs == 0:
        return Priced(np.zeros(0, dtype=np.int64), 0.0, 0.0, 0.0, proven=True)
    owner = owners(start)
    listed = _worth_having(gpus, value, start, pools)
    best = np.maximum.reduceat(value, start[:-1])
    loss = best[owner[listed]] - value[listed]
    scale = max(float(loss.max()), 1e-300)
    problem = _Program(listed, gpus, owner, pools, groups)
    cost = problem.padded(loss / scale)
    if pools.racks is None and jobs > 1 and listed.size > LARGE:
        large = _through_core(_Given(gpus, value, start, pools, groups), problem, loss / scale, nodes)
        if large is not None:
            chosen, least = large
            total, bound = float(value[chosen].sum()), float(best.sum()) - least * scale + _ROUNDING * scale
            return Priced(chosen, total, max(bound, total), 0.0)
    for floors in (True, False) if any(g.floor for g in groups) else (False,):
        found = milp(
            cost,
            integrality=np.ones(cost.size),
            bounds=Bounds(0, 1),
            constraints=problem.constraints(floors=floors),
            options={"node_limit": nodes, "time_limit": SECONDS, "mip_rel_gap": GAP},
        )
        if found.status != 2:
            break
    ideal = float(best.sum())
    dual = 0.0 if found.mip_dual_bound is None else max(float(found.mip_dual_bound), 0.0)
    if not np.isfinite(dual):
        dual = 0.0
    bound = ideal - max(dual - EQUAL, 0.0) * scale
    x = found.x if found.x is not None else _relaxed(cost, problem)
    chosen = start[:-1].copy()
    for o, share in zip(listed.tolist(), x[: listed.size].tolist(), strict=True):
        if share > _WHOLE:
            chosen[owner[o]] = o
    total = float(value[chosen].sum())
    proven = found.status == 0 and bound - total <= 10 * GAP * scale
    if proven:
        # The tolerance of the search is a share of the largest loss, for example the loss of a job without GPUs. An
        # option that alone loses more than this whole choice is in no better choice: search again without it.
        keep = np.union1d(listed[loss <= (ideal - total) * (1 + _ROUNDING)], chosen)
        if 0 < float((best[owner[keep]] - value[keep]).max()) < scale / _FINER:
            finer = _among(keep, _Given(gpus, value, start, pools, groups), nodes)
            if finer.total > total + _ROUNDING * abs(total):
                return finer
            return Priced(chosen, total, max(finer.bound, total), 0.0, finer.proven)
    return Priced(chosen, total, max(bound, total), 0.0, proven)


def _among(keep: Ints, given: _Given, nodes: int) -> Priced:
    """Run `solve` over some of the options, at least one of every job."""
    gpus, value, start, pools, groups = given
    racks = pools.racks
    if racks is not None:
        racks = replace(racks, within=racks.within[keep], nodes=racks.nodes[keep])
    begin = np.searchsorted(keep, start)
    found = solve(
        gpus[keep],
        value[keep],
        begin,
        Pools(pools.of_option[keep], pools.capacity, racks),
        groups,
        nodes=nodes,
    )
    return found._replace(chosen=keep[found.chosen])


def _worth_having(gpus: Ints, value: Floats, start: Ints, pools: Pools) -> Ints:
    """Return the options that are worth having.

    An option is dropped where another of the same job and pool is worth as much with no more GPUs. The first option
    of each job always stays. Where racks are told apart, an option is compared only with options that are as hard to
    place.
    """
    room = pools.of_option
    if pools.racks is not None:
        room = np.where(room < 0, -1, 3 * room + (pools.racks.nodes > 0) + pools.racks.within)
    owner = owners(start)
    kept = frontiers(gpus, value, owner * (int(room.max()) + 2) + room + 1)
    return np.union1d(kept, start[:-1])


class _Program:
    """The rows of the program over the options that are worth having."""

    def __init__(self, listed: Ints, gpus: Ints, owner: Ints, pools: Pools, groups: Sequence[Group]) -> None:
        self.listed = listed
        self._size = gpus[listed].astype(np.float64)
        self._owner = owner[listed]
        self._pool = pools.of_option[listed]
        self._pools = pools
        self._groups = groups
        # Pairs of an option (by its place in `listed`) and a rack that could hold it: variables of their own.
        self._placed, self._rack = _pairs(listed, pools)

    def padded(self, cost: Floats) -> Floats:
        """Costs of all variables: an option's rack costs nothing."""
        return np.append(cost, np.zeros(self._placed.size))

    def steep(self, value: Floats) -> Ints:
        """Return the places in `listed` of the options on the concave hulls of each job's options in each pool.

        The relaxation needs no others: it would rather mix two of these.
        """
        pools = len(self._pools.capacity)
        nothing = np.flatnonzero(self._pool < 0)
        place = np.concatenate([np.flatnonzero(self._pool >= 0), np.repeat(nothing, pools)])
        pool = np.concatenate([self._pool[self._pool >= 0], np.tile(np.arange(pools), nothing.size)])
        points = hull(self._size[place], value[self.listed[place]], self._owner[place] * pools + pool)
        return np.unique(place[points])

    def constraints(self, *, floors: bool) -> list[LinearConstraint]:
        count = self._size.size
        columns = np.arange(count)
        jobs = int(self._owner[-1]) + 1
        one = csr_array((np.ones(count), (self._owner, columns)), shape=(jobs, count))
        rows = [np.where(self._pool == k, self._size, 0.0) for k in range(len(self._pools.capacity))]
        low, high = [0.0] * len(rows), [float(c) for c in self._pools.capacity]
        for group in self._groups:
            inside = np.isin(self._owner, np.array(group.members, dtype=np.int64))
            rows.append(np.where(inside, self._size, 0.0))
            low.append(float(self._usable(group) if floors else 0))
            high.append(float(group.ceiling) if group.ceiling < NO_CEILING else np.inf)
        limits = csr_array(np.stack(rows)) if rows else csr_array((0, count))
        found = [LinearConstraint(one, 1, 1), LinearConstraint(limits, low, high)]
        return found if self._pools.racks is None else self._over_racks(found, self._pools.racks)

    def _usable(self, group: Group) -> int:
        """Return the most GPUs within the guarantee that the jobs can hold."""
        sums, within = 1, (1 << (group.floor + 1)) - 1
        for job in group.members if group.floor else ():
            sizes = set(self._size[self._owner == job].astype(np.int64).tolist())
            sums = reduce(or_, (sums << size for size in sizes), sums) & within
        return sums.bit_length() - 1

    def _over_racks(self, found: list[LinearConstraint], racks: Racks) -> list[LinearConstraint]:
        """Widen the rows by a column per option and rack; add the racks' rows."""
        pairs, count = self._placed.size, self._size.size
        wide = [
            LinearConstraint(hstack([csr_array(c.A), csr_array((c.A.shape[0], pairs))]), c.lb, c.ub)
            for c in found
        ]
        taken = racks.nodes[self.listed].astype(np.float64)
        held = np.flatnonzero(racks.within[self.listed])
        # x[o] = sum_r y[o, r]
        divided = np.zeros((held.size, count + pairs))
        divided[np.arange(held.size), held] = -1
        divided[np.searchsorted(held, self._placed), count + np.arange(pairs)] = 1
        rows, high = [], []
        for pool, number in np.ndindex(racks.gpus.shape):
            here = (self._pool[self._placed] == pool) & (self._rack == number)
            size, many = int(racks.open[pool, number]), int(racks.many[number])
            limits = [(self._size, float(racks.gpus[pool, number])), (taken, float(many * size))]
            if many > 1 and size > 0:
                limits += [(dual_feasible(taken / size, k), float(many)) for k in CUTS]
            for amount, most in limits:
                rows.append(np.append(np.zeros(count), np.where(here, amount[self._placed], 0.0)))
                high.append(most)
        for pool, most in enumerate((racks.open * racks.many).sum(axis=1).tolist()):
            rows.append(np.append(np.where(self._pool == pool, taken, 0.0), np.zeros(pairs)))
            high.append(float(most))
        return [
            *wide,
            LinearConstraint(csr_array(divided), 0, 0),
            LinearConstraint(csr_array(np.stack(rows)), -np.inf, high),
        ]


def dual_feasible(share: Floats, k: int) -> Floats:
    """Map parts of a bin to numbers that sum to at most 1 if the parts fit.

    Source: dual feasible functions (Fekete and Schepers, 2001).
    """
    scaled = (k + 1) * share
    whole = np.rint(scaled)
    return np.where(np.abs(scaled - whole) < _ROUNDING, share, np.floor(scaled) / k)


def _pairs(listed: Ints, pools: Pools) -> tuple[Ints, Ints]:
    """Pair each option within a rack with every rack that has its nodes.

    Returns the options' places in `listed`, and the racks.
    """
    if pools.racks is None:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    within = np.flatnonzero(pools.racks.within[listed])
    room = pools.racks.open[pools.of_option[listed[within]]]
    place, rack = np.nonzero(room >= pools.racks.nodes[listed[within]][:, None])
    return within[place], rack


class _Given(NamedTuple):
    gpus: Ints
    value: Floats
    start: Ints
    pools: Pools
    groups: Sequence[Group]


def _through_core(given: _Given, problem: _Program, cost: Floats, nodes: int) -> tuple[Ints, float] | None:
    """Return a choice and a lower bound on the cost, through the relaxation.

    The relaxation covers all jobs. The program then settles only the jobs at the margin: jobs that the relaxation
    divides, and jobs whose second-best option costs least at the relaxation's prices. The other jobs keep what the
    relaxation gives them. Guarantees that not even the relaxation can keep are left out. Returns None where the
    relaxation has no answer.
    """
    gpus, value, start, pools, groups = given
    owner = owners(start)
    steep = problem.steep(value)
    for floors in (True, False) if any(g.floor for g in groups) else (False,):
        one, limits = problem.constraints(floors=floors)
        above, below = np.isfinite(limits.ub), np.asarray(limits.lb) > 0
        rows = vstack([limits.A[above], -limits.A[below]], format="csr")
        most = np.concatenate([limits.ub[above], -limits.lb[below]])
        begin = np.searchsorted(owner[problem.listed[steep]], np.arange(start.size))
        relaxed = (
            _by_columns(cost[steep], begin, rows[:, steep].toarray(), most) if most.size <= FEW_ROWS else None
        )
        if relaxed is None:
            found = linprog(
                cost[steep],
                A_ub=rows[:, steep],
                b_ub=most,
                A_eq=one.A[:, steep],
                b_eq=np.ones(start.size - 1),
                bounds=(0, 1),
            )
            if found.x is None:
                continue
            relaxed = _Relaxation(found.x, -found.ineqlin.marginals, float(found.fun))
        break
    else:
        return None
    net = cost + rows.T @ relaxed.prices
    lowest = np.minimum.reduceat(net, np.searchsorted(owner[problem.listed], np.arange(start.size - 1)))
    priced = net - lowest[owner[problem.listed]]
    chosen = start[:-1].copy()
    taken = np.zeros(cost.size, dtype=np.bool_)
    taken[steep] = relaxed.shares > _WHOLE
    chosen[owner[problem.listed[taken]]] = problem.listed[taken]
    slack = np.full(start.size - 1, np.inf)
    np.minimum.at(slack, owner[problem.listed[~taken]], np.maximum(priced[~taken], 0.0))
    slack[np.setdiff1d(np.arange(slack.size), owner[problem.listed[taken]])] = -1.0
    nearest = np.argsort(slack, kind="stable")[:CORE_JOBS]
    # A core as large as the whole would be no core.
    size = np.cumsum(np.bincount(owner[problem.listed], minlength=slack.size)[nearest])
    core = np.sort(nearest[: max(int(np.searchsorted(size, CORE_OPTIONS, side="right")), 1)])
    outside = np.setdiff1d(np.arange(slack.size), core)
    kept = chosen[outside]
    left = [c - int(gpus[kept][pools.of_option[kept] == k].sum()) for k, c in enumerate(pools.capacity)]
    number = {j: n for n, j in enumerate(core.tolist())}
    held = dict(zip(outside.tolist(), gpus[kept].tolist(), strict=True))
    inner = [
        replace(
            g.less(sum(held.get(j, 0) for j in g.members)),
            members=tuple(number[j] for j in g.members if j in number),
        )
        for g in groups
    ]
    own = np.concatenate([np.arange(start[j], start[j + 1]) for j in core])
    begin = np.concatenate([[0], np.cumsum(start[core + 1] - start[core])])
    settled = solve(
        gpus[own],
        value[own],
        begin,
        Pools(pools.of_option[own], left),
        [g for g in inner if g.members],
        nodes=nodes,
    )
    chosen[core] = own[settled.chosen]
    return chosen, max(relaxed.bound, 0.0)


class _Relaxation(NamedTuple):
    shares: Floats
    prices: Floats
    """Of the rows."""
    bound: float
    """No shares cost less."""


def _by_columns(cost: Floats, begin: Ints, rows: Floats, most: Floats) -> _Relaxation | None:
    """Solve the relaxation in a third of the time of a general solver, where few rows join the jobs.

    A column has one option of every job (Dantzig and Wolfe, 1960). A small program mixes the columns within the rows;
    at its prices, the best option of each job makes the next column. Returns None where that does not come to an end,
    or where the jobs' first options are beyond the rows.
    """
    job, pick = owners(begin), begin[:-1]
    columns, last, gains = list[Ints](), np.inf, False
    paid, used, best = list[float](), list[Floats](), _Relaxation(cost, most, -np.inf)
    for _ in range(MOST_COLUMNS):
        columns.append(pick)
        paid.append(float(cost[pick].sum()))
        used.append(rows[:, pick].sum(axis=1))
        found = linprog(paid, A_ub=np.stack(used, 1), b_ub=most, A_eq=np.ones((1, len(paid))), b_eq=1)
        if found.x is None:
            return None
        prices = -found.ineqlin.marginals
        if gains:
            # Half-way to the best ones: a third fewer turns with thousands of jobs (Wentges, 1997). After a turn in
            # vain it could stall.
            prices = 0.5 * (prices + best.prices)
        net = cost + prices @ rows
        lowest = np.minimum.reduceat(net, begin[:-1])
        bound = float(lowest.sum() - prices @ most)
        gains, last = bound > best.bound or found.fun < last, found.fun
        if bound > best.bound:
            best = best._replace(prices=prices, bound=bound)
        if found.fun - best.bound <= _ROUNDING * max(abs(found.fun), 1.0):
            shares = np.zeros(cost.size)
            np.add.at(shares, np.stack(columns), found.x[:, None])
            return best._replace(shares=shares)
        at = np.flatnonzero(net <= lowest[job])[::-1]
        pick = np.empty_like(pick)
        pick[job[at]] = at
    return None


def _relaxed(cost: Floats, problem: _Program) -> Floats:
    """Return the relaxation's shares, all 0 where it has no answer."""
    found = milp(
        cost,
        integrality=np.zeros(cost.size),
        bounds=Bounds(0, 1),
        constraints=problem.constraints(floors=False),
    )
    # The program may divide one option among several racks, although no single rack has room for all of it. The
    # placement then finds another option.
    return np.zeros(cost.size) if found.x is None else np.asarray(found.x, dtype=np.float64)
