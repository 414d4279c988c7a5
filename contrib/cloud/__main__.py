"""Rented nodes on a real slurmctld with power saving: money and time, beside two other ways.

    fixed      polluxd on all nodes, always on
    slurm      Slurm's own power saving, without polluxd; users ask for the sizes that a careful user would
    pollux@V   polluxd rents by price; an hour of a training's completion is worth V, as many such arms as you like
    budget     the same at the usual V, with two short trainings and a budget that is too small, and kills of polluxd
               and slurmctld while a node boots

All run at the same time, each on a cluster of its own: the trainings sleep for most of their time.

The money is counted from the calls of ResumeProgram and SuspendProgram, the times by squeue and scontrol: no figure is
polluxd's own, except what it counted itself, which is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from contrib.demo.measure import Recording, slurm
from contrib.demo.plain import tuned_sizes
from contrib.demo.run import Run, RunFailedError
from contrib.demo.workload import Workload, load
from contrib.devcluster import DevCluster, DevClusterError, Polluxd, SiteLines
from contrib.devcluster.interrupts import interruptible
from contrib.devcluster.power_saving import PowerSaving, rented_seconds
from contrib.devcluster.processes import program
from polluxd.apply.boots import FIRST_S
from polluxd.store import Store

ROOT = Path(__file__).resolve().parents[2]
PRICE = 3.6
"""Of a node for an hour: 0.001 for a second."""
HOUR_VALUE = 36.0
"""The usual worth of an hour of a training's completion: ten hours of a node."""
UNPRICED = ("fixed", "slurm")
"""Arms without rented nodes by price."""
OWN = "n1"
KIND = "rented"
BUDGET, SHORTER = 0.4, 3.0
"""Of the arm `budget`. Its trainings are the first two of the workload, shorter by this factor."""
APART_S = 15.0
"""Between the starts of two clusters, which look for free ports."""


class Arm:
    """One way of running the workload, on a cluster of its own. Once `stop` is set, it ends by RunFailedError."""

    def __init__(self, name: str, work: Workload, folder: Path, boot_s: float, stop: threading.Event) -> None:
        self.name, self.work, self.folder, self.stop = name, work, folder, stop
        folder.mkdir()
        folder.chmod(0o755)
        self.power = PowerSaving(folder / "power", boot_s=boot_s, resume_timeout_s=int(boot_s) + 30)
        self.cloud = [f"n{number}" for number in range(2, work.nodes + 1)]
        site = SiteLines(
            lines=() if name == "fixed" else self.power.lines,
            nodes=dict.fromkeys(self.cloud, f"Feature={KIND}") | {OWN: "Feature=own"},
            cloud=() if name == "fixed" else self.cloud,
        )
        self.cluster = DevCluster(
            folder / "cluster", nodes=work.nodes, gpus_per_node=work.gpus_per_node, site=site
        )
        self.power.programs(self.cluster.slurm_conf, program("slurmd"))
        self.daemon: Polluxd | None = None
        self.budget = BUDGET if name == "budget" else None
        self.hour_value = float(name.removeprefix("pollux@")) if "@" in name else HOUR_VALUE
        self.restarts: list[str] = []

    def run(self) -> dict[str, Any]:
        with self.cluster:
            if self.name != "slurm":
                self._start_polluxd()
            sizes = tuned_sizes(self.work, {}) if self.name == "slurm" else {}
            run = Run(
                self.work,
                env=self.cluster.client_environment,
                root=ROOT,
                folder=self.folder / "jobs",
                sizes=sizes,
            )
            try:
                recording = run(lambda _: None, self._at_each_sample)
                ended = time.time()
                if self.name != "fixed":
                    self._wait_for_the_end_of_nodes()
                return self._result(recording, ended)
            finally:
                if self.daemon is not None:
                    self.daemon.stop()

    def _start_polluxd(self) -> None:
        self.daemon = Polluxd(self.cluster, self.folder)
        if self.name != "fixed":
            words = ["--cloud-price", f"{KIND}={PRICE}", "--cloud-hour-value", str(self.hour_value)]
            words += ["--cloud-return-s", str(self.power.idle_s + 25)]
            words += ["--cloud-boot-s", str(self.power.boot_s)]
            words += [] if self.budget is None else ["--cloud-month-budget", f"*={self.budget}"]
            done = self.daemon.command("polluxctl", "settings", "set", *words)
            if done.returncode:
                raise DevClusterError(done.stderr)
        self.daemon.start()

    def _at_each_sample(self) -> None:
        if self.stop.is_set():
            raise RunFailedError(f"{self.name}: stopped")
        if self.name == "budget":
            self._disturb()

    def _disturb(self) -> None:
        """Kill polluxd while the first node boots, and slurmctld while the next one does."""
        assert self.daemon is not None
        bill = self.power.bill()
        booting = {node for _, what, node in bill if what == "resume"} - {
            node for _, what, node in bill if what in ("up", "failed")
        }
        if booting and not self.restarts:
            self.restarts.append("polluxd")
            self.daemon.stop(9)
            self.daemon.start()
        elif booting and len(self.restarts) == 1 and sum(what == "resume" for _, what, _ in bill) > 1:
            self.restarts.append("slurmctld")
            self.cluster.restart_slurmctld()

    def _wait_for_the_end_of_nodes(self) -> None:
        deadline = time.monotonic() + self.power.idle_s + 60
        env = self.cluster.client_environment
        while time.monotonic() < deadline:
            states = slurm(["scontrol", "show", "node", "-o", ",".join(self.cloud)], env)
            if states.count("POWERED_DOWN") == len(self.cloud):
                return
            if self.stop.wait(1.0):
                raise RunFailedError(f"{self.name}: stopped")

    def _result(self, recording: Recording, ended: float) -> dict[str, Any]:
        bill = self.power.bill()
        times = {track.name: track.jct_s for track in recording.tracks.values()}
        begun = min(track.submitted_at for track in recording.tracks.values())
        rented_s = (
            len(self.cloud) * (ended - begun) if self.name == "fixed" else rented_seconds(bill, time.time())
        )
        found = {
            "cost": rented_s * PRICE / 3600.0,
            "mean_completion_s": recording.mean_jct_s,
            "completion_s": times,
            "jobs_completed": sum(track.state == "COMPLETED" for track in recording.tracks.values()),
            "jobs": len(self.work.trainings),
            "boots": sum(what == "resume" for _, what, _ in bill),
            "boots_failed": sum(what == "failed" for _, what, _ in bill),
            "booted_again_too_early": too_early(bill),
            "restarted_in_mid_boot": self.restarts,
            "budget": self.budget,
        }
        if self.name not in UNPRICED:
            store = Store(self.cluster.database_url, self.cluster.cluster_name)
            found["cost_counted_by_polluxd"] = sum(row["cost"] for row in store.rentals(begun))
            found["hours_saved_by_polluxd"] = (
                sum(row["saved_seconds"] for row in store.rentals(begun)) / 3600.0
            )
            found["reasons"] = sorted({m.reason for m in store.moves() if "Slurm boots" in m.reason})[:3]
            store.close()
        return found


