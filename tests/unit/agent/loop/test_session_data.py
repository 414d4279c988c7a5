"""The training loop on real ranks over data of every kind.

Data are iterable, sampled, collated or fetched by workers.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SubsetRandomSampler

from pollux import attach
from pollux.data.stream import checksum
from pollux.errors import BatchError, DataError
from tests.unit.agent.loop.mistakes_page import on_the_page
from tests.unit.agent.regression import attached, logged, network, train_step, update

EXAMPLES = 50
"""With 3 ranks of 8 a pass ends with 2 samples, and a rank that has none."""


def example(index: int) -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(6, generator=generator), torch.randn(1, generator=generator), index


class Indexed(Dataset[Any]):
    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> Any:
        return example(index)


class Stream(IterableDataset[Any]):
    """In order; goes on where a state was taken."""

    def __init__(self) -> None:
        self.given = self.start = self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"]

    def __iter__(self) -> Iterator[Any]:
        self.given, self.start = self.start, 0
        while self.given < EXAMPLES:
            self.given += 1
            self.read += 1
            yield example(self.given - 1)


def train(dataset: Any, m0: int, passes: int = 1, **options: Any) -> tuple[list[list[int]], list[Tensor]]:
    """Return this rank's samples by micro-batch, and the parameters.

    Stand-ins are left out. The parameters are those after training.
    """
    job = attached(0.1)
    loader = job.loader(dataset, m0, **options)
    evaluation = DataLoader(Indexed(), batch_size=25)
    seen: list[list[int]] = []
    for _ in job.epochs(passes):
        for x, y, ids in loader:
            with job.micro_batch():
                job.backward(mse_loss(job.model(x), y))
            seen.append(ids.tolist() if loader.data.local_samples else [])
            update(job)
        with torch.no_grad():  # a second loader, of each rank's own, during training
            assert sum(len(job.module(x)) for x, _, _ in evaluation) == EXAMPLES
    job.close()
    return seen, [p.detach().clone() for p in job.module.parameters()]


def train_plainly(m0: int, passes: int) -> list[Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (torch.stack(column) for column in list(zip(*map(example, range(EXAMPLES)), strict=True))[:2])
    for _ in range(passes):
        for rows in torch.arange(EXAMPLES).split(m0):
            optimizer.zero_grad()
            mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def stream_on_ranks(m: int) -> Any:
    return train(Stream(), 24, passes=2, per_gpu=(1, m), length=EXAMPLES)


@pytest.mark.parametrize(("size", "m"), [(3, 8), (2, 4)])
def test_a_stream_trains_as_on_one_rank_with_uneven_tails(ranks: Any, size: int, m: int) -> None:
    """Each sample counts once a pass, with and without accumulation.

    The gradient of each step is the mean over its samples.
    """
    results = ranks(size, stream_on_ranks, m)
    counts = Counter(index for seen, _ in results for batch in seen for index in batch)
    assert counts == dict.fromkeys(range(EXAMPLES), 2)
    if size == 3:
        assert results[2][0][2] == []
    plain = train_plainly(24, 2)
    for _, parameters in results:
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(parameters, plain, strict=True))


@pytest.mark.parametrize("m", [8, 2])
@pytest.mark.parametrize("length", [17, 30, 70])
def test_a_length_told_wrong_bends_no_gradient_and_is_corrected_after_the_first_pass(
    length: int, m: int
) -> None:
    """Each step is the mean over its samples, whatever length was given.

    This holds where the stream went on and where it ended early.
    """
    model = torch.nn.Linear(6, 1, bias=False)
    job = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), adaptive=False)
    loader = job.loader(Stream(), 8, length=length, per_gpu=(1, m))
    counts: Counter[int] = Counter()
    weights: list[float] = []
    weight = 0.0
    for _ in job.epochs(3):
        for x, _, ids in loader:
            with job.micro_batch():
                weight += job.stepper.share
                job.backward(job.model(x).sum() * 0.0)
            counts.update(ids.tolist())
            if job.sync_gradients:
                weights.append(weight)
                weight = 0.0
                job.optimizer.step()
                job.optimizer.zero_grad()
    job.close()
    assert counts == dict.fromkeys(range(EXAMPLES), 3)
    assert weights == pytest.approx([1.0] * len(weights))
    assert job.dataset_length == EXAMPLES


def interrupted(
    directory: Path, steps: int, kind: type[Stream] = Stream, **options: Any
) -> tuple[list[int], int]:
    """Train until both attempts together have checkpointed `steps` steps.

    Return the samples that this attempt used, and how many it read.
    """
    model, stream = network(), kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = attach(model, optimizer, adaptive=False, checkpoint_dir=directory)
    loader = job.loader(stream, 6, length=EXAMPLES, **options)
    seen: list[int] = []
    for _ in job.epochs(2):
        for x, y, ids in loader:
            with job.micro_batch():
                job.backward(mse_loss(job.model(x), y))
            seen += ids.tolist() if loader.data.local_samples else []
            update(job)
            if job.sync_gradients and job.progress.optimizer_steps == steps:
                loader.data.commit()  # this step is over: what comes is saved, and the attempt ends
                job.coordinator.save(durable=True)
                return seen, stream.read
    return seen, stream.read


def test_a_stream_goes_on_at_another_number_of_ranks_where_it_was(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pollux.data.stream.REMEMBER_EVERY", 4)
    before = ranks(2, interrupted, tmp_path, 12)
    after = ranks(3, interrupted, tmp_path, 10**6)
    used = Counter(index for seen, _ in before + after for index in seen)
    assert used == dict.fromkeys(range(EXAMPLES), 2)
    assert before[0][1] > EXAMPLES  # into the second pass
    assert after[0][1] < EXAMPLES  # not read again from its start


def pairs(samples: list[Any]) -> Any:
    x, y, ids = zip(*samples, strict=True)
    return torch.stack(x), torch.stack(y), torch.tensor(ids)


def sampled(workers: int, drop_last: bool) -> list[list[int]]:
    indices = list(range(0, EXAMPLES, 2))
    sampler = SubsetRandomSampler(indices, generator=torch.Generator())
    options: dict[str, Any] = {"sampler": sampler, "collate_fn": pairs, "num_workers": workers}
    if workers:
        options["multiprocessing_context"] = "fork"
    return train(Indexed(), 8, passes=2, drop_last=drop_last, **options)[0]


@pytest.mark.parametrize(("workers", "drop_last"), [(0, True), (1, False)])
def test_samplers_collation_workers_and_drop_last(ranks: Any, workers: int, drop_last: bool) -> None:
    """25 samples in steps of 8 on 2 ranks: 24 of them with drop_last, twice."""
    results = ranks(2, sampled, workers, drop_last)
    counts = Counter(index for seen in results for batch in seen for index in batch)
    assert set(counts) <= set(range(0, EXAMPLES, 2))
    if drop_last:
        assert sum(counts.values()) == 48
        assert {len(batch) for seen in results for batch in seen} == {4}
    else:
        assert counts == dict.fromkeys(range(0, EXAMPLES, 2), 2)


def small(loader_options: dict[str, Any], dataset: Any) -> str:
    job = attached(0.1)
    with pytest.raises(BatchError) as caught:
        job.loader(dataset, 64, **loader_options)
    job.close()
    return str(caught.value)


def test_a_dataset_smaller_than_the_batch_is_refused_alike_on_any_number_of_ranks(ranks: Any) -> None:
    """A job refused on one GPU must not start on four, then fail on a shrink."""
    told = {small({}, Indexed()), *ranks(2, small, {}, Indexed()), small({"drop_last": True}, Indexed())}
    told |= {small({"length": EXAMPLES}, Stream()), small({"sampler": RandomSampler(Indexed())}, Indexed())}
    assert len(told) == 1
    assert "50 samples, fewer than the batch size of 64" in told.pop()


class DividesItself(Stream):
    """As webdataset with split_by_node: each rank has a part of the stream."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), int(os.environ["RANK"]), None, 2)


