"""Pretrain a language model under FSDP2, by a loop of torchtitan's shape.

pollux run --nproc 2 pretraining.py text.txt
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

import pollux

STEPS, BATCH, MICRO_BATCH, LENGTH = int(sys.argv[2]) if sys.argv[2:] else 1000, 32, 8, 32


class Text(IterableDataset):  # type: ignore[type-arg]
    """Sequences of bytes, and of the next bytes; a line's last byte predicts nothing."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        text = torch.tensor(list(Path(sys.argv[1]).read_bytes()))
        parts = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
        for part in parts:
            yield part[:-1], part[1:].where(part[:-1] != ord("\n"), -100)


class Model(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x).float().flatten(0, 1)


dist.init_process_group()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
torch.manual_seed(0)
model = Model().to(device)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 20, 1 - n / STEPS))
job = pollux.attach(model, optimizer, scheduler)
length = Path(sys.argv[1]).stat().st_size // (LENGTH + 1)
loader = job.loader(Text(), BATCH, max_batch_size=256, per_gpu=(2, MICRO_BATCH), length=length)
for _ in job.epochs(steps=STEPS):
    for x, y in loader:
        tokens = (y != -100).sum()
        loss = job.step(
            lambda: cross_entropy(job.model(x.to(device)), y.to(device).flatten(), reduction="sum"),
            clip=1.0,
            weight=tokens,
        )
    if job.is_main:
        print(f"step {job.progress.optimizer_steps}: loss {float(loss / tokens):.3f}")
