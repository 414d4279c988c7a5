"""What a move costs: one real training moved about a private Slurm, its pause split by step.

    python tests/benchmarks/realloc.py [--moves 20] [--json FILE] [--markdown FILE]

The training (digits, up to four ranks over gloo), the checkpoints, Slurm, Postgres and polluxd's controller are real;
only the decisions are scripted, so that every move happens. Pause: from the last optimizer step before to the first
after it. Decision to effect: from the intent in the database to the first reported step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "agent")]

from contrib.devcluster import DevCluster  # noqa: E402
from polluxd.apply.actions import Limits  # noqa: E402
from polluxd.apply.reconciler import Reconciler  # noqa: E402
from polluxd.config import parse_config  # noqa: E402
from polluxd.cycle import Controller  # noqa: E402
from polluxd.model import Allocation, Placement, Plan, Snapshot, Step  # noqa: E402
from polluxd.policy.cache import Cache  # noqa: E402
from polluxd.slurm.scontrol import ScontrolClient  # noqa: E402
from polluxd.store import Store  # noqa: E402

PLACES = (
    Placement(("n1",), 1),
    Placement(("n1",), 4),
    Placement(("n2", "n3"), 2),
    Placement(("n2",), 2),
    Placement(("n3", "n4"), 1),
    Placement(("n4",), 3),
)
"""Grows, shrinks and moves at the same size, on to other nodes and back, of at most four ranks."""

SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=1 --gpus-per-node=1 --ntasks-per-node=1 --cpus-per-task=1 --output={folder}/training.log
#POLLUX max-gpus=4
export PATH={bin}:$PATH POLLUX_CHECKPOINT_DIR={folder}/checkpoints
cd {root}
pollux run contrib/examples/digits_conv.py --epochs 100000 --alpha 0.05 --beta 0.001 --sync 0.01 0.02
"""

_TRAINING_FOR = 3.0
"""Seconds of training between two moves: steps, a report, and so something to lose."""

_PATIENCE = 180.0


class Script:
    """A policy that sends the one job to the next of `PLACES` as soon as it trains on the last."""

    def __init__(self, moves: int) -> None:
        self._moves = moves
        self._made = 0
        self.done = False

    def __call__(self, snapshot: Snapshot, cache: Cache) -> Plan:
        allocations = []
        for job in snapshot.jobs:
            if job.placement == self._target and not job.pinned:  # it trains there, and has rested
                self.done = self._made == self._moves
                self._made += not self.done
            allocations.append(
                Allocation(
                    job_id=job.job_id,
                    placement=self._target,
                    goodput=1.0,
                    speedup=1.0,
                    batch_size=1,
                    changed=job.placement != self._target,
                    reason="benchmark",
                )
            )
        return Plan(tuple(allocations), 1.0, 1.0, "script")

    @property
    def _target(self) -> Placement:
        return PLACES[self._made % len(PLACES)]


