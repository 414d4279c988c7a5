"""Scripts that change between two attempts, or that restore twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations, prune

from pollux import Job, attach
from pollux.errors import CheckpointError, ForeignCheckpoint, LoopMistake
from tests.unit.agent.loop.mistakes_page import on_the_page
from tests.unit.agent.regression import data, logged, network


def train(job: Job, steps: int | None = None, thaw: Any = lambda epoch: None) -> None:
    """Train 3 epochs, or stop after so many optimizer steps of this attempt."""
    loader = job.loader(data(64), 16)
    most = None if steps is None else job.progress.optimizer_steps + steps
    for epoch in job.epochs(3):
        thaw(epoch)
        for x, y, _ in loader:
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
            if job.progress.optimizer_steps == most:
                break
        if job.progress.optimizer_steps == most:
            break
    job.close()


def begun(
    folder: Path, *, lr: float = 0.05, length: int = 12, module: nn.Module | None = None, **settings: Any
) -> Job:
    """An attempt before its loop; `settings` are AdamW's."""
    model = network() if module is None else module
    optimizer = torch.optim.AdamW(model.parameters(), lr, **settings)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)
    return attach(model, optimizer, scheduler, adaptive=False, checkpoint_dir=folder)


def attempt(folder: Path, steps: int | None = None, **options: Any) -> Job:
    job = begun(folder, **options)
    train(job, steps)
    return job


def notices(capfd: Any) -> list[str]:
    return re.findall(r"pollux: as in the checkpoint, not as in the script: (.*)", capfd.readouterr().err)


def test_settings_that_the_checkpoint_restores_over_edited_ones_are_named(tmp_path: Path, capfd: Any) -> None:
    attempt(tmp_path, 5)
    attempt(tmp_path, 1)
    assert notices(capfd) == [], "a scheduled learning rate is no edit"
    edited = (
        "lr of parameter group 0 0.05 (the script has 0.1); T_max of the scheduler 12 (the script has 24)"
    )
    for _ in range(2):
        job = attempt(tmp_path, 1, lr=0.1, length=24)
        assert notices(capfd) == [edited]
    assert job.scheduler.T_max == 12
    attempt(tmp_path, 1)
    assert notices(capfd) == []


def test_another_optimizer_or_scheduler_is_refused_by_name(tmp_path: Path) -> None:
    attempt(tmp_path, 5)
    model = network()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(CheckpointError, match="its optimizer was AdamW, and is SGD now"):
        attach(model, sgd, adaptive=False, checkpoint_dir=tmp_path)
    adam = torch.optim.AdamW(model.parameters(), 0.1)
    with pytest.raises(CheckpointError, match="its scheduler was CosineAnnealingLR, and is StepLR now"):
        attach(model, adam, torch.optim.lr_scheduler.StepLR(adam, 3), adaptive=False, checkpoint_dir=tmp_path)


def test_parameters_in_another_order_are_refused_by_name(tmp_path: Path) -> None:
    attempt(tmp_path, 5)
    model = network()
    reversed_ = torch.optim.AdamW(list(model.parameters())[::-1], 0.05)
    with pytest.raises(CheckpointError, match=r"group 0 of the optimizer has 2\.bias where it had 0\.weight"):
        attach(model, reversed_, adaptive=False, checkpoint_dir=tmp_path)


def test_the_first_parameter_that_differs_is_named(tmp_path: Path) -> None:
    attempt(tmp_path, 5)
    torch.manual_seed(0)
    wider = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1, bias=False))
    with pytest.raises(
        ForeignCheckpoint, match=r"no further parameter in the script, 2\.bias of shape \[1\]"
    ):
        attempt(tmp_path, module=wider)
    renamed = nn.Sequential()
    for name, part in zip("abc", network().children(), strict=True):
        renamed.add_module(name, part)
    with pytest.raises(ForeignCheckpoint, match=r"a\.weight of shape \[16, 6\] in the script, 0\.weight"):
        attempt(tmp_path, module=renamed)


