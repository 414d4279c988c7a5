"""Cost against time on rented nodes: polluxd's rule, the paper's, and fixed sizes, on random days in the simulator."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean

from polluxd.sim.applications import BUILT_IN
from polluxd.sim.cluster import Cloud, Scenario
from polluxd.sim.engine import simulate
from polluxd.sim.generator import generate
from polluxd.sim.measures import measure
from polluxd.sim.policies import POLICIES
from tests.benchmarks.simulator_tables import table

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "cloud.png"
MOST, OWN, JOBS, HOURS = 8, 1, 30, 6.0
BUDGET = 8.0
BOOT_S = 120.0

CLOUDS: Mapping[str, Cloud] = {
    **{f"fixed, {n} nodes": Cloud(n, n) for n in (2, 4, 8)},
    "paper's rule": Cloud(OWN, MOST),
    **{f"by price, an hour is worth {v:g}": Cloud(OWN, MOST, hour_value=v) for v in (1.0, 4.0, 16.0)},
    f"by price, 16, budget {BUDGET:g} a day": Cloud(OWN, MOST, hour_value=16.0, day_budget=BUDGET),
}

Result = dict[str, float]


def day(name: str, seed: int) -> Result:
    """Run one random day. Cost and node hours are the engine's."""
    cloud = CLOUDS[name]
    scenario = Scenario(nodes=cloud.most, cloud=cloud, seed=seed)
    jobs = generate(BUILT_IN, JOBS, HOURS, cluster_gpus=4 * MOST, seed=seed)
    run = simulate(jobs, BUILT_IN, POLICIES["pollux"](scenario), scenario)
    found = measure(run, scenario)
    own_hours = cloud.least * found["makespan_s"] / 3600.0
    return {
        "cost": found["cost"],
        "rented": found["cost"] - cloud.price * own_hours,
        "jct_h": found["avg_jct_s"] / 3600.0,
        "days": (jobs[0].time + found["makespan_s"]) // 86400.0 + 1,
    }


def run(days: int) -> Iterator[tuple[str, list[Result]]]:
    with ProcessPoolExecutor(2) as pool:
        for name in CLOUDS:
            yield name, list(pool.map(day, [name] * days, range(days)))


def page(found: Mapping[str, list[Result]], days: int) -> str:
    """Return the text of the committed page."""
    rows = [
        (
            name,
            f"{fmean(r['cost'] for r in results):.1f}",
            f"{fmean(r['jct_h'] for r in results):.3f}",
            f"{max(0.0, *(r['rented'] for r in results)):.2f}",
        )
        for name, results in found.items()
    ]
    limited = found[f"by price, 16, budget {BUDGET:g} a day"]
    kept = sum(r["rented"] <= BUDGET * r["days"] + BOOT_S / 3600.0 for r in limited)
    over = max(r["rented"] - BUDGET * r["days"] for r in limited)
    return f"""# Rented nodes

Written by `make bench-cloud`: {days} random days of {JOBS} jobs over {HOURS:g} hours, on up to {MOST} nodes of 4 GPUs
in the simulator. A node costs 1 an hour and boots in {BOOT_S:g} s. Under the paper's rule and by price, {OWN} node is
always there. Cost: mean over the days, all nodes included. Completion: mean over jobs and days. Most rented: the
largest cost of a day's workload beyond the nodes that are always there; jobs may run on into the next day.

{table(("nodes", "cost of a day", "mean completion [h]", "most rented"), rows)}
The budget was kept in {kept} of {days} runs, counted for each day that a run touched. The largest cost beyond it is
{max(over, 0.0):.3f}, and a boot costs {BOOT_S / 3600.0:.3f}.

![Cost of a day against mean completion time](../images/cloud.png)
"""


def picture(found: Mapping[str, list[Result]], path: Path) -> None:
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
    parser.add_argument("--days", type=int, default=6)
    args = parser.parse_args()
    found = {}
    for name, results in run(args.days):
        found[name] = results
        print(name, {key: round(fmean(r[key] for r in results), 3) for key in results[0]}, flush=True)
    Path(__file__).with_suffix(".md").write_text(page(found, args.days))
    picture(found, PICTURE)


if __name__ == "__main__":
    main()
