"""Train a small language model on the bytes of the standard library: AdamW, clipping; on a GPU in bfloat16."""

import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import pollux
from contrib.examples.emulated import Accelerator, arguments, finish

CUDA = torch.cuda.is_available()
WIDTH, LAYERS, BLOCK = (512, 8, 256) if CUDA else (32, 1, 32)
TRAINED = 2048
HELD_OUT = 1 << 15
"""Bytes at the text's end."""

args = arguments(__doc__, epochs=4, batch_size=32, max_batch_size=512, lr=1e-3)
device = torch.device("cuda" if CUDA else "cpu")
files = sorted(Path(os.__file__).parent.glob("*.py"))
data = torch.tensor(list(b"".join(file.read_bytes() for file in files)[-4_000_000:]), dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return TRAINED

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        start = i * 7919 % (len(data) - HELD_OUT - BLOCK - 1)
        window = data[start : start + BLOCK + 1].long()
        return window[:-1], window[1:]


class Model(nn.Module):
    """Logits [n, 256, BLOCK] of the next byte at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(BLOCK, device=x.device)
        h = self.token(x) + self.place(torch.arange(BLOCK, device=x.device))
        found: Tensor = self.head(self.layers(h, mask=mask, is_causal=True)).transpose(1, 2)
        return found


model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), fused=CUDA)
steps = args.epochs * math.ceil(TRAINED / args.batch_size)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / 20, 0.55 + 0.45 * math.cos(math.pi * min(step / steps, 1.0)))
)
job = pollux.attach(model, optimizer, scheduler, seed=args.seed)
loader = job.loader(Windows(), args.batch_size, max_batch_size=args.max_batch_size, per_gpu=args.per_gpu)
accelerator = Accelerator(args, job)


def loss_of(x: Tensor, y: Tensor) -> Tensor:
    accelerator.compute(len(y))
    with torch.autocast(device.type, torch.bfloat16, enabled=CUDA):
        return cross_entropy(job.model(x.to(device)), y.to(device))


for _ in job.epochs(args.epochs, statistical=True):
    for x, y in loader:
        job.step(lambda x=x, y=y: loss_of(x, y), clip=1.0)  # type: ignore[misc]
held = data[-(HELD_OUT // BLOCK) * BLOCK - 1 :].long()
pairs = (part.view(-1, BLOCK)[:64].to(device) for part in (held[:-1], held[1:]))
finish("text", args, job, TensorDataset(*pairs))
