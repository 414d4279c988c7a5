"""A Hugging Face Trainer script as its users write it: its own save_steps, one batch size, no word of Pollux."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

OUT = sys.argv[1]
BATCH, MICRO = 32, 4
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Data(torch.utils.data.Dataset):
    """Points, and the sign of their sums."""

    def __init__(self) -> None:
        self.x = torch.randn(640, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[number], "labels": (self.x[number].sum() > 0).long()}


class Net(nn.Module):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Hold(TrainerCallback):
    """Waits at the checkpoint of step `HOLD_AT` until the job is ended, so that a slow machine misses no move."""

    def on_save(self, _arguments, state, _control, **_others) -> None:
        if os.environ.get("HOLD_AT") == str(state.global_step):
            time.sleep(600)


set_seed(1)
arguments = TrainingArguments(
    OUT,
    per_device_train_batch_size=MICRO,
    gradient_accumulation_steps=BATCH // MICRO // WORLD,
    num_train_epochs=2,
    save_steps=10,
    logging_steps=2,
    report_to=[],
    use_cpu=True,
    learning_rate=1e-2,
    disable_tqdm=True,
    remove_unused_columns=False,
    lr_scheduler_type="constant",
)
trainer = Trainer(Net(), arguments, train_dataset=Data(), callbacks=[Hold()])
last = get_last_checkpoint(OUT) if os.path.isdir(OUT) else None
print("resumes from", last, "on", WORLD, flush=True)
trainer.train(resume_from_checkpoint=last)
print("ended at", trainer.state.global_step, flush=True)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()  # a rank that leaves gloo's threads running may abort as it exits
