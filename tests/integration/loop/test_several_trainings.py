"""One batch script holds several trainings: each trains, and a move in the middle repeats and skips none.

Beside each Pollux job runs a control: the same batch script without polluxd's line, as a plain job, undisturbed.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Loop

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(600)]

SCRIPT = """
import json, os, sys, time, torch, pollux
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
result, seed, pace, slow = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
with open(result + "-spied", "a") as file:
    print(os.environ.get("MINE"), file=file)


def train(model, number):
    trained = [each for each in model.parameters() if each.requires_grad]
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(number))
    job = pollux.attach(model, torch.optim.SGD(trained, 0.05, momentum=0.9), adaptive=False)
    loader = job.loader(TensorDataset(x, x.sum(1, keepdim=True) * number), 16)
    steps = 0
    for _ in job.epochs(5):
        for x, y in loader:
            job.step(lambda: mse_loss(job.model(x), y))
            steps += 1
            # The one that the test interrupts waits for it, however slow the machine is.
            time.sleep(2 if number == slow and steps > 3 and not os.path.exists(result + "-go") else pace)
    job.close()
    weights = sum(float(each.detach().double().sum()) for each in model.parameters())
    found.append([steps, job.progress.optimizer_steps, weights])


found = []
for fold in range(2):
    torch.manual_seed(10 * seed + fold)
    train(torch.nn.Linear(6, 1), 10 * seed + fold)
torch.manual_seed(seed)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
for phase in range(2):  # the head first, then all layers
    model[0].requires_grad_(phase == 1)
    train(model, seed)
with open(f"{result}-{seed}.json", "a") as file:
    print(json.dumps(found), file=file)
"""
SEEDS = (1, 2, 3)


def body(loop: Loop, name: str, pace: float, slow: int = -1) -> str:
    """Seeds in a loop, each of two folds and two phases. Number `slow` is slow until `name`-go is there."""
    script = loop.folder / "trainings.py"
    script.write_text(SCRIPT)
    command = f"pollux run {script} {loop.folder}/{name} $seed {pace} {slow}"
    return f"export POLLUX_CHECKPOINT_INTERVAL=1\nfor seed in {' '.join(map(str, SEEDS))}; do {command}; done"


def lives(loop: Loop, name: str, seed: int) -> list[list[list[Any]]]:
    """What each start of a seed's script that ended well has found: steps in this life, in all, and the weights."""
    return [json.loads(line) for line in (loop.folder / f"{name}-{seed}.json").read_text().splitlines()]


def folders(loop: Loop, name: str) -> list[str]:
    """The folders of trainings that have a checkpoint, below the job's own."""
    found = (loop.folder / f"checkpoints-{name}").glob("*/**/checkpoint-*/state.pt")
    return sorted({"/".join(path.parts[:-2][len(loop.folder.parts) + 2 :]) for path in found})


def test_loops_over_seeds_folds_and_phases_go_on_where_a_move_interrupted_them(loop: Loop) -> None:
    control = loop.sbatch("control", body(loop, "control", 0.0), directive="")
    # As Open OnDemand submits: srun would give the ranks no variable of the batch script, so no report, no checkpoint.
    hostile = "SLURM_DISTRIBUTION=plane=2 SLURM_OPEN_MODE=x SLURM_CPU_BIND=map_cpu:99 SLURM_GRES=gpu:9 SQUEUE_FORMAT=%a"
    lines = f"export MINE=mine SLURM_TIME_FORMAT=relative {hostile}\n{body(loop, 'moved', 0.1, slow=21)}"
    moved = loop.sbatch("moved", lines, directive="#SBATCH --export=NONE\n#POLLUX max-gpus=1")
    loop.until(lambda: "run-2/attach-fold=1" in folders(loop, "moved"), why="the second seed's second fold")
    loop.until(lambda: moved in loop.store.reports(), why="a report")
    loop.park(moved)
    (loop.folder / "moved-go").touch()
    loop.completed(control)
    ended = loop.completed(moved)
    assert ended.restart_count >= 1
    assert set((loop.folder / "moved-spied").read_text().split()) == {"mine"}
    for seed in SEEDS:
        [[*expected]] = lives(loop, "control", seed)
        *_, last = lives(loop, "moved", seed)
        assert [each[1] for each in last] == [30] * 4
        assert [each[2] for each in last] == pytest.approx([each[2] for each in expected])
    # The first seed had ended: its start after the move trained nothing. The second went on within its second fold.
    assert [[each[0] for each in life] for life in lives(loop, "moved", 1)] == [[30] * 4, [0] * 4]
    [second] = lives(loop, "moved", 2)
    assert second[0][0] == 0
    assert 0 < second[1][0] < 30
    assert [each[0] for each in second[2:]] == [30, 30]
    runs = ["", "run-2", "run-3"]
    loops = ("fold=0", "fold=1", "phase=0", "phase=1")
    assert folders(loop, "moved") == sorted(
        f"{run}/attach-{each}".strip("/") for run in runs for each in loops
    )
