"""What plain PyTorch scripts may pass, and what is refused at once."""

from __future__ import annotations

import itertools
import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Subset

from pollux import attach
from pollux.data.loader import elastic_loader
from pollux.data.place import RankShare
from pollux.errors import DataError, PolluxAgentError
from tests.unit.agent.loop.mistakes_page import on_the_page
from tests.unit.agent.regression import attached, data, network


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def wrapped() -> list[str]:
    dist.init_process_group("gloo")
    model, said = DistributedDataParallel(network()), []
    for given in (model, torch.compile(model, backend="eager")):
        with pytest.raises(PolluxAgentError) as refused:
            attach(given, sgd(model))  # type: ignore[arg-type]
        said.append(str(refused.value))
    job = attach(network(), sgd(model))
    with pytest.raises(PolluxAgentError) as refused:
        job.add_model("critic", model, sgd(model))
    job.close()
    return [*said, str(refused.value)]


def test_a_model_that_is_wrapped_already_is_refused(ranks: Any) -> None:
    """A wrapped model would train, with each gradient reduced twice.

    The agent would measure no noise between the ranks.
    """
    for said in ranks(2, wrapped):
        assert len(said) == 3
        assert all(
            "got one in DistributedDataParallel. The agent wraps the model: leave out your own wrapper" in one
            for one in said
        )
        assert on_the_page(said[0])
    alone = nn.DataParallel(network())
    with pytest.raises(PolluxAgentError, match="one in DataParallel"):
        attach(alone, sgd(alone))


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model = network().requires_grad_(False)
    with pytest.raises(PolluxAgentError, match="no parameter that requires a gradient"):
        attach(model, sgd(model))


@pytest.mark.parametrize("told", [False, True])
def test_parameters_of_an_optimizer_unknown_to_the_agent_are_told_of(
    told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    body, head = sgd(model[0]), sgd(model[2])  # type: ignore[index]
    job = attach(model, body, adaptive=True)
    if told:
        job.add_model("head", model[2], head)  # type: ignore[index]
    job.loader(data(), 16, max_batch_size=64)
    job.close()
    assert (
        "2 of 4 parameters that require a gradient (2.weight first) are in no optimizer" in caplog.text
    ) is not told


def test_a_batch_size_that_stays_makes_no_word_of_them(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    job = attach(model, sgd(model[0]), adaptive=False)  # type: ignore[index]
    job.loader(data(), 16)
    job.close()
    assert not caplog.text


def test_a_graph_may_be_kept_for_another_backward_pass() -> None:
    job = attached(0.01)
    for x, y, _ in job.loader(data(), 16, shuffle=False):
        with job.micro_batch():
            loss = mse_loss(job.model(x), y)
            job.backward(loss, retain_graph=True)
            once = [p.grad.clone() for p in job.module.parameters() if p.grad is not None]
            job.backward(loss)
        break
    for before, p in zip(once, job.module.parameters(), strict=True):
        torch.testing.assert_close(p.grad, 2 * before)
    job.close()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data())


class LikeMosaic(IterableDataset[int]):
    """The documented interface of Mosaic's StreamingDataset, in miniature."""

    size = 48

    def __iter__(self) -> Any:
        return iter(range(int(os.environ["RANK"]), self.size, int(os.environ["WORLD_SIZE"])))

    def __len__(self) -> int:
        return self.size // 2

    def __getitem__(self, number: int) -> int:
        return number

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        return {"sample_in_epoch": num_samples}


def test_a_stream_that_divides_itself_moves_when_it_is_read_by_number() -> None:
    stream = LikeMosaic()
    numbers = Subset(stream, range(stream.size))
    used = []
    loaders = [elastic_loader(numbers, RankShare(rank, 2, 4), batch_size=8) for rank in range(2)]
    for batches in itertools.islice(zip(*loaders, strict=True), 2):
        used += [int(number) for batch in batches for number in batch]
        for loader in loaders:
            loader.commit()
    state = loaders[0].state_dict()
    for rank in range(3):
        loader = elastic_loader(numbers, RankShare(rank, 3, 4), batch_size=8)
        loader.load_state_dict(state)
        used += [int(number) for batch in loader for number in batch]
    assert sorted(used) == list(range(stream.size))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: (LikeMosaic(), {}), r"Subset\(stream, range\(stream.size\)\)"),
        (lambda: (DataLoader(LikeMosaic(), batch_size=None), {}), "LikeMosaic, a stream that divides itself"),
        (
            lambda: (Stream(), {"length": 203, "divided": True}),
            "no divided: give every rank the whole stream",
        ),
        (lambda: (DataLoader(data(), batch_size=8), {}), "makes batches: give its dataset"),
        (lambda: (DataLoader(Stream(), batch_size=8), {"length": 203}), "batch_size=None"),
        (lambda: (data(), {"sampler": DistributedSampler(data(), 2, 0)}), "the same indices"),
        (lambda: (data(), {"batch_sampler": [[0, 1], [2, 3]]}), "no batch_sampler"),
        (lambda: (data(), {"generator": torch.Generator()}), "no generator"),
    ],
)
def test_data_that_is_divided_already_is_refused(make: Any, said: str) -> None:
    job = attached(0.01)
    dataset, options = make()
    with pytest.raises(DataError, match=said) as told:
        job.loader(dataset, 16, **options)
    assert on_the_page(told.value) or re.search("expected no|divides itself", str(told.value))
    job.close()


def test_data_that_is_not_divided_is_taken() -> None:
    for dataset, options in (
        (DataLoader(Stream(), batch_size=None), {"length": 203}),
        (data(), {"sampler": RandomSampler(data())}),
    ):
        job = attached(0.01)
        assert len(job.loader(dataset, 16, **options)) == 13
        job.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_memory_is_pinned_where_there_is_something_to_pin_it_for(stream: bool) -> None:
    job = attached(0.01)
    options = {"length": 203} if stream else {}
    for x, _, _ in job.loader(Stream() if stream else data(), 16, pin_memory=True, **options):
        assert x.is_pinned() == torch.cuda.is_available()
        break
    job.close()
