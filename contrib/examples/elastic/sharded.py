"""Train a model under fully_shard (FSDP2).

pollux run --nproc 2 sharded.py
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import pollux

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
job = pollux.attach(model, optimizer)
loader = job.loader(data, BATCH, max_batch_size=512, per_gpu=(4, 128))
for epoch in job.epochs(EPOCHS):
    for x, y in loader:
        loss = job.step(lambda: mse_loss(job.model(x.to(device)), y.to(device)))
    if job.is_main:
        print(f"epoch {epoch}: loss {float(loss):.4f}")
