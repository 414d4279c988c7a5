"""Runs of the simulator for the benchmark: each done once per version of the sources, and kept."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import platform
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polluxd.sim.applications import BUILT_IN
from polluxd.sim.cluster import Scenario
from polluxd.sim.engine import simulate
from polluxd.sim.generator import generate
from polluxd.sim.measures import measure
from polluxd.sim.policies import POLICIES
from polluxd.sim.profiles import load_profiles
from polluxd.sim.workload import read_workload

ROOT = Path(__file__).parents[2]
SOURCES = (
    "polluxd/policy",
    "polluxd/sim",
    "polluxd/model.py",
    "agent/pollux/goodput.py",
    "agent/pollux/fit.py",
)
SILENT = ("reasons.py", "remarks.py", "explain.py", "autoscale.py")
"""Modules of the policy that only put a plan into words, or are not simulated here."""


@dataclass(frozen=True)
class Task:
    """One run: a policy's name, a workload's name, a scenario."""

    policy: str
    workload: str
    scenario: Scenario

    @property
    def key(self) -> str:
        return f"{self.policy} | {self.workload} | {self.scenario}"


def run(task: Task, data: Path) -> dict[str, Any]:
    """The figures of one run, and the CPU seconds that it took."""
    kind, number = task.workload.rsplit("-", 1)
    if kind == "generated":
        apps: Any = BUILT_IN
        jobs = generate(apps, 120, 12.0, cluster_gpus=task.scenario.gpus, seed=int(number))
    else:
        apps = load_profiles(data / "profiles")
        jobs = read_workload(
            data / "workloads" / f"{task.workload}.csv", apps, cluster_gpus=task.scenario.gpus
        )
    began = time.process_time()
    found = measure(simulate(jobs, apps, POLICIES[task.policy](task.scenario), task.scenario), task.scenario)
    for bulky in ("jobs", "details", "timeline"):
        found.pop(bulky)
    return {**found, "cpu_s": time.process_time() - began}


def digest(data: Path) -> str:
    """Of every file that a result depends on."""
    found = hashlib.sha256(platform.python_version().encode())
    parts = [ROOT / name for name in SOURCES]
    files = [f for part in parts for f in (sorted(part.rglob("*.py")) if part.is_dir() else [part])]
    files = [f for f in files if f.name not in SILENT]
    for path in [*files, *sorted(data.rglob("*.csv"))]:
        found.update(str(path.name).encode() + path.read_bytes())
    return found.hexdigest()[:16]


class _Any(dict[str, Any]):
    """What stands for a result while the runs that a page needs are being collected."""

    def __missing__(self, key: str) -> Any:
        return _Any() if key in ("finish_time_fairness", "decision_ms") else 1.0


@dataclass
class Bench:
    """Runs, each done once per version of the sources."""

    data: Path
    kept: Path
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    wanted: dict[str, Task] | None = field(default_factory=dict)
    """While collecting; then None."""
    tasks: dict[str, Task] = field(default_factory=dict)
    """All that the page needs, in the order in which it asks."""

    def __post_init__(self) -> None:
        self.version = digest(self.data)
        if self.kept.exists():
            kept = json.loads(self.kept.read_text())
            if kept.get("version") == self.version:
                self.done = kept["runs"]

    def of(self, policy: str, workloads: Iterable[str], scenario: Scenario) -> list[dict[str, Any]]:
        """The results of a policy, one per workload."""
        tasks = [Task(policy, workload, scenario) for workload in workloads]
        if self.wanted is None:
            return [self.done[task.key] for task in tasks]
        self.wanted |= {task.key: task for task in tasks}
        return [_Any() for _ in tasks]

    def work(self, processes: int) -> None:
        """Do the collected runs that are missing."""
        self.tasks = dict(self.wanted or {})
        missing = [task for key, task in self.tasks.items() if key not in self.done]
        self.wanted = None
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            running = {pool.submit(run, task, self.data): task for task in missing}
            for ended in as_completed(running):
                task, found = running[ended], ended.result()
                self.done[task.key] = found
                self.kept.parent.mkdir(exist_ok=True)
                self.kept.write_text(json.dumps({"version": self.version, "runs": self.done}, indent=1))
                print(
                    f"{task.policy}, {task.workload}: {found['avg_jct_s']:.0f} s, p99 {found['p99_jct_s']:.0f} s, "
                    f"in {found['cpu_s']:.0f} CPU s",
                    flush=True,
                )
        if digest(self.data) != self.version:
            # Nobody knows which of the two versions each process had loaded.
            self.kept.unlink(missing_ok=True)
            raise SystemExit("the sources changed while they were measured: run it again")


def rows_of(bench: Bench) -> list[dict[str, Any]]:
    """Every run as one flat row."""
    found = []
    for key, task in sorted(bench.tasks.items()):
        run = bench.done[key]
        found.append(
            {
                "trace": task.workload,
                "policy": task.policy,
                "seed": task.scenario.seed,
                "mean_jct_s": run["avg_jct_s"],
                "p50_s": run["p50_jct_s"],
                "p99_s": run["p99_jct_s"],
                "makespan_s": run["makespan_s"],
                "restarts": run["avg_restarts"],
                "ftf_mean": run["finish_time_fairness"]["mean"],
                "ftf_p99": run["finish_time_fairness"]["p99"],
                "scenario": str(task.scenario),
            }
        )
    return found