def move_about(moves: int, folder: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """Costs of so many moves, as `Store.reallocation_costs` gives them, and the seconds from decision to effect."""
    with DevCluster(folder / "cluster", publish_interval_s=1.0) as cluster:
        config = parse_config(
            {
                "mode": "enforce",
                "database": {"url": cluster.database_url},
                "slurm": {"cluster": cluster.cluster_name, "conf": str(cluster.slurm_conf), "lease_s": 120},
                "cycle": {"interval_s": 1, "floor_s": 0.5, "poll_s": 0.25, "busy_poll_s": 0.25},
            },
            "benchmark",
        )
        slurm = ScontrolClient(conf=cluster.slurm_conf, timeout=config.slurm.timeout_s)
        store = Store(config.database.url, config.slurm.cluster)
        store.migrate()
        store.install_secret(cluster.hooks.secret_file.read_bytes().strip())
        script = Script(moves)
        reconciler = Reconciler(
            slurm,
            store,
            limits=Limits(),
            cooldown=_TRAINING_FOR,
            lease=config.slurm.lease_s,
            max_concurrent=0,
            authorize=lambda: store.epoch or 0,
        )
        controller = Controller(config, slurm, store, reconciler, policy=script)
        job_id = submit(cluster, folder)
        try:
            drive(controller, store, script, moves, job_id, folder)
            costs = [cost for cost in store.reallocation_costs(job_id) if cost["measured"]]
            whole = {move.id: move.times for move in store.reallocations(job_id)}
            took = [whole[c["id"]][Step.TRAINING] - whole[c["id"]][Step.PLANNED] for c in costs]
        finally:
            subprocess.run(["scancel", str(job_id)], env=cluster.client_environment, check=False)
            store.close()
        return [dict(cost) for cost in costs], took


def submit(cluster: DevCluster, folder: Path) -> int:
    path = folder / "training.sbatch"
    path.write_text(SCRIPT.format(folder=folder, bin=Path(sys.executable).parent, root=ROOT))
    return int(cluster.command("sbatch", "--parsable", str(path)))


def drive(
    controller: Controller, store: Store, script: Script, moves: int, job_id: int, folder: Path
) -> None:
    """polluxd's loop, until the script is through; RuntimeError when no move ends for long."""
    ended, since = 0, time.monotonic()
    while not script.done:
        if store.lead() is None:
            raise RuntimeError("another polluxd leads on a private database")
        controller.step()
        count = sum(Step.TRAINING in move.times for move in store.reallocations(job_id))
        if count > ended:
            ended, since = count, time.monotonic()
            print(f"\r{max(0, ended - 1)} of {moves} moves", end="", flush=True, file=sys.stderr)
        if time.monotonic() - since > _PATIENCE:
            log = (folder / "training.log").read_text(errors="replace")[-2000:]
            raise RuntimeError(
                f"no move ended within {_PATIENCE:.0f} s; the training's log ends with:\n{log}"
            )
        store.wait_for_notify(0.25)
    print(file=sys.stderr)


def summary(costs: list[dict[str, Any]], took: list[float]) -> list[dict[str, Any]]:
    """The contract of bench-out/realloc.json: a row per path."""
    rows = []
    for path in sorted({cost["path"] for cost in costs}):
        mine = [(cost, t) for cost, t in zip(costs, took, strict=True) if cost["path"] == path]
        pauses = sorted(cost["total_s"] for cost, _ in mine)
        names = list(dict.fromkeys(name for cost, _ in mine for name in cost["steps"]))
        rows.append(
            {
                "path": path,
                "n": len(mine),
                "pause_median_s": round(statistics.median(pauses), 3),
                "pause_p95_s": round(pauses[min(len(pauses) - 1, int(0.95 * len(pauses)))], 3),
                "decision_to_effect_median_s": round(statistics.median(t for _, t in mine), 3),
                "steps": {
                    name: round(statistics.median(cost["steps"].get(name, 0.0) for cost, _ in mine), 3)
                    for name in names
                },
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# What a re-allocation costs",
        "",
        "Regenerate with `make bench-realloc`: a real training of at most four ranks (gloo, digits) on a private",
        f"Slurm of 4 nodes, all of it on the {os.cpu_count()} cores of one machine. Pause: from the last optimizer",
        "step before to the first after. The paper's constant is 30 s.",
        "",
        "| path | moves | pause, median [s] | 95 % [s] | decision to effect, median [s] |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        figures = (row["pause_median_s"], row["pause_p95_s"], row["decision_to_effect_median_s"])
        lines.append(f"| {row['path']} | {row['n']} | " + " | ".join(f"{x:.2f}" for x in figures) + " |")
    for row in rows:
        lines += ["", f"`{row['path']}`, by step (medians):", "", "| step | s |", "| --- | ---: |"]
        lines += [f"| {name} | {value:.2f} |" for name, value in row["steps"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--moves", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pollux-realloc-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        rows = summary(*move_about(arguments.moves, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(markdown(rows))
    if arguments.json:
        arguments.json.parent.mkdir(exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(markdown(rows))


if __name__ == "__main__":
    main()
