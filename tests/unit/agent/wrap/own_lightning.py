"""A Lightning script as its users write it: a fixed batch over all ranks, checkpoints by step, its own bar."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

out, ranks = Path(sys.argv[1]), int(os.environ.get("POLLUX_GPUS", "1"))
BATCH, EPOCHS = 16, 4

lightning.seed_everything(0, verbose=False)
inputs = torch.randn(160, 8)
data = TensorDataset(inputs, inputs @ torch.randn(8, 1))


class Module(lightning.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch, _number):
        x, y = batch
        loss = nn.functional.mse_loss(self.layer(x), y)
        mean = self.all_gather(loss.detach()).mean().item()
        if self.trainer.is_global_zero:
            print(f"\nloss[{self.global_step + 1}]={mean:.6f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Hold(Callback):
    """Waits behind the checkpoint of step `HOLD_AT` until the job is ended, so that a slow machine misses no move."""

    def on_train_epoch_start(self, trainer, _module) -> None:
        if os.environ.get("HOLD_AT") == str(trainer.global_step) != "0":
            time.sleep(600)


last = out / "last.ckpt"
if last.exists():
    print(f"resumes from {last} on {ranks}", flush=True)
# The bar of `rich`, where that is installed, draws its steps by the cursor.
callbacks = [
    TQDMProgressBar(),
    ModelCheckpoint(out, save_last=True, every_n_train_steps=10, save_on_train_epoch_end=False),
    Hold(),
]
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=ranks,
    max_epochs=EPOCHS,
    callbacks=callbacks,
    logger=False,
    plugins=[LightningEnvironment()],
    use_distributed_sampler=False,  # Lightning's own shuffles as soon as there are two ranks
    enable_model_summary=False,
)
rank = int(os.environ.get("LOCAL_RANK", "0"))
loader = DataLoader(data, BATCH // ranks, sampler=DistributedSampler(data, ranks, rank, shuffle=False))
trainer.fit(Module(), loader, ckpt_path=last if last.exists() else None)
