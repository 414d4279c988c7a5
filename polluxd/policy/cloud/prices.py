"""What rented nodes cost, and what may still be spent."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import inf

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


class Budgets:
    """What the accounts with a budget may still spend."""

    def __init__(self, snapshot: Snapshot) -> None:
        settings, spent = snapshot.settings, snapshot.spent or Spent()
        nodes = {node.name: node for node in snapshot.nodes if is_rented(node, settings)}
        returns = {n: price_of(nodes[n], settings)[1] * settings.cloud_return_s / 3600.0 for n in nodes}
        held = [
            (name, job.account, job.placement.gpus_per_node)
            for job in snapshot.jobs
            for name in job.placement.nodes
            if name in nodes
        ]
        gpus, owed = Counter[str](), defaultdict[str, float](float)
        for name, _, number in held:
            gpus[name] += number
        for name, account, number in held:
            owed[account] += returns[name] * number / gpus[name]
        # Whoever used such a node last pays for it, and a snapshot does not tell who that was.
        idle = sum(
            returns[name]
            for name, node in nodes.items()
            if node.power != "off" and not (gpus[name] or node.foreign_gpus or node.foreign_cpus)
        )
        accounts, budgets = {job.account for job in snapshot.jobs}, settings.cloud_month_budgets
        left = {
            account: budget - spent.month.get(account, 0.0) - owed.get(account, 0.0) - idle
            for account in accounts
            if (budget := budgets.get(account, budgets.get("*"))) is not None
        }
        least = min((self.first(node, settings) for node in nodes.values()), default=0.0)
        self.used_up = {
            account for account, money in left.items() if money <= (0.0 if account in owed else least)
        }
        """Accounts whose budget only pays for the return of the nodes that their jobs hold. Of an account whose jobs
        hold none, it does not pay for a first one: the account would rent and give back in turn."""
        self.room = sum(max(left[one], 0.0) for one in accounts) if accounts <= left.keys() else inf
        """Money for nodes that one decision rents, of all accounts together."""

    @staticmethod
    def first(node: Node, settings: PolicySettings) -> float:
        """Return what a node costs at least that is rented now: its boot, as long again, and its return."""
        boot = 0.0 if node.power != "off" else settings.cloud_boot_s if node.boot_s is None else node.boot_s
        return price_of(node, settings)[1] * (2.0 * boot + settings.cloud_return_s) / 3600.0
