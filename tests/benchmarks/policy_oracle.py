"""Compare solvers and plans with provably best ones.

The best ones come from a search of every choice and every plan, and from HiGHS run to the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from polluxd.policy import counts, integer, price
from tests.unit.policy import count_instances, every_plan
from tests.unit.policy.programs import by_prices

Row = dict[str, Any]
SAME = 1e-9
"""Two totals are equal up to this relative difference: they are added up in different orders."""


def _relative(found: float, best: float) -> float:
    return (best - found) / max(abs(best), 1e-9)


def _counts(seed: int) -> tuple[float, float]:
    table, capacity = count_instances.plain(seed)
    return counts.solve(*count_instances.flat(table), capacity=capacity)[1], count_instances.best_plain(
        table, capacity
    )


def _limits(seed: int) -> tuple[float, float]:
    table, capacity, groups = count_instances.limited(seed, floors=seed % 2 == 0)
    found = counts.solve(*count_instances.flat(table), capacity=capacity, groups=groups)[1]
    return found, count_instances.best_limited(table, capacity, groups)


def _types(seed: int) -> tuple[float, float]:
    given = count_instances.by_type(seed)
    return integer.solve(*given).total, count_instances.best_by_type(*given)


def of_counts(quick: bool) -> Iterator[Row]:
    """Compare the count programs with every choice there is."""
    many = 200 if quick else 5_000
    kinds: list[tuple[str, Callable[[int], tuple[float, float]], int]] = [
        ("dynamic program", _counts, many),
        ("dynamic program, ceilings and guarantees", _limits, many),
        ("integer program, two or three GPU types", _types, many // 5),
    ]
    for what, solve, instances in kinds:
        lost = [_relative(*solve(seed)) for seed in range(instances)]
        yield {
            "kind": "counts",
            "what": what,
            "instances": instances,
            "unequal": sum(abs(loss) > SAME for loss in lost),
            "worst": max(map(abs, lost)),
        }


def of_prices(quick: bool) -> Iterator[Row]:
    """Compare the price-based solver with the integer optimum (HiGHS).

    The solver runs as it is, and with hardly any core.
    """
    for jobs, many in ((50, 60), (100, 60), (200, 60), (400, 12)):
        lost: list[float] = []
        alone: list[float] = []
        below = 0
        for seed in range(4 if quick else many):
            gpus, value, start = count_instances.rough(jobs, 1_000 * jobs + seed)
            capacity = int((0.6, 1.5, 4.0)[seed % 3] * jobs)
            best = count_instances.integer_optimum(gpus, value, start, capacity)
            found = price.solve(gpus, value, start, capacity)
            lost.append(_relative(found.total, best))
            below += found.bound < best - 1e-6 * abs(best)
            with pytest.MonkeyPatch.context() as patch:
                by_prices(patch)
                alone.append(_relative(price.solve(gpus, value, start, capacity).total, best))
        yield {
            "kind": "prices",
            "jobs": jobs,
            "instances": len(lost),
            "exact": sum(loss <= 1e-6 for loss in lost),
            "worst": max(lost),
            "worst_alone": max(alone),
            "bound_below": below,
        }


def of_plans(quick: bool) -> Iterator[Row]:
    """Compare whole plans with every plan there is.

    The kinds cover placements kept, partitions, ceilings and fragmentation.
    """
    many = 80 if quick else 2_400
    kinds = [
        ("one GPU type, p = -1, 0, 1", every_plan.small, many, ""),
        ("two GPU types", every_plan.two_types, many // 2, "integer program"),
        ("racks", every_plan.racked, many // 3, "integer program"),
        *(
            (f"one GPU type, {name}", every_plan.at_power(power), many // 2, "")
            for name, power in (("p = -2", -2.0), ("p = -10", -10.0), ("max-min", float("-inf")))
        ),
    ]
    for what, make, seeds, solver in kinds:
        found = every_plan.compared(make, range(10_000, 10_000 + seeds), solver=solver)
        yield {
            "kind": "plans",
            "what": what,
            "clusters": len(found),
            "outside": len(every_plan.outside_the_gap(found)),
            "best": sum(c.shortfall <= 1e-6 for c in found),
            "worst": max(c.shortfall for c in found),
            "mean": statistics.mean(c.shortfall for c in found),
            "gap_mean": statistics.mean(c.plan.gap for c in found),
            "gap_worst": max(c.plan.gap for c in found),
        }


def rows(quick: bool) -> Iterator[Row]:
    for part in (of_counts, of_prices, of_plans):
        yield from part(quick)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.3f} %" if share > 5e-6 else "0 %"


def section(found: Sequence[Row]) -> str:
    """Return the page's section on the proven instances."""
    of = {kind: [r for r in found if r["kind"] == kind] for kind in ("counts", "prices", "plans")}
    programs = table(
        ("counts by", "instances", "not equal to brute force", "largest difference"),
        [(r["what"], f"{r['instances']:,}", r["unequal"], f"{r['worst']:.1e}") for r in of["counts"]],
    )
    prices = table(
        ("jobs", "instances", "the optimum itself", "worst shortfall", "without a core", "bound too low"),
        [
            (
                r["jobs"], r["instances"], r["exact"], _percent(r["worst"]), _percent(r["worst_alone"]),
                r["bound_below"],
            )
            for r in of["prices"]
        ],
    )  # fmt: skip
    plans = table(
        (
            "clusters", "number", "outside their gap", "the best plan itself", "mean shortfall", "worst shortfall",
            "mean gap", "worst gap",
        ),
        [
            (
                r["what"], f"{r['clusters']:,}", r["outside"], f"{100 * r['best'] / r['clusters']:.1f} %",
                _percent(r["mean"]), _percent(r["worst"]), _percent(r["gap_mean"]), _percent(r["gap_worst"]),
            )
            for r in of["plans"]
        ],
    )  # fmt: skip
    return f"""## Against what can be proven

Counts against every choice there is, up to five jobs and 16 GPUs:

{programs}
Prices against the integer optimum (HiGHS to the end, one GPU type, 0.6 to 4 GPUs per job). Without a core: prices and
what four jobs at the margin make of it, nothing else settled exactly.

{prices}
Whole plans against every plan there is, up to four jobs on three or four nodes, with partitions, ceilings, GPUs of
others, drained nodes and what jobs hold already. Outside their gap: better than the best there is, or a bound below it.

{plans}"""
