"""Trainers of the table, run as their users have them: moved once from one rank to two, beside a run that stays."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pollux.slurm_job.attempt import AgentSettings
from pollux.slurm_job.environment import Times
from pollux.wrap import wrapper as module
from pollux.wrap.wrapper import Contract, Wrapper

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("own_hf.py")
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
        self.it.child.kill()
        return True


def attempt(monkeypatch, folder, command, gpus, *, moved):
    monkeypatch.setattr(module, "Publisher", Publisher)
    monkeypatch.setattr(module, "PASSED_ON", ())
    known = SimpleNamespace(settings=AgentSettings(drain_wait=0.1), times=Times(launched_at=time.time()))
    contract = Contract(command, str(folder / "out/checkpoint-*/trainer_state.json"))
    visible = ",".join(map(str, range(gpus)))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": visible}
    it = Wrapper(contract, known, SimpleNamespace(job_id=7), folder, environ)
    it.publisher.it, it.publisher.moves = it, int(moved)
    return it, it.run()


def losses(printed):
    """By epoch; what was made again counts as it was at last."""
    return {
        float(found[2]): float(found[1])
        for found in re.finditer(r"'loss': '?([\d.]+)'?.*?'epoch': '?([\d.]+)'?", printed.decode())
    }


def test_a_hugging_face_trainer_moves_at_its_own_checkpoint_with_the_losses_of_a_fixed_run(
    tmp_path, monkeypatch, capfdbinary
):
    pytest.importorskip("transformers")
    alone = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "fixed")], capture_output=True, check=True
    )
    fixed = losses(alone.stdout)
    assert len(fixed) == 20
    out = str(tmp_path / "out")
    first, status = attempt(monkeypatch, tmp_path, [sys.executable, str(SCRIPT), out], 1, moved=True)
    assert status == 128 + 9, "Slurm has ended it after its checkpoint"
    assert first.report()["checkpointed"]
    again = [*TORCHRUN, "--nproc-per-node=2", str(SCRIPT), out]
    second, status = attempt(monkeypatch, tmp_path, again, 2, moved=False)
    assert status == 0
    printed = capfdbinary.readouterr().out
    assert re.search(rb"resumes from \S+checkpoint-\d+ on 2", printed)
    assert losses(printed) == pytest.approx(fixed, abs=1e-3)
    assert second.report()["progress"] == 2.0, "epochs"
