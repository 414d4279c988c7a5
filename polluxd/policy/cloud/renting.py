"""Choose the rented nodes that jobs may use: time against money.

A node whose feature or GPU type has a price (`cloud_prices`) is rented. Slurm boots it for a job that is placed there,
and powers it off once nothing has run there for SuspendTime. So polluxd rents a node by leaving it to the policy, and
gives it back by keeping it from the policy: the plan then vacates it. Of all sets S of rented nodes, the one in use
minimises

    sum_j v_j T_j(S) + sum_n in S p_n H_n(S)

T_j: predicted time to the end of job j under the plan on the own nodes and S, boots and moves included; v_j: what an
hour of it is worth; H_n: time to the end of the last job on node n, its boot and return included; p_n: its price, with
what interruptions of a spot node are expected to cost. The boot of a node that is on is paid: that keeps a node which
would not be rented again just now. A set changes only for a gain beyond `hysteresis` of the change in cost. Where the
provider takes money for whole intervals, H_n ends with one, and a node stays in use until its return has to begin.

Nodes of one price and kind are alike, so a set is a number per kind. The search takes steps of 1, 2, 4, ... nodes from
the set in use, one kind at a time, while they gain.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf, isfinite
from typing import NamedTuple

from polluxd.model import KEPT_BACK, Allocation, Node, Placement, Plan, Snapshot, SnapshotJob
from polluxd.policy import market
from polluxd.policy.cloud.barred import without_barred, without_gain
from polluxd.policy.cloud.prices import budget_left, is_rented, paid, paid_ahead, price_of, returning
from polluxd.policy.feasible import GROWTH, measured_on
from polluxd.policy.shapes import ANY

NEVER_S = 86400.0
"""Wait of a job that nothing else would let start: a day."""
_EVERY = 8
"""Up to so many nodes, each number is tried; beyond, every doubling."""
_ROUNDS = 8
_LATEST = 0.05
"""A node is given back at the earliest this part of a paid interval before its return has to begin."""

_NOTHING = 1e-6

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
    barred = without_barred(snapshot)
    if barred is not snapshot:
        # Whoever is barred gains no own nodes by that.
        barred = without_gain(barred, snapshot, _Search(snapshot, solve).run().plan)
    return _Search(barred, solve).run()


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
        self._shut = {name: replace(node, schedulable=False) for name, node in self._rented.items()}
        self._unused = {
            name for name, node in self._rented.items() if node.power == "off"
        } - self._held.keys()
        # A node that others use, or a job that stays, is on in any case.
        self._fixed = frozenset(
            name
            for name, node in self._rented.items()
            if node.foreign_gpus
            or node.foreign_cpus
            or any(job.pinned or not job.spec.preemptible for job in self._held.get(name, ()))
        )
        lead = self._settings.cloud_return_s + _LATEST * self._settings.cloud_paid_interval_s
        self._paid = frozenset(name for name, node in self._rented.items() if self._ahead(node) > lead)
        """Nodes that cost nothing yet: their interval is paid for."""
        self._usual: dict[int, float] = {}
        """Goodput of each job on all nodes: what a wait, and a length that is not known, are measured by."""
        self._before: dict[int, float] = {}
        """Goodput of each job on the nodes in use at present."""
        first, _, last = self._settings.cloud_hours.partition("-")
        self._closed = not int(first) <= snapshot.taken_at % 86400.0 / 3600.0 < int(last)
        returns = sum(map(self._returning, (n for n in self._rented.values() if n.power != "off")))
        self._room = budget_left(snapshot) - returns
        """Money for further nodes. Below 0, the budget only lasts to give back those that are on."""
        self._always = self._fixed | self._paid
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
        best = self._before_boots(best)
        gains = {j: self._hour_value(j) * (present.ends[j] - end) / 3600.0 for j, end in best.ends.items()}
        plan = replace(
            best.plan,
            allocations=tuple(self._with_price(a, present, best, gains) for a in best.plan.allocations),
            sooner=self._sooner(best.plan),
        )
        used = {name for a in plan.allocations for name in a.placement.nodes}
        return Rental(plan, best.nodes & (used | self._always), best.net, len(self._known))

    def _before_boots(self, best: _Valued) -> _Valued:
        """Return what is done first where a job would stop for a boot.

        It moves on the nodes that are on, and can grow in place from there. If there is nowhere to move, it grows in
        place onto the nodes to boot, with as many GPUs of each as it has of its present nodes: it trains while they
        boot, and moves once they are up.
        """
        stops = {
            a.job_id: {n for n in a.placement.nodes if n in self._rented and self._rented[n].power == "off"}
            for a in best.plan.allocations
            if (job := self._jobs[a.job_id]).placement
            and job.report is not None
            and job.report.resize == "in-place"
            and not _alike(job, a)
        }
        off = frozenset().union(*stops.values())
        if not off:
            return best
        first = self._value(best.nodes - off)
        waiting = {a.job_id for a in first.plan.allocations if not a.placement}
        if any(
            a.job_id in waiting and a.placement and not off & {*a.placement.nodes}
            for a in best.plan.allocations
        ):
            return best  # a job starts at once on the GPUs that another one leaves
        if any(stops.get(a.job_id) for a in first.plan.allocations if a.changed):
            return first
        booting = set[str]()
        allocations = []
        for a in first.plan.allocations:
            wider = self._wider(a, best.plan, stops.get(a.job_id, set()) - booting)
            booting |= {*wider.placement.nodes} & off
            allocations.append(wider)
        if not booting:
            return best
        return best._replace(
            nodes=first.nodes | booting, plan=replace(first.plan, allocations=tuple(allocations))
        )

    def _wider(self, a: Allocation, plan: Plan, nodes: set[str]) -> Allocation:
        """Return the allocation with `nodes`, if the job can take them in place on the way to its place in `plan`."""
        job, aim, settings = self._jobs[a.job_id], plan.of(a.job_id), self._settings
        if not nodes or aim is None or job.report is None:
            return a
        place = Placement((*job.placement.nodes, *sorted(nodes)), job.placement.gpus_per_node)
        types = {node.gpu_type for node in self._snapshot.nodes if node.name in place.nodes}
        limits, spec = job.report.limits, job.spec
        most = min(GROWTH * measured_on(job), job.report.most_gpus or inf, spec.max_gpus or inf)
        if (
            place.gpus > most
            or place.gpus * limits.local_min > (limits.maximum if spec.adaptive else limits.initial)
            or job.user in settings.user_ceilings
            or job.account in settings.account_ceilings
            or any(job.job_id in limit.jobs for limit in self._snapshot.limits)
            or place.gpus_per_node > aim.placement.gpus_per_node
            or (len(types), job.contiguous) != (1, False)
            or (spec.gpu_counts, settings.gpu_counts) != (ANY, ANY)
        ):
            return a
        reason = f"grows from {job.placement.gpus} to {place.gpus} GPUs and trains while {_named(sorted(nodes))} boots"
        reason += f"; the plan has {aim.placement.gpus} for it afterwards"
        return replace(a, placement=place, changed=True, reason=reason)

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
        seconds = paid(2.0 * self._boot(node) + self._settings.cloud_return_s, self._settings)
        return price_of(node, self._settings)[1] * seconds / 3600.0

    def _returning(self, node: Node) -> float:
        return returning(node, self._settings, self._snapshot.taken_at)

    def _ahead(self, node: Node) -> float:
        return paid_ahead(node, self._settings, self._snapshot.taken_at) if node.power != "off" else 0.0

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
                self._shut[n.name] if n.name in self._shut and n.name not in nodes else n
                for n in self._snapshot.nodes
                # Of thousands that are off, most are in no set.
                if n.name in nodes or n.name not in self._unused
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
                why = a.explanation
                size = (why.next_gpus if why else None) or job.spec.min_gpus
                left = self._left(job, _next_goodput(a))
                # Without an explanation, nothing in service is of use to it.
                waiting.append((job.submitted_at, a.job_id, size if why else 1 << 40, left))
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
        if job.resize_cost is not None and _alike(job, a):
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
        total, settings = 0.0, self._settings
        for name in sorted(nodes & on.keys() - self._fixed):
            node = self._rented[name]
            kind, price = price_of(node, settings)
            held = max(ends[job_id] for job_id in on[name])
            restarts = sum(self._hour_value(j) * self._jobs[j].move_cost for j in on[name]) / 3600.0
            lost = restarts + price * self._boots(node) / 3600.0
            total += held / 3600.0 * settings.cloud_interruptions.get(kind, 0.0) / 24.0 * lost
            # A node that is on costs its return in any case.
            returns = settings.cloud_return_s - self._ahead(node)
            due = paid(returns, settings) if node.power != "off" else 0.0
            total += price * (paid(held + returns, settings) - due) / 3600.0
        return total

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
        boots = [n for n in a.placement.nodes if n in best.nodes and self._rented[n].power == "off"]
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
            why = "not worth the price" if self._room >= 0 else "beyond the budget"
            why = f"outside the hours {self._settings.cloud_hours} (UTC)" if self._closed else why
            return replace(
                a, reason=f"{a.reason}{KEPT_BACK}{_named(leaves) or 'any further one'} is {why} now"
            )
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
