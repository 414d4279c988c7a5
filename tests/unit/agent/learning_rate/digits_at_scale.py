"""Train a perceptron on scikit-learn's digits, by SGD, at a fixed multiple of M0.

Gradients are accumulated, so that only the batch size differs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pollux
from contrib.examples.emulated import accuracy, digits
from pollux.goodput import BatchChoice
from pollux.learning_rate.scaling import Rule

M0 = 16
EPOCHS = 12
RATE = 0.05


class Trace(NamedTuple):
    """The trace of one training, an entry per step, and its final quality."""

    samples: np.ndarray
    progress: np.ndarray
    loss: np.ndarray
    accuracy: float


def train(seed: int, scale: int, rule: str | Rule, *, passes: bool = False, epochs: int = EPOCHS) -> Trace:
    """Train once on one rank, at a fixed scale."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    data = digits()
    x, y = data.train.tensors
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    job = pollux.attach(model, optimizer, seed=seed, adaptive=True, scaling=rule, measuring={"every": 1})
    loader = job.loader(data.train, M0, max_batch_size=M0 * scale, per_gpu=(M0, M0))
    assert job.training.advisor is not None
    job.training.advisor.close()  # keep the batch size fixed
    job.training.choice = BatchChoice(M0, scale - 1)
    rows: list[tuple[float, float, float]] = []
    for _ in job.epochs(epochs, statistical=not passes):
        for a, b in loader:
            with job.micro_batch():
                job.backward(cross_entropy(job.model(a), b))
            if job.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    loss = float(cross_entropy(model(x), y))
                # The step just made counts as soon as the next batch is asked for.
                rows.append((job.progress.samples, job.progress.steps, loss))
    trace = Trace(*np.array(rows).T, accuracy(model, data.test))
    job.close()
    return trace


def first_below(trace: Trace, target: float) -> int | None:
    """Return the first step whose smoothed loss is below the target, or None.

    The loss is smoothed over about a hundredth of the steps.
    """
    width = max(len(trace.loss) // 100, 1)
    padded = np.pad(trace.loss, (width // 2, width - 1 - width // 2), mode="edge")
    smooth = np.convolve(padded, np.ones(width) / width, "valid")
    found = np.flatnonzero(smooth < target)
    return int(found[0]) if found.size else None


def predicted(base: Trace, trace: Trace, target: float) -> tuple[float, float] | None:
    """Return the examples used and predicted until the target loss.

    None: one of the two runs never reached the loss.
    """
    here, there = first_below(trace, target), first_below(base, target)
    if here is None or there is None or base.progress[there] > trace.progress[-1]:
        return None
    return float(trace.samples[here]), float(np.interp(base.progress[there], trace.progress, trace.samples))
