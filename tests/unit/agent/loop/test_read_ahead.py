"""A loader that something reads ahead of the passes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.nn.functional import mse_loss

from pollux.errors import LoopMistake
from pollux.loop.slips import READ_AHEAD
from tests.unit.agent.regression import attached, data, logged


def ahead(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    held = next(batches, None)
    while held is not None:
        following = next(batches, None)
        yield held
        held = following


def through_a_thread(loader: Any) -> Iterator[Any]:
    batches: queue.Queue[Any] = queue.Queue()
    for batch in loader:
        yield batch
        break
    reader = threading.Thread(target=lambda: batches.put(next(iter(loader))), daemon=True)
    reader.start()
    reader.join()
    yield batches.get()


def train(most: int, form: str, read: Any, said: list[str]) -> None:
    job = attached()
    loader = job.loader(data(), 32, per_gpu=(1, most))
    for _ in job.epochs(2):
        for number, (x, y, _) in enumerate(read(loader)):
            if form == "step":
                job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
                continue
            if form == "bare":
                mse_loss(job.model(x), y).backward()  # type: ignore[no-untyped-call]
            else:
                with job.micro_batch():
                    job.backward(mse_loss(job.model(x), y))
            if job.sync_gradients:
                job.optimizer.step()
                job.optimizer.zero_grad()
            if read is ahead and number == 0:
                assert READ_AHEAD in said
    job.close()


@pytest.mark.parametrize("most", [8, 32])
@pytest.mark.parametrize("form", ["step", "micro_batch", "bare"])
def test_a_prefetcher_is_warned_of_at_once_and_refused(most: int, form: str) -> None:
    said = logged()
    with pytest.raises(LoopMistake, match="before it used the one before"):
        train(32 if form == "bare" else most, form, ahead, said)
    assert READ_AHEAD in said


def test_a_thread_that_reads_the_loader_is_refused() -> None:
    with pytest.raises(LoopMistake, match="prefetcher"):
        train(32, "step", through_a_thread, [])


def test_a_look_at_the_first_batch_is_no_mistake() -> None:
    said = logged()
    job = attached()
    loader = job.loader(data(), 32)
    next(iter(loader))
    for _ in job.epochs(2):
        for x, y, _ in loader:
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
    job.close()
    assert READ_AHEAD not in said
