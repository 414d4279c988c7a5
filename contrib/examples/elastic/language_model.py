"""Train a small language model on a text's characters, as nanoGPT does.

python language_model.py TEXT [STEPS]
"""

import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import pollux

STEPS, BATCH, BLOCK = int(sys.argv[2]) if sys.argv[2:] else 2000, 16, 32
RATE, LOWEST, WARM_UP, EVERY = 3e-3, 3e-4, STEPS // 20, max(STEPS // 20, 1)

torch.manual_seed(0)
text = Path(sys.argv[1]).read_bytes()
data = torch.tensor(list(text))
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(BLOCK, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        h = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        return self.head(self.layer(h, src_mask=mask, is_causal=True))


def get_lr(step: float) -> float:
    if step < WARM_UP:
        return RATE * (step + 1) / (WARM_UP + 1)
    return LOWEST + 0.5 * (RATE - LOWEST) * (1 + math.cos(math.pi * min(step / STEPS, 1.0)))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return len(data) - BLOCK - 1

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return data[i : i + BLOCK], data[i + 1 : i + BLOCK + 1]


model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99))
job = pollux.attach(model, optimizer)
loader = job.loader(Windows(), BATCH, max_batch_size=512, per_gpu=(4, 128))
for _ in job.epochs(steps=STEPS):
    for x, y in loader:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(job.progress.steps)
        loss = job.step(
            lambda: cross_entropy(job.model(x.to(device)).flatten(0, 1), y.to(device).flatten()), clip=1.0
        )
        step = job.progress.optimizer_steps
        if job.is_main and job.sync_gradients and step % EVERY == 0:
            print(f"step {step}: loss {float(loss):.3f}")