def test_torch_compile_may_come_and_go_between_attempts(tmp_path: Path) -> None:
    job = attempt(tmp_path, 5)
    before = {name: p.clone() for name, p in job.module.named_parameters()}
    model = network()
    job = begun(tmp_path, module=torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    assert job.progress.optimizer_steps == 5
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
    train(job, 2)
    assert attempt(tmp_path, 1).progress.optimizer_steps == 8


def phased(folder: Path, steps: int | None, by_group: bool) -> tuple[Job, nn.Module]:
    """Thaw the first layer in epoch 1 alone, as guides on fine-tuning do."""
    model: Any = network()
    model[0].requires_grad_(False)
    chosen = model[2].parameters() if by_group else model.parameters()
    optimizer = torch.optim.AdamW(chosen, 0.05)

    def thaw(epoch: int) -> None:
        if epoch == 1:
            model[0].requires_grad_(True)
            if by_group:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})

    job = attach(model, optimizer, adaptive=False, checkpoint_dir=folder)
    train(job, steps, thaw)
    return job, model


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("stop", [6, 9])  # in epoch 1, which adds the group again, and in epoch 2
def test_layers_and_groups_that_were_added_are_there_after_a_restart(
    tmp_path: Path, capfd: Any, by_group: bool, stop: int
) -> None:
    phased(tmp_path / "stopped", stop, by_group)
    job, resumed = phased(tmp_path / "stopped", None, by_group)
    assert len(job.optimizer.param_groups) == 1 + by_group
    assert notices(capfd)[0].startswith("parameter group 1 added (the script's add_param") is by_group
    _, whole = phased(tmp_path / "whole", None, by_group)
    for mine, wanted in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted)


def test_one_addition_of_a_restored_group_is_ignored_and_no_other(tmp_path: Path) -> None:
    phased(tmp_path, 6, True)
    model: Any = network()
    optimizer = torch.optim.AdamW(model[2].parameters(), 0.05)
    job = attach(model, optimizer, adaptive=False, checkpoint_dir=tmp_path)
    twice = "appear in more than one parameter group"
    with pytest.raises(ValueError, match=twice):
        optimizer.add_param_group({"params": model[0].weight})
    optimizer.add_param_group({"params": model[0].named_parameters(), "lr": 1.0})
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
    with pytest.raises(ValueError, match=twice):
        optimizer.add_param_group({"params": model[0].parameters()})
    optimizer.add_param_group({"params": nn.Parameter(torch.zeros(1))})
    assert len(optimizer.param_groups) == 3
    job.close()
    assert "add_param_group" not in vars(optimizer)


@pytest.mark.parametrize("equal", [False, True])
def test_weights_loaded_over_restored_ones_are_refused(tmp_path: Path, equal: bool) -> None:
    first = attempt(tmp_path, 5)
    weights = {name: p.clone() for name, p in first.module.state_dict().items()}
    if not equal:
        weights["2.bias"] += 1.0
    job = begun(tmp_path)
    job.module.load_state_dict(weights)
    if equal:
        train(job)
        return
    with pytest.raises(LoopMistake, match=r"2\.bias was changed between `attach`, which restored") as error:
        train(job)
    assert on_the_page(error.value)
    job.close()


def test_a_model_that_is_frozen_as_a_whole_between_steps_is_not_restored_so(tmp_path: Path) -> None:
    for _ in range(2):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        job = attach(model, optimizer, adaptive=False, checkpoint_dir=tmp_path)
        assert all(p.requires_grad for p in model.parameters())
        steps = job.progress.optimizer_steps
        for x, y, _ in job.loader(data(64), 16):
            model.requires_grad_(True)
            job.step(lambda x=x, y=y, job=job: mse_loss(job.model(x), y))
            model.requires_grad_(False)
            if job.progress.optimizer_steps == steps + 2:
                break
        job.close()
    assert job.progress.optimizer_steps == 4


CHANGES: dict[str, Any] = {
    "pruned": lambda model: prune.l1_unstructured(model[0], "weight", 0.5),
    "normed": lambda model: parametrizations.weight_norm(model[0]),
    "another head": lambda model: model.__setitem__(2, nn.Linear(model[2].in_features, 3)),
    "adapter": lambda model: model[0].register_parameter("adapter", nn.Parameter(torch.zeros(2))),
    "buffer": lambda model: model.register_buffer("seen", torch.zeros(2)),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_model_that_changes_is_warned_of_and_the_refusal_says_what_to_do(
    change: str, tmp_path: Path
) -> None:
    said = logged()
    model = network()[:3]
    job = begun(tmp_path, module=model)
    assert job.module is model

    def body(epoch: int) -> None:
        if epoch == 1:
            CHANGES[change](model)

    loader = job.loader(data(64), 16)
    for epoch in job.epochs(3):
        body(epoch)
        for x, _, _ in loader:
            job.step(lambda x=x: job.model(x).square().mean())  # type: ignore[misc]
        if epoch == 1:
            break
    job.close()
    assert "could not read its checkpoints" in " ".join(said)
    with pytest.raises(CheckpointError, match="changed its model after `attach`"):
        begun(tmp_path, module=network()[:3])


def test_thawing_and_a_head_of_the_same_shape_are_no_change(tmp_path: Path) -> None:
    said = logged()
    model = network()
    model[0].requires_grad_(False)
    train(begun(tmp_path, module=model), thaw=lambda epoch: model[0].requires_grad_(epoch > 0))
    assert "could not read" not in " ".join(said)
