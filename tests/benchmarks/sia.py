"""Policy `pollux` against our Sia on the inputs of Sia's own evaluation (SOSP 2023).

    python -m tests.benchmarks.sia [--data DIR] [TRACE:POLICY:LEAST_GAIN:KAPPA ...]

The cluster, the calibration of step times and the restart costs are those of Sia's artifact. Each run is kept in
bench-out/sia.json, and not made again.
"""

from __future__ import annotations

import argparse
import json
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

OUT = ROOT / "bench-out" / "sia.json"
SIA = Scenario(
    groups=(NodeGroup("t4", 6, 4), NodeGroup("rtx", 3, 8), NodeGroup("a100", 2, 8)),
    step_factors={
        "cifar10": 1.8,
        "ncf": 1.5,
        "bert": 1.2,
        "deepspeech2": 1.2,
        "imagenet": 1.2,
        "yolov3": 1.2,
    },
    restarts={"cifar10": 50, "deepspeech2": 25, "bert": 120, "yolov3": 80, "imagenet": 250, "ncf": 15},
)
TRACES = tuple(f"{kind}/workload-{number}" for kind in ("philly", "helios") for number in (1, 2, 3, 4))
RUNS = tuple(f"{trace}:{run}" for trace in TRACES for run in ("sia:0:2", "pollux:0:2", "pollux:0.1:2"))


def run(spec: str, data: Path) -> dict[str, float]:
    """Return the columns of Sia's table; `spec` is a trace, a policy, `least_gain` and `kappa`."""
    trace, policy, least_gain, kappa = spec.split(":")
    apps = load_profiles(data / "profiles")
    jobs = read_workload(data / "workloads" / f"{trace}.csv", apps, cluster_gpus=SIA.gpus)
    settings = PolicySettings(least_gain=float(least_gain), kappa=float(kappa))
    scenario = replace(SIA, policy=settings)
    found = measure(played(jobs, apps, POLICIES[policy](scenario), scenario), scenario)
    return {
        "mean": found["avg_jct_s"],
        "p99": found["p99_jct_s"],
        "makespan": found["makespan_s"],
        "GPU hours per job": found["gpu_hours"] / len(jobs),
        "worst fairness": found["finish_time_fairness"]["worst"],
    }


def main() -> None:
    """Make the runs; print each as it ends."""
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


if __name__ == "__main__":
    main()
