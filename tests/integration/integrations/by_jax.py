"""A JAX script under the agent, as `test_contract` wants it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import pollux  # noqa: E402
from pollux.integrations.jax import JaxModel, Optax  # noqa: E402
from tests.integration.integrations.inputs import data  # noqa: E402
from tests.integration.integrations.orders import Orders, run  # noqa: E402


def parameters() -> dict[str, Any]:
    one, two = jax.random.split(jax.random.key(0))
    return {
        "one": 0.4 * jax.random.normal(one, (6, 8)),
        "two": 0.4 * jax.random.normal(two, (8, 1)),
        "bias": jax.numpy.zeros((1,)),
    }


def loss(params: dict[str, Any], x: Any, y: Any) -> Any:
    out = jax.numpy.tanh(x @ params["one"]) @ params["two"] + params["bias"]
    return ((out - y) ** 2).mean()


def train(
    directory: Path,
    checkpoints: Path | None,
    orders: Orders,
    *,
    epochs: int = 3,
    adaptive: bool = False,
    exact: bool = False,
) -> dict[str, Any]:
    os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"  # the ranks agree after every step, however fast it was
    torch.manual_seed(0)
    model = JaxModel(loss, parameters())
    optimizer = Optax(model, optax.sgd if exact else optax.adamw, learning_rate=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.99**n)
    job = pollux.attach(
        model, optimizer, scheduler, checkpoint_dir=checkpoints, adaptive=adaptive, measuring={"every": 1}
    )
    loader = job.loader(data(), 16, max_batch_size=64, per_gpu=(1, 32))
    found = run(job, loader, orders, epochs, lambda x, y: job.step(lambda: job.model(x, y), clip=10.0))
    weights = [model.vector.detach().clone().numpy()]
    return found | {"schedule": scheduler.last_epoch, "weights": weights}


def assert_logged(rest: dict[str, Any]) -> None:
    """A JAX script logs what it wants."""


LAUNCHED = """
import jax
import optax
import torch
import pollux
from pollux.integrations.jax import JaxModel, Optax

torch.set_num_threads(1)
network = JaxModel(lambda w, a, b: ((a @ w - b) ** 2).mean(), jax.numpy.ones((6, 1)))
optimizer = Optax(network, optax.sgd, learning_rate=0.01)
x = torch.randn(101, 6, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True), torch.arange(101))
job = pollux.attach(network, optimizer, adaptive=False, checkpoint_dir=here / "checkpoints")
loader = job.loader(data, 8)
for epoch in job.epochs(EPOCHS, statistical=True):
    for a, b, ids in loader:
        trouble(job)
        mine = ids.tolist() if loader.data.local_samples else []
        samples = [(loader.data.pass_index, each) for each in mine]
        note("used", who=os.getpid(), step=job.progress.optimizer_steps, samples=samples)
        job.step(lambda: job.model(a, b))
    if enough(job):
        break
main = [job.is_main] * 3
weights = [float(network.vector.detach().double().sum())]
note("over", seen=list(range(101)), main=main, size=job.world.size, weights=weights)
"""
