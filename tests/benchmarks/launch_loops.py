"""Compare `pollux run` with a loop over srun: the pause after a lost rank, and when a node leaves.

    python tests/benchmarks/launch_loops.py [--repeats 3] [--markdown FILE]

One training (contrib/chaos/counted.py, three ranks on three nodes of a private Slurm, gloo) runs under `pollux run`,
and under a loop in its batch script that starts `srun --kill-on-bad-exit=1` again and again: one task for each rank,
with RANK and WORLD_SIZE of Slurm's task, and MASTER_PORT of the turn. Under the loop the state is in a checkpoint's
file: no process lives on from one turn to the next that could hold it in memory.

- rank lost: kill -9 of rank 2. `pollux run` forks new ranks; srun ends the others, and the loop starts it again.
- node leaves: the loop's ranks get SIGTERM, write a checkpoint and end; srun starts on two nodes. (`pollux run` does
  this in place, by order of polluxd: `realloc.py` measures that.)

Pause: from the last step of any rank before to the first one after. Slurm, srun, torch and the files are real.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "agent")]

from contrib.chaos.ledger import ledgers  # noqa: E402
from contrib.devcluster import DevCluster  # noqa: E402
from contrib.devcluster.processes import wait_until  # noqa: E402

PATIENCE_S = 240.0
CASES = (("pollux run", "rank lost"), ("srun loop", "rank lost"), ("srun loop", "node leaves"))
LOOP = """\
turn=0; nodes=3
while :; do
    export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 10000 + turn)) WORLD_SIZE=$nodes GLOO_SOCKET_IFNAME=lo
    srun --nodes=$nodes --ntasks=$nodes --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=0 \\
        sh -c 'RANK=$SLURM_PROCID LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=$SLURM_PROCID exec {training}' &
    echo $! > {folder}/srun
    wait $! && exit 0
    turn=$((turn + 1))
    [ -e {folder}/leave ] && nodes=2
done
"""
JOB = """\
#!/bin/bash
export PYTHONPATH={root}:{root}/agent POLLUX_CHECKPOINT_DIR={folder}/checkpoints POLLUX_CHECKPOINT_INTERVAL=2
export OMP_NUM_THREADS=1
"""


def steps(folder: Path) -> dict[int, list[float]]:
    """When each step of each start ended, by the start."""
    found: dict[int, list[float]] = {}
    for each in ledgers(folder / "ledger"):
        found.setdefault(each.launch, []).extend(done.at for done in each.done)
    return {launch: sorted(times) for launch, times in found.items()}


def last_step(folder: Path, launch: int) -> int:
    return max(
        done.step for each in ledgers(folder / "ledger") if each.launch == launch for done in each.done
    )


def first_step(folder: Path, launch: int) -> int:
    return max(each.start for each in ledgers(folder / "ledger") if each.launch == launch)


def trained(folder: Path, start: int) -> bool:
    """Whether a start, by its number, has made 40 steps on each rank."""
    made = steps(folder)
    return len(made) > start and len(made[sorted(made)[start]]) >= 120


def pid_of(folder: Path, rank: int) -> int:
    (path,) = (folder / "ledger").glob(f"*-{rank}.txt")
    return int(path.read_text().split("\n", 1)[0].split()[-1])


def measure(cluster: DevCluster, launcher: str, ending: str) -> tuple[float, int]:
    """Return the pause in seconds, and the steps that were lost."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "ledger").mkdir()
        training = (
            f"{ROOT}/contrib/chaos/counted.py --passes 100000 --until {folder}/end --ledger {folder}/ledger"
        )
        script = folder / "job.sh"
        if launcher == "pollux run":
            body = f"exec {sys.executable} -m pollux.launcher.launch run --nproc 1 {training}\n"
        else:
            body = LOOP.format(folder=folder, training=f"{sys.executable} {training}")
        script.write_text(JOB.format(root=ROOT, folder=folder) + body)
        job = cluster.command(
            "sbatch", "--parsable", "--nodes=3", "--exclusive", f"--output={folder}/out", str(script)
        )
        try:
            wait_until(lambda: trained(folder, 0), PATIENCE_S, "a start")
            (before,) = steps(folder)
            if ending == "rank lost":
                os.kill(pid_of(folder, 2), signal.SIGKILL)
            else:
                (folder / "leave").touch()
                os.kill(int((folder / "srun").read_text()), signal.SIGTERM)
            wait_until(lambda: trained(folder, 1), PATIENCE_S, "a second start")
            made_steps = steps(folder)
            after = sorted(made_steps)[1]
            pause = made_steps[after][0] - made_steps[before][-1]
            return pause, last_step(folder, before) + 1 - first_step(folder, after)
        finally:
            (folder / "end").touch()
            cluster.command("scancel", job.strip())
            wait_until(
                lambda: not cluster.command("squeue", "--noheader", "--jobs", job.strip()).strip(),
                PATIENCE_S,
                "the job's end",
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)  # munged demands it
        with DevCluster(folder / "cluster", nodes=3, gpus_per_node=1, postgres=False) as cluster:
            for launcher, ending in CASES:
                found = [measure(cluster, launcher, ending) for _ in range(arguments.repeats)]
                pauses, lost = zip(*found, strict=True)
                figures = f"{statistics.median(pauses):.1f} | {max(pauses):.1f} | {max(lost)}"
                rows.append(f"| {ending} | {launcher} | {figures} |")
                print(rows[-1], flush=True)
    if arguments.markdown is not None:
        head = "| ending | launcher | pause, median [s] | longest [s] | steps lost, most |\n|---|---|---:|---:|---:|\n"
        arguments.markdown.write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
