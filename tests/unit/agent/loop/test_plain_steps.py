"""A step that is as the one before takes a short way; its training is that of the long way to the last bit.

The oracle is the same script with every step on the long way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from pollux import Job
from pollux.loop.stepper import Stepper
from tests.unit.agent.regression import attached, data, network

pytestmark = pytest.mark.one_process

Script = Callable[[], Job]


def passes(job: Job, loader: Any, body: Callable[[Any, Any], object], epochs: float = 3) -> Job:
    for _ in job.epochs(epochs):
        for x, y, _ in loader:
            body(x, y)
    return job


def loss_of(job: Job, x: Any, y: Any) -> Any:
    return mse_loss(job.model(x), y)


def ordinary() -> Job:
    job = attached()
    return passes(job, job.loader(data(), 4), lambda x, y: job.step(lambda: loss_of(job, x, y), clip=1.0))


def contexts() -> Job:
    job = attached()

    def body(x: Any, y: Any) -> None:
        job.optimizer.zero_grad()
        with job.micro_batch():
            job.backward(loss_of(job, x, y))
        job.optimizer.step()

    return passes(job, job.loader(data(), 4), body, epochs=2.5)


def own_backward() -> Job:
    """The script calls `loss.backward` and leaves passes out."""
    job = attached()

    def body(x: Any, y: Any) -> None:
        with job.micro_batch():
            if float(x[0, 0]) < 1.0:
                loss_of(job, x, y).backward()
        if float(x[0, 0]) < 1.0:
            job.optimizer.step()
        job.optimizer.zero_grad()

    return passes(job, job.loader(data(), 4), body)


def schedule_and_growth() -> Job:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
    import pollux

    job = pollux.attach(model, optimizer, scheduler, adaptive=True)
    loader = job.loader(data(), 4, max_batch_size=16)
    return passes(job, loader, lambda x, y: job.step(lambda: loss_of(job, x, y)))


def skipped_and_weighed() -> Job:
    job = attached()

    def body(x: Any, y: Any) -> None:
        if float(x[0, 1]) > 1.0:
            job.step(lambda: None)
        elif float(x[0, 1]) > 0.5:
            job.step(lambda: loss_of(job, x, y) * len(x), weight=len(x))
        else:
            job.step(lambda: loss_of(job, x, y))

    return passes(job, job.loader(data(), 4), body)


def left_and_begun_again() -> Job:
    job = attached()
    loader = job.loader(data(), 4, drop_last=True)
    for _ in job.epochs(2, statistical=True):
        for n, (x, y, _) in enumerate(loader):
            job.step(lambda x=x, y=y: loss_of(job, x, y))  # type: ignore[misc]
            if n == 12:
                break
        for n, (x, y, _) in enumerate(loader):
            job.step(lambda x=x, y=y: loss_of(job, x, y))  # type: ignore[misc]
            if n == 20:
                job.poll()
                job.optimizer.param_groups[0]["lr"] = 0.01
    return job


def out_of_memory() -> Job:
    job, tries = attached(), iter(range(10_000))

    def loss(x: Any, y: Any) -> Any:
        if next(tries) == 120:
            raise torch.cuda.OutOfMemoryError
        return loss_of(job, x, y)

    return passes(job, job.loader(data(), 4, per_gpu=(1, 4)), lambda x, y: job.step(lambda: loss(x, y)))


def workers() -> Job:
    job = attached()
    loader = job.loader(data(), 4, num_workers=1)
    return passes(job, loader, lambda x, y: job.step(lambda: loss_of(job, x, y)), epochs=2)


SCRIPTS: list[Script] = [
    ordinary,
    contexts,
    own_backward,
    schedule_and_growth,
    skipped_and_weighed,
    left_and_begun_again,
    out_of_memory,
    workers,
]


def ended(script: Script) -> tuple[list[float], dict[str, Any], int, dict[str, Any]]:
    """The weights, the progress, the places of the ranks and the data's place after a script."""
    torch.manual_seed(5)
    job = script()
    progress = job.progress.state_dict() | {"gpu_seconds": 0.0}
    places, data_now = job.coordinator.places.steps, job.training.data.state_dict()
    rates = list(map(float, job.learning_rates))
    job.close()
    return (
        [v for p in job.module.parameters() for v in p.flatten().tolist()] + rates,
        progress,
        places,
        data_now,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_short_way_trains_as_the_long_one(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLLUX_EXCHANGE_INTERVAL", "1e9")  # an exchange every 50 steps, on any machine
    short = []
    end = Stepper.end_plain_step
    monkeypatch.setattr(Stepper, "end_plain_step", lambda self: (short.append(1), end(self))[1])
    found = ended(script)
    assert len(short) > 10, "the short way was taken"
    monkeypatch.setattr("pollux.loop.stepper.alike", lambda *_: 0)
    taken = len(short)
    assert found == ended(script)
    assert len(short) == taken
