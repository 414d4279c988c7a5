"""Pretrain a language model under FSDP2, by a loop of torchtitan's shape.

torchrun --nproc-per-node 2 pretraining.py text.txt
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

STEPS, BATCH, MICRO_BATCH, LENGTH = int(sys.argv[2]) if sys.argv[2:] else 1000, 32, 8, 32
FOLDER = Path("checkpoints")


class Text(IterableDataset):  # type: ignore[type-arg]
    """Sequences of bytes, and of the next bytes; a line's last byte predicts nothing."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        text = torch.tensor(list(Path(sys.argv[1]).read_bytes()))
        parts = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
        for part in itertools.islice(parts, dist.get_rank(), None, dist.get_world_size()):
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
loader = DataLoader(Text(), MICRO_BATCH, drop_last=True)
accumulation = BATCH // (MICRO_BATCH * dist.get_world_size())
batches = (batch for _ in itertools.count() for batch in loader)
begun = 0
if (FOLDER / ".metadata").exists():
    states = get_state_dict(model, optimizer)
    state = {"model": states[0], "optimizer": states[1], "scheduler": scheduler, "step": 0}
    dcp.load(state, checkpoint_id=FOLDER)  # the stream begins at its start
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    begun = state["step"]
for step in range(begun + 1, STEPS + 1):
    step_batches = [next(batches) for _ in range(accumulation)]
    tokens = torch.stack([(y != -100).sum() for _, y in step_batches]).sum().to(device)
    dist.all_reduce(tokens)
    for number, (x, y) in enumerate(step_batches):
        model.set_requires_gradient_sync(number == accumulation - 1)
        loss = cross_entropy(model(x.to(device)), y.to(device).flatten(), reduction="sum")
        (loss * dist.get_world_size() / tokens).backward()  # fully_shard divides by the ranks
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        states = get_state_dict(model, optimizer)
        state = {"model": states[0], "optimizer": states[1], "scheduler": scheduler, "step": step}
        dcp.save(state, checkpoint_id=FOLDER)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {float(loss / (y != -100).sum()):.3f}")
