"""Measure the cost of moves, by path, on a private Slurm.

    python -m tests.benchmarks.realloc [--moves 20] [--json FILE] [--markdown FILE]

Two real trainings move about, one after the other. The trainings (digits, two to four ranks over gloo), the
checkpoints, Slurm, its accounting, Postgres and polluxd's controller are real. Only the decisions are scripted, so that
every move happens: one training grows and shrinks in place, the other goes
through the queue. Both write down each optimizer step.

Pause: from the last step before a move to the first step after it. It is the pause of the longest-waiting process that
lives through the move, or of the job where no process does. Decision to effect: from the intent in the database to the
first reported step.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from contrib.chaos.ledger import Ledger, ledgers, lineage
from contrib.devcluster import DevCluster
from contrib.devcluster.polluxd import lost_gpu_s
from polluxd.apply.reconciler import Reconciler
from polluxd.config.config_file import parse_config
from polluxd.config.settings import MoveSettings
from polluxd.cycle.controller import Controller
from polluxd.model import Allocation, JobState, Move, Placement, Plan, Snapshot, Step
from polluxd.policy.listing import Cache
from polluxd.slurm.scontrol import ScontrolClient
from polluxd.store import Store
from polluxd.store.views import MoveCost
from tests.benchmarks.results import ROOT, save

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name} --nodes=1 --gpus-per-node=1 --ntasks-per-node=1 --cpus-per-task=1
#SBATCH --output={folder}/{name}.log --open-mode=append
#POLLUX {directive}
export PATH={bin}:$PATH POLLUX_CHECKPOINT_DIR={folder}/checkpoints-{name}
cd {root}
pollux run contrib/chaos/counted.py --passes 100000 --until {folder}/{name}.end --ledger {folder}/ledger-{name}
"""

PATHS = ("requeue", "resize grow", "resize shrink")

_TRAINING_FOR = 2.0
"""Seconds of training between two moves: time for steps and a report, so that a move can lose work."""

_PATIENCE = 180.0

_IN_PLACE_ROUND = 4
"""Moves of each kind between two requeues of the in-place training."""


@dataclass(frozen=True)
class Tour:
    """One training and the successive places where it is sent. The training starts at the first place."""

    name: str
    directive: str
    places: tuple[Placement, ...]


