"""A script by Accelerate under the agent, as `test_contract` wants it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

accelerate = pytest.importorskip("accelerate")

from pollux.integrations.accelerate import attach  # noqa: E402
from tests.integration.integrations.inputs import data  # noqa: E402
from tests.integration.integrations.orders import Orders, run  # noqa: E402


def train(
    directory: Path,
    checkpoints: Path | None,
    orders: Orders,
    *,
    epochs: int = 3,
    adaptive: bool = False,
    exact: bool = False,
    precision: str = "no",
) -> dict[str, Any]:
    os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"  # the ranks agree after every step, however fast it was
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = (torch.optim.SGD if exact else torch.optim.AdamW)(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.99**n)
    optimizer = accelerator.prepare(optimizer)
    options = {"checkpoint_dir": checkpoints, "adaptive": adaptive, "measuring": {"every": 1}}
    job = attach(accelerator, model, optimizer, scheduler, **options)
    loader = job.loader(data(), 16, max_batch_size=64, per_gpu=(1, 32))
    kinds = set()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        with job.micro_batch():
            out = job.model(x)
            with accelerator.autocast():
                kinds.add(model[0](x).dtype)
            job.backward(mse_loss(out.float(), y))
        if job.sync_gradients:
            accelerator.clip_grad_norm_(job.model.parameters(), 10.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    found = run(job, loader, orders, epochs, step)
    weights = [p.detach().clone().numpy() for p in model.parameters()]
    return found | {"kinds": kinds, "schedule": scheduler.last_epoch, "weights": weights}


def assert_logged(rest: dict[str, Any]) -> None:
    """An Accelerate script logs what it wants."""


LAUNCHED = """
import accelerate
import torch
from pollux.integrations.accelerate import attach

torch.set_num_threads(1)
torch.manual_seed(0)
accelerator = accelerate.Accelerator(cpu=True)
network = torch.nn.Linear(6, 1)
optimizer = accelerator.prepare(torch.optim.SGD(network.parameters(), lr=0.01))
x = torch.randn(101, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True), torch.arange(101))
held_out = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=8))
job = attach(accelerator, network, optimizer, adaptive=False, checkpoint_dir=here / "checkpoints")
loader = job.loader(data, 8)
for epoch in job.epochs(EPOCHS, statistical=True):
    for a, b, ids in loader:
        trouble(job)
        mine = ids.tolist() if loader.data.local_samples else []
        samples = [(loader.data.pass_index, each) for each in mine]
        note("used", who=os.getpid(), step=job.progress.optimizer_steps, samples=samples)
        job.step(lambda: torch.nn.functional.mse_loss(job.model(a), b))
    seen = [accelerator.gather_for_metrics(ids) for _, _, ids in held_out]
    if enough(job):
        break
accelerator.wait_for_everyone()
main = accelerator.is_main_process, accelerator.is_local_main_process, accelerator.process_index == 0
note("over", seen=torch.cat(seen).tolist(), main=main, size=accelerator.num_processes,
     weights=[float(p.detach().double().sum()) for p in network.parameters()])
"""
