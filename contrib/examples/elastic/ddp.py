"""Classify digits with DistributedDataParallel under torchrun."""

import math
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

import pollux

EPOCHS, BATCH = int(sys.argv[1]) if sys.argv[1:] else 20, 32  # over all GPUs: 16 on each of 2

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
train, test = TensorDataset(x[:1400], y[:1400]), (x[1400:].to(device), y[1400:].to(device))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * math.ceil(len(train) / BATCH))

job = pollux.attach(model, optimizer, scheduler)
loader = job.loader(train, BATCH, max_batch_size=512)
for _ in job.epochs(EPOCHS):
    for x, y in loader:
        loss = job.step(lambda x=x, y=y: cross_entropy(job.model(x.to(device)), y.to(device)))
if job.is_main:
    with torch.no_grad():
        accuracy = (job.module(test[0]).argmax(1) == test[1]).float().mean()
    print(f"accuracy {accuracy:.3f}")
    torch.save(job.module.state_dict(), "model.pt")
