"""Two ranks, or two starts, with other data; data that changes between passes; workers that see the change."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

from pollux import attach
from pollux.data.identity import difference, identity
from pollux.data.loader import ElasticLoader
from pollux.data.place import RankShare
from pollux.errors import BatchError, PolluxAgentError


class Drawn(Dataset[Any]):
    """Rows of noise by a seed, augmented at random; the label is not."""

    def __init__(self, seed: int, length: int = 64) -> None:
        self.seed, self.length, self.own = seed, length, np.random.default_rng(3)
        self.epoch = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x + random.random() + self.own.random(), float(self.seed + i)


class Unsteady(Drawn):
    """Its generator is made for each sample, without a seed."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return x + np.random.default_rng().random(), y


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Drawn, Unsteady])
def test_other_data_is_known_under_random_augmentation(kind: Any, workers: int) -> None:
    mine, same, other = (identity(kind(seed), 64, workers) for seed in (0, 0, 5))
    assert difference(mine, same) is None
    assert difference(mine, other) == 0


def test_the_comparison_leaves_no_trace() -> None:
    data, untouched = Drawn(0), Drawn(0)
    torch.manual_seed(1)
    random.seed(1)
    before = random.getstate(), torch.get_rng_state()
    identity(data, 64, 0)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    random.seed(1)
    first = data[3]
    random.seed(1)
    assert torch.equal(first[0], untouched[3][0])


def test_a_sample_that_cannot_be_read_is_left_to_the_loop() -> None:
    assert identity([1, 2], 5, 0)[0] == 5


class Growing(Dataset[int]):
    def __init__(self) -> None:
        self.length, self.epoch = 40, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> int:
        return i + 1000 * self.epoch


@pytest.mark.parametrize("workers", [0, 1])
def test_a_length_that_changes_between_passes_is_followed(workers: int) -> None:
    data = Growing()
    loader = ElasticLoader(data, RankShare(0, 1, 8), num_workers=workers)
    for length in (40, 56, 24):
        data.length = length
        loader.begin_pass()
        assert sorted(int(i) for batch in loader for i in batch) == list(range(length))
    data.length = 5
    with pytest.raises(BatchError, match="5 samples in pass 3, and had 24"):
        loader.begin_pass()


@pytest.mark.parametrize(("keeps", "seen"), [(None, [0, 1, 2]), (False, [0, 1, 2]), (True, [0, 0, 0])])
def test_workers_see_what_the_script_changes_between_passes_as_in_torch(
    keeps: bool | None, seen: list[int]
) -> None:
    data = Growing()
    options = {} if keeps is None else {"persistent_workers": keeps}
    loader = ElasticLoader(data, RankShare(0, 1, 8), num_workers=1, **options)
    found = []
    for epoch in range(3):
        data.epoch = epoch
        loader.begin_pass()
        found.append({int(i) // 1000 for batch in loader for i in batch})
    assert found == [{epoch} for epoch in seen]


def start(length_by_rank: bool, growing: bool, seed_by_rank: bool) -> Any:
    said: list[str] = []

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("pollux").addHandler(Said())
    model = nn.Linear(4, 1)
    job = attach(model, torch.optim.SGD(model.parameters(), 0.01), adaptive=False)
    data = Drawn(job.rank if seed_by_rank else 0, 64 + 8 * job.rank * length_by_rank)
    try:
        loader = job.loader(data, 16)
        for _ in job.epochs(2):
            for x, y in loader:
                job.step(lambda x=x, y=y: mse_loss(job.model(x), y[:, None].float()))
            if growing and job.rank:
                data.length = 96
    except PolluxAgentError as error:
        return f"{type(error).__name__}: {error}"
    job.close()
    return " ".join(said)


def test_ranks_with_other_data_are_told(ranks: Any) -> None:
    environment = {"POLLUX_EXCHANGE_INTERVAL": "0"}
    assert all(
        "samples on ranks 0 to 1" in told for told in ranks(2, start, True, False, False, env=environment)
    )
    assert "sample 0 of the dataset is another one on rank 1" in ranks(2, start, False, False, True)[0]
    assert any("has 96" in str(told) for told in ranks(2, start, False, True, False, env=environment))
