"""A plain script under torchrun adapts without a daemon.

It has two real ranks and writes its curves to TensorBoard.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EXAMPLES = 83

SCRIPT = f"""
import json, os, sys
from torch import distributed
from every_sample import Training
from pollux.goodput import BatchChoice
from pollux.integrations.tensorboard import Board

os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"  # the ranks agree after every step, however fast it was
training = Training(checkpoint_dir=sys.argv[1], measure_every=1)
job = training.job
assert job.adaptive and distributed.get_world_size() == 2
loader = job.loader(training.data({EXAMPLES}), 16, max_batch_size=64, per_gpu=(1, 16))
if job.is_main:
    job.training.advisor.close()  # its thread: here the test is the advisor
board = Board(job, sys.argv[2], every=1)

def propose(number, size):
    if job.is_main and number == 4:
        job.training.advisor.proposal = BatchChoice(16, 0)

training.run(loader, 4, propose)
board.close()
job.close()
if job.is_main:
    print(json.dumps({{"ids": training.used.ids, "steps": job.progress.optimizer_steps}}))
"""


def test_a_plain_script_under_torchrun(tmp_path: Path) -> None:
    script, runs = tmp_path / "train.py", tmp_path / "runs"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[3]
    arguments = [str(script), str(tmp_path / "checkpoints"), str(runs)]
    elastic = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *elastic, *arguments],
        env={
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("SLURM_", "POLLUX_"))
            },
            "PYTHONPATH": f"{root}/agent:{root}/tests/unit/agent",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert Counter(result["ids"]) == dict.fromkeys(range(EXAMPLES), 4)
    events = EventAccumulator(str(runs))
    events.Reload()
    names = events.Tags()["scalars"]
    wanted = ("batch_size", "gain", "progress", "goodput", "lr_factor", "epoch")
    assert {f"pollux/{name}" for name in wanted} <= set(names)
    sizes = events.Scalars("pollux/batch_size")
    steps = [event.step for event in sizes]
    assert steps == list(range(1, result["steps"] + 1))
    assert {event.value for event in sizes} >= {16.0, 32.0}
    progress = [event.value for event in events.Scalars("pollux/progress")]
    assert progress == sorted(progress)
