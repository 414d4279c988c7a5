"""Policy `pollux` against our Sia on the inputs of Sia's own evaluation (SOSP 2023).

    python -m tests.benchmarks.sia [--data DIR] [TRACE:POLICY:LEAST_GAIN:KAPPA ...]

The cluster, the calibration of step times and the restart costs are those of Sia's artifact. Each run is kept in
bench-out/sia.json, and not made again. When all are there, the tables go to sia_table.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from polluxd.config.settings import PolicySettings
from polluxd.sim.cluster import NodeGroup, Scenario
from polluxd.sim.comparison import played
from polluxd.sim.measures import measure
from polluxd.sim.policies import POLICIES
from polluxd.sim.profiles import load_profiles
from polluxd.sim.workload import read_workload
from tests.benchmarks.results import ROOT, save
from tests.benchmarks.simulator_tables import change, interval, table

OUT = ROOT / "bench-out" / "sia.json"
PAGE = Path(__file__).with_name("sia_table.md")
SIA = Scenario(
    groups=(NodeGroup("t4", 6, 4), NodeGroup("rtx", 3, 8), NodeGroup("a100", 2, 8)),
    step_factors=dict.fromkeys(("bert", "deepspeech2", "imagenet", "yolov3"), 1.2)
    | {"cifar10": 1.8, "ncf": 1.5},
    restarts={"cifar10": 50, "deepspeech2": 25, "bert": 120, "yolov3": 80, "imagenet": 250, "ncf": 15},
)
TRACES = tuple(f"{kind}/workload-{number}" for kind in ("philly", "helios") for number in (1, 2, 3, 4))
SIAS, OURS, SELDOM = "sia:0:2", "pollux:0:2", "pollux:0.1:2"
RUNS = tuple(f"{trace}:{run}" for trace in TRACES for run in (SIAS, OURS, SELDOM))
GOALS = {"mean": "-10 %", "p99": "0 %", "makespan": "0 %", "GPU hours per job": "0 %", "worst fairness": ""}


def run(spec: str, data: Path) -> dict[str, float]:
    """Return the columns of Sia's table; `spec` is a trace, a policy, `least_gain` and `kappa`."""
    trace, policy, least_gain, kappa = spec.split(":")
    apps = load_profiles(data / "profiles")
    jobs = read_workload(data / "workloads" / f"{trace}.csv", apps, cluster_gpus=SIA.gpus)
    scenario = replace(SIA, policy=PolicySettings(least_gain=float(least_gain), kappa=float(kappa)))
    found = measure(played(jobs, apps, POLICIES[policy](scenario), scenario), scenario)
    return {
        "mean": found["avg_jct_s"],
        "p99": found["p99_jct_s"],
        "makespan": found["makespan_s"],
        "GPU hours per job": found["gpu_hours"] / len(jobs),
        "worst fairness": found["finish_time_fairness"]["worst"],
    }


def page(done: Mapping[str, Mapping[str, float]]) -> str:
    """Return the tables: changes against our Sia on the same traces, over all and by trace."""
    rows = [["goal", *GOALS.values()]]
    for title, run in (("`pollux`", OURS), ("the same, `least_gain` 0.1", SELDOM)):
        pairs = [(done[f"{trace}:{run}"], done[f"{trace}:{SIAS}"]) for trace in TRACES]
        rows.append([title, *(interval([100 * (a[m] / b[m] - 1) for a, b in pairs]) for m in GOALS)])
    pairs = [(done[f"{trace}:{SIAS}"], done[f"{trace}:{OURS}"]) for trace in TRACES]
    cells = [[f"{their[m]:,.1f} ({change(our[m], their[m])})" for m in GOALS] for their, our in pairs]
    traces = [[trace, *row] for trace, row in zip(TRACES, cells, strict=True)]
    return table(["policy", *GOALS], rows) + "\n" + table(["trace: our Sia (`pollux`)", *GOALS], traces)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="*", default=RUNS)
    parser.add_argument("--data", type=Path, default=ROOT / "../shared/data/sia23")
    arguments = parser.parse_args()
    done = json.loads(OUT.read_text()) if OUT.exists() else {}
    for spec in arguments.runs:
        if spec not in done:
            done[spec] = run(spec, arguments.data)
            save(OUT, done)
        print(spec, *(f"{name} {value:,.1f}" for name, value in done[spec].items()), sep="  ", flush=True)
    if all(spec in done for spec in RUNS):
        PAGE.write_text(page(done))


if __name__ == "__main__":
    main()
