"""Classify digits with DistributedDataParallel under torchrun."""

import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH_PER_GPU = int(sys.argv[1]) if sys.argv[1:] else 20, 16

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
train, test = TensorDataset(x[:1400], y[:1400]), (x[1400:].to(device), y[1400:].to(device))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(train) // (BATCH_PER_GPU * world_size))

model = DistributedDataParallel(model)
sampler = DistributedSampler(train)
loader = DataLoader(train, BATCH_PER_GPU, sampler=sampler)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
if rank == 0:
    with torch.no_grad():
        accuracy = (model.module(test[0]).argmax(1) == test[1]).float().mean()
    print(f"accuracy {accuracy:.3f}")
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
