"""Trainers of the table, run as their users have them: moved once from one rank to two, beside a run that stays.

transformers, Lightning and accelerate are the real ones; nanoGPT, torchtitan and DeepSpeed are loops in their shape.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pollux.slurm_job.attempt import AgentSettings
from pollux.slurm_job.environment import Times
from pollux.wrap import wrapper as module
from pollux.wrap.sizes import UNKNOWN_BATCH, Sizes
from pollux.wrap.trainers import TRAINERS
from pollux.wrap.wrapper import Contract, Wrapper

pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


class Publisher:
    """Orders a move at the first step; ends the job at once when its checkpoint is acknowledged, as Slurm does."""

    def __init__(self, _access, collect, drain, _resize):
        self.collect, self.order, self.it, self.moves = collect, drain, None, 0

    def start(self):
        pass

    close = start

    def wake(self):
        if self.moves and self.it.steps.first_at is not None and self.it.order is None:
            self.it.order = self.moves, time.monotonic()

    def acknowledge(self, _move, _stamps):
        self.moves = 0
        self.it.child.signal_trainer(signal.SIGKILL, {})
        return True


def attempt(monkeypatch, folder, command, gpus, *, hold_at, checkpoints, number=0):
    monkeypatch.setattr(module, "Publisher", Publisher)
    monkeypatch.setattr(module, "PASSED_ON", ())
    known = SimpleNamespace(settings=AgentSettings(drain_wait=0.1), times=Times(launched_at=time.time()))
    contract = Contract(command, f"{folder}/out/{checkpoints}")
    visible = ",".join(map(str, range(gpus)))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": visible, "HOLD_AT": str(hold_at)}
    it = Wrapper(contract, known, SimpleNamespace(job_id=7, attempt=number), folder, environ)
    it.publisher.it, it.publisher.moves = it, int(bool(hold_at))
    return it, it.run()


KINDS = {
    "transformers": (
        "own_hf.py",
        "checkpoint-*/trainer_state.json",
        r"'loss': '?(?P<loss>[\d.]+)'?.*?'epoch': '?(?P<at>[\d.]+)'?",
        (20, 2.0),
        10,
    ),
    "accelerate": (
        "own_accelerate.py",
        "checkpoint_*/random_states_0.pkl",
        r"loss\[(?P<at>\d+)\]=(?P<loss>[\d.]+)",
        (40, 40.0),
        15,
    ),
    "lightning": ("own_lightning.py", "last.ckpt", r"loss\[(?P<at>\d+)\]=(?P<loss>[\d.]+)", (40, 4.0), 10),
}
"""By package: the script, what a checkpoint completes, the line of a loss; lines, and the last one's step; the step
of the first checkpoint, which the moved run waits at: none may be half written when it is ended."""


@pytest.mark.slow
@pytest.mark.parametrize("package", KINDS)
def test_a_script_moves_at_its_own_checkpoint_with_the_losses_of_a_fixed_run(
    tmp_path, monkeypatch, capfdbinary, package
):
    pytest.importorskip(package)
    name, checkpoints, line, (lines, last), hold_at = KINDS[package]
    script = str(HERE / name)

    def losses(printed):
        """By epoch or step; what was made again counts as it was at last."""
        found = re.finditer(line, printed.decode())
        return {float(one["at"]): float(one["loss"]) for one in found}

    def run(command, gpus, hold_at=0):
        number = 0 if hold_at else 1
        return attempt(
            monkeypatch, tmp_path, command, gpus, hold_at=hold_at, checkpoints=checkpoints, number=number
        )

    alone = subprocess.run([sys.executable, script, str(tmp_path / "fixed")], capture_output=True, check=True)
    fixed = losses(alone.stdout)
    assert len(fixed) == lines
    out = str(tmp_path / "out")
    first, status = run([sys.executable, script, out], 1, hold_at)
    assert status == 128 + 9, "Slurm has ended it after its checkpoint"
    assert first.report()["checkpointed"]
    launch = [sys.executable] if package == "lightning" else [*TORCHRUN, "--nproc-per-node=2"]
    second, status = run([*launch, script, out], 2)  # Lightning starts its ranks itself
    assert status == 0
    printed = capfdbinary.readouterr().out
    assert re.search(rb"resumes from \S+ on 2", printed)
    assert losses(printed) == pytest.approx(fixed, abs=1e-3)
    assert second.report()["progress"] == last


@pytest.mark.parametrize(
    ("shape", "trainer", "refuses"),
    [
        ("nanogpt", "nanoGPT", ""),
        ("torchtitan", "torchtitan", "cannot resume after changing the effective data-parallel degree"),
        ("deepspeed", "DeepSpeed", "checkpoint used a DP world size of 1 but the current is 2"),
    ],
)
def test_a_loop_in_its_trainers_shape_moves_or_stays_at_its_size(
    tmp_path, monkeypatch, capfdbinary, shape, trainer, refuses
):
    """By the row of the table: its lines and its checkpoints. One that refuses is parked, and goes on where it was."""
    script = [sys.executable, str(HERE / "own_shapes.py"), shape]
    fixed = subprocess.run(
        [*script, str(tmp_path / "fixed")], capture_output=True, check=True
    ).stdout.splitlines()[-1]
    requeued = []

    def scontrol(*words, **_more):
        requeued.append(words)
        return subprocess.CompletedProcess(words, 1, "", "")

    monkeypatch.setattr(module.slurm_commands, "run", scontrol)
    row = next(row for row in TRAINERS if row.name == trainer)

    def run(gpus, number, hold_at=0):
        command, checkpoints = [*script, str(tmp_path / "out")], row.checkpoints.partition("/")[2]
        return attempt(
            monkeypatch, tmp_path, command, gpus, hold_at=hold_at, checkpoints=checkpoints, number=number
        )

    it, status = run(1, 0, hold_at=20)
    assert status == 128 + 9, "Slurm has ended it after its checkpoint"
    assert it.steps.line == row.line
    sizes = Sizes.read(it.file)
    sizes.rows.setdefault((1, 1, UNKNOWN_BATCH), 0.02)  # lines that are read at once measure nothing
    sizes.write(it.file)
    it, status = run(2, 1)
    assert status == bool(refuses)
    if refuses:
        assert [words[:2] for words in requeued] == [("scontrol", "requeue")]
        assert refuses in Sizes.read(it.file).barred()
        it, status = run(1, 2)
        assert status == 0
    assert it.report()["progress"] == 40
    assert capfdbinary.readouterr().out.splitlines()[-1] == fixed
