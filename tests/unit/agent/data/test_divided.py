"""Streams that divide themselves by rank: shares, places, rank counts.

All ranks stand side by side in one process, and a checkpoint's content passes through the form that ranks exchange.
"""

from __future__ import annotations

import itertools
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from pollux.data.divided import DividedStream
from pollux.data.loader import elastic_loader
from pollux.data.place import RankShare
from pollux.errors import DataError, StateError
from pollux.ranks.plain_values import dumps, loads
from tests.unit.agent.loading import Numbers

LENGTH = 48


class Part(IterableDataset[int]):
    """Every n-th number, in a new order for each round; without a state."""

    def __init__(self, rank: int, ranks: int, length: int = LENGTH) -> None:
        self.numbers = list(range(rank, length, ranks))
        self.round = 0

    def set_epoch(self, round_: int) -> None:
        self.round = round_

    def __iter__(self) -> Iterator[int]:
        turn = self.round % max(len(self.numbers), 1)
        return iter(self.numbers[turn:] + self.numbers[:turn])


class StatefulPart(Part):
    """The same with a state, which reads nothing again."""

    def __init__(self, rank: int, ranks: int, length: int = LENGTH) -> None:
        super().__init__(rank, ranks, length)
        self.given = self.start = self.read = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "round": self.round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["given"]
        assert self.round == state["round"], "set_epoch comes first"

    def __iter__(self) -> Iterator[int]:
        self.given, self.start = self.start, 0
        for number in list(super().__iter__())[self.given :]:
            self.given += 1
            self.read += 1
            yield number


class LikeMosaic(IterableDataset[int]):
    """The documented interface of Mosaic's StreamingDataset, in miniature.

    The state counts samples over all ranks, and each iteration is an epoch.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.next_epoch = rank, ranks, 0
        self.loaded: dict[str, int] | None = None

    def __len__(self) -> int:
        return LENGTH // self.ranks

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        assert from_beginning
        return {"epoch": self.next_epoch - 1, "sample_in_epoch": num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state

    def __iter__(self) -> Iterator[int]:
        first = 0
        if self.loaded is not None:
            self.next_epoch, first = self.loaded["epoch"], self.loaded["sample_in_epoch"]
            self.loaded = None
        turn = self.next_epoch
        self.next_epoch += 1
        rest = [(number + turn) % LENGTH for number in range(first, LENGTH)]
        return iter(rest[self.rank :: self.ranks])


def on(ranks: int, kind: Callable[[int, int], Any], local_batch: int = 4, **options: Any) -> list[Any]:
    options = {"divided": True, "length": LENGTH} | options
    return [
        elastic_loader(kind(rank, ranks), RankShare(rank, ranks, local_batch), batch_size=8, **options)
        for rank in range(ranks)
    ]


def steps(loaders: list[Any], count: int) -> list[list[int]]:
    """Each rank's samples of so many steps, in lockstep."""
    seen: list[list[int]] = [[] for _ in loaders]
    made = 0
    while made < count:
        for batches in zip(*loaders, strict=True):
            assert len({len(batch) for batch in batches}) == 1
            assert {loader.weight for loader in loaders} == {1.0}
            for taken, batch, loader in zip(seen, batches, loaders, strict=True):
                taken.extend(torch.as_tensor(batch).tolist())
                loader.commit()
            made += 1
            if made == count:
                return seen
    return seen


def saved(loaders: list[Any]) -> dict[str, Any]:
    places = [loads(dumps(loader.rank_state())) for loader in loaders]
    return {**loads(dumps(loaders[0].state_dict())), "ranks": places}


def restored(state: dict[str, Any], loaders: list[Any]) -> list[Any]:
    for loader in loaders:
        loader.load_state_dict(state)
    return loaders


@pytest.mark.parametrize("kind", [Part, StatefulPart, LikeMosaic])
@pytest.mark.parametrize("after", [0, 2, 6, 9, 12])
def test_each_rank_goes_on_where_its_own_stream_was(kind: Any, after: int) -> None:
    whole = steps(on(2, kind), 18)
    first = on(2, kind)
    before = steps(first, after)
    again = restored(saved(first), on(2, kind))
    twice = restored(saved(again), on(2, kind))  # saved before anything was read
    rest = steps(twice, 18 - after)
    assert [a + b for a, b in zip(before, rest, strict=True)] == whole
    assert Counter(itertools.chain(*whole)) == dict.fromkeys(range(LENGTH), 3)
    if kind is StatefulPart and after:
        assert twice[0].dataset.read == 4 * (18 - after), "nothing is read again"


@pytest.mark.parametrize("kind", [Part, StatefulPart, LikeMosaic])
def test_a_step_that_is_taken_again_has_the_same_samples(kind: Any) -> None:
    loaders = on(2, kind)
    seen = steps(loaders, 2)
    iterators = [iter(loader) for loader in loaders]
    failed = [next(each).tolist() + next(each).tolist() for each in iterators]
    state = saved(loaders)  # in the middle of a step
    for loader in loaders:
        loader.rewind()
    expected = [a + b for a, b in zip(failed, steps(loaders, 3)[0:2], strict=True)]
    assert [again[:8] for again in [e[8:] for e in expected]] == failed
    fresh = restored(state, on(2, kind))
    assert [own[:8] for own in steps(fresh, 2)] == failed
    assert not set(seen[0]) & set(failed[0])


