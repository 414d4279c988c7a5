"""Search a learning rate and a width for digits: 16 trials, one after the other."""

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

EPOCHS, BATCH = 10, 32

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
train, validation = random_split(TensorDataset(x, y), [0.8, 0.2])


@torch.no_grad()
def accuracy(network: nn.Module) -> float:
    x, y = validation[:]
    return float((network(x).argmax(1) == y).float().mean())


def objective(trial: optuna.Trial) -> float:
    lr = trial.suggest_float("lr", 1e-4, 1.0, log=True)
    width = trial.suggest_int("width", 8, 128, log=True)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    loader = DataLoader(train, BATCH, shuffle=True)
    for epoch in range(EPOCHS):
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trial.report(accuracy(model), epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy(model)


study = optuna.create_study(direction="maximize", pruner=optuna.pruners.SuccessiveHalvingPruner())
study.optimize(objective, n_trials=16)
print(f"accuracy {study.best_value:.3f} with {study.best_params}")
