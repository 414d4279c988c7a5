"""Cost against time on rented nodes, on random days in the simulator; and own nodes against rented ones, over load."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from polluxd.config.settings import PolicySettings
from polluxd.sim.applications import BUILT_IN
from polluxd.sim.cluster import Cloud, Scenario
from polluxd.sim.comparison import played
from polluxd.sim.generator import generate
from polluxd.sim.policies import POLICIES
from tests.benchmarks.simulator_tables import table

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "cloud.png"
MOST, OWN, JOBS, HOURS = 4, 1, 5, 2.0
LENGTH = 0.3
"""Of trainings, against those of the shipped applications: a thousand days take half an hour."""
INTERVAL_S = 300.0
BUDGET = 1.0
BOOT_S = 120.0
IDLE_S = 300.0


class Rule(NamedTuple):
    """A way to choose the nodes: a policy, the nodes that are always on, all nodes, and polluxd's settings."""

    policy: str
    least: int
    most: int
    hour_value: float = 0.0
    budget: float | None = None


RULES: Mapping[str, Rule] = {
    **{f"fixed, {n} nodes": Rule("pollux", n, n) for n in (1, 2, 3, 4)},
    "paper's rule and policy": Rule("pollux-paper", OWN, MOST),
    **{f"by price, an hour is worth {v:g}": Rule("pollux", OWN, MOST, v) for v in (1.0, 4.0)},
    f"by price, 16, budget {BUDGET:g}": Rule("pollux", OWN, MOST, 16.0, BUDGET),
    "by price, 4, no own node": Rule("pollux", 0, MOST, 4.0),
}

LOADS = (8, 32, 96, 192)
"""Trainings a day."""
LOAD_DAYS = 5
OWN_PRICE = 0.3
"""Of an own node for an hour: purchase over its life, power and care, where a rented one costs 1."""
CLUSTERS: Mapping[str, Rule] = {
    f"{MOST} own nodes": Rule("pollux", MOST, MOST),
    f"{OWN} own node, {MOST - OWN} rented by price": Rule("pollux", OWN, MOST, 4.0),
    f"{OWN} own node, {MOST - OWN} rented by the paper's rule": Rule("pollux-paper", OWN, MOST),
}

Result = dict[str, float]


def day(rule: Rule, seed: int, jobs: int = JOBS, hours: float = HOURS) -> Result:
    """Run one random day. The node hours are the engine's."""
    cloud = Cloud(rule.least, rule.most, boot_seconds=BOOT_S, idle_seconds=IDLE_S)
    budgets = {} if rule.budget is None else {"*": rule.budget}
    worth = PolicySettings(cloud_hour_value=rule.hour_value, cloud_month_budgets=budgets)
    scenario = Scenario(nodes=cloud.most, cloud=cloud, policy=worth, seed=seed, interval=INTERVAL_S)
    submitted = generate(BUILT_IN, jobs, hours, cluster_gpus=4 * MOST, seed=seed, length=LENGTH)
    run = played(submitted, BUILT_IN, POLICIES[rule.policy](scenario), scenario)
    begin, end = submitted[0].time, max(job.ended_at or 0.0 for job in run.jobs)
    cost = cloud.price * run.node_seconds / 3600.0
    return {
        "cost": cost,
        "rented": cost - cloud.price * cloud.least * (end - begin) / 3600.0,
        "jct_h": fmean((job.ended_at or 0.0) - job.submission.time for job in run.jobs) / 3600.0,
        "jobs": float(len(run.jobs)),
    }


def loaded(rule: Rule, jobs: int) -> tuple[float, float]:
    """Return the cost of a finished training at so many a day, and the mean completion time in hours."""
    days = [day(rule, seed, jobs, 24.0) for seed in range(LOAD_DAYS)]
    own = OWN_PRICE * 24.0 * rule.least
    cost = fmean((own + max(found["rented"], 0.0)) / found["jobs"] for found in days)
    return cost, fmean(found["jct_h"] for found in days)


def page(found: Mapping[str, Sequence[Result]], loads: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return the text of the committed page."""
    rows = [
        (
            name,
            f"{fmean(r['cost'] for r in results):.2f}",
            f"{fmean(r['jct_h'] for r in results):.3f}",
            f"{max(0.0, *(r['rented'] for r in results)):.2f}",
        )
        for name, results in found.items()
    ]
    limited = found[f"by price, 16, budget {BUDGET:g}"]
    kept = sum(r["rented"] <= BUDGET + BOOT_S / 3600.0 for r in limited)
    over = max(r["rented"] - BUDGET for r in limited)
    compared = [(name, *(f"{cost:.2f} ({jct:.2f})" for cost, jct in cells)) for name, cells in loads.items()]
    return f"""# Rented nodes

Written by `make bench-cloud`: {len(limited)} random days of {JOBS} jobs over {HOURS:g} hours, {LENGTH:g} times as long
as the shipped applications, on up to {MOST} nodes of 4 GPUs in the simulator. A node costs 1 an hour, boots in
{BOOT_S:g} s and is off again {IDLE_S:g} s after its last job. Fixed and by price: polluxd's own controller, which
decides every {INTERVAL_S:g} s, and when jobs come and end. The paper's rule is policy `pollux-paper`, which decides
every {INTERVAL_S:g} s. Under this rule and by price, {OWN} node is always there unless a row says otherwise. Cost:
mean over the days, all nodes included. Completion: mean over jobs and days. Most
rented: the largest cost of a day's workload beyond the nodes that are always there; jobs may run on into the next day.

{table(("nodes", "cost of a day", "mean completion [h]", "most rented"), rows)}
The budget was kept in {kept} of {len(limited)} runs. The largest cost beyond
it is {max(over, 0.0):.3f}, and a boot costs {BOOT_S / 3600.0:.3f}.

![Cost of a day against mean completion time](../../docs/images/cloud.png)

## Own nodes against rented ones

What a finished training costs, and in brackets its mean completion time in hours, by the number of trainings that
come in 24 hours: means over {LOAD_DAYS} random days. An own node costs {OWN_PRICE:g} an hour, whether it is in use or
not, a rented one 1; these are inputs (`OWN_PRICE` in `tests/benchmarks/cloud.py`). By price, an hour of a training is
worth 4.

{table(("nodes", *(f"{load} a day" for load in LOADS)), compared)}"""


def picture(found: Mapping[str, Sequence[Result]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    marks = {"fixed": "s", "paper": "^", "by pr": "o"}
    for name, results in found.items():
        x, y = fmean(r["cost"] for r in results), fmean(r["jct_h"] for r in results)
        axes.plot(x, y, marks[name[:5]], label=name)
    axes.set(
        xlabel="cost of a day", ylabel="mean completion time [h]", title="Rented nodes: cost against time"
    )
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    found: dict[str, list[Result]] = {}
    with ProcessPoolExecutor(args.processes) as pool:
        for name, rule in RULES.items():
            found[name] = list(pool.map(day, [rule] * args.days, range(args.days), chunksize=5))
            means = {key: round(fmean(r[key] for r in found[name]), 3) for key in found[name][0]}
            print(name, means, flush=True)
        loads = {name: list(pool.map(loaded, [c] * len(LOADS), LOADS)) for name, c in CLUSTERS.items()}
    Path(__file__).with_suffix(".md").write_text(page(found, loads))
    picture(found, PICTURE)


if __name__ == "__main__":
    main()
