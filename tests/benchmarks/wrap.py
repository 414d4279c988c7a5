"""Six wrapped trainings under polluxd, and under plain Slurm at the sizes that their users ask for.

    python -m tests.benchmarks.wrap [--seconds 180] [--json FILE] [--markdown FILE]

Two private clusters of 4 nodes with 4 emulated GPUs run the same six trainings at the same time. A trainer is one
process that knows nothing of Pollux (tests/integration/loop/own_loop.py): a step of K GPUs takes 0.01 s and a K-th of
the work. There are three kinds: one saves on TERM, one at its own rhythm alone, and one goes on at its own size alone.

- completion: from the submission to the trainer's end;
- idle: GPUs that no job holds, times seconds, until the last end;
- error: of the throughput that the wrapper's model predicts for a third size, once it has seen two;
- pause: from the last step before a move to the first after it. Steps that were made again count to it.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contrib.commit import COMMIT
from contrib.devcluster import DevCluster, Polluxd
from pollux.goodput import step_time
from pollux.wrap.sizes import Sizes
from polluxd.slurm.scontrol import ScontrolClient
from tests.benchmarks.results import ROOT, parser_of, save

NODES, GPUS_PER_NODE = 4, 4
BATCH = 96
OVERHEAD_S = 0.01
BIN = Path(sys.executable).parent
STOPPED_S = 2.0
"""Between two steps of one start it is never so long."""


@dataclass(frozen=True)
class Training:
    """One of the six."""

    name: str
    kind: str
    asked: int
    """GPUs."""
    length: float
    """Time at that size, as a part of --seconds."""

    @property
    def work(self) -> float:
        """Seconds of a step on one GPU."""
        return 0.1 * self.asked

    def steps(self, seconds: float) -> int:
        return round(seconds * self.length / (OVERHEAD_S + self.work / self.asked))


TRAININGS = (
    Training("a", "saves on TERM", 4, 1.3),
    Training("b", "saves in its rhythm", 4, 1.1),
    Training("c", "one size", 2, 1.0),
    Training("d", "saves on TERM", 2, 1.4),
    Training("e", "saves in its rhythm", 4, 1.0),
    Training("f", "one size", 4, 1.0),
)
OPTIONS = {"saves on TERM": ("--signal TERM", "--saves-on-term"), "one size": ("", "--rigid")}


@dataclass
class Outcome:
    """What came of the six trainings on one cluster."""

    completion: dict[str, float] = field(default_factory=dict)
    idle_gpu_s: float = 0.0
    pauses: list[float] = field(default_factory=list)
    repeated: int = 0
    errors: list[float] = field(default_factory=list)


def script(training: Training, folder: Path, seconds: float, *, wrapped: bool) -> str:
    out = folder / training.name
    options, own = OPTIONS.get(training.kind, ("", ""))
    nodes = -(-training.asked // GPUS_PER_NODE)
    directive = f"#POLLUX max-gpus={NODES * GPUS_PER_NODE} adaptive=no resize=requeue"
    if training.kind == "one size":
        directive += f" gpu-counts={training.asked}"
    return (
        f"#!/bin/bash\n#SBATCH --job-name={training.name} --nodes={nodes} --gpus-per-node={training.asked // nodes}\n"
        f"#SBATCH --ntasks-per-node=1 --output={out}.log --open-mode=append\n{directive if wrapped else ''}\n"
        f"export PATH={BIN}:$PATH POLLUX_GPUS={training.asked} POLLUX_CHECKPOINT_DIR={out}-kept\ncd {ROOT}\n"
        f"pollux wrap --checkpoints '{out}/step-*.json' --batch {BATCH} {options} -- "
        f"python tests/integration/loop/own_loop.py --out {out} --work {training.work} {own} "
        f"--steps {training.steps(seconds)}\n"
        f"date +%s.%N > {out}.ended\n"
    )


def played(cluster: DevCluster, folder: Path, seconds: float, *, wrapped: bool) -> Outcome:
    """Run the six to their ends."""
    found, slurm = Outcome(), ScontrolClient(conf=cluster.slurm_conf, timeout=20)
    begun, ids = {}, {}
    for training in TRAININGS:
        path = folder / f"{training.name}.sbatch"
        path.write_text(script(training, folder, seconds, wrapped=wrapped))
        begun[training.name] = time.time()
        ids[int(cluster.command("sbatch", str(path)).split()[-1])] = training
    before = time.time()
    while True:
        jobs = slurm.jobs(list(ids))
        now = time.time()
        # A requeued job has the finished state of no attempt: what has ended has left its mark.
        held = sum(sum(job.gpus_per_node_held.values()) for job in jobs.values() if not job.state.finished)
        found.idle_gpu_s += (NODES * GPUS_PER_NODE - held) * (now - before)
        before = now
        if all(job.state.finished for job in jobs.values()):
            break
        if now > min(begun.values()) + 20 * seconds + 300:
            raise SystemExit(f"not ended: {[job.raw_state for job in jobs.values()]}; see {folder}")
        time.sleep(0.5)
    for training in TRAININGS:
        ended = folder / f"{training.name}.ended"
        found.completion[training.name] = float(ended.read_text()) - begun[training.name]
        take_steps(training, folder, found)
        found.errors += errors(folder / f"{training.name}-kept")
    return found


def take_steps(training: Training, folder: Path, found: Outcome) -> None:
    """Read pauses and repeated steps off what a trainer wrote down: step, GPUs, time of each step."""
    rows = [line.split() for line in (folder / training.name / "made.txt").read_text().splitlines()]
    reached, last, paused_from = 0, (0, float(rows[0][2])), None
    for step, at in ((int(step), float(at)) for step, _, at in rows):
        if paused_from is None and (step <= last[0] or at - last[1] > STOPPED_S):
            paused_from = last[1]
        if step <= reached:
            found.repeated += 1
        else:
            if paused_from is not None:
                found.pauses.append(at - paused_from)
                paused_from = None
            reached = step
        last = step, at


def errors(folder: Path) -> list[float]:
    """Compare what the model predicted for the third and later sizes with their measured step times."""
    found = []
    for file in folder.rglob("wrap-*.json"):
        rows = list(Sizes.read(file).rows.items())
        for known in range(2, len(rows)):
            (nodes, gpus, batch), seconds = rows[known]
            params = Sizes(dict(rows[:known])).fitted()
            assert params is not None
            found.append(seconds / float(step_time(params, nodes, gpus, batch / gpus)) - 1.0)
    return found


def on_a_cluster(seconds: float, outcomes: dict[bool, Outcome], *, wrapped: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-wrap-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # Postgres has a user of its own
        jobs = folder / "jobs"
        jobs.mkdir()
        with DevCluster(
            folder / "cluster", nodes=NODES, gpus_per_node=GPUS_PER_NODE, lease_s=60, publish_interval_s=5.0
        ) as cluster:
            daemon = (
                Polluxd(cluster, jobs, cycle={"interval_s": 5.0, "busy_poll_s": 0.5}) if wrapped else None
            )
            if daemon is not None:
                daemon.start()
            try:
                outcomes[wrapped] = played(cluster, jobs, seconds, wrapped=wrapped)
            finally:
                if daemon is not None:
                    daemon.stop()


def page(outcomes: dict[bool, Outcome], seconds: float, load: float) -> str:
    plain, ours = outcomes[False], outcomes[True]
    rows = "".join(
        f"| {t.name} | {t.kind} | {t.asked} | {plain.completion[t.name]:.0f} | {ours.completion[t.name]:.0f} |\n"
        for t in TRAININGS
    )
    means = [statistics.mean(one.completion.values()) for one in (plain, ours)]
    pauses, wrong = ours.pauses, [100 * abs(error) for error in ours.errors]
    return (
        "# Trainers with a loop of their own, measured\n\n"
        "Regenerate with `make bench-wrap`: six trainings of three kinds on 16 emulated GPUs, under polluxd and\n"
        f"under plain Slurm at the sizes that their users ask for. Commit {COMMIT}; both clusters at the same time on\n"
        f"one machine of {os.cpu_count()} cores with a load of {load:.1f}; `--seconds {seconds:g}`, so that a start\n"
        "of a few seconds weighs more than in a training of hours.\n\n"
        "| training | kind | GPUs asked for | plain Slurm, completion [s] | polluxd, completion [s] |\n"
        f"| --- | --- | ---: | ---: | ---: |\n{rows}"
        f"| mean | | | {means[0]:.0f} | {means[1]:.0f} ({100 * (means[1] / means[0] - 1):+.0f} %) |\n"
        f"| idle GPU seconds | | | {plain.idle_gpu_s:.0f} | {ours.idle_gpu_s:.0f} |\n\n"
        f"Without training per move: {_spread(pauses, 's')}. Steps made again: {ours.repeated}.\n\n"
        f"Throughput at the third and later sizes against the model of those before: {_spread(wrong, '% off')}.\n"
    )


def _spread(values: list[float], unit: str) -> str:
    if not values:
        return "none was seen"
    return f"median {statistics.median(values):.1f} {unit}, at most {max(values):.1f}, of {len(values)}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="time of a training at its user's size")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    outcomes: dict[bool, Outcome] = {}
    threads = [
        threading.Thread(target=on_a_cluster, args=(options.seconds, outcomes), kwargs={"wrapped": wrapped})
        for wrapped in (False, True)
    ]
    for thread in threads:
        thread.start()
    load: list[float] = []
    while any(thread.is_alive() for thread in threads):
        load.append(os.getloadavg()[0])
        time.sleep(5.0)
    if len(outcomes) < 2:
        raise SystemExit("a cluster did not come to its end")
    text = page(outcomes, options.seconds, statistics.mean(load))
    print(text)
    figures: dict[str, Any] = {
        "plain" if not wrapped else "polluxd": vars(one) for wrapped, one in outcomes.items()
    }
    if options.json:
        save(options.json, {"commit": COMMIT, "load": statistics.mean(load), **figures})
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
