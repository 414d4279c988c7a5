"""A rank is killed under `pollux run`: the launchers let the others go on."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.agent.launched_step import step

SCRIPT = """
import torch
from torch.nn.functional import mse_loss
import pollux

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(101, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True), torch.arange(101))
network = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
job = pollux.attach(network, optimizer, adaptive=False, checkpoint_dir=here / "checkpoints")
loader, used = job.loader(data, 8, num_workers=1), []
for epoch in job.epochs(2, passes=True):
    for inputs, targets, ids in loader:
        if WHERE == "pass" and job.progress.optimizer_steps == 5 and rank == LOST:
            os.kill(os.getpid(), signal.SIGKILL)  # its data loader's process lives on
        step, mine = job.progress.optimizer_steps, []
        if loader.data.local_samples:
            mine = [f"{loader.data.pass_index}.{i}" for i in ids.tolist()]
        with job.micro_batch():
            job.backward(mse_loss(job.model(inputs), targets))
        if job.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
            used += mine
            note("used", step=step, samples=mine)
    if WHERE == f"evaluation {epoch}" and rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
weights = [float(p.detach().double().sum()) for p in network.parameters()]
note("over", weights=weights, size=job.world.size)
"""


@pytest.mark.parametrize(
    ("nodes", "workers", "lost", "left", "where"),
    [
        (1, 3, 2, 2, "pass"),
        (2, 2, 3, 2, "pass"),
        (1, 3, 0, 2, "pass"),
        (2, 2, 0, 2, "evaluation 1"),
        (3, 1, 0, 2, "evaluation 0"),
    ],
)
def test_the_launchers_leave_the_others_alone(
    nodes: int, workers: int, lost: int, left: int, where: str, tmp_path: Path
) -> None:
    # A kill by the launcher of what nobody has gone on without would come after minutes.
    body = SCRIPT.replace("LOST", str(lost)).replace("WHERE", repr(where))
    with step(tmp_path, nodes, body, workers=workers) as launched:
        assert launched.statuses() == [0] * nodes, launched.output()
        output = launched.output()
    over = launched.log("over")
    assert [note["size"] for note in over] == [left] * left, output
    assert over[0]["weights"] == over[1]["weights"]
    assert len(launched.log("started")) == nodes * workers, "no process was started again"
    counts = Counter(sample for note in launched.log("used") for sample in note["samples"])
    assert set(counts.values()) == {1}
    assert len(counts) == 2 * 101
    assert "ranks were lost: the training goes on with 2" in output
    assert not [entry for entry in os.listdir(tmp_path) if entry.startswith("start-1")]
