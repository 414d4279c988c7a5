"""Train on two ranks and record the number of every sample used.

Tests start scripts that import this module as separate processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import pollux


class Used:
    """The numbers of all samples used so far, saved with checkpoints."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"ids": list(self.ids)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ids = list(state["ids"])


class Training:
    """One linear layer that learns the sum of its four inputs.

    Args:
        options: of `pollux.attach`.
    """

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        self.used = Used()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.job: Any = pollux.attach(model, self.optimizer, state=self.used, **options)

    def data(self, examples: int) -> TensorDataset:
        x = torch.randn(examples, 4, generator=torch.Generator().manual_seed(3))
        return TensorDataset(x, x.sum(1, keepdim=True), torch.arange(examples))

    def run(self, loader: Any, epochs: int, before_backward: Callable[[int, int], None]) -> None:
        """Train `epochs` passes and call `before_backward` for each micro-batch.

        `before_backward` gets the micro-batch's number in this process, from 1, and its size.
        """
        number = 0
        for _ in self.job.epochs(epochs):
            for inputs, targets, ids in loader:
                with self.job.micro_batch():
                    out = self.job.model(inputs)
                    number += 1
                    before_backward(number, len(inputs))
                    self.job.backward(mse_loss(out, targets))
                    every: list[Any] = [None, None]
                    mine = ids.tolist() if self.job.training.data.local_samples else []
                    distributed.all_gather_object(every, mine)
                    self.used.ids += every[0] + every[1]
                if self.job.sync_gradients:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
