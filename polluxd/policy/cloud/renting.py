"""Choose the rented nodes that jobs may use: time against money.

A node whose feature or GPU type has a price (`cloud_prices`) is rented. Slurm boots it for a job that is placed there,
and powers it off once nothing has run there for SuspendTime. So polluxd rents a node by leaving it to the policy, and
gives it back by keeping it from the policy: the plan then vacates it. Of all sets S of rented nodes, the one in use
minimises

    v sum_j T_j(S) + sum_n in S p_n H_n(S)

T_j: predicted time to the end of job j under the plan on the own nodes and S, boots and moves included; v: what an
hour of it is worth; H_n: time to the end of the last job on node n, its boot and return included; p_n: its price. The
boot of a node that is on is paid: that keeps a node which would not be rented again just now. A set changes only for a
gain beyond `hysteresis` of the change in cost.

Nodes of one price and kind are alike, so a set is a number per kind. The search takes steps of 1, 2, 4, ... nodes from
the set in use, one kind at a time, while they gain.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite
from typing import NamedTuple

from polluxd.model import KEPT_BACK, Allocation, Node, Plan, Snapshot, SnapshotJob
from polluxd.policy import market
from polluxd.policy.cloud.barred import without_barred, without_gain
from polluxd.policy.cloud.prices import Budgets, is_rented, price_of

NEVER_S = 86400.0
"""Wait of a job that nothing else would let start: a day."""
_EVERY = 8
"""Up to so many nodes, each number is tried; beyond, every doubling."""
_ROUNDS = 8
_NOTHING = 1e-6
_NO_USE = 1 << 40
"""GPUs that a waiting job lacks which nothing in service is of use to."""

Solve = Callable[[Snapshot], Plan]


class Rental(NamedTuple):
    """The rented nodes that jobs may use now."""

    plan: Plan
    nodes: frozenset[str]
    net: float
    """Money: minus what the jobs' time is worth, minus what the nodes cost, up to the jobs' ends."""
    tried: int
    """Sets of nodes that were decided on."""


def choose(snapshot: Snapshot, solve: Solve) -> Rental:
    """Choose the rented nodes, and solve the plan on them and the own nodes.

    `solve` has to explain its plans. Deterministic.
    """
    poor = Budgets(snapshot).used_up
    barred = {job.job_id for job in snapshot.jobs if job.account in poor}
    if not barred:
        return _Search(snapshot, solve).run()
    if len(barred) == len(snapshot.jobs):
        shut = (
            replace(n, schedulable=False) if is_rented(n, snapshot.settings) else n for n in snapshot.nodes
        )
        allowed = replace(snapshot, nodes=tuple(shut))
    else:
        # Whoever is barred gains no own nodes of others by that.
        free = _Search(snapshot, solve).run().plan
        allowed = without_gain(without_barred(snapshot, barred), snapshot, free)
    found = _Search(allowed, solve).run()
    why = f"{KEPT_BACK}its account's budget for rented nodes is used up"
    told = {a.job_id: why for a in found.plan.allocations if a.job_id in barred and not a.placement}
    return found._replace(plan=found.plan.with_remarks(told))


class _Valued(NamedTuple):
    """A set of rented nodes, and what it comes to."""

    nodes: frozenset[str]
    plan: Plan
    ends: Mapping[int, float]
    """Seconds to the end, by job."""
    cost: float
    net: float


class _Search:
    def __init__(self, snapshot: Snapshot, solve: Solve) -> None:
        self._snapshot, self._solve = snapshot, solve
        self._settings = snapshot.settings
        self._hour = snapshot.settings.cloud_hour_value
        self._rented = {
            node.name: node
            for node in sorted(snapshot.nodes, key=lambda n: (n.power == "off", n.name))
            if is_rented(node, self._settings) and node.schedulable
        }
        self._jobs = {job.job_id: job for job in snapshot.jobs}
        self._held: dict[str, list[SnapshotJob]] = {}
        for job in snapshot.jobs:
            for name in job.placement.nodes:
                self._held.setdefault(name, []).append(job)
        self._unused = {n for n, node in self._rented.items() if node.power == "off"} - self._held.keys()
        self._always = frozenset(
            name
            for name, node in self._rented.items()
            if node.foreign_gpus
            or node.foreign_cpus
            or any(job.pinned or not job.spec.preemptible for job in self._held.get(name, ()))
        )
        """Nodes that others use, or where a job stays: they are on in any case."""
        self._room = Budgets(snapshot).room
        self._known: dict[frozenset[str], _Valued] = {}
        self._usual = {
            a.job_id: a.goodput or _next_goodput(a)
            for a in self._solve(self._on(frozenset(self._rented))).allocations
        }
        """Goodput of each job on all nodes: what a wait, and a length that is not known, are measured by."""
        self._present = self._always | {n for n, node in self._rented.items() if node.power != "off"}
        now = self._solve(self._on(self._present))
        self._before = {a.job_id: a.goodput for a in now.allocations}
        """Goodput of each job on the nodes in use at present."""
        self._now = now

    def run(self) -> Rental:
        present = best = self._value(self._present, self._now)
        for _ in range(_ROUNDS):
            further = max(map(self._value, self._steps(best.nodes)), key=lambda v: v.net, default=best)
            if further.net <= best.net + 1e-9 * abs(best.net):
                break
            best = further
        if best.net - present.net <= self._settings.hysteresis * abs(best.cost - present.cost):
            best = present
        gains = {j: self._hour * (present.ends[j] - end) / 3600.0 for j, end in best.ends.items()}
        plan = replace(
            best.plan,
            allocations=tuple(self._with_price(a, present, best, gains) for a in best.plan.allocations),
            sooner=self._sooner(best.plan),
        )
        used = {name for a in plan.allocations for name in a.placement.nodes}
        return Rental(plan, best.nodes & (used | self._always), best.net, len(self._known))

    def _off(self, name: str) -> bool:
        return name in self._rented and self._rented[name].power == "off"

    def _steps(self, nodes: frozenset[str]) -> list[frozenset[str]]:
        """Return the sets that differ from `nodes` by some nodes of one kind."""
        more: dict[object, list[str]] = {}
        less: dict[object, list[str]] = {}
        for name, node in self._rented.items():
            side = less if name in nodes else more
            kind = (price_of(node, self._settings), node.gpu_type, node.gpus, node.partitions)
            if name not in self._always:
                side.setdefault(kind, []).append(name)
        for names in less.values():
            names.sort(key=self._burden)
        further = (nodes | set(names[:n]) for names in more.values() for n in _ladder(len(names)))
        found = [one for one in further if self._first_cost(one) <= self._room]
        return found + [nodes - set(names[:n]) for names in less.values() for n in _ladder(len(names))]

    def _first_cost(self, nodes: frozenset[str]) -> float:
        return sum(Budgets.first(self._rented[n], self._settings) for n in nodes if self._off(n))

    def _burden(self, name: str) -> tuple[bool, int, int, str]:
        """Order nodes by what it takes to vacate them: a job can shrink in place from the last of its nodes on."""
        jobs = self._held.get(name, [])
        place = min((job.keeps.index(name) for job in jobs if name in job.keeps), default=0)
        return not self._off(name), sum(job.placement.gpus_per_node for job in jobs), -place, name

    def _on(self, nodes: frozenset[str]) -> Snapshot:
        """Return the snapshot with these rented nodes alone in service."""
        # Of thousands that are off, most are in no set.
        kept = (n for n in self._snapshot.nodes if n.name in nodes or n.name not in self._unused)
        shut = self._rented.keys() - nodes
        return replace(
            self._snapshot,
            nodes=tuple(replace(n, schedulable=False) if n.name in shut else n for n in kept),
        )

    def _value(self, nodes: frozenset[str], plan: Plan | None = None) -> _Valued:
        if nodes not in self._known:
            plan = plan or self._solve(self._on(nodes))
            ends = self._ends(nodes, plan)
            cost = self._cost(nodes, plan, ends)
            worth = self._hour * sum(ends.values()) / 3600.0
            self._known[nodes] = _Valued(nodes, plan, ends, cost, -worth - cost)
        return self._known[nodes]

    def _ends(self, nodes: frozenset[str], plan: Plan) -> dict[int, float]:
        """Return the seconds to each job's end; jobs that wait start in order of submission as others end."""
        found: dict[int, float] = {}
        running: list[tuple[float, int]] = []
        waiting: list[tuple[float, int, int, float]] = []
        free = sum(n.capacity for n in self._snapshot.nodes if n.name not in self._rented or n.name in nodes)
        for a in plan.allocations:
            job = self._jobs[a.job_id]
            if a.placement:
                found[a.job_id] = self._delay(job, a) + self._left(job, a.goodput)
                running.append((found[a.job_id], a.placement.gpus))
                free -= a.placement.gpus
            else:
                why = a.explanation
                size = (why.next_gpus or job.spec.min_gpus) if why else _NO_USE
                waiting.append((job.submitted_at, a.job_id, size, self._left(job, _next_goodput(a))))
        heapq.heapify(running)
        now = 0.0
        for _, job_id, size, left in sorted(waiting):
            while free < size < _NO_USE and running:
                now, freed = heapq.heappop(running)
                free += freed
            if free < size:
                found[job_id] = NEVER_S + left
                continue
            free -= size
            found[job_id] = now + left
            heapq.heappush(running, (found[job_id], size))
        return found

    def _left(self, job: SnapshotJob, goodput: float) -> float:
        """Return the seconds that a job takes at a goodput.

        A job that declared no length is expected to take as long again as for what it has done.
        """
        work, done = market.work(job)
        usual = self._usual.get(job.job_id) or goodput
        rate = goodput if goodput > 0 else usual
        if rate <= 0:
            return market.UNKNOWN
        if not isfinite(work):
            work = usual * min(max(market.UNKNOWN, done / usual), job.time_limit or NEVER_S)
        return work / rate

    def _delay(self, job: SnapshotJob, a: Allocation) -> float:
        """Return the training that a job loses to boots and to its move [s]."""
        boot = max((self._boot(self._rented[n]) for n in a.placement.nodes if n in self._rented), default=0.0)
        if not a.changed or not job.placement:
            return boot
        if job.resize_cost is None or not _alike(job, a):
            return boot + job.move_cost
        if a.goodput <= 0:
            return boot
        # It trains on where it is while the nodes boot.
        return boot * max(1.0 - self._before[job.job_id] / a.goodput, 0.0) + job.resize_cost

    def _boot(self, node: Node) -> float:
        if node.power != "off":
            return 0.0
        return self._settings.cloud_boot_s if node.boot_s is None else node.boot_s

    def _cost(self, nodes: frozenset[str], plan: Plan, ends: Mapping[int, float]) -> float:
        """Return what the rented nodes cost until the last job on each ends."""
        held: dict[str, float] = {}
        for a in plan.allocations:
            for name in a.placement.nodes:
                held[name] = max(held.get(name, 0.0), ends[a.job_id])
        return sum(
            price_of(self._rented[name], self._settings)[1]
            # A node that is on costs its return in any case.
            * (held[name] + self._settings.cloud_return_s * self._off(name))
            / 3600.0
            for name in sorted(nodes & held.keys() - self._always)
        )

    def _sooner(self, plan: Plan) -> dict[int, float]:
        """Return `Plan.sooner`, against the plan on the own nodes and those that are in use anyway."""
        without = {a.job_id: a.goodput for a in self._value(self._always).plan.allocations}
        found = {}
        for a in plan.allocations:
            alone = without.get(a.job_id, 0.0)
            # A job that would wait is an hour nearer to its end after each hour in which it does not.
            found[a.job_id] = a.goodput / alone - 1.0 if alone > 0 else float(a.goodput > 0)
        return {job_id: rate for job_id, rate in found.items() if abs(rate) > _NOTHING}

    def _with_price(
        self, a: Allocation, present: _Valued, best: _Valued, gains: Mapping[int, float]
    ) -> Allocation:
        """Name the job that makes a node worth its price, and the node that none does."""
        boots = [n for n in a.placement.nodes if n in best.nodes and self._off(n)]
        held = self._jobs[a.job_id].placement.nodes
        leaves = [n for n in held if n in self._rented and n not in best.nodes and n not in a.placement.nodes]
        if boots:
            prices = sum(price_of(self._rented[n], self._settings)[1] for n in boots)
            # Another job may get the room that this one leaves on own nodes.
            most = a.job_id if gains[a.job_id] > 0 else max(gains, key=lambda j: (gains[j], -j))
            who = "it" if most == a.job_id else f"job {most}"
            gain = f"it ends {_time(present.ends[most] - best.ends[most])} sooner, worth {gains[most]:.2f}"
            return replace(
                a, reason=f"{a.reason}; Slurm boots {_named(boots)}, {prices:.2f} an hour, for {who}: {gain}"
            )
        if leaves or (not a.placement and len(best.nodes) < len(self._rented)):
            which = _named(leaves) or "any further one"
            return replace(a, reason=f"{a.reason}{KEPT_BACK}{which} is not worth the price now")
        return a


def _alike(job: SnapshotJob, a: Allocation) -> bool:
    """Tell whether the job only gets further nodes, or only gives nodes back."""
    former, new = set(job.placement.nodes), set(a.placement.nodes)
    return (former <= new or former >= new) and job.placement.gpus_per_node == a.placement.gpus_per_node


def _next_goodput(a: Allocation) -> float:
    return a.explanation.next_goodput if a.explanation else 0.0


def _named(nodes: list[str]) -> str:
    return " and ".join([*nodes[:1], *([f"{len(nodes) - 1} more"] if nodes[1:] else [])])


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.0f} min"


def _ladder(most: int) -> list[int]:
    """Return the numbers of nodes to try: each of a few, doublings of many."""
    if most <= _EVERY:
        return list(range(1, most + 1))
    return sorted({most, *(1 << power for power in range(most.bit_length()))})
