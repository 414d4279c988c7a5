"""Several optimizers of one model, given to `attach` as a list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR

from pollux import attach
from pollux.errors import LoopMistake, PolluxAgentError
from pollux.loop.slips import ATTACHED
from pollux.optimizers.families import ADAM, SGD_LIKE
from tests.unit.agent.regression import data, network

LENGTH, M0 = 192, 16
STEPS = 3 * LENGTH // M0


def optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.SGD(matrices, 0.05, momentum=0.9), torch.optim.AdamW(rest, 0.01)]


def flat(model: torch.nn.Module) -> list[float]:
    found: list[float] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return found


def plain() -> list[float]:
    model = network()
    own = optimizers(model)
    schedules = [CosineAnnealingLR(each, STEPS) for each in own]
    for _ in range(3):
        for x, y, _ in torch.utils.data.DataLoader(data(LENGTH), M0):
            mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            for each in (*own, *schedules):
                each.step()
            for each in own:
                each.zero_grad()
    return flat(model)


def trained(form: str, folder: str | None = None, stop: int = 0, most: int = M0) -> list[float]:
    model = network()
    own = optimizers(model)
    schedules = [CosineAnnealingLR(each, STEPS) for each in own]
    job = attach(model, own, schedules, adaptive=False, checkpoint_dir=folder)
    loader = job.loader(data(LENGTH), M0, shuffle=False, per_gpu=(1, most))
    for _ in job.epochs(3):
        for x, y, _ in loader:
            if form == "step":
                job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
            else:
                for each in own:
                    each.zero_grad()  # loses no gradient of an earlier pass
                with job.micro_batch():
                    job.backward(mse_loss(job.model(x), y))
                if job.sync_gradients:
                    job.optimizer.step()
                    for schedule in schedules:
                        schedule.step()
            if stop and job.progress.optimizer_steps == stop:
                job.close()
                return []
    job.close()
    return flat(model)


@pytest.mark.parametrize("form", ["step", "explicit"])
@pytest.mark.parametrize(("size", "most"), [(1, 16), (1, 4), (2, 8), (2, 4)])
def test_they_train_as_they_do_in_plain_torch(ranks: Any, form: str, size: int, most: int) -> None:
    for found in ranks(size, trained, form, None, 0, most):
        assert found == pytest.approx(plain(), abs=1e-6)


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_they_are_restored_on_other_ranks(ranks: Any, tmp_path: Path, first: int, then: int) -> None:
    ranks(first, trained, "step", str(tmp_path), 17, 8)
    for found in ranks(then, trained, "step", str(tmp_path), 0, 8):
        assert found == pytest.approx(plain(), abs=1e-6)


def test_each_keeps_its_family_and_is_free_after_close() -> None:
    model = network()
    own = optimizers(model)
    job = attach(model, own)
    loader = job.loader(data(LENGTH), M0, max_batch_size=64)
    for x, y, _ in loader:
        job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
    assert job.training.models[0].norms.families == (SGD_LIKE, ADAM)
    with pytest.raises(LoopMistake, match=r"job\.optimizer\.step"):
        own[0].step()
    with pytest.raises(LoopMistake, match="add_param_group"):
        own[0].add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert own[1].state_dict()["state"]
    with pytest.raises(PolluxAgentError, match="attached before"):
        attach(model, own[1])
    assert "attached before" in ATTACHED
    job.close()
    own[0].step()
    attach(model, own[1]).close()


def test_a_list_that_is_none_is_refused() -> None:
    model = network()
    for wrong in ([], ["adam"], [torch.optim.SGD(model.parameters(), 0.1)] * 2):
        with pytest.raises(PolluxAgentError, match="expected"):
            attach(model, wrong)  # type: ignore[arg-type]


def test_another_kind_after_a_restart_is_refused(tmp_path: Path) -> None:
    trained("step", str(tmp_path), 5)
    model = network()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    others = [torch.optim.SGD(matrices, 0.05, momentum=0.9), torch.optim.RMSprop(rest, 0.01)]
    with pytest.raises(PolluxAgentError, match=r"its optimizer was SGD \+ AdamW, and is SGD \+ RMSprop now"):
        attach(model, others, adaptive=False, checkpoint_dir=tmp_path)
