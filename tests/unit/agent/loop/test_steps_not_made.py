"""Passes that a loop leaves out, and steps that it does not make."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from pollux import Job, attach
from pollux.errors import LoopMistake
from pollux.loop import slips
from tests.unit.agent.loop.mistakes_page import on_the_page
from tests.unit.agent.regression import attached, data, network, train_step

NAN = float("nan")


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the agent logs."""
    lines: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return True

    logger = logging.getLogger("pollux")
    logger.addFilter(keep)
    yield lines
    logger.removeFilter(keep)


def moves(how: str) -> list[float]:
    """How far each step moves the only weight. One is right.

    Each step has two passes. The loop leaves out the last pass of the third step.
    """
    weight = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(weight.weight)
    optimizer = torch.optim.SGD(weight.parameters(), 1.0)
    job = attach(weight, optimizer, adaptive=False)
    loader = job.loader(TensorDataset(torch.ones(64 * job.world.size, 1)), 8 * job.world.size, per_gpu=(1, 4))
    before, found = 0.0, []
    for k, (x,) in enumerate(loader):
        bad = k == 5
        try:
            if bad and how == "before":
                continue
            with job.micro_batch():
                loss = job.model(x).mean() * (NAN if bad else 1.0)
                if bad and how == "exception":
                    raise ValueError("bad sample")
                if bad and how == "continue":
                    continue
                if bad and how == "skip":
                    job.skip()
                else:
                    job.backward(loss)
        except ValueError:
            optimizer.zero_grad()
            continue
        if job.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
            now = float(weight.weight)
            found.append(round(before - now, 4))
            before = now
        if k == 15:
            break
    steps, samples = job.progress.optimizer_steps, job.progress.samples
    job.close()
    assert steps == len(found)
    assert samples == 8 * job.world.size * len(found)
    return found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("how", ["exception", "continue", "before"])
def test_a_step_that_was_not_made_leaves_nothing_in_the_next_one(ranks: Any, size: int, how: str) -> None:
    assert ranks(size, moves, how) == [[1.0] * 7] * size


@pytest.mark.parametrize("size", [1, 2])
def test_skip_leaves_a_batch_out_whatever_its_loss_is(ranks: Any, size: int) -> None:
    assert ranks(size, moves, "skip") == [[1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0]] * size


def skipped_on_one(how: str, unused: bool) -> Tensor:
    """Rank 1 has no loss in three passes: in a step's last, and in others."""
    options = {"find_unused_parameters": True} if unused else None
    job = attached(measuring={"every": 1}, ddp_kwargs=options)
    for k, (x, y, _) in enumerate(job.loader(data(192), 24, per_gpu=(1, 6), shuffle=False)):
        out = job.rank == 1 and k in (2, 5, 7)

        def loss_of(x: Tensor = x, y: Tensor = y, k: int = k, out: bool = out) -> Tensor | None:
            if out and how == "none" and k == 5:
                return None  # without a forward pass
            loss = mse_loss(job.model(x), y)
            if how == "zero":
                return loss * 0.0 if out else loss
            return None if out else loss

        job.step(loss_of)
    found = torch.cat([p.detach().flatten() for p in job.module.parameters()])
    job.close()
    return found


@pytest.mark.parametrize("unused", [False, True])
def test_a_batch_skipped_on_one_rank_is_as_one_of_loss_zero(ranks: Any, unused: bool) -> None:
    wanted = ranks(2, skipped_on_one, "zero", unused)[0]
    for found in ranks(2, skipped_on_one, "none", unused):
        torch.testing.assert_close(found, wanted)


