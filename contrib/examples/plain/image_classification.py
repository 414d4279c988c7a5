"""Classify digits: validate after each epoch, keep the best weights."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset, random_split

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


best = 0.0
loader = DataLoader(train, BATCH, shuffle=True)
for epoch in range(EPOCHS):
    for x, y in loader:
        loss = cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    reached = accuracy(model)
    print(f"epoch {epoch}: accuracy {reached:.3f}")
    if reached > best:
        best = reached
        torch.save(model.state_dict(), "best.pt")
