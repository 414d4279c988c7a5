"""The settings of rented nodes, beside those of sharing: `PolicySettings` has them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, AllowInfNan, ConfigDict, StrictFloat, StrictInt
from pydantic.dataclasses import dataclass

from polluxd.config.annotations import example, expected, unit

Money = Annotated[StrictFloat, Ge(0), AllowInfNan(False), expected("an amount of money from 0", "MONEY")]
NodePrice = Annotated[StrictFloat, Gt(0), Le(1e6), expected("a price above 0", "PRICE")]
PerDay = Annotated[StrictFloat, Gt(0), Le(1440), expected("a number above 0, up to 1440", "NUMBER")]
Nodes = Annotated[StrictInt, Ge(0), expected("a number of nodes from 0", "NODES")]


def _hours(value: str) -> str:
    first, dash, last = value.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and 0 <= int(first) < int(last) <= 24):
        raise ValueError("not hours of the day")
    return value


Hours = Annotated[
    str,
    AfterValidator(_hours),
    expected("hours from 0 to 24, the first below the last, such as 8-18", "HOURS"),
]


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid", use_attribute_docstrings=True))
class CloudSettings:
    """Which nodes are rented, and what they may cost."""

    cloud_prices: Annotated[Mapping[str, NodePrice], example({"p4d": 32.8, "p4d-spot": 12.5})] = field(
        default_factory=dict
    )
    """Price of a node for an hour, by a Slurm feature of the node or by its GPU type. Nodes with a price are rented:
    polluxd uses them where that is worth the price."""
    cloud_interruptions: Annotated[Mapping[str, PerDay], example({"p4d-spot": 2.0})] = field(
        default_factory=dict
    )
    """How often a day the provider takes back a node, by the name that has the price: such a node is a spot node. Jobs
    that cannot move or have a fixed size get none."""
    cloud_hour_value: Money = 0.0
    """What it is worth that one job ends an hour sooner. At 0, no node is rented."""
    cloud_account_hour_values: Annotated[Mapping[str, Money], example({"physics": 20.0})] = field(
        default_factory=dict
    )
    """The same for the jobs of one account."""
    cloud_day_budget: Annotated[Money | None, example(500.0)] = None
    """Most that rented nodes may cost in a day, in UTC."""
    cloud_month_budget: Annotated[Money | None, example(9000.0)] = None
    """Most that rented nodes may cost in a month."""
    cloud_account_day_budgets: Annotated[Mapping[str, Money], example({"physics": 200.0})] = field(
        default_factory=dict
    )
    """Most that the jobs of an account may cost in a day on rented nodes."""
    cloud_account_month_budgets: Annotated[Mapping[str, Money], example({"physics": 4000.0})] = field(
        default_factory=dict
    )
    """The same for a month."""
    cloud_boot_s: Annotated[StrictFloat, Ge(0), AllowInfNan(False), unit("seconds")] = 300.0
    """How long a boot takes, until polluxd has measured one."""
    cloud_return_s: Annotated[StrictFloat, Ge(0), AllowInfNan(False), unit("seconds")] = 600.0
    """How long a node costs money after polluxd has begun to vacate it: a move, and Slurm's `SuspendTime`."""
    cloud_paid_interval_s: Annotated[StrictFloat, Ge(0), AllowInfNan(False), unit("seconds")] = 0.0
    """The provider takes money for whole intervals of this length, from a node's boot on. 0: for each second. A node
    stays in use until the end of an interval is near."""
    cloud_least: Nodes = 0
    """Rented nodes that jobs may always use, whatever they are worth."""
    cloud_most: Annotated[Nodes | None, example(16)] = None
    """Most rented nodes that jobs use at one time."""
    cloud_hours: Hours = "0-24"
    """Hours of the day, in UTC, in which jobs may use rented nodes."""
