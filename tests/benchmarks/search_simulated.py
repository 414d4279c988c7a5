"""Search algorithms under Pollux, under static GPUs and under one GPU each, in the simulator.

    python -m tests.benchmarks.search_simulated --profiles DIR [--seeds N]

Every search trains CIFAR-10 of the OSDI'21 artifact on 4 nodes of 4 GPUs. Moves cost what the product's paths cost.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import Any

from polluxd.sim.cluster import Scenario
from polluxd.sim.move_costs import MoveCosts
from polluxd.sim.search import compare_searches
from tests.benchmarks.results import ROOT, parser_of
from tests.benchmarks.simulator_tables import table

METHODS = (
    *(f"{sampler}/asha" for sampler in ("tpe", "random", "grid", "cma")),
    *(f"tpe/{pruner}" for pruner in ("hyperband", "median", "none", "pbt")),
)
HEAD = (
    *("search", "GPUs of a trial", "to the target [min]", "reached", "best", "all ended [min]", "GPU hours"),
    *("complete", "stopped"),
)
WAYS = {"pollux": "pollux", "fifo, 4 GPUs each": "4", "fifo, 1 GPU each": "1"}

Result = dict[str, Any]


def run(profiles: Path, method: str, seed: int) -> list[Result]:
    """Return the figures of one search, by policy."""
    scenario = Scenario(nodes=4, gpus_per_node=4, moves=MoveCosts(), seed=seed)
    return compare_searches([method], profiles, ["pollux", "fifo"], scenario)


def page(results: Sequence[Result], seeds: int) -> str:
    """Return the text of the committed page."""
    target = Scenario().search.target
    rows, ratios = [], {}
    for method in METHODS:
        times = {}
        for way, name in WAYS.items():
            these = [r for r in results if (r["search"], r["policy"]) == (method, way)]
            times[way] = median(r["to_target_s"] for r in these)
            reached = sum(math.isfinite(r["to_target_s"]) for r in these)
            rows.append(
                (
                    *(method, name, f"{times[way] / 60:.0f}", f"{reached} of {seeds}"),
                    f"{fmean(r['best_gain'] for r in these):.4f}",
                    f"{fmean(r['ended_s'] for r in these) / 60:.0f}",
                    *(f"{fmean(r[key] for r in these):.1f}" for key in ("gpu_hours", "complete", "stopped")),
                )
            )
        ratios[method] = [times["pollux"] / times[way] for way in list(WAYS)[1:]]
    compared = [(method, *(f"{ratio:.2f}" for ratio in found)) for method, found in ratios.items()]
    search = Scenario().search
    return f"""# Search algorithms in the simulator

`make bench-search-sim`: {search.trials} trials of CIFAR-10 on 4 nodes of 4 GPUs, {search.parallel} at a time (with
`pbt` all), over {seeds} seeds. The learning curve is the measured one of the OSDI 2021 artifact, and moves cost what
the product's paths cost. How far a trial falls behind that curve by its learning rate and decay is assumed
(`polluxd/sim/search.py`). Under `pollux` polluxd sizes the trials; otherwise each has 4 GPUs, or one, and waits its
turn. Best: part of what the measured training gains, at its best epoch. Target: {target:g} of it. To the target: median
over the seeds; the other figures are means.

{table(HEAD, rows)}
Time to the target under Pollux, as a part of that with fixed GPUs:

{table(("search", "4 GPUs each", "1 GPU each"), compared)}"""


def main() -> None:
    parser = parser_of(__doc__)
    default = ROOT / os.environ.get("POLLUX_OSDI21", "../shared/data/osdi21") / "profiles"
    parser.add_argument("--profiles", type=Path, default=default)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    runs = [(args.profiles, method, seed) for seed in range(args.seeds) for method in METHODS]
    results: list[Result] = []
    with ProcessPoolExecutor(2) as pool:
        for (_, method, seed), found in zip(runs, pool.map(run, *zip(*runs, strict=True)), strict=True):
            results += found
            print(method, seed, [round(row["to_target_s"]) for row in found], flush=True)
    Path(__file__).with_suffix(".md").write_text(page(results, args.seeds))


if __name__ == "__main__":
    main()
