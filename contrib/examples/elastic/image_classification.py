"""Classify digits: validate after each epoch, keep the best weights."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset, random_split

import pollux

EPOCHS, BATCH = int(sys.argv[1]) if sys.argv[1:] else 20, 32

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
train, validation = random_split(TensorDataset(x, y), [0.8, 0.2])
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(train) // BATCH)


@torch.no_grad()
def accuracy(network: nn.Module) -> float:
    network.eval()
    x, y = (part.to(device) for part in validation[:])
    right = (network(x).argmax(1) == y).float().mean()
    network.train()
    return float(right)


kept = {"best": 0.0}  # in the checkpoints too
job = pollux.attach(model, optimizer, scheduler, state=kept)
loader = job.loader(train, BATCH, max_batch_size=512, per_gpu=(8, 256))
for epoch in job.epochs(EPOCHS):
    for x, y in loader:
        job.step(lambda: cross_entropy(job.model(x.to(device)), y.to(device)), clip=1.0)
    reached = accuracy(model)
    if job.is_main:
        print(f"epoch {epoch}: accuracy {reached:.3f}")
    if reached > kept["best"]:
        kept["best"] = reached
        if job.is_main:
            torch.save(job.module.state_dict(), "best.pt")
