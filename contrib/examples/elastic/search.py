"""Search a learning rate and a width for digits: one trial, as a job of a search; alone, with the defaults."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

import pollux

EPOCHS, BATCH = 10, 32

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
train, validation = random_split(TensorDataset(x, y), [0.8, 0.2])


@torch.no_grad()
def accuracy(network: nn.Module) -> float:
    x, y = validation[:]
    return float((network(x).argmax(1) == y).float().mean())


trial = pollux.trial(maximize=True)
lr = trial.suggest_float("lr", 1e-4, 1.0, log=True, default=0.05)
width = trial.suggest_int("width", 8, 128, log=True)
model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
job = pollux.attach(model, optimizer)
loader = job.loader(train, BATCH, max_batch_size=512, per_gpu=(8, 256))
for _ in job.epochs(EPOCHS, statistical=True):
    for x, y in loader:
        job.step(lambda: cross_entropy(job.model(x), y))
    trial.report(accuracy(job.module))
if job.is_main:
    print(f"accuracy {accuracy(job.module):.3f} with lr={lr:.3g} width={width}")
