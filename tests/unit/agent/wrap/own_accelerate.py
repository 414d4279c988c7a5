"""A script on accelerate, which knows nothing of Pollux: a fixed batch over all ranks, its own checkpoints, a bar."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

out = Path(sys.argv[1])
STEPS, EVERY = 40, 15

torch.manual_seed(0)
inputs = torch.randn(160, 8)
data = TensorDataset(inputs, inputs @ torch.randn(8, 1))
model = nn.Linear(8, 1)
accelerator = Accelerator(
    cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=0.05), DataLoader(data, batch_size=16, shuffle=True)
)
step = max((int(folder.name.split("_")[1]) for folder in out.glob("checkpoint_*")), default=0)
if step:
    accelerator.load_state(str(out / f"checkpoint_{step}"))
    accelerator.print(f"resumes from checkpoint_{step} on {accelerator.num_processes}")
bar = tqdm(initial=step, total=STEPS, desc="Steps", mininterval=0.0, disable=not accelerator.is_main_process)
while step < STEPS:
    epoch, begin = divmod(step, len(loader))
    loader.set_epoch(epoch)
    for x, y in accelerator.skip_first_batches(loader, begin):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        bar.update()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"\nloss[{step}]={mean:.6f}")
        if step % EVERY == 0:
            accelerator.save_state(str(out / f"checkpoint_{step}"))
            if os.environ.get("HOLD_AT") == str(step):
                time.sleep(600)  # until the job is ended, so that a slow machine misses no move