def skipped_tokens() -> list[float]:
    """Losses that are sums: a skipped pass has no tokens."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    job = attach(model, optimizer, adaptive=False)
    found = []
    for k, (x,) in enumerate(job.loader(TensorDataset(torch.ones(64, 1)), 8)):
        job.step(lambda x=x, k=k: None if k == 3 and job.rank else job.model(x).sum(), weight=len(x))
        found.append(round(float(model.weight.detach()), 4))
    job.close()
    return found


def test_a_skipped_pass_counts_no_tokens(ranks: Any) -> None:
    assert ranks(2, skipped_tokens) == [[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0]] * 2


def steps_without_a_pass() -> str:
    job, optimizer, loader = started()
    try:
        for k, (x, y, _) in enumerate(loader):
            if k != 3:
                with job.micro_batch():
                    job.backward(mse_loss(job.model(x), y))
            if job.sync_gradients:
                optimizer.step()
    except LoopMistake as error:
        return str(error)
    return "silence"


def test_a_step_after_a_last_pass_that_was_left_out_is_refused_on_several_ranks(ranks: Any) -> None:
    for found in ranks(2, steps_without_a_pass):
        assert found == slips.STEP_WITHOUT_PASS
        assert on_the_page(found)


def started(scheduler: Any = None) -> tuple[Job, torch.optim.Optimizer, Any]:
    """A job whose steps take four passes."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job = attach(model, optimizer, None if scheduler is None else scheduler(optimizer), adaptive=False)
    return job, optimizer, job.loader(data(), 32, per_gpu=(1, 32 // 4 // job.world.size))


@pytest.mark.parametrize("stepped", [False, True])
def test_a_loop_whose_optimizer_the_agent_does_not_know_ends_with_the_reason(
    said: list[str], stepped: bool
) -> None:
    job, _, loader = started()
    other = torch.optim.AdamW(job.module.parameters(), 1e-3)
    passes = 0

    def train() -> None:
        nonlocal passes
        for _ in job.epochs(1, statistical=True):
            for x, y, _ in loader:
                passes += 1
                with job.micro_batch():
                    job.backward(mse_loss(job.model(x), y))
                if job.sync_gradients and stepped:
                    other.step()
                    other.zero_grad()

    with pytest.raises(LoopMistake, match="made no step") as error:
        train()
    assert passes == 3 * len(loader)
    assert said.count(slips.IDLE) == 1
    assert on_the_page(error.value)
    job.close()


def test_own_accumulation_over_a_whole_pass_is_no_such_mistake(said: list[str]) -> None:
    job, optimizer, loader = started()
    passes = 0
    for _ in job.epochs(4):
        for x, y, _ in loader:
            passes += 1
            with job.micro_batch():
                job.backward(mse_loss(job.model(x), y))
            if passes % len(loader) == 0:
                optimizer.step()
                optimizer.zero_grad()
    job.close()
    assert slips.IDLE not in said


@pytest.mark.parametrize("own", [False, True])
def test_a_scheduler_that_steps_in_every_pass_is_refused(own: bool) -> None:
    job, _, loader = started(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5))

    def train() -> None:
        for x, y, _ in loader:
            if own:
                job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
            else:
                train_step(job, x, y)
            job.scheduler.step()

    with pytest.raises(LoopMistake, match=f"called {5 if own else 4} times in one optimizer step") as error:
        train()
    assert on_the_page(str(error.value).replace("5", "4"))
    job.close()


def test_step_names_what_it_expects() -> None:
    job, _, loader = started()
    x, y, _ = next(iter(loader))
    with pytest.raises(LoopMistake, match="got Tensor") as error:
        job.step(mse_loss(job.model(x), y))  # type: ignore[arg-type]
    assert on_the_page(error.value)

    def backward() -> Tensor:
        loss = mse_loss(job.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with pytest.raises(LoopMistake) as error:
        job.step(backward)
    assert on_the_page(error.value)
    job.close()


def test_loops_over_epochs_are_not_nested_and_count_from_the_beginning(capfd: Any) -> None:
    job, _, loader = started()

    def train(count: int) -> list[int]:
        epochs = []
        for epoch in job.epochs(count, statistical=True):
            epochs.append(epoch)
            for x, y, _ in loader:
                job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
        return epochs

    def nested() -> None:
        for _ in job.epochs(2, statistical=True):
            train(2)

    with pytest.raises(LoopMistake) as error:
        nested()
    assert on_the_page(error.value)
    assert [train(2), train(4), train(4)] == [[0, 1], [2, 3], []]
    job.close()
    assert "already finished: 28 optimizer steps, 4 of 4 epochs." in capfd.readouterr().err


def test_a_training_that_has_failed_is_named_once(said: list[str]) -> None:
    job, _, loader = started()
    for _ in job.epochs(2, statistical=True):
        for x, y, _ in loader:
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y) * NAN)
    job.close()
    (line,) = [line for line in said if "not finite" in line]
    assert on_the_page(line.split("step")[0])
    assert "optimizer step 7" in line
