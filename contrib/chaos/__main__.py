"""Train on a private Slurm while faults hit Slurm, polluxd and the jobs.

The faults kill, stop and delay processes. The run passes (status 0) if all of this holds: every job completed; each job
trained on each sample exactly once per pass, counted along the checkpoints that it kept; no companion outlived its job;
and no job that did not opt in was touched.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contrib.devcluster import DevCluster, Polluxd
from contrib.devcluster.interrupts import interruptible
from polluxd.apply.idle_watch import PREFIX as IDLE
from polluxd.errors import SlurmError
from polluxd.model import JobState, Step
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.scontrol import ScontrolClient
from polluxd.store import Store

from .faults import KINDS, Chaos
from .ledger import ledgers, lineage
from .workload import Training, submit, submit_plain, trainings

ROOT = Path(__file__).resolve().parents[2]
AFTERWARDS_S = 1200.0
"""How long jobs may take to end after the last fault [s]."""

PACE: Mapping[str, Mapping[str, object]] = {
    "slurm": {"timeout_s": 3},
    "cycle": {"interval_s": 10, "floor_s": 2, "leader_lease_s": 5},
    "moves": {"cooldown_s": 10},
    "policy": {"start_gpus": 1},  # more moves
}

COMPANIONS_S = 60.0
"""How long companions may outlive the last job [s]."""


def _arguments() -> argparse.Namespace:
    kinds = "; ".join(f"{name}={kind.mean_s:g} ({kind.what})" for name, kind in KINDS.items())
    parser = argparse.ArgumentParser(prog="python -m contrib.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long things go wrong")
    parser.add_argument("--jobs", type=int, help="how many; one in three minutes unless said")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and faults")
    parser.add_argument(
        "--rate",
        action="append",
        default=[],
        metavar="KIND=SECONDS",
        help=f"mean seconds between two faults of a kind, 0 for none: {kinds}",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "chaos-out", help="where the outcome goes")
    parser.add_argument("--keep", action="store_true", help="keep the scratch folder with all logs")
    return parser.parse_args()


def _rates(words: list[str]) -> dict[str, float]:
    rates = {}
    for word in words:
        kind, equals, seconds = word.partition("=")
        if kind not in KINDS or not equals or not seconds.replace(".", "", 1).isdigit():
            raise SystemExit(f"--rate {word}: expected KIND=SECONDS with one of {', '.join(KINDS)}")
        rates[kind] = float(seconds)
    return rates


class Run:
    """One run on one cluster."""

    def __init__(self, cluster: DevCluster, folder: Path, args: argparse.Namespace) -> None:
        self.started = time.monotonic()
        self._cluster, self._folder, self._args = cluster, folder, args
        self._environment: Mapping[str, str] = cluster.client_environment
        self._slurm = ScontrolClient(conf=cluster.slurm_conf, timeout=10)
        self.daemons = [Polluxd(cluster, folder, name, **PACE) for name in ("polluxd-a", "polluxd-b")]
        self.chaos = Chaos(cluster, self.daemons, seed=args.seed, rates=_rates(args.rate), say=self.say)
        count = args.jobs or max(1, round(args.minutes / 3))
        self._waiting = trainings(count, args.minutes, args.seed)
        self.jobs: dict[int, Training] = {}
        self.plain: list[int] = []
        self.last: dict[int, SlurmJob] = {}

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:6.0f} s  {text}", flush=True)

    def go(self) -> None:
        for daemon in self.daemons:
            daemon.start()
        self.chaos.start()
        while time.monotonic() - self.started < self._args.minutes * 60.0:
            self._turn()
            self.chaos.turn()
        self.chaos.stop()
        self.say("nothing goes wrong any more")
        until = time.monotonic() + AFTERWARDS_S
        while time.monotonic() < until and (self._waiting or not self._all_ended()):
            self._turn()
        until = time.monotonic() + COMPANIONS_S
        while time.monotonic() < until and self._companions():
            time.sleep(0.5)

    def _companions(self) -> list[SlurmJob]:
        """Return the live companions: jobs that lend nodes to other jobs."""
        return [
            job
            for job in self._slurm.observe().jobs
            if job.companion is not None and job.state in (JobState.PENDING, JobState.RUNNING)
        ]

    def _turn(self) -> None:
        time.sleep(0.2)
        at = time.monotonic() - self.started
        if self._waiting and at >= self._waiting[0].at_s:
            job_id = submit(self._waiting[0], self._folder, self._environment)
            if job_id is not None:
                training = self._waiting.pop(0)
                self.jobs[job_id] = training
                self.say(f"job {job_id}: {training.name}, {training.passes} passes")
        if len(self.plain) < 1 + at // 300 and (plain := submit_plain(self._folder, self._environment)):
            self.plain.append(plain)

    def _all_ended(self) -> bool:
        try:
            self.last = self._slurm.jobs([*self.jobs, *self.plain])
        except SlurmError:
            return False
        # A job that did not opt in need not end: Slurm may hold it for good if a killed slurmd spoilt its launch.
        return all(job.state.finished for job_id, job in self.last.items() if job_id in self.jobs)

    def outcome(self) -> dict[str, Any]:
        """Return the result of the run; `faults` is empty where it passed."""
        self._all_ended()
        store = Store(self._cluster.database_url, self._cluster.cluster_name)
        moves = store.moves()
        store.close()
        faults: list[str] = []
        rows = []
        for job_id, training in self.jobs.items():
            job, ledger = self.last.get(job_id), lineage(ledgers(self._folder / f"ledger-{training.name}"))
            state = job.raw_state if job is not None else "unknown to Slurm"
            wrong = ledger.faults(training.passes)
            if job is None or job.state is not JobState.COMPLETED:
                wrong.insert(0, f"ended as {state}")
            faults += [f"job {job_id} ({training.name}): {fault}" for fault in wrong]
            own = [m for m in moves if m.job_id == job_id]
            rows.append(
                {
                    "job_id": job_id,
                    "state": state,
                    "passes": training.passes,
                    "flat": not ledger.faults(training.passes),
                    "launches": ledger.launches,
                    "samples_undone": ledger.undone,
                    "steps_repeated": ledger.repeated,
                    "requeues": job.restart_count if job is not None else None,
                    "moves": sum(m.step is Step.TRAINING and m.path != "start" for m in own),
                    "moves_requeued": sum(Step.REQUEUED in m.times for m in own),
                    "moves_failed": sum(m.step is Step.FAILED for m in own),
                }
            )
        for training in self._waiting:
            faults.append(f"{training.name} was never submitted")
        for job_id in self.plain:
            plain = self.last.get(job_id)
            if plain is not None and (plain.spec is not None or plain.admin_comment):
                faults.append(f"job {job_id}, which did not opt in, was touched")
        faults += [f"companion {job.job_id} ({job.name}) outlives its parent" for job in self._companions()]
        faults += self._own_faults()
        made = Counter((m.path, str(m.step)) for m in moves)
        return {
            "seed": self._args.seed,
            "minutes": self._args.minutes,
            "faults_made": dict(self.chaos.counts),
            "moves": {f"{path} {step}": n for (path, step), n in sorted(made.items())},
            "completed": f"{sum(r['state'] == 'COMPLETED' for r in rows)}/{len(rows) + len(self._waiting)}",
            "flat": f"{sum(bool(r['flat']) for r in rows)}/{len(rows)}",
            "jobs": rows,
            "faults": faults,
        }

    def _own_faults(self) -> list[str]:
        found = []
        for daemon in self.daemons:
            lines = daemon.log.read_text(errors="replace").splitlines()
            faulty = [line for line in lines if "a fault in polluxd itself" in line or IDLE in line]
            found += [f"{daemon.name}: {line}" for line in faulty[:3]]
        return found

    def end(self) -> None:
        self.chaos.stop()
        for daemon in self.daemons:
            daemon.stop(grace_s=20)


def main() -> int:
    args = _arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = Path(tempfile.mkdtemp(prefix="pollux-chaos-", dir="/tmp"))
    folder.chmod(0o755)
    told: dict[str, Any] = {}
    try:
        with DevCluster(
            # A GPU per node: jobs of two or three ranks span nodes, and can be resized.
            folder / "cluster",
            nodes=5,
            gpus_per_node=1,
            lease_s=60,
            publish_interval_s=1.0,
            accounting=True,
        ) as cluster:
            run = Run(cluster, folder, args)
            try:
                run.go()
                told = run.outcome()
            finally:
                run.end()
    finally:
        args.out.mkdir(parents=True, exist_ok=True)
        for log in [*folder.glob("*.log"), *folder.glob("cluster/log/*.log")]:
            shutil.copy(log, args.out / log.name)
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    (args.out / "chaos.json").write_text(json.dumps(told, indent=2) + "\n")
    made = sum(told["faults_made"].values())
    print(f"{made} faults; completed {told['completed']}, flat histograms {told['flat']}")
    print("moves: " + (", ".join(f"{n} {what}" for what, n in told["moves"].items()) or "none"))
    for fault in told["faults"]:
        print(f"WRONG: {fault}")
    return 1 if told["faults"] else 0


if __name__ == "__main__":
    with interruptible():
        sys.exit(main())
