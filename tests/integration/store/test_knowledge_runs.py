"""A second training begins with the first one's measurements.

The trainings run one after the other, through `attach` and a real Postgres.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pollux.goodput import step_time
from pollux.slurm_job.access import ADDRESSES, SUBMITTED

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[3]

TRAINING = """
import sys, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import pollux

torch.set_num_threads(1)
model = nn.Linear(4, 1)
job = pollux.attach(model, torch.optim.SGD(model.parameters(), lr=0.01), adaptive=False)
loader = job.loader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), 8)
until, deadline = sys.argv[1], time.monotonic() + 90
for epoch in job.epochs(10**6, statistical=True):
    for x, y in loader:
        time.sleep(0.01)
        with job.micro_batch():
            job.backward(nn.functional.mse_loss(job.model(x), y))
        if job.sync_gradients:
            job.optimizer.step()
            job.optimizer.zero_grad()
        done = job.params is not None or until != "fit" or time.monotonic() > deadline
        if done:
            break
    if done:
        break
while until == "heard" and job.profile.prior is None and time.monotonic() < deadline:
    time.sleep(0.05)
if until != "step":
    time.sleep(3.0)  # some reports' time: a busy machine may not get the last one out while closing
job.close()
"""


@pytest.fixture
def train(postgres: Any, access_for: Any, tmp_path: Path) -> Any:
    """Run the script as a Slurm job of this user would.

    The script inherits the token that the launcher has asked for.
    """
    (tmp_path / "train.py").write_text(TRAINING)

    def train(job_id: int, until: str, *, address: str = "") -> None:
        access = access_for(postgres, job_id, uid=os.getuid())
        place = replace(access.grant, gpu_type="t4").to_environment()
        place |= {ADDRESSES: address or access.addresses[0], SUBMITTED: "1", "SLURM_JOB_ID": str(job_id)}
        place |= {"POLLUX_CHECKPOINT_DIR": str(tmp_path / "checkpoints"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, str(tmp_path / "train.py"), until],
            env={**os.environ, **place, "PYTHONPATH": f"{ROOT}/agent"},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr

    return train


@pytest.mark.timeout(500)
def test_the_second_training_begins_with_the_fit_of_the_first(store: Any, train: Any) -> None:
    train(7, "fit")
    first = store.reports()[7]
    assert (first.gpu_type, first.prior_gpus, first.explored_gpus) == ("t4", 0, 1)
    assert first.params is not None
    assert first.data_wait is not None
    store.remember_fits()
    train(8, "heard")  # after one step: nothing of its own is measured yet
    second = store.reports()[8]
    assert (second.prior_gpus, second.explored_gpus) == (1, 0)
    assert second.params is not None
    assert float(step_time(second.params, 1, 1, 8)) == pytest.approx(float(step_time(first.params, 1, 1, 8)))
    assert set(second.params_by_type) == {"t4"}


@pytest.mark.timeout(300)
def test_without_a_gateway_the_same_script_trains(train: Any) -> None:
    train(7, "step", address="http://127.0.0.1:1")
