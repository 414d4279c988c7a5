"""Resize in place under `pollux run`.

The launchers, the ranks and a companion run as processes of their own.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agent.launched_step import PATIENCE_S, step

SCRIPT = """
import logging
import torch
from torch.nn.functional import mse_loss
import pollux
from pollux.resize import resizer as resize
from pollux.resize.capability import ResizeCapability
from pollux.scheduler.orders import ResizeOrder

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
ORDERS, MOVES = {orders!r}, {moves}
resize.capability_of = lambda *_: ResizeCapability.IN_PLACE
os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(101, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(101, 1), torch.arange(101))
network = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
where = None if os.environ.get("POLLUX_COMPANION") else here / "checkpoints"
job = pollux.attach(network, optimizer, adaptive=True, measure_every=1, checkpoint_dir=where)
model, used = job.model, []

class Line:
    def acknowledge(self, move, payload):
        note("acknowledged", id=move)
        return True
    def wake(self): ...
    def close(self): ...

if not os.environ.get("POLLUX_COMPANION"):
    job.coordinator.line.connect(Line())
loader = job.loader(data, 8, max_batch_size=16, per_gpu=(2, 8))
resizer, since = job.coordinator.resizer, 0
try:
    for _ in job.epochs(1000):
        deadline = time.monotonic() + 90
        for inputs, targets, ids in loader:
            assert time.monotonic() < deadline
            if loader.data.local_samples:
                used += [f"{{loader.data.pass_index}}.{{i}}" for i in ids.tolist()]
            with job.micro_batch():
                job.backward(mse_loss(model(inputs), targets))
            if job.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
                since += 1
            if job.is_main and ORDERS and not resizer.state.first_step_of and not resizer.state.answering and since > 8:
                since = 0
                job.coordinator.inbox.put(ResizeOrder(ORDERS.pop(0)))
            time.sleep(0.002)
            if job.world.size == 2 and job.coordinator.groups.generation == MOVES:
                # A pass to the end among the new ranks.
                ended = ended if "ended" in globals() else loader.data.pass_index + 2
                if loader.data.pass_index >= ended:
                    break
        else:
            continue
        break
finally:
    weights = [float(p.detach().double().sum()) for p in network.parameters()]
    note("used", samples=used, weights=weights, size=job.world.size, factors=list(job.lr_factors),
         steps=job.progress.optimizer_steps, report=job.report() if rank == 0 else None)
"""

SBATCH = """#!/bin/sh
cat > {folder}/submitted
env > {folder}/environment
echo "$@" > {folder}/options
echo 4711
"""


def order(number: int, nodes: str, kind: str, path: str = "resize") -> dict[str, Any]:
    return {"id": number, "path": path, "kind": kind, "nodes": nodes.split(), "gpus_per_node": 1}


def wait_for(path: Path, launched: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, launched.output()
        time.sleep(0.02)


@pytest.mark.slow
def test_a_node_leaves_and_another_comes_while_rank_0_trains_on(tmp_path: Path) -> None:
    orders = [order(7, "n0", "shrink"), order(8, "n0 c0", "grow") | {"nonce": "5eed"}]
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(SBATCH.format(folder=tmp_path))
    sbatch.chmod(0o755)
    around = {"SLURM_JOB_NAME": "mine", "SLURM_JOB_PARTITION": "gpu", "SLURM_NTASKS": "2", "MINE": "kept"}
    body = SCRIPT.format(orders=orders, moves=2)
    with step(tmp_path, 2, body, workers=1, **around) as base:
        wait_for(tmp_path / "options", base)
        directive = r"#POLLUX companion-of=\d+ attempt=0 move=8 nonce=5eed"
        submitted = (tmp_path / "submitted").read_text()
        assert re.search(rf"^{directive}$", submitted, re.MULTILINE)
        file = tmp_path / "checkpoints" / "companion-8.json"
        assert submitted.rstrip().endswith(f"-m pollux.launcher.launch run --companion {file}")
        elsewhere = tmp_path / "companion"
        elsewhere.mkdir()
        # The companion's rank may end long after rank 0 on a busy machine.
        with step(
            elsewhere, 1, "", "--companion", str(file), settings="sibling=60", SLURMD_NODENAME="c0"
        ) as companion:
            assert base.statuses() == [0, 0], base.output() + companion.output()
            assert companion.statuses() == [0], companion.output()
            print(base.output() + companion.output())
    options = (tmp_path / "options").read_text().split()
    assert {"--parsable", "--no-requeue", "--nodes=1", "--gres=gpu:1", "--partition=gpu"} <= set(options)
    assert "--job-name=mine.companion" in options
    environment = dict(
        line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line
    )
    assert environment["MINE"] == "kept"
    foreign = ("SLURM_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "POLLUX_", "CUDA_VISIBLE", "GLOO_")
    assert not [name for name in environment if name.startswith(foreign)]

    used = {note["node"]: note for note in base.log("used")}
    assert used["n1"]["size"] == 2, "it has left the world that it knew"
    assert (used["n0"]["size"], used["c0"]["size"]) == (2, 2)
    assert used["n0"]["weights"] == used["c0"]["weights"]
    assert used["n0"]["factors"] == used["c0"]["factors"]
    assert used["n0"]["steps"] == used["c0"]["steps"]
    assert len(base.log("started")) == 3, "rank 0 lives on"
    report = used["n0"]["report"]
    assert (report["resized"], report["gpus"], report["resize"]) == (8, 2, "in-place")
    assert [note["id"] for note in base.log("acknowledged")] == [7]
    counts = Counter(sample for note in used.values() for sample in note["samples"])
    assert max(counts.values()) == 1
    passes = max(int(sample.partition(".")[0]) for sample in counts)
    assert all(counts[f"{number}.{i}"] == 1 for number in range(passes) for i in range(101))
