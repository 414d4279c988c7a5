"""The jobs of a chaos run, and what their ledgers say of the samples that they trained on."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 1438
"""Of the digits that are trained on (contrib/examples/emulated.py)."""

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name} --nodes=1 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=1
#SBATCH --output={folder}/{name}.log --open-mode=append
#POLLUX max-gpus=2
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
    """One job: when it is submitted, in seconds from the start, and how many passes it is to make."""

    name: str
    at_s: float
    passes: int


def trainings(count: int, minutes: float, seed: int) -> list[Training]:
    """Jobs that arrive over the first two thirds, 20 to 60 passes each (45 to 135 s alone on a GPU)."""
    chance = random.Random(seed)
    at = sorted(chance.uniform(0.0, minutes * 40.0) for _ in range(count))
    return [Training(f"counted{i:02d}", at_s, chance.randint(20, 60)) for i, at_s in enumerate(at, 1)]


def submit(training: Training, folder: Path, environment: Mapping[str, str]) -> int | None:
    """sbatch it, once: an sbatch that timed out may have been carried out. None where slurmctld does not answer now."""
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
        )
    )
    (folder / f"ledger-{training.name}").mkdir(exist_ok=True)
    return _sbatch([str(script)], environment)


def submit_plain(folder: Path, environment: Mapping[str, str]) -> int | None:
    """A job that did not opt in, on one GPU for as long as a re-allocation takes several times over."""
    words = ["--gpus-per-node=1", f"--output={folder}/plain.log", "--wrap=sleep 120"]
    return _sbatch(words, environment)


def _sbatch(words: list[str], environment: Mapping[str, str]) -> int | None:
    said = _asked(["sbatch", "--parsable", *words], environment)
    return None if said is None else int(said.split(";")[0])


def _asked(command: list[str], environment: Mapping[str, str]) -> str | None:
    """What a command of Slurm's prints; None where it fails, or takes too long."""
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


@dataclass(frozen=True)
class Lineage:
    """What of a training lives on in its last state."""

    launches: int
    undone: int
    """Samples that were trained on and then undone, since a crash went back to a checkpoint before them."""
    counts: Counter[int]

    def faults(self, passes: int) -> list[str]:
        """What is not as it must be: each sample once per pass, and no other."""
        if not self.launches:
            return ["it never trained"]
        odd = {i: n for i in range(SAMPLES) if (n := self.counts[i]) != passes}
        foreign = sorted(set(self.counts) - set(range(SAMPLES)))
        told = (
            [f"{len(odd)} samples not seen {passes} times, such as {dict(list(odd.items())[:3])}"]
            if odd
            else []
        )
        return told + ([f"samples that do not exist: {foreign[:3]}"] if foreign else [])


def lineage(folder: Path) -> Lineage:
    """Read a job's ledger. A step counts where no later launch began at it or before it."""
    launches: dict[int, tuple[int, list[tuple[int, list[int]]]]] = {}
    for path in sorted(folder.glob("*.txt")):
        lines = path.read_text().split("\n")[:-1]  # the last one is empty, or was cut off by a kill
        if not lines:
            continue  # killed before its first step
        number, start = int(path.name.split("-")[0]), int(lines[0].split()[1])
        _, steps = launches.setdefault(number, (start, []))
        for line in lines[1:]:
            step, *indices = map(int, line.split())
            steps.append((step, indices))
    counts, undone, bound = Counter[int](), 0, sys.maxsize
    for number in sorted(launches, reverse=True):
        start, steps = launches[number]
        for step, indices in steps:
            if step < bound:
                counts.update(indices)
            else:
                undone += len(indices)
        bound = min(bound, start)
    return Lineage(len(launches), undone, counts)
