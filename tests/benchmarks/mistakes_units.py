"""Slips with units, counters and what is trained; see `mistakes_scripts.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler
from torch.optim.swa_utils import update_bn
from torch.utils.data import Dataset, IterableDataset

import pollux
from tests.benchmarks.mistakes_scripts import (
    EXAMPLES,
    M0,
    Attempt,
    Result,
    Script,
    Slip,
    data,
    network,
    weights,
)


def scheduled(make: Callable[[Any], Any], own: bool = False) -> Callable[[Attempt], Result]:
    """Give a schedule to `attach`, and loop by `job.step`. `own`: the script steps it after each epoch, too."""

    def run(_: Attempt) -> Result:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        scheduler = make(optimizer)
        job = pollux.attach(model, optimizer, scheduler, adaptive=False)
        loader = job.loader(data(), M0)
        for _ in job.epochs(6):
            for x, y in loader:
                job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
            if own:
                scheduler.step()
        job.close()
        return weights(model), {}

    return run


def another_m0(attempt: Attempt) -> Result:
    """M0 that follows what each start finds."""
    script = Script(cosine=24, checkpoint_dir=attempt.folder)
    script.loader = script.job.loader(data(), M0 if attempt.number else 2 * M0)
    return script.train(most=0 if attempt.number else 7)


def own_counter(_: Attempt) -> Result:
    script, counted = Script(), []

    def body(k: int, x: Tensor, y: Tensor) -> None:
        script.pass_(k, x, y)
        counted.append(k)

    found, facts = script.train(body)
    return found, facts | {"counted": len(counted)}


def twice(_: Attempt) -> Result:
    script = Script()
    loader = script.load(M0)
    for _ in script.job.epochs(2):
        for _ in range(2):
            for k, (x, y) in enumerate(loader):
                script.pass_(k, x, y)
    return script.end()


def batch_norm_again(_: Attempt) -> Result:
    script = Script()
    loader = script.load(M0)
    script.train()
    update_bn(loader, nn.BatchNorm1d(6))
    return weights(script.model), {}


def steps_in_backward(_: Attempt) -> Result:
    model = network()
    own = {p: torch.optim.SGD([p], 0.05) for p in model.parameters()}

    def step(p: Tensor) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    script = Script(model)
    script.load(M0)
    return script.train()


def returning(what: Callable[[Tensor], Any]) -> Callable[[Attempt], Result]:
    def run(_: Attempt) -> Result:
        script = Script()
        return script.train(lambda k, x, y: script.job.step(lambda: what(script.loss(x, y))) and None)

    return run


class Growing(Dataset[tuple[Tensor, ...]]):
    length = 96

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        return data()[i]


def growing(attempt: Attempt) -> Result:
    """Data that the script makes longer before each pass."""
    script, rows = Script(checkpoint_dir=attempt.folder), Growing()
    script.begin = lambda epoch: setattr(rows, "length", 96 + 48 * epoch)  # type: ignore[method-assign]
    script.loader = script.job.loader(rows, M0)
    return script.train(most=0 if attempt.number else 8)


def few_batches(_: Attempt) -> Result:
    script = Script()
    loader = script.load(M0)
    for _ in script.job.epochs(4):
        for k, (x, y) in enumerate(itertools.islice(loader, 5)):
            script.pass_(k, x, y)
    return script.end()


class Dropping(nn.Module):
    """Leaves out one of its layers: always, or in each third pass."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways = nn.ModuleList([nn.Linear(6, 16), nn.Linear(6, 16)])
        self.out, self.always, self.passes = nn.Linear(16, 1), always, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        used = self.ways[:1] if self.always or self.passes % 3 == 0 else self.ways
        out: Tensor = self.out(torch.tanh(sum(way(x) for way in used)))
        return out


def dropping(always: bool, **options: Any) -> Callable[[Attempt], Result]:
    return lambda _: Script(Dropping(always), **options).train()


