"""Runs of the simulator, each made once per version of the sources."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from polluxd.sim.applications import BUILT_IN
from polluxd.sim.cluster import Scenario
from polluxd.sim.comparison import played
from polluxd.sim.generator import Trace, generate, stiffened
from polluxd.sim.measures import measure
from polluxd.sim.policies import POLICIES
from polluxd.sim.profiles import load_profiles
from polluxd.sim.workload import Submission, read_workload

ROOT = Path(__file__).parents[2]
SOURCES = (
    "polluxd/policy",
    "polluxd/sim",
    "polluxd/cycle",
    "polluxd/apply",
    "polluxd/slurm/fake/fake_slurm.py",
    "polluxd/slurm/fake/fake_slurmctld.py",
    "polluxd/slurm/fake/fake_job.py",
    "polluxd/slurm/fake/fake_power.py",
    "polluxd/store/fake.py",
    "polluxd/model",
    "agent/pollux/goodput.py",
    "agent/pollux/fit.py",
)
SILENT = ("reasons.py", "explain.py", "steep.py")
"""Modules of the policy that only describe a plan in words, or work at powers of -2 and below, which no run has."""
OURS = ("market.py", "pollux.py")
"""Modules that only policy `pollux` uses: other policies' runs stay good where these change."""


GENERATED = {
    "generated": (120, Trace(12.0)),
    "short": (50, Trace(5.0)),
    "rigid8": (100, Trace(8.0, rigid_share=0.17, rigid_gpus=8)),
    "rigid16": (100, Trace(10.0, rigid_share=0.11, rigid_gpus=16)),
    "rigid16-overload": (130, Trace(8.0, rigid_share=0.08, rigid_gpus=16)),
    "rigid32": (100, Trace(9.0, rigid_share=0.05, rigid_gpus=32)),
}
"""Jobs of the traces that are generated, and which."""


Result = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One run: a policy's name, a workload's name, a scenario."""

    policy: str
    workload: str
    scenario: Scenario

    @property
    def key(self) -> str:
        return f"{self.policy} | {self.workload} | {self.scenario}"


_profiles = lru_cache(maxsize=1)(load_profiles)
"""The step times that they interpolate are kept from run to run."""


def load(workload: str, data: Path, gpus: int) -> tuple[Sequence[Submission], Any]:
    """Return a trace's jobs and their applications."""
    kind, number = workload.rsplit("-", 1)
    if kind in GENERATED:
        count, trace = GENERATED[kind]
        made = generate(BUILT_IN, count, trace.hours, cluster_gpus=gpus, seed=int(number))
        return stiffened(made, BUILT_IN, trace, int(number)), BUILT_IN
    apps = _profiles(data / "profiles")
    jobs = read_workload(data / "workloads" / f"workload-{number}.csv", apps, cluster_gpus=gpus)
    return [replace(job, time=job.time / 2) for job in jobs] if kind == "doubled" else jobs, apps


def run(task: Task, data: Path) -> Result:
    """The figures of one run, and the CPU seconds that it took."""
    jobs, apps = load(task.workload, data, task.scenario.gpus)
    began = time.process_time()
    found = measure(played(jobs, apps, POLICIES[task.policy](task.scenario), task.scenario), task.scenario)
    for bulky in ("jobs", "details", "timeline"):
        found.pop(bulky)
    return {**found, "cpu_s": time.process_time() - began}


def code_of(path: Path) -> bytes:
    """Return a module without comments and docstrings: they change no result."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                line
                for line in body
                if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            ]
    return ast.dump(tree).encode()


def digest(data: Path, without: Collection[str] = SILENT) -> str:
    """Return a digest of every file that a result depends on. It leaves out the modules `without`."""
    found = hashlib.sha256(platform.python_version().encode())
    parts = [ROOT / name for name in SOURCES]
    files = [f for part in parts for f in (sorted(part.rglob("*.py")) if part.is_dir() else [part])]
    files = [f for f in files if f.name not in without]
    for path in files:
        found.update(path.name.encode() + code_of(path))
    for path in sorted(data.rglob("*.csv")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


@dataclass
class Bench:
    """Runs, each done once per version of the sources that it uses."""

    data: Path
    kept: Path
    done: dict[str, Result] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)
    """Runs that were asked for, in that order."""

    def __post_init__(self) -> None:
        self.version, self._of_others = digest(self.data), digest(self.data, (*SILENT, *OURS))
        if self.kept.exists():
            for key, found in json.loads(self.kept.read_text()).items():
                if found["version"] == self._version_of(key):
                    self.done[key] = found

    def _version_of(self, key: str) -> str:
        return self.version if key.startswith("pollux |") else self._of_others

    def of(self, policy: str, workloads: Iterable[str], scenario: Scenario) -> list[Result | None]:
        """Return the results of a policy, one per workload; None: not yet made."""
        tasks = {task.key: task for task in (Task(policy, workload, scenario) for workload in workloads)}
        self.tasks |= {key: task for key, task in tasks.items() if key not in self.tasks}
        return [self.done.get(key) for key in tasks]

    @property
    def missing(self) -> list[str]:
        """Keys of runs that were asked for and are not made yet."""
        return [key for key in self.tasks if key not in self.done]

    def work(self, seconds: float, at_once: int = 1) -> None:
        """Make the missing runs in order; begin none after so many seconds."""
        until = time.monotonic() + seconds
        missing, running = iter(self.missing), dict[Future[Result], str]()
        with ProcessPoolExecutor(at_once, get_context("spawn")) as pool:
            while True:
                while len(running) < at_once and time.monotonic() <= until:
                    key = next(missing, None)
                    if key is None:
                        break
                    running[pool.submit(run, self.tasks[key], self.data)] = key
                if not running:
                    break
                for ended in wait(running, return_when=FIRST_COMPLETED).done:
                    self._keep(running.pop(ended), ended.result())

    def _keep(self, key: str, found: Result) -> None:
        if digest(self.data) != self.version:
            raise SystemExit("the sources changed while they were measured: run it again")
        self.done[key] = {"version": self._version_of(key), **found}
        self.kept.parent.mkdir(exist_ok=True)
        partial = self.kept.with_suffix(".new")
        partial.write_text(json.dumps(self.done, indent=1))
        partial.replace(self.kept)
        task = self.tasks[key]
        print(
            f"{task.policy}, {task.workload}: {found['avg_jct_s']:.0f} s, p99 {found['p99_jct_s']:.0f} s, "
            f"in {found['cpu_s']:.0f} CPU s",
            flush=True,
        )


def rows_of(bench: Bench) -> list[dict[str, Any]]:
    """Return every run as one flat row."""
    found = []
    for key, task in sorted(bench.tasks.items(), key=lambda item: item[0]):
        if key not in bench.done:
            continue
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
