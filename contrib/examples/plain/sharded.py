"""Train a model under fully_shard (FSDP2).

torchrun --nproc-per-node 2 sharded.py
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = int(sys.argv[1]) if sys.argv[1:] else 20, 32

dist.init_process_group()
torch.manual_seed(0)
x = torch.randn(2048, 16)
data = TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)).to(
    device
)
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
sampler = DistributedSampler(data)
loader = DataLoader(data, BATCH // dist.get_world_size(), sampler=sampler)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {float(loss):.4f}")
