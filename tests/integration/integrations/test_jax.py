"""What JAX needs beside `test_contract`: plain Optax' updates, torch's noise scale, state, keys, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

from pollux import attach  # noqa: E402
from pollux.errors import PolluxAgentError  # noqa: E402
from pollux.integrations.jax import JaxModel, Optax  # noqa: E402
from tests.integration.integrations.by_jax import loss, parameters  # noqa: E402

Ranks = Callable[..., list[Any]]
X = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True) + 0.3 * torch.randn(96, 1, generator=torch.Generator().manual_seed(2))
OPTIMIZERS = {"sgd": {"momentum": 0.9}, "adamw": {"weight_decay": 0.01}, "rmsprop": {"decay": 0.95}}


def trained(name: str, checkpoints: Path | None, epochs: int) -> np.ndarray:
    model = JaxModel(loss, parameters())
    optimizer = Optax(model, getattr(optax, name), learning_rate=0.01, **OPTIMIZERS[name])
    job = attach(model, optimizer, adaptive=False, checkpoint_dir=checkpoints)
    loader = job.loader(TensorDataset(X, Y), 16, shuffle=False)
    for _ in job.epochs(epochs):
        for x, y in loader:
            job.step(lambda x=x, y=y: job.model(x, y))
    job.close()
    assert job.module.params["one"].shape == (6, 8)
    return model.vector.detach().numpy().copy()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_updates_are_those_of_plain_optax(ranks: Ranks, tmp_path: Path, name: str) -> None:
    def body(checkpoints: Path | None, epochs: int) -> Any:
        return trained(name, checkpoints, epochs)

    def plain() -> np.ndarray:
        params = parameters()
        transformation = getattr(optax, name)(learning_rate=0.01, **OPTIMIZERS[name])
        state = transformation.init(params)
        for _ in range(4):
            for at in range(0, 96, 16):
                gradient = jax.grad(loss)(params, X[at : at + 16].numpy(), Y[at : at + 16].numpy())
                changes, state = transformation.update(gradient, state, params)
                params = optax.apply_updates(params, changes)
        return np.asarray(jax.flatten_util.ravel_pytree(params)[0])

    [wanted] = ranks(1, plain)
    two = ranks(2, body, None, 4)
    assert np.array_equal(two[0], two[1])
    assert two[0] == pytest.approx(wanted, abs=2e-5)
    ranks(2, body, tmp_path, 2)
    [resumed] = ranks(1, body, tmp_path, 4)
    assert resumed == pytest.approx(wanted, abs=2e-5), "Optax' state came through the checkpoint"


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_the_noise_scale_is_that_of_the_same_training_in_torch(ranks: Ranks, name: str) -> None:
    def body(in_jax: bool) -> Any:
        model: torch.nn.Module
        optimizer: torch.optim.Optimizer
        if in_jax:
            model = JaxModel(lambda w, x, y: ((x @ w - y) ** 2).mean(), jax.numpy.zeros((6, 1)))
            optimizer = Optax(model, getattr(optax, name), learning_rate=0.001)
        else:
            model = torch.nn.Linear(6, 1, bias=False)
            torch.nn.init.zeros_(model.weight)
            optimizer = (torch.optim.SGD if name == "sgd" else torch.optim.Adam)(model.parameters(), lr=0.001)
        job = attach(model, optimizer, adaptive=False, measuring={"every": 1, "decay": 1 - 1e-9})
        loader = job.loader(TensorDataset(X, Y), 16)
        for _ in job.epochs(8):
            for x, y in loader:
                job.step(
                    lambda x=x, y=y: (
                        job.model(x, y) if in_jax else torch.nn.functional.mse_loss(job.model(x), y)
                    )
                )
        found = job.noise_scale
        return found and (found.sqr, found.var)

    # SGD's family shows after a step here, so one of 48 samples is missing.
    by_jax, by_torch = ranks(2, body, True), ranks(2, body, False)
    assert by_jax[0] == pytest.approx(by_torch[0], rel=0.05)


def test_state_and_keys_reach_the_loss(ranks: Ranks, tmp_path: Path) -> None:
    def counted(params: Any, x: Any, y: Any, *, key: Any, state: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        new = {"passes": state["passes"] + 1, "kept": state["kept"].at[state["passes"]].set(kept.sum())}
        return ((x * kept @ params - y) ** 2).mean(), new

    def body(epochs: int) -> Any:
        torch.manual_seed(0)
        state = {"passes": jax.numpy.zeros((), "int32"), "kept": jax.numpy.zeros(64)}
        model = JaxModel(counted, jax.numpy.ones((6, 1)), state=state)
        job = attach(
            model, Optax(model, optax.sgd, learning_rate=0.001), adaptive=False, checkpoint_dir=tmp_path
        )
        loader = job.loader(TensorDataset(X, Y), 16)
        for _ in job.epochs(epochs):
            for x, y in loader:
                job.step(lambda x=x, y=y: job.model(x, y))
        before = int(model.state["passes"])
        with torch.no_grad():
            model(X, Y)
        job.close()
        assert int(model.state["passes"]) == before, "no step, no new state"
        return before, np.asarray(model.state["kept"])

    [(first, _)], [(second, kept)] = ranks(1, body, 1), ranks(1, body, 2)
    assert (first, second) == (6, 12), "state is saved and restored"
    assert len(set(kept[:12])) > 3, "each pass has a key of its own"


def test_what_cannot_work_is_refused(ranks: Ranks) -> None:
    def body() -> None:
        with pytest.raises(PolluxAgentError, match="one floating-point type, got float32, int32"):
            JaxModel(loss, {"one": jax.numpy.ones(2), "two": jax.numpy.ones(2, "int32")})
        with pytest.raises(PolluxAgentError, match="got none"):
            JaxModel(loss, {})
        model = JaxModel(loss, parameters())
        with pytest.raises(PolluxAgentError, match="expected a number as learning_rate"):
            Optax(model, optax.adam, learning_rate=optax.constant_schedule(0.1))
        adam, sgd = (Optax(model, make, learning_rate=0.1) for make in (optax.adam, optax.sgd))
        with pytest.raises(ValueError, match="expected the state of this Optax optimizer"):
            adam.load_state_dict(sgd.state_dict())

    ranks(1, body)


def test_keys_and_unsigned_numbers_are_state_on_several_ranks(ranks: Ranks, tmp_path: Path) -> None:
    def drawn(params: Any, x: Any, y: Any, *, state: Any) -> Any:
        typed, noise = jax.random.split(state["typed"])
        plain, _ = jax.random.split(state["plain"])
        loss = ((x @ params - y + jax.random.normal(noise)) ** 2).mean()
        return loss, {"typed": typed, "plain": plain, "seed": state["seed"] + 1}

    def body(epochs: int) -> Any:
        state = {
            "typed": jax.random.key(5),
            "plain": jax.random.PRNGKey(5),
            "seed": jax.numpy.asarray([2**32 - 2], "uint32"),
        }
        model = JaxModel(drawn, jax.numpy.ones((6, 1)), state=state)
        optimizer = Optax(model, optax.sgd, learning_rate=0.001)
        job = attach(model, optimizer, adaptive=False, checkpoint_dir=tmp_path)
        loader = job.loader(TensorDataset(X, Y), 16)
        for _ in job.epochs(epochs):
            for x, y in loader:
                job.step(lambda x=x, y=y: job.model(x, y))
        job.close()
        typed, plain = jax.random.key(5), jax.random.PRNGKey(5)
        for _ in range(6 * epochs):
            typed, plain = jax.random.split(typed)[0], jax.random.split(plain)[0]
        found, data = model.state, jax.random.key_data
        return (
            np.array_equal(data(found["typed"]), data(typed)),
            np.array_equal(found["plain"], plain),
            int(found["seed"][0]),
        )

    # All of JAX in the ranks: its threads do not survive a fork.
    for epochs in (1, 2):
        assert ranks(2, body, epochs) == [(True, True, (2**32 - 2 + 6 * epochs) % 2**32)] * 2
