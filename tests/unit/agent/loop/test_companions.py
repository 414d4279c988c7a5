"""Several models and optimizers in one job: a tiny GAN on real ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from pollux import attach
from pollux.errors import PolluxAgentError
from pollux.goodput import BatchChoice, NoiseScale
from pollux.ranks.control import Decision

pytestmark = pytest.mark.usefixtures("read_at_once")

EXAMPLES = 240


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(1.0 + 0.5 * torch.randn(EXAMPLES, 2, generator=generator), torch.arange(EXAMPLES))


def players() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    return generator, critic


def latent(ids: Tensor) -> Tensor:
    """Noise that belongs to the example, whichever rank draws it."""
    return torch.sin(ids[:, None] * torch.tensor([1.0, 2.3, 3.1]))


def play(
    directory: str | None,
    per_gpu: tuple[int, int],
    epochs: int,
    leave_at: int = 10**9,
    adaptive: bool = False,
) -> dict[str, Any]:
    generator, critic = players()
    first = torch.optim.Adam(generator.parameters(), lr=0.01)
    second = torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.5)
    schedule = LambdaLR(second, lambda n: 0.999**n)
    os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"
    job = attach(generator, first, adaptive=adaptive, measuring={"every": 2}, checkpoint_dir=directory)
    judge = job.add_model("critic", critic, second, schedule)
    loader = job.loader(data(), 24, max_batch_size=96 if adaptive else None, per_gpu=per_gpu)
    if job.training.advisor is not None:
        job.training.advisor.close()
    factors: list[tuple[float, float]] = []
    passes = 0
    for _ in job.epochs(epochs):
        for real, ids in loader:
            passes += 1
            with torch.no_grad():
                fake = generator(latent(ids))
            with judge.micro_batch():
                good, bad = judge.model(real), judge.module(fake)
                judge.backward(bce(good, torch.ones_like(good)) + bce(bad, torch.zeros_like(bad)))
            with job.micro_batch():
                critic.requires_grad_(False)
                said = judge.module(job.model(latent(ids)))
                job.backward(bce(said, torch.ones_like(said)))
                critic.requires_grad_(True)
            if job.sync_gradients:
                factors.append((sum(job.lr_factors), sum(judge.lr_factors)))
                second.step()
                schedule.step()
                first.step()
                first.zero_grad()
                second.zero_grad()
            if adaptive and job.is_main and job.progress.optimizer_steps == 24 and job.batch_size < 96:
                job.training.advisor.proposal = BatchChoice(96 // job.world.size, 0)  # type: ignore[union-attr]
            if job.progress.optimizer_steps >= leave_at:
                break
        if job.progress.optimizer_steps >= leave_at:
            job.coordinator.save(durable=True)
            break
    result = {
        "weights": [p.detach().clone() for p in [*generator.parameters(), *critic.parameters()]],
        "steps": job.progress.optimizer_steps,
        "schedule": schedule.last_epoch,
        "noise": (job.training.models[0].meter.total, judge.noise_scale, job.noise_scale),
        "factors": factors[-1],
        "passes": passes,
    }
    job.close()
    return result


def plain(size: int, passes: int, epochs: int) -> list[Tensor]:
    """Play the same game in one process, without the agent's passes.

    Batches are whole batches of 24. `play` takes each in `size * passes` parts.
    """
    generator, critic = players()
    first = torch.optim.Adam(generator.parameters(), lr=0.01)
    second = torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.5)
    schedule = LambdaLR(second, lambda n: 0.999**n)
    job = attach(generator, first, adaptive=False)
    loader = job.loader(data(), 24, per_gpu=(24, 24))
    for _ in range(epochs):
        for real, ids in loader.data:
            with torch.no_grad():
                fake = generator(latent(ids))
            good, bad = critic(real), critic(fake)
            (bce(good, torch.ones_like(good)) + bce(bad, torch.zeros_like(bad))).backward()
            critic.requires_grad_(False)
            said = critic(generator(latent(ids)))
            bce(said, torch.ones_like(said)).backward()
            critic.requires_grad_(True)
            second.step()
            schedule.step()
            first.step()
            first.zero_grad()
            second.zero_grad()
    job.close()
    return [p.detach().clone() for p in [*generator.parameters(), *critic.parameters()]]


@pytest.mark.parametrize(("size", "m", "passes"), [(1, 6, 4), (2, 12, 1), (2, 4, 3)])
def test_both_players_train_as_in_plain_pytorch(ranks: Any, size: int, m: int, passes: int) -> None:
    results = ranks(size, play, None, (1, m), 4)
    expected = plain(size, passes, 4)
    for result in results:
        assert result["steps"] == result["schedule"] == 40
        assert result["passes"] == 40 * passes
        for a, b in zip(expected, result["weights"], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-4)
        for noise in result["noise"]:
            assert noise is not None
            assert noise.var > 0


def test_each_has_its_own_noise_scale_and_the_least_decides(ranks: Any) -> None:
    results = ranks(2, play, None, (1, 96), 8, 10**9, True)
    for result in results:
        generator, critic, together = result["noise"]
        assert result["noise"] == results[0]["noise"]
        least = min((generator, critic), key=lambda n: n.var / n.sqr if n.sqr > 0 else np.inf)
        assert together == least
        assert generator != critic
        assert result["factors"][0] != result["factors"][1], (
            "each learning rate follows its own rule and noise"
        )
        assert result["factors"] == results[0]["factors"]
        assert result["steps"] < 80, "the batch size grew for both"


def test_a_checkpoint_holds_both(ranks: Any, tmp_path: Path) -> None:
    for size, leave_at in ((2, 13), (1, 22), (2, 10**9)):
        results = ranks(size, play, str(tmp_path / "moved"), (1, 12), 4, leave_at)
    whole = play(str(tmp_path / "whole"), (12, 12), 4)
    for result in results:
        assert (result["steps"], result["schedule"]) == (40, 40)
        for a, b in zip(whole["weights"], result["weights"], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-4)


def critics_in_turn() -> tuple[int, int, int, int]:
    """Step the critic five times for each step of the generator.

    Return (steps, samples, measurements of the generator, measurements of the critic).
    """
    generator, critic = players()
    first, second = (torch.optim.SGD(p.parameters(), lr=0.01) for p in (generator, critic))
    job = attach(generator, first, adaptive=False, measuring={"every": 3})
    judge = job.add_model("critic", critic, second)
    for n, (real, ids) in enumerate(job.loader(data(), 8, per_gpu=(1, 8))):
        with judge.micro_batch():
            judge.backward(judge.model(real).mean() - critic(generator(latent(ids)).detach()).mean())
        if job.sync_gradients:
            second.step()
            second.zero_grad()
        if n % 5 == 4:
            with job.micro_batch():
                job.backward(-critic(job.model(latent(ids))).mean())
            first.step()
            first.zero_grad()
            second.zero_grad()
    result = job.progress.optimizer_steps, job.progress.samples, job.training.models[0].averages.samples
    job.close()
    return *result, job.training.models[1].averages.samples


def test_a_player_that_steps_seldom_is_measured_too(ranks: Any) -> None:
    for steps, samples, generators, critics in ranks(2, critics_in_turn):
        assert (steps, samples) == (30, EXAMPLES)
        assert generators >= 3
        assert critics >= 6


def test_a_further_model_is_named_once_and_in_time() -> None:
    generator, critic = players()
    job = attach(generator, torch.optim.SGD(generator.parameters(), lr=0.1), adaptive=False)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    job.add_model("critic", critic, optimizer)
    with pytest.raises(PolluxAgentError, match="name of its own"):
        job.add_model("critic", critic, optimizer)
    job.loader(data(), 8)
    with pytest.raises(PolluxAgentError, match="before the loader"):
        job.add_model("other", critic, optimizer)
    job.close()


def sharded_pair(directory: str, steps: int) -> tuple[int, list[Tensor], str]:
    """Train generator and critic, both under fully_shard.

    The training is saved and resumed. Return (steps, weights, what `add_model` refuses).
    """
    torch.distributed.init_process_group("gloo")
    generator, critic = (fully_shard(player) for player in players())
    first, second = (torch.optim.Adam(p.parameters(), lr=0.01) for p in (generator, critic))
    job = attach(generator, first, adaptive=False, checkpoint_dir=directory)
    judge = job.add_model("critic", critic, second)
    last = job.progress.optimizer_steps + steps
    for real, ids in job.loader(data(), 24, per_gpu=(1, 24)):
        with judge.micro_batch():
            judge.backward(judge.model(real).square().mean())
        with job.micro_batch():
            job.backward(job.model(latent(ids)).square().mean())
        if job.sync_gradients:
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        if job.sync_gradients and job.progress.optimizer_steps == last:
            break
    job.close()
    weights = [p.detach().full_tensor() for model in (generator, critic) for p in model.parameters()]
    plain = players()[0]
    other = attach(plain, torch.optim.SGD(plain.parameters(), lr=0.1), adaptive=False)
    try:
        other.add_model("critic", critic, second)
        said = "taken"
    except PolluxAgentError as error:
        said = str(error)
    other.close()
    return job.progress.optimizer_steps, weights, said


@pytest.mark.skipif(torch.__version__ < "2.13", reason="fully_shard is supported from torch 2.13 on")
def test_both_may_be_sharded(ranks: Any, tmp_path: Path) -> None:
    whole = ranks(2, sharded_pair, str(tmp_path / "whole"), 8)[0]
    for size in (2, 1):
        results = ranks(size, sharded_pair, str(tmp_path / "moved"), 4)
    assert results[0][0] == whole[0] == 8
    for a, b in zip(whole[1], results[0][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert "only beside it" in whole[2]


def test_a_decision_tells_unknown_noise_from_none() -> None:
    noise = (NoiseScale(0.0, 2.0), None, NoiseScale(1.0, 3.0))
    decision = Decision(noise=noise, local_batch=3)
    assert Decision.decode(decision.encode(3)) == decision
    assert Decision.decode(Decision().encode(2)).noise == (None, None)


def without_contexts() -> list[int]:
    """Return the samples of two models that a plain loop trains.

    The gradient of the second model is reduced, and clipped, in place.
    """
    generator, critic = players()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (generator, critic)]
    job = attach(generator, optimizers[0], adaptive=False, measuring={"every": 1})
    judge = job.add_model("critic", critic, optimizers[1], ddp_kwargs={"gradient_as_bucket_view": True})
    for real, ids in job.loader(data(), 24):
        for model, optimizer, x in zip(
            (job.model, judge.model), optimizers, (latent(ids), real), strict=True
        ):
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    job.close()
    return [trained_model.averages.samples for trained_model in job.training.models]


def test_a_gradient_that_a_plain_loop_changes_in_place_is_no_sample(ranks: Any) -> None:
    for first, second in ranks(2, without_contexts):
        assert first >= 5, "of 10 steps"
        assert second == 0
