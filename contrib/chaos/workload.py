"""The jobs of a chaos run."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SMALL, LARGE = "max-gpus=2", "min-gpus=2 max-gpus=3"
"""What jobs ask of Pollux. On nodes with one GPU each, a SMALL job is often requeued, because it may have a
single rank. A LARGE job grows and shrinks in place."""

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name} --nodes=1 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=1
#SBATCH --output={folder}/{name}.log --open-mode=append
#POLLUX {directive}
export PATH={bin}:$PATH POLLUX_CHECKPOINT_DIR={folder}/checkpoints-{name}
cd {root}
# A killed rank fails the step: it is begun again from the newest checkpoint, as anybody's script would.
for attempt in 1 2 3 4 5 6 7 8; do
    pollux run contrib/chaos/counted.py --passes {passes} --ledger {folder}/ledger-{name} && exit 0
    sleep 1
done
exit 1
"""


@dataclass(frozen=True)
class Training:
    """One job: its submission time and its number of passes.

    The time is in seconds from the start of the run.
    """

    name: str
    at_s: float
    passes: int
    directive: str = SMALL


def trainings(count: int, minutes: float, seed: int) -> list[Training]:
    """Draw jobs that arrive over the first two thirds of the run.

    Each job makes 20 to 60 passes, which take 45 to 135 s alone on a GPU. Every other job is LARGE, starting with the
    first.
    """
    chance = random.Random(seed)
    at = sorted(chance.uniform(0.0, minutes * 40.0) for _ in range(count))
    return [
        Training(f"counted{i:02d}", at_s, chance.randint(20, 60), LARGE if i % 2 else SMALL)
        for i, at_s in enumerate(at, 1)
    ]


def submit(training: Training, folder: Path, environment: Mapping[str, str]) -> int | None:
    """Submit the job with sbatch, once; return None if slurmctld is silent.

    slurmctld may have carried out an sbatch that timed out. So look for a job of this name first.
    """
    known = _asked(
        ["squeue", "--noheader", "--format=%A", "--states=all", f"--name={training.name}"], environment
    )
    if known is None:
        return None
    if known.split():
        return int(known.split()[0])
    script = folder / f"{training.name}.sbatch"
    script.write_text(
        SCRIPT.format(
            name=training.name,
            folder=folder,
            bin=Path(sys.executable).parent,
            root=ROOT,
            passes=training.passes,
            directive=training.directive,
        )
    )
    (folder / f"ledger-{training.name}").mkdir(exist_ok=True)
    return _sbatch([str(script)], environment)


def submit_plain(folder: Path, environment: Mapping[str, str]) -> int | None:
    """Submit a job that did not opt in, on one GPU.

    It runs several times as long as a move takes.
    """
    words = ["--gpus-per-node=1", f"--output={folder}/plain.log", "--wrap=sleep 120"]
    return _sbatch(words, environment)


def _sbatch(words: list[str], environment: Mapping[str, str]) -> int | None:
    said = _asked(["sbatch", "--parsable", *words], environment)
    return None if said is None else int(said.split(";")[0])


def _asked(command: list[str], environment: Mapping[str, str]) -> str | None:
    """Return a Slurm command's output; None if it fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None