class Sharpness(torch.optim.Optimizer):
    """SAM, as public scripts have it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, 0.05)

    def first_step(self) -> None: ...

    def second_step(self) -> None:
        self.base_optimizer.step()


class WholeBatches(IterableDataset[tuple[Tensor, ...]]):
    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for start in range(0, EXAMPLES, M0):
            yield data()[start : start + M0]


def whole_batches(size: int, length: int) -> Callable[[Attempt], Result]:
    def run(_: Attempt) -> Result:
        script = Script()
        script.loader = script.job.loader(WholeBatches(), size, length=length)
        return script.train()

    return run


def lazy(_: Attempt) -> Result:
    return Script(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 1))).train()


def several(parameters: list[Tensor]) -> list[torch.optim.Optimizer]:
    matrices, rest = [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]
    return [torch.optim.SGD(group, 0.05, momentum=0.9) for group in (matrices, rest)]


def several_optimizers(own: bool) -> Callable[[Attempt], Result]:
    """The same as one SGD. `own`: the script steps each of them."""

    def run(_: Attempt) -> Result:
        model = network()
        optimizers = several(list(model.parameters()))
        job = pollux.attach(model, optimizers, adaptive=False)
        loader = job.loader(data(), M0, per_gpu=(1, M0 // 2 // job.world.size))
        for _ in job.epochs(2):
            for x, y in loader:
                with job.micro_batch():
                    job.backward(mse_loss(job.model(x), y))
                if job.sync_gradients:
                    for optimizer in optimizers if own else [job.optimizer]:
                        optimizer.step()
                    job.optimizer.zero_grad()
        job.close()
        return weights(model), {}

    return run


def one_optimizer(_: Attempt) -> Result:
    return Script().train()


UNIT_SLIPS = (
    Slip("StepLR of epochs", scheduled(lambda o: lr_scheduler.StepLR(o, 2))),
    Slip("ExponentialLR of epochs", scheduled(lambda o: lr_scheduler.ExponentialLR(o, 0.9))),
    Slip("CosineAnnealingLR of epochs", scheduled(lambda o: lr_scheduler.CosineAnnealingLR(o, 6, 0.01))),
    Slip("LambdaLR of epochs", scheduled(lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.1 ** (e // 2)))),
    Slip(
        "scheduler.step() per epoch beside job.step",
        scheduled(lambda o: lr_scheduler.CosineAnnealingLR(o, 78), own=True),
    ),
    Slip("another M0 in each start", another_m0, attempts=2),
    Slip(
        "a counter in a loop over passes", own_counter, good=lambda facts: facts["counted"] == facts["steps"]
    ),
    Slip("islice of the loader", few_batches),
    Slip("the loader used twice in an epoch", twice),
    Slip("update_bn over the job's loader", batch_norm_again),
    Slip("optimizers that step in the backward pass", steps_in_backward),
    Slip("a tuple from job.step's function", returning(lambda loss: (loss, 1))),
    Slip("a loss per example", returning(lambda loss: loss.expand(4))),
    Slip("data that grow in each epoch", growing, attempts=2, good=lambda facts: facts["steps"] == 15),
    Slip("a layer that no pass uses", dropping(True)),
    Slip("the same on two ranks", dropping(True), 2),
    Slip("layers dropped at random", dropping(False)),
    Slip("the same on two ranks, at random", dropping(False), 2),
    Slip(
        "unused parameters, with ddp_kwargs",
        dropping(True, ddp_kwargs={"find_unused_parameters": True}),
        2,
        good=lambda facts: facts["steps"] == 24,
    ),
    Slip("SAM", lambda _: Script(make=Sharpness).train()),
    Slip("a stream of whole batches", whole_batches(M0, EXAMPLES)),
    Slip("a stream of whole batches, each as a sample", whole_batches(1, EXAMPLES // M0)),
    Slip("a lazy module", lazy),
    Slip("two optimizers in a list", several_optimizers(False), 2, one_optimizer),
    Slip("each of two optimizers stepped", several_optimizers(True), 2),
)
