"""Simulate a week of 5,000 jobs on 2,048 GPUs under polluxd's policy.

It writes contrib/experiments/simulator_week.md.

    python -m contrib.experiments.simulator_week [--policy NAME] [--jobs N] [--nodes N] [--hours H] [--length F]
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is loaded: see polluxd.cli

from polluxd.sim.applications import BUILT_IN
from polluxd.sim.cluster import Scenario
from polluxd.sim.comparison import played
from polluxd.sim.generator import generate
from polluxd.sim.measures import measure
from polluxd.sim.policies import POLICIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="pollux", choices=sorted(POLICIES))
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--nodes", type=int, default=512, help="of 4 GPUs")
    parser.add_argument("--hours", type=float, default=168.0)
    parser.add_argument(
        "--length", type=float, default=8.0, help="of trainings, against the applications' own"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    asked = parser.parse_args()
    scenario = Scenario(nodes=asked.nodes)
    jobs = generate(BUILT_IN, asked.jobs, asked.hours, cluster_gpus=scenario.gpus, length=asked.length)
    began, at = time.process_time(), time.monotonic()

    def heard(ended: int, of: int) -> None:
        if ended % 50 == 0:
            print(f"{ended} of {of} jobs after {time.process_time() - began:.0f} CPU s", flush=True)

    run = played(jobs, BUILT_IN, POLICIES[asked.policy](scenario), scenario, heard)
    cpu, wall = time.process_time() - began, time.monotonic() - at
    found = measure(run, scenario)
    active = [moment.jobs for moment in run.moments]
    busy = sum(moment.gpus for moment in run.moments) / len(run.moments) / scenario.gpus
    asked.out.write_text(
        f"""# A simulated week

`contrib.experiments.simulator_week`
({platform.machine()}, Python {platform.python_version()}): {asked.jobs} generated jobs over
{asked.hours:g} hours on {asked.nodes} nodes of 4 GPUs, trainings {asked.length:g} times the shipped applications',
under `{asked.policy}`.

| | |
| --- | ---: |
| CPU time | {cpu / 60:.1f} min |
| wall-clock, on a machine shared with other work | {wall / 60:.1f} min |
| decisions | {len(run.decision_seconds)} |
| decision, median | {found["decision_ms"]["median"]:.0f} ms |
| decision, worst | {found["decision_ms"]["max"]:.0f} ms |
| jobs in the system, mean | {sum(active) / len(active):.0f} |
| jobs in the system, most | {max(active)} |
| GPUs in use | {100 * busy:.0f} % |
| mean JCT | {found["avg_jct_s"] / 3600:.2f} h |
| makespan | {found["makespan_s"] / 3600:.0f} h |
"""
    )
    print(f"wrote {asked.out}")


if __name__ == "__main__":
    main()
