"""A lab's own DDP loop under torchrun, which knows nothing of Pollux.

It keeps its batch size over all ranks, has its own checkpoints, and prints each step's loss and its first sample.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--until", type=Path, help="end at the next checkpoint once this file is there")
options = parser.parse_args()

BATCH, SAMPLES, SAVE_EVERY = 48, 2000, 30
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(SAMPLES, 16)
targets = (inputs @ torch.randn(16, 4)).argmax(1)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
options.out.mkdir(exist_ok=True)
begin = 0
if saved := sorted(options.out.glob("step-*.pt")):
    found = torch.load(saved[-1], weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    begin = found["step"]
net = nn.parallel.DistributedDataParallel(model) if world > 1 else model


def save(step: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, options.out / "tmp")
    (options.out / "tmp").rename(options.out / f"step-{step:06d}.pt")


for step in range(begin, options.steps):
    time.sleep(0.4 / world)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))[:BATCH]
    mine = order.chunk(world)[rank]
    loss = nn.functional.cross_entropy(net(inputs[mine]), targets[mine])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    if world > 1:
        dist.all_reduce(mean)
        mean /= world
    if rank == 0:
        print(f"step {step + 1}: loss {mean:.6f} sample {int(order[0])} on {world}", flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == options.steps:
            save(step + 1)
    if (step + 1) % SAVE_EVERY == 0 and options.until is not None:
        ends = torch.tensor([float(options.until.exists())])
        if world > 1:
            dist.all_reduce(ends)
        if ends:
            break
if world > 1:
    dist.destroy_process_group()
