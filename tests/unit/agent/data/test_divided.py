"""Streams that divide themselves by rank: shares, places, rank counts.

All ranks stand side by side in one process, and a checkpoint's content passes through the form that ranks exchange.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from pollux.data.divided import DividedStream
from pollux.data.loader import elastic_loader
from pollux.data.place import RankShare
from pollux.errors import DataError, StateError
from pollux.ranks.plain_values import dumps, loads
from tests.unit.agent.loading import DIVIDED_LENGTH as LENGTH
from tests.unit.agent.loading import LikeMosaic, Numbers


def on(
    ranks: int, kind: Callable[[int, int], Any] = LikeMosaic, local_batch: int = 4, **options: Any
) -> list[Any]:
    options = {"length": LENGTH} | options
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
    states = [loads(dumps(loader.state_dict())) for loader in loaders]
    assert all(state == states[0] for state in states), "rank 0's place is that of all"
    return dict(states[0])


def restored(state: dict[str, Any], loaders: list[Any]) -> list[Any]:
    for loader in loaders:
        loader.load_state_dict(state)
    return loaders


@pytest.mark.parametrize("after", [0, 2, 6, 9, 12])
def test_each_rank_goes_on_where_its_own_stream_was(after: int) -> None:
    whole = steps(on(2), 18)
    first = on(2)
    before = steps(first, after)
    again = restored(saved(first), on(2))
    twice = restored(saved(again), on(2))  # saved before anything was read
    rest = steps(twice, 18 - after)
    assert [a + b for a, b in zip(before, rest, strict=True)] == whole
    assert Counter(itertools.chain(*whole)) == dict.fromkeys(range(LENGTH), 3)


def test_a_step_that_is_taken_again_has_the_same_samples() -> None:
    loaders = on(2)
    seen = steps(loaders, 2)
    iterators = [iter(loader) for loader in loaders]
    failed = [next(each).tolist() + next(each).tolist() for each in iterators]
    state = saved(loaders)  # in the middle of a step
    for loader in loaders:
        loader.rewind()
    expected = [a + b for a, b in zip(failed, steps(loaders, 3)[0:2], strict=True)]
    assert [again[:8] for again in [e[8:] for e in expected]] == failed
    fresh = restored(state, on(2))
    assert [own[:8] for own in steps(fresh, 2)] == failed
    assert not set(seen[0]) & set(failed[0])


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_stream_that_counts_over_all_ranks_goes_on_at_any_number(ranks: int) -> None:
    first = on(2)  # known by its interface
    assert isinstance(first[0], DividedStream)
    before = steps(first, 8)  # 64 samples: into the second pass
    later = restored(saved(first), on(ranks, LikeMosaic, 8 // ranks))
    rest = steps(later, 10)
    used = Counter(itertools.chain(*before, *rest))
    assert set(used) == set(range(LENGTH))
    total = sum(used.values())
    assert set(used.values()) <= {total // LENGTH, total // LENGTH + 1}, "each round takes each sample once"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_checkpoint_of_0_1_0_has_the_place_of_each_rank(ranks: int) -> None:
    first = on(2)
    before = steps(first, 8)
    state = saved(first)
    place = state.pop("stream")
    place["since"] //= 2
    later = restored(state | {"ranks": [place, place]}, on(ranks, LikeMosaic, 8 // ranks))
    rest = steps(later, 4)
    assert Counter(itertools.chain(*before, *rest)) == dict.fromkeys(range(LENGTH), 2)


def test_a_wrong_length_cuts_no_part_off() -> None:
    """A part that is longer than `length` says goes on in the next pass, and begins again at its own end."""
    loaders = on(2, length=32)
    seen = steps(loaders, 9)
    assert loaders[0].pass_index == 2
    assert sorted(seen[0][:24] + seen[1][:24]) == list(range(LENGTH))


def test_no_rank_has_one_sample_at_a_pass_end() -> None:
    (loader,) = on(1, length=17)
    assert [len(batch) for batch in loader] == [4, 4, 4, 3, 2]
    assert loader.ahead(9) == (5, 17)


class Fixed(IterableDataset[int]):
    """A part of its own for each rank, as webdataset's split_by_node gives; with a state."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.numbers = range(rank, LENGTH, ranks)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


class Empty(LikeMosaic):
    def __iter__(self) -> Iterator[int]:
        return iter(())


class Odd(LikeMosaic):
    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        return {"given": object()}


def test_what_a_divided_stream_cannot_be() -> None:
    with pytest.raises(DataError, match="samples of a pass over all ranks as length"):
        on(1, length=None)
    for other in (Fixed, lambda *_: Numbers(20)):
        with pytest.raises(
            DataError, match=r"goes on at any number of ranks, as Mosaic's.*leave divided=True out"
        ):
            on(1, other, divided=True)
    (empty,) = on(1, Empty)
    with pytest.raises(DataError, match="of rank 0 is empty"):
        next(iter(empty))
    (loader,) = on(1)
    state = loader.state_dict()
    del state["stream"]
    with pytest.raises(DataError, match="checkpoint is of data that the agent divided"):
        loader.load_state_dict(state)
    (odd,) = on(1, Odd)
    with pytest.raises(StateError, match=r"the stream's state_dict\(\)"):
        next(iter(odd))
