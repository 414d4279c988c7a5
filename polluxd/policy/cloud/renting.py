"""Choose the rented nodes that jobs may use: time against money.

A node whose feature or GPU type has a price (`cloud_prices`) is rented. Slurm boots it for a job that is placed there,
and powers it off once nothing has run there for SuspendTime. So polluxd rents a node by leaving it to the policy, and
gives it back by keeping it from the policy: the plan then vacates it. Of all sets S of rented nodes, the one in use
minimises

    sum_j v_j T_j(S) + sum_n in S p_n H_n(S)

T_j: predicted time to the end of job j under the plan on the own nodes and S, boots and moves included; v_j: what an
hour of it is worth; H_n: time to the end of the last job on node n, its boot and return included; p_n: its price, with
what interruptions of a spot node are expected to cost. The boot of a node that is on is paid: that keeps a node which
would not be rented again just now. A set changes only for a gain beyond `hysteresis` of the change in cost.

Nodes of one price and kind are alike, so a set is a number per kind. The search takes steps of 1, 2, 4, ... nodes from
the set in use, one kind at a time, while they gain.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf, isfinite
from typing import NamedTuple

from polluxd.config.settings import PolicySettings
from polluxd.model import KEPT_BACK, Allocation, Node, Plan, Snapshot, SnapshotJob, Spent
from polluxd.policy import market

NEVER_S = 86400.0
"""Wait of a job that nothing else would let start: a day."""
_EVERY = 8
"""Up to so many nodes, each number is tried; beyond, every doubling."""
_ROUNDS = 8

Solve = Callable[[Snapshot], Plan]


def price_of(node: Node, settings: PolicySettings) -> tuple[str, float]:
    """Return the name under which a node has a price, and the price of an hour; "" and 0 of an own node."""
    for name in (*sorted(node.features), node.gpu_type):
        if name in settings.cloud_prices:
            return name, settings.cloud_prices[name]
    return "", 0.0


def is_rented(node: Node, settings: PolicySettings) -> bool:
    """Tell whether the node has a price."""
    return bool(settings.cloud_prices) and bool(price_of(node, settings)[0])


def hourly(snapshot: Snapshot, plan: Plan) -> float:
    """Return what the rented nodes that a plan uses cost in an hour."""
    used = {name for a in plan.allocations for name in a.placement.nodes}
    return sum(price_of(node, snapshot.settings)[1] for node in snapshot.nodes if node.name in used)


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
    return _Search(_without_barred(snapshot), solve).run()


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
        # A node that others use, or a job that stays, is on in any case.
        self._fixed = frozenset(
            name
            for name, node in self._rented.items()
            if node.foreign_gpus
            or node.foreign_cpus
            or any(job.pinned or not job.spec.preemptible for job in self._held.get(name, ()))
        )
        self._usual: dict[int, float] = {}
        """Goodput of each job on all nodes: what a wait, and a length that is not known, are measured by."""
        self._before: dict[int, float] = {}
        """Goodput of each job on the nodes in use at present."""
        first, _, last = self._settings.cloud_hours.partition("-")
        self._closed = not int(first) <= snapshot.taken_at % 86400.0 / 3600.0 < int(last)
        left = _budget_left(self._settings, snapshot.spent or Spent())
        self._room = left - sum(_tail(n, self._settings) for n in self._rented.values() if n.power != "off")
        """Money for further nodes. Below 0, the budget only lasts to give back those that are on."""
        self._always = self._fixed
        """Nodes that are in use whatever they are worth."""
        self._always |= self._open([*self._rented][: self._settings.cloud_least])
        self._known: dict[frozenset[str], _Valued] = {}

    def run(self) -> Rental:
        everything = self._solve(self._on(self._open(self._rented)))
        self._usual = {a.job_id: a.goodput or _next_goodput(a) for a in everything.allocations}
        on = self._open(name for name, node in self._rented.items() if node.power != "off")
        plan = self._solve(self._on(on))
        self._before = {a.job_id: a.goodput for a in plan.allocations}
        present = best = self._value(on, plan)
        for _ in range(_ROUNDS):
            further = max(map(self._value, self._steps(best.nodes)), key=lambda v: v.net, default=best)
            if further.net <= best.net + 1e-9 * abs(best.net):
                break
            best = further
        if best.net - present.net <= self._settings.hysteresis * abs(best.cost - present.cost):
            best = present
        plan = replace(
            best.plan, allocations=tuple(self._said(a, present, best) for a in best.plan.allocations)
        )
        used = {name for a in plan.allocations for name in a.placement.nodes}
        return Rental(plan, best.nodes & (used | self._always), best.net, len(self._known))

    def _open(self, names: Iterable[str]) -> frozenset[str]:
        """Return the nodes that may be in use: those that always are, and as many others as the settings allow."""
        if self._closed or self._room < 0:
            return self._always
        most = inf if self._settings.cloud_most is None else self._settings.cloud_most
        chosen, room = set(self._always), self._room - sum(map(self._need, self._always))
        for name in names:
            if name not in chosen and self._need(name) <= room and len(chosen) < most:
                chosen.add(name)
                room -= self._need(name)
        return frozenset(chosen)

    def _need(self, name: str) -> float:
        """Return the money for a boot, as long again, and the return; 0 of a node that is on."""
        node = self._rented[name]
        if node.power != "off":
            return 0.0
        price = price_of(node, self._settings)[1]
        return price * 2.0 * self._boot(node) / 3600.0 + _tail(node, self._settings)

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
        found = [
            self._open([*sorted(nodes), *names[:n]]) for names in more.values() for n in _ladder(len(names))
        ]
        found += [nodes - set(names[:n]) for names in less.values() for n in _ladder(len(names))]
        return [one for one in dict.fromkeys(found) if one != nodes]

    def _burden(self, name: str) -> tuple[bool, int, int, str]:
        """Order nodes by what it takes to vacate them: a job can shrink in place from the last of its nodes on."""
        jobs = self._held.get(name, [])
        place = min((job.keeps.index(name) for job in jobs if name in job.keeps), default=0)
        return (
            self._rented[name].power != "off",
            sum(job.placement.gpus_per_node for job in jobs),
            -place,
            name,
        )

    def _on(self, nodes: frozenset[str]) -> Snapshot:
        return replace(
            self._snapshot,
            nodes=tuple(
                replace(n, schedulable=False) if n.name in self._rented and n.name not in nodes else n
                for n in self._snapshot.nodes
            ),
        )

    def _value(self, nodes: frozenset[str], plan: Plan | None = None) -> _Valued:
        if nodes not in self._known:
            plan = plan or self._solve(self._on(nodes))
            ends = self._ends(nodes, plan)
            cost = self._cost(nodes, plan, ends)
            worth = sum(self._hour_value(job_id) * end for job_id, end in ends.items()) / 3600.0
            self._known[nodes] = _Valued(nodes, plan, ends, cost, -worth - cost)
        return self._known[nodes]

    def _hour_value(self, job_id: int) -> float:
        settings = self._settings
        return settings.cloud_account_hour_values.get(self._jobs[job_id].account, settings.cloud_hour_value)

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
                told = a.explanation
                size = (told.next_gpus if told else None) or job.spec.min_gpus
                left = self._left(job, _next_goodput(a))
                # Without an explanation, nothing in service is of use to it.
                waiting.append((job.submitted_at, a.job_id, size if told else 1 << 40, left))
        heapq.heapify(running)
        now = 0.0
        for _, job_id, size, left in sorted(waiting):
            while free < size < 1 << 40 and running:
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
        former = set(job.placement.nodes)
        alike = former <= set(a.placement.nodes) or former >= set(a.placement.nodes)
        if job.resize_cost is not None and alike and job.placement.gpus_per_node == a.placement.gpus_per_node:
            # It trains on where it is while the nodes boot.
            return (
                boot * max(1.0 - self._before[job.job_id] / a.goodput, 0.0) + job.resize_cost
                if a.goodput > 0
                else boot
            )
        return boot + job.move_cost

    def _boot(self, node: Node) -> float:
        return self._boots(node) if node.power == "off" else 0.0

    def _boots(self, node: Node) -> float:
        return self._settings.cloud_boot_s if node.boot_s is None else node.boot_s

    def _cost(self, nodes: frozenset[str], plan: Plan, ends: Mapping[int, float]) -> float:
        """Return what the rented nodes cost until the last job on each ends."""
        on: dict[str, list[int]] = {}
        for a in plan.allocations:
            for name in a.placement.nodes:
                on.setdefault(name, []).append(a.job_id)
        total = 0.0
        for name in sorted(nodes & on.keys() - self._fixed):
            kind, price = price_of(self._rented[name], self._settings)
            held = max(ends[job_id] for job_id in on[name]) / 3600.0
            restarts = sum(self._hour_value(j) * self._jobs[j].move_cost for j in on[name]) / 3600.0
            lost = restarts + price * self._boots(self._rented[name]) / 3600.0
            total += held * (price + self._settings.cloud_interruptions.get(kind, 0.0) / 24.0 * lost)
            if self._rented[name].power == "off":
                total += _tail(self._rented[name], self._settings)
        return total

    def _said(self, a: Allocation, present: _Valued, best: _Valued) -> Allocation:
        """Name the job that makes a node worth its price, and the node that none does."""
        boots = [n for n in a.placement.nodes if n in best.nodes and self._rented[n].power == "off"]
        held = self._jobs[a.job_id].placement.nodes
        leaves = [n for n in held if n in self._rented and n not in best.nodes and n not in a.placement.nodes]
        sooner = present.ends[a.job_id] - best.ends[a.job_id]
        if boots:
            prices = sum(price_of(self._rented[n], self._settings)[1] for n in boots)
            gain = f"it ends {_time(sooner)} sooner, worth {self._hour_value(a.job_id) * sooner / 3600.0:.2f}"
            return replace(
                a, reason=f"{a.reason}; Slurm boots {_named(boots)}, {prices:.2f} an hour, for it: {gain}"
            )
        if leaves or (not a.placement and len(best.nodes) < len(self._rented)):
            why = "not worth the price" if self._room >= 0 else "beyond the budget"
            why = f"outside the hours {self._settings.cloud_hours} (UTC)" if self._closed else why
            return replace(
                a, reason=f"{a.reason}{KEPT_BACK}{_named(leaves) or 'any further one'} is {why} now"
            )
        return a


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


def _budget_left(settings: PolicySettings, spent: Spent) -> float:
    """Return the money that may still be spent, today and this month."""
    budgets = ((settings.cloud_day_budget, spent.day), (settings.cloud_month_budget, spent.month))
    return min((budget - cost for budget, cost in budgets if budget is not None), default=inf)


def _tail(node: Node, settings: PolicySettings) -> float:
    """Return what a node costs from its last job to its end."""
    return price_of(node, settings)[1] * settings.cloud_return_s / 3600.0


def _spenders(snapshot: Snapshot) -> set[str]:
    """Return the accounts whose budget only lasts to give back the nodes that their jobs hold."""
    settings, spent = snapshot.settings, snapshot.spent or Spent()
    nodes = {node.name: node for node in snapshot.nodes}
    owed: dict[str, float] = defaultdict(float)
    for job in snapshot.jobs:
        for node in (nodes[name] for name in job.placement.nodes if name in nodes):
            owed[job.account] += _tail(node, settings) * job.placement.gpus_per_node / max(node.gpus, 1)
    return {
        account
        for budgets, cost in (
            (settings.cloud_account_day_budgets, spent.account_day),
            (settings.cloud_account_month_budgets, spent.account_month),
        )
        for account, budget in budgets.items()
        if cost.get(account, 0.0) + owed.get(account, 0.0) >= budget
    }


def _without_barred(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot in which no job may use a node that it must not be on.

    That is any rented node where the account's budget is used up, and a spot node where the job cannot move or has a
    fixed size.
    """
    settings, spenders = snapshot.settings, _spenders(snapshot)
    kinds = {n.name: price_of(n, settings)[0] for n in snapshot.nodes}
    barred: dict[int, str] = {}
    for job in snapshot.jobs:
        if job.account in spenders:
            barred[job.job_id] = "no rented node"
        elif settings.cloud_interruptions and (
            not job.spec.preemptible or job.spec.min_gpus == job.spec.max_gpus
        ):
            barred[job.job_id] = "no spot node"
    if not barred:
        return snapshot
    # The policy separates partitions by commas.
    renamed = {
        (job.partition, barred[job.job_id]): f"{job.partition} ({barred[job.job_id]})".replace(",", "+")
        for job in snapshot.jobs
        if job.job_id in barred
    }

    def open_to(node: Node) -> frozenset[str]:
        kind = kinds[node.name]
        closed = {
            "no rented node": bool(kind),
            "no spot node": kind in settings.cloud_interruptions,
        }
        return node.partitions | {
            name
            for (partition, why), name in renamed.items()
            if not closed[why] and not node.partitions.isdisjoint(partition.split(","))
        }

    return replace(
        snapshot,
        nodes=tuple(replace(n, partitions=open_to(n)) for n in snapshot.nodes),
        jobs=tuple(
            replace(job, partition=renamed[job.partition, barred[job.job_id]])
            if job.job_id in barred
            else job
            for job in snapshot.jobs
        ),
    )
