"""What rented nodes cost, and what may still be spent."""

from __future__ import annotations

from collections import defaultdict
from math import ceil, inf

from polluxd.config.settings import PolicySettings
from polluxd.model import Node, Plan, Snapshot, Spent


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


def paid(seconds: float, settings: PolicySettings) -> float:
    """Return the seconds that the provider takes money for: whole intervals, where there are any."""
    interval = settings.cloud_paid_interval_s
    return max(ceil(seconds / interval) * interval if interval else seconds, 0.0)


def paid_ahead(node: Node, settings: PolicySettings, now: float) -> float:
    """Return the seconds to the end of the interval that is paid for, of a node that is on."""
    if node.booted_at is None:
        return 0.0
    passed = max(now - node.booted_at, 0.0)
    return paid(passed, settings) - passed


def returning(node: Node, settings: PolicySettings, now: float) -> float:
    """Return what a node is going to cost that is vacated now, or boots just for its return."""
    ahead = paid_ahead(node, settings, now) if node.power != "off" else 0.0
    seconds = ahead + paid(settings.cloud_return_s - ahead, settings)
    return price_of(node, settings)[1] * seconds / 3600.0


def budget_left(snapshot: Snapshot) -> float:
    """Return the money that may still be spent, today and this month."""
    settings, spent = snapshot.settings, snapshot.spent or Spent()
    budgets = ((settings.cloud_day_budget, spent.day), (settings.cloud_month_budget, spent.month))
    return min((budget - cost for budget, cost in budgets if budget is not None), default=inf)


def spenders(snapshot: Snapshot) -> set[str]:
    """Return the accounts whose budget only lasts to give back the nodes that their jobs hold."""
    settings, spent = snapshot.settings, snapshot.spent or Spent()
    nodes = {node.name: node for node in snapshot.nodes}
    owed: dict[str, float] = defaultdict(float)
    for job in snapshot.jobs:
        for node in (nodes[name] for name in job.placement.nodes if name in nodes):
            owed[job.account] += (
                returning(node, settings, snapshot.taken_at) * job.placement.gpus_per_node / max(node.gpus, 1)
            )
    return {
        account
        for budgets, cost in (
            (settings.cloud_account_day_budgets, spent.account_day),
            (settings.cloud_account_month_budgets, spent.account_month),
        )
        for account, budget in budgets.items()
        if cost.get(account, 0.0) + owed.get(account, 0.0) >= budget
    }