def told_of(kind: type[Stream], **options: Any) -> list[str]:
    told = logged()
    job = attached(0.1)
    loader = job.loader(kind(), 24, length=EXAMPLES, **options)
    for _ in job.epochs(1):
        for x, y, _ in loader:
            train_step(job, x, y)
            if job.progress.optimizer_steps == 3:
                break
    job.close()
    return told


def test_a_stream_that_divides_itself_by_rank_is_told_of(ranks: Any) -> None:
    assert ranks(2, told_of, Stream) == [[], []]
    (told,), none = ranks(2, told_of, DividesItself)
    assert not none
    assert told.startswith(
        "sample 0 of the stream is another one on rank 1 than on rank 0. A stream that divides itself"
    )
    assert on_the_page(told)


def test_checksums_of_samples() -> None:
    one = {"x": torch.arange(3.0), "n": np.arange(2), "text": b"a", "more": [1, None, object()]}
    other = one | {"x": torch.tensor([0.0, 1.0, 3.0])}
    assert checksum(one) == checksum(dict(one))
    assert (
        len({checksum(sample) for sample in (one, other, one | {"text": b"b"}, tuple(one), one | {"n": 1})})
        == 5
    )


def test_what_a_stream_cannot_do_is_said() -> None:
    job = attached(0.1)
    with pytest.raises(DataError, match="batch_size=None"):
        job.loader(Stream(), 8, length=EXAMPLES, num_workers=2)
    with pytest.raises(DataError, match="give the approximate number of samples of a pass"):
        job.loader(Stream(), 8)
    with pytest.raises(DataError, match="starts again"):
        job.loader(iter(Stream()), 8, length=EXAMPLES)
    job.close()