def in_place(moves: int) -> Tour:
    """Return the tour of a training that is resized in place.

    The training shrinks by a node of its own job, then grows by companions and gives them back. Every so often, while
    it holds a companion, the queue gives it two nodes of its own again, on other nodes.
    """
    places = []
    for number in range(moves):
        a, b, c, _ = _nodes_from(number // _IN_PLACE_ROUND)
        if number % _IN_PLACE_ROUND == 0:
            places.append(_on(2, a, b))
        places += [_on(2, a), _on(2, a, c)]
    return Tour("in-place", "max-gpus=4", tuple(places))


def through_the_queue(moves: int) -> Tour:
    """Return the tour of a training that goes through the queue.

    It grows to two nodes, of one GPU or of two. Then it shrinks to one of the nodes.
    """
    places = []
    for number in range(moves):
        a, b, _, _ = _nodes_from(number)
        per_node = 1 + number % 2
        places += [_on(per_node, a, b), _on(per_node, a)]
    a, b, _, _ = _nodes_from(moves)
    return Tour("requeue", "max-gpus=4 resize=requeue", (*places, _on(1, a, b)))


def _nodes_from(number: int) -> tuple[str, ...]:
    """Return the four nodes' names, in an order that turns with `number`.

    The first two are always in Slurm's order: the job's script runs on the first, which no shrink may take.
    """
    return tuple(f"n{1 + (number % 3 + i) % 4}" for i in range(4))


def _on(per_node: int, *nodes: str) -> Placement:
    return Placement(tuple(sorted(nodes)), per_node)


class Script:
    """A policy that sends one job through the places of a tour.

    The job goes to the next place as soon as it trains at the last one chosen.
    """

    def __init__(self) -> None:
        self.begin(())

    def begin(self, places: Sequence[Placement]) -> None:
        self._places = places
        self._at = 0
        self.done = not places

    def __call__(self, snapshot: Snapshot, cache: Cache) -> Plan:
        allocations = []
        for job in snapshot.jobs:
            if (
                not self.done and job.placement == self._target and not job.pinned
            ):  # it trains there, and its cooldown is over
                self.done = self._at + 1 == len(self._places)
                self._at += not self.done
            target = self._target if self._places else job.placement
            changed = job.placement != target
            allocations.append(Allocation(job.job_id, target, 1.0, 1.0, 1, changed, "benchmark"))
        return Plan(tuple(allocations), 1.0, 1.0, "script")

    @property
    def _target(self) -> Placement:
        return self._places[self._at]


@dataclass(frozen=True)
class Cost:
    """The cost of one move [s]."""

    path: str
    pause: float
    to_effect: float
    steps: dict[str, float]


class Bench:
    """polluxd's controller on a private cluster, with a scripted policy."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        config = parse_config(
            {
                "mode": "enforce",
                "database": {"url": cluster.database_url},
                "slurm": {"cluster": cluster.cluster_name, "conf": str(cluster.slurm_conf), "lease_s": 120},
                "cycle": {"interval_s": 1, "floor_s": 0.5, "poll_s": 0.25, "busy_poll_s": 0.25},
            },
            "benchmark",
        )
        self.slurm = ScontrolClient(conf=cluster.slurm_conf, timeout=config.slurm.timeout_s)
        self.store = Store(config.database.url, config.slurm.cluster)
        self.script = Script()
        self.failed: dict[int, str] = {}
        """Why moves failed, by move id."""
        reconciler = Reconciler(
            self.slurm,
            self.store,
            limits=MoveSettings(cooldown_s=_TRAINING_FOR),
            lease=config.slurm.lease_s,
            authorize=lambda: self.store.epoch or 0,
        )
        self.controller = Controller(config, self.slurm, self.store, reconciler, policy=self.script)

    def take(self, tour: Tour) -> list[Cost]:
        """Take one training through its whole tour, until it ends.

        Raises:
            RuntimeError: the training or polluxd did not behave as it should.
        """
        self.script.begin(tour.places)
        job_id = self._submit(tour)
        try:
            self._drive(tour, job_id)
            (self.folder / f"{tour.name}.end").touch()
            self._until_ended(job_id)
        finally:
            self.script.begin(())
            subprocess.run(["scancel", str(job_id)], env=self.cluster.client_environment, check=False)
        found = ledgers(self.folder / f"ledger-{tour.name}")
        lived = lineage(found)
        wrong = lived.faults(lived.counts[0])
        if lived.repeated or wrong:
            raise RuntimeError(f"{tour.name}: {lived.repeated} optimizer steps were made twice; {wrong}")
        moves = [m for m in self.store.moves(job_id) if m.source and m.step is Step.TRAINING]
        told = {cost["id"]: cost for cost in self.store.move_costs(job_id)}
        return [cost_of(move, told[move.id], found) for move in moves]

    def _submit(self, tour: Tour) -> int:
        (self.folder / f"ledger-{tour.name}").mkdir()
        path = self.folder / f"{tour.name}.sbatch"
        words = {"name": tour.name, "directive": tour.directive, "folder": self.folder, "root": ROOT}
        path.write_text(SCRIPT.format(bin=Path(sys.executable).parent, **words))
        return int(self.cluster.command("sbatch", "--parsable", str(path)))

    def _turn(self) -> None:
        if self.store.lead() is None:
            raise RuntimeError("another polluxd leads on a private database")
        self.controller.step()
        self.store.wait(0.25, for_news=True)

    def _drive(self, tour: Tour, job_id: int) -> None:
        """Run polluxd's loop until the script is at its end."""
        ended, since = 0, time.monotonic()
        while not self.script.done:
            self._turn()
            moves = self.store.moves(job_id)
            for move in moves:
                if move.step is Step.FAILED and move.id not in self.failed:
                    # The script goes on with the next move, and the row of this path lacks one move.
                    self.failed[move.id] = f"{move.path} to {move.target}: {move.detail}"
                    print(f"\nfailed: {self.failed[move.id]}", file=sys.stderr)
            count = sum(m.step is Step.TRAINING for m in moves)
            if count > ended:
                ended, since = count, time.monotonic()
                told = f"\r{tour.name}: {max(0, ended - 1)} of {len(tour.places) - 1} moves"
                print(told, end="", flush=True, file=sys.stderr)
            if time.monotonic() - since > _PATIENCE:
                raise RuntimeError(f"no move ended within {_PATIENCE:.0f} s{self._log(tour)}")
        print(file=sys.stderr)

    def _until_ended(self, job_id: int) -> None:
        end = time.monotonic() + _PATIENCE
        while not (job := self.slurm.jobs([job_id])[job_id]).state.finished:
            if time.monotonic() > end:
                raise RuntimeError(f"job {job_id} did not end within {_PATIENCE:.0f} s")
            self._turn()
        if job.state is not JobState.COMPLETED:
            raise RuntimeError(f"job {job_id} ended as {job.raw_state}")

    def _log(self, tour: Tour) -> str:
        text = (self.folder / f"{tour.name}.log").read_text(errors="replace")
        return f"; the training's log ends with:\n{text[-2000:]}"


def cost_of(move: Move, told: MoveCost, found: Sequence[Ledger]) -> Cost:
    """Return the cost of a move, by the steps that the ranks wrote down.

    The cost is split by the times that polluxd and the agent report for the move.
    """
    planned, over = move.times[Step.PLANNED], move.times[Step.TRAINING]
    if move.path != "resize":
        return Cost(move.path, _pause_of_job(found, planned, over), over - planned, told["steps"])
    pauses = [
        after.at - before.at
        for ledger in found
        for before, after in pairwise(ledger.done)
        if planned < after.at < over and before.ranks != after.ranks
    ]
    path = "resize grow" if move.grows else "resize shrink"
    stamps = sorted(move.times.items(), key=lambda item: item[1])
    waits = {str(step): at - before for (_, before), (step, at) in pairwise(stamps)}
    return Cost(path, max(pauses), over - planned, waits)


def _pause_of_job(found: Sequence[Ledger], planned: float, over: float) -> float:
    """Return the pause of a job whose processes were all replaced.

    It is the time from the last step of the old processes to the first step of the new ones [s].
    """
    begun = {x.launch for x in found if x.done and not x.joined and planned < x.done[0].at < over}
    (launch,) = begun
    before = [done.at for x in found if x.launch < launch for done in x.done]
    return min(x.done[0].at for x in found if x.launch == launch and x.done) - max(before)


def summary(costs: Sequence[Cost], moves: Sequence[Move]) -> list[dict[str, Any]]:
    """The contract of bench-out/realloc.json: a row per path, of all `moves` of the run."""
    rows = []
    for path in PATHS:
        mine = [cost for cost in costs if cost.path == path]
        if not mine:
            continue
        pauses = sorted(cost.pause for cost in mine)
        names = list(dict.fromkeys(name for cost in mine for name in cost.steps))
        rows.append(
            {
                "path": path,
                "n": len(mine),
                "pause_median_s": round(statistics.median(pauses), 3),
                "pause_p95_s": round(pauses[min(len(pauses) - 1, int(0.95 * len(pauses)))], 3),
                "lost_gpu_s": lost_gpu_s(moves) if path == "requeue" else 0.0,
                "decision_to_effect_median_s": round(statistics.median(cost.to_effect for cost in mine), 3),
                "steps": {
                    name: round(statistics.median(cost.steps.get(name, 0.0) for cost in mine), 3)
                    for name in names
                },
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]], failed: Sequence[str]) -> str:
    lines = [
        "# What a move costs",
        "",
        "Regenerate with `make bench-realloc`: real trainings of one to four ranks (gloo, digits) on a private Slurm",
        f"of 4 nodes, all of it on the {os.cpu_count()} cores of one machine. Pause: from the last optimizer step",
        "before to the first after, in the longest-waiting of the processes that live through the move; of the job,",
        "where none does. No optimizer step was made twice in any of these moves, and each sample counted once in each",
        "pass. Every requeue leads to two nodes, whose launchers import torch at the same time. The paper's",
        "constant is 30 s.",
        "",
        "| path | moves | pause, median [s] | 95 % [s] | decision to effect, median [s] |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        figures = (row["pause_median_s"], row["pause_p95_s"], row["decision_to_effect_median_s"])
        lines.append(f"| {row['path']} | {row['n']} | " + " | ".join(f"{x:.2f}" for x in figures) + " |")
    if failed:
        lines += ["", f"{len(failed)} further moves failed, and the training went on where it was:", ""]
        lines += [f"- {what}" for what in failed]
    for row in rows:
        resize = row["path"].startswith("resize")
        what = (
            "until each step was reached, training on except during the pause"
            if resize
            else "the pause by step"
        )
        lines += ["", f"`{row['path']}`, {what} (medians):", "", "| step | s |", "| --- | ---: |"]
        lines += [f"| {name} | {value:.2f} |" for name, value in row["steps"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--moves", type=int, default=20, help="by each path, at least")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pollux-realloc-", dir="/tmp"))
    folder.chmod(0o755)
    # Compile the agent once, like an installed package: Python may be told to write no bytecode at its starts.
    compileall.compile_dir(ROOT / "agent", quiet=1)
    try:
        with DevCluster(folder / "cluster", publish_interval_s=1.0, accounting=True) as cluster:
            bench = Bench(cluster, folder)
            try:
                tours = (in_place(arguments.moves), through_the_queue(arguments.moves))
                rows = summary([cost for tour in tours for cost in bench.take(tour)], bench.store.moves())
            finally:
                bench.store.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    page = markdown(rows, list(bench.failed.values()))
    print(page)
    if arguments.json:
        save(arguments.json, rows)
    if arguments.markdown:
        arguments.markdown.write_text(page)


if __name__ == "__main__":
    main()