def test_a_stream_of_another_number_of_ranks_is_refused_when_it_is_read() -> None:
    first = on(4, StatefulPart, 2)
    steps(first, 3)
    assert first[0].bound == (
        "its data stream divides itself by rank, and goes on at the same number of ranks alone (4)"
    )
    other = restored(saved(first), on(2, StatefulPart))
    with pytest.raises(
        DataError, match=r"holds the places of 4 ranks, here are 2: train on 4 GPUs \(#POLLUX min"
    ):
        next(iter(other[0]))


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_stream_that_counts_over_all_ranks_goes_on_at_any_number(ranks: int) -> None:
    first = on(2, LikeMosaic, divided=None)  # known by its interface
    assert isinstance(first[0], DividedStream)
    assert first[0].bound is None
    before = steps(first, 8)  # 64 samples: into the second pass
    later = restored(saved(first), on(ranks, LikeMosaic, 8 // ranks, divided=None))
    rest = steps(later, 10)
    used = Counter(itertools.chain(*before, *rest))
    assert set(used) == set(range(LENGTH))
    total = sum(used.values())
    assert set(used.values()) <= {total // LENGTH, total // LENGTH + 1}, "each round takes each sample once"


def test_parts_of_different_length_and_a_wrong_length() -> None:
    """A shorter part begins again; no part is cut off by the pass's end."""
    lengths = [10, 7]
    loaders = on(2, lambda rank, _: Part(0, 1, lengths[rank]), length=16)
    seen = steps(loaders, 4)
    assert loaders[0].pass_index == 2
    assert sorted(seen[0][:10]) == list(range(10))
    assert sorted(seen[1][:7]) == sorted(seen[1][7:14]) == list(range(7))


def test_no_rank_has_one_sample_at_a_pass_end() -> None:
    (loader,) = on(1, Part, 4, length=17)
    assert [len(batch) for batch in loader] == [4, 4, 4, 3, 2]
    assert loader.ahead(9) == (5, 17)


def test_what_a_divided_stream_cannot_be() -> None:
    with pytest.raises(DataError, match="samples of a pass over all ranks as length"):
        on(1, Part, length=None)
    with pytest.raises(DataError, match="with a stream, got Numbers, which has indices"):
        on(1, lambda *_: Numbers(20))
    (empty,) = on(1, lambda *_: Part(0, 1, 0))
    with pytest.raises(DataError, match="of rank 0 is empty"):
        next(iter(empty))
    (loader,) = on(1, Part)
    with pytest.raises(DataError, match="checkpoint is of data that the agent divided"):
        loader.load_state_dict(loader.state_dict())

    class Odd(StatefulPart):
        def state_dict(self) -> dict[str, Any]:
            return {"given": object()}

    (odd,) = on(1, Odd)
    with pytest.raises(StateError, match=r"the stream's state_dict\(\)"):
        next(iter(odd))


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_over_a_distributed_sampler(workers: int) -> None:
    loading = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def part(rank: int, ranks: int) -> Any:
        sampler = DistributedSampler(Numbers(LENGTH), num_replicas=ranks, rank=rank, seed=5)
        return loading.StatefulDataLoader(
            Numbers(LENGTH), sampler=sampler, batch_size=None, num_workers=workers
        )

    whole = steps(on(2, part), 15)
    assert Counter(itertools.chain(*(own[:24] for own in whole))) == dict.fromkeys(range(LENGTH), 1)
    assert whole[0][:24] != whole[0][24:48], "the sampler hears of each round"
    for after in (4, 6, 8):
        first = on(2, part)
        before = steps(first, after)
        rest = steps(restored(saved(first), on(2, part)), 15 - after)
        assert [a + b for a, b in zip(before, rest, strict=True)] == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_webdataset_split_by_node(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wds = pytest.importorskip("webdataset", reason="webdataset is not installed")
    for shard in range(4):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for number in range(shard * 12, shard * 12 + 12):
                info = tarfile.TarInfo(f"{number:04d}.cls")
                info.size = len(str(number))
                tar.addfile(info, BytesIO(str(number).encode()))

    def part(rank: int, ranks: int) -> Any:
        def nodes(urls: Any) -> Any:  # as split_by_node, which asks torch.distributed
            return itertools.islice(urls, rank, None, ranks)

        urls = str(tmp_path / "{0..3}.tar")
        data = wds.WebDataset(urls, nodesplitter=nodes, shardshuffle=False, empty_check=False).decode()
        return DataLoader(data.to_tuple("cls").map(lambda one: one[0]), batch_size=None, num_workers=workers)

    whole = steps(on(2, part), 9)
    assert Counter(itertools.chain(*(own[:24] for own in whole))) == dict.fromkeys(range(LENGTH), 1)
    first = on(2, part)
    before = steps(first, 4)
    rest = steps(restored(saved(first), on(2, part)), 5)
    assert [a + b for a, b in zip(before, rest, strict=True)] == whole