def too_early(bill: list[tuple[float, str, str]]) -> int:
    """Return how often a node was booted for a job within polluxd's time after a failed boot."""
    failed: dict[str, float] = {}
    count = 0
    for at, what, node in bill:
        if what == "resume":
            count += at - failed.get(node, 0.0) < FIRST_S
        elif what == "failed":
            failed[node] = at
    return count


def arms(text: str) -> list[str]:
    """Read the names of arms."""
    names = text.split(",")
    for name in names:
        if name not in (*UNPRICED, "budget") and not re.fullmatch(r"pollux@\d+(\.\d+)?", name):
            raise argparse.ArgumentTypeError(
                f"{name}: expected fixed, slurm, budget, or pollux@36 (any number)"
            )
    return names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--boot", type=float, default=60.0, metavar="SECONDS", help="boot of a node")
    parser.add_argument("--arms", type=arms, default=f"fixed,slurm,pollux@{HOUR_VALUE:g},budget")
    parser.add_argument(
        "--stretch",
        type=float,
        default=1.0,
        help="factor on the trainings' lengths and on the times between them",
    )
    parser.add_argument("--first", type=int, metavar="N", help="the first N trainings alone")
    parser.add_argument("--out", type=Path, default=Path("cloud-out"))
    parser.add_argument("--keep", action="store_true", help="keep the scratch folder with all logs")
    args = parser.parse_args()
    work = load(Path(__file__).with_name("workload.toml"))
    longer = tuple(
        replace(each, epochs=each.epochs * args.stretch, arrive_s=each.arrive_s * args.stretch)
        for each in work.trainings[: args.first]
    )
    work = replace(work, trainings=longer, limit_s=work.limit_s * max(args.stretch, 1.0))
    short = tuple(replace(each, epochs=each.epochs / SHORTER) for each in work.trainings[:2])
    works = dict.fromkeys(args.arms, work)
    if "budget" in works:
        works["budget"] = replace(work, trainings=short)
    scratch = Path(tempfile.mkdtemp(prefix="pollux-cloud-"))
    scratch.chmod(0o755)
    os.environ["OMP_NUM_THREADS"] = "1"
    results: dict[str, Any] = {}
    stop = threading.Event()

    def run(number: int, name: str) -> tuple[str, dict[str, Any]]:
        if stop.wait(number * APART_S):
            raise RunFailedError(f"{name}: stopped")
        return name, Arm(name, works[name], scratch / name, args.boot, stop).run()

    try:
        with ThreadPoolExecutor(len(works)) as pool, interruptible():
            try:
                for name, found in pool.map(run, range(len(works)), works):
                    results[name] = found
                    print(json.dumps({name: found}, indent=2), flush=True)
            finally:
                stop.set()
    finally:
        if not args.keep:
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            print(f"logs: {scratch}")
    for name, found in results.items():
        if "fixed" in results and name != "budget":
            for key in ("cost", "mean_completion_s"):
                found[f"{key}_against_fixed"] = found[key] / results["fixed"][key]
    args.out.mkdir(exist_ok=True)
    (args.out / "cloud.json").write_text(
        json.dumps({"boot_s": args.boot, "stretch": args.stretch, "arms": results}, indent=2) + "\n"
    )
    faults = list(check(results, args.boot))
    for fault in faults:
        print(f"FAULT: {fault}")
    sys.exit(bool(faults))


def check(results: dict[str, Any], boot_s: float) -> list[str]:
    """Return what must hold and does not."""
    faults = []
    for name, found in results.items():
        if found["jobs_completed"] < found["jobs"]:
            faults.append(f"{name}: {found['jobs'] - found['jobs_completed']} jobs were lost")
        if name not in UNPRICED and found["booted_again_too_early"]:
            faults.append(f"{name}: a job was planned on a node that had failed to boot")
        if found["budget"] is not None and found["cost"] > found["budget"] + boot_s * PRICE / 3600.0:
            faults.append(f"{name}: {found['cost']:.3f} spent of a budget of {found['budget']:.3f}")
    return faults


if __name__ == "__main__":
    main()
