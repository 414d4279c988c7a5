"""Every sample exactly once per pass, whatever happens in between: all ranks simulated in one process."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, RandomSampler

from pollux.data import ElasticLoader
from pollux.data_plan import next_micro_batch, pass_order
from pollux.errors import BatchError, DataError


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def loaders(length: int, world_size: int, local_batch: int, **options: Any) -> list[ElasticLoader]:
    return [
        ElasticLoader(Numbers(length), rank=rank, world_size=world_size, local_batch=local_batch, **options)
        for rank in range(world_size)
    ]


def step(ranks: list[ElasticLoader], iterators: list[Any], micro_steps: int) -> list[int] | None:
    """One optimizer step of all ranks: the samples it used, or None at the end of the pass. No commit."""
    used: list[int] = []
    for micro in range(micro_steps):
        batches: list[Any] = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            assert all(batch is None for batch in batches)
            assert micro == 0
            return None
        counts = [loader.local_samples for loader in ranks]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == ranks[0].samples
        assert sum(loader.weight for loader in ranks) == pytest.approx(len(ranks))
        for loader, batch in zip(ranks, batches, strict=True):
            assert len(batch) == max(loader.local_samples, 1)
            if loader.local_samples:
                used += batch.tolist()
        ends = {loader.last_of_pass for loader in ranks}
        assert len(ends) == 1
        if ends == {True}:
            break
    return used


EVENTS = st.tuples(
    st.integers(1, 16),  # ranks
    st.integers(1, 9),  # local batch
    st.integers(1, 3),  # micro-steps
    st.integers(0, 4),  # optimizer steps before the next event
    st.sampled_from(["restart", "lose", "batch", "rewind"]),
)


@settings(max_examples=1000, deadline=None)
@given(length=st.integers(9, 120), seed=st.integers(0, 5), events=st.lists(EVENTS, min_size=1, max_size=12))
def test_every_sample_exactly_once_over_any_resizes(  # noqa: PLR0912
    length: int, seed: int, events: list[Any]
) -> None:
    seen: dict[int, Counter[int]] = {}
    state: dict[str, int] | None = None
    ranks: list[ElasticLoader] = []
    lost = False
    for world_size, local_batch, micro_steps, steps, event in [*events, (3, 4, 1, 10**6, "restart")]:
        if event == "restart" or lost or not ranks:
            lost = False
            ranks = loaders(length, world_size, local_batch, seed=seed)
            for loader in ranks:
                if state is not None:
                    loader.load_state_dict(state)
            iterators = [iter(loader) for loader in ranks]
        elif event == "batch":
            for loader in ranks:
                loader.set_batch(local_batch)
        else:
            for iterator in iterators:
                next(iterator, None)
            for loader in ranks:
                loader.rewind()
        for number in range(steps):
            this_pass = ranks[0].pass_index
            if steps > 10**5 and this_pass >= 2 and ranks[0].position == 0:
                break
            used = step(ranks, iterators, micro_steps)
            if used is None:
                iterators = [iter(loader) for loader in ranks]
                continue
            if event == "lose" and number == steps - 1:
                lost = True  # the step never happened: killed before its commit
                break
            seen.setdefault(this_pass, Counter()).update(used)
            for loader in ranks:
                loader.commit()
        states = [loader.state_dict() for loader in ranks]
        assert all(each == states[0] for each in states)
        state = states[0]
    for number in range(ranks[0].pass_index):
        assert seen[number] == Counter(range(length))


def test_the_order_is_a_permutation_that_changes_with_pass_and_seed() -> None:
    first, second, other = pass_order(50, 1, 0), pass_order(50, 1, 1), pass_order(50, 2, 0)
    assert sorted(first) == list(range(50))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    assert np.array_equal(first, pass_order(50, 1, 0))


def test_a_rank_without_samples_stands_in_with_weight_zero() -> None:
    micro = [next_micro_batch(10, 8, rank=rank, world_size=4, local_batch=2) for rank in range(4)]
    assert [m.local_samples for m in micro if m] == [1, 1, 0, 0]
    assert [m.weight for m in micro if m] == [2.0, 2.0, 0.0, 0.0]
    assert all(m and m.last for m in micro)


def test_the_weighted_mean_over_ranks_is_the_mean_over_samples() -> None:
    ranks = loaders(11, 4, 2, shuffle=False)
    for batches in zip(*ranks, strict=True):
        total = ranks[0].samples
        weighted = sum(
            float(b.double().mean()) * r.weight for r, b in zip(ranks, batches, strict=True)
        ) / len(ranks)
        plain = sum(float(b.sum()) for r, b in zip(ranks, batches, strict=True) if r.local_samples) / total
        assert weighted == pytest.approx(plain)


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_batches_are_dropped_and_come_again(workers: int) -> None:
    (loader,) = loaders(60, 1, 4, num_workers=workers, shuffle=False)
    seen: list[int] = []
    for count, batch in enumerate(loader):
        seen += batch.tolist()
        loader.commit()
        if count == 2:
            loader.set_batch(7)
        if count == 4:
            loader.set_batch(2)
    assert seen == list(range(60))
    assert loader.pass_index == 1
    assert sorted(chain.from_iterable(b.tolist() for b in loader)) == list(range(60))


def test_leaving_the_loop_keeps_the_place() -> None:
    (loader,) = loaders(10, 1, 3, shuffle=False)
    for batch in loader:
        assert batch.tolist() == [0, 1, 2]
        break
    loader.commit()
    assert [b.tolist() for b in loader] == [[3, 4, 5], [6, 7, 8], [9]]


def test_drop_last_drops_the_rest_only() -> None:
    ranks = loaders(11, 2, 2, drop_last=True, shuffle=False)
    assert len(ranks[0]) == 2
    assert [b.tolist() for b in ranks[0]] == [[0, 1], [4, 5]]
    assert ranks[0].last_of_pass
    assert ranks[0].pass_index == 1


def test_a_state_where_drop_last_leaves_nothing_goes_to_the_next_pass() -> None:
    (loader,) = loaders(11, 1, 4, drop_last=True)
    loader.load_state_dict({"version": 1, "pass": 2, "position": 8, "seed": 0, "len": 11})
    assert len(list(loader)) == 2
    assert loader.pass_index == 4


def test_a_user_sampler_is_deterministic_and_leaves_the_global_generator() -> None:
    def make() -> ElasticLoader:
        numbers = Numbers(20)
        sampler = RandomSampler(numbers)
        return ElasticLoader(numbers, rank=0, world_size=1, local_batch=4, sampler=sampler)

    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first = make()
    iterator = iter(first)
    head = [next(iterator).tolist() for _ in range(2)]
    first.commit()
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(4)
    second = make()
    second.load_state_dict(first.state_dict())
    tail = [batch.tolist() for batch in second]
    assert sorted(chain(*head, *tail)) == list(range(20))


def test_a_sampler_that_changes_its_order_is_refused() -> None:
    class Fickle(RandomSampler):
        turns = 0

        def __iter__(self) -> Any:
            Fickle.turns += 1
            return iter(np.roll(np.arange(20), Fickle.turns).tolist())

    def make() -> ElasticLoader:
        return ElasticLoader(Numbers(20), rank=0, world_size=1, local_batch=4, sampler=Fickle(Numbers(20)))

    first = make()
    next(iter(first))
    first.commit()
    second = make()
    second.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="another order"):
        next(iter(second))


def test_bad_sizes_and_states_are_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        loaders(0, 1, 1)
    with pytest.raises(BatchError, match="fewer than one rank's batch"):
        loaders(5, 1, 6)
    with pytest.raises(BatchError, match="drop_last"):
        loaders(5, 2, 4, drop_last=True)
    with pytest.raises(BatchError, match="at least 1"):
        loaders(5, 1, 0)
    (loader,) = loaders(5, 1, 1)
    with pytest.raises(DataError, match="the dataset has 5 now"):
        loader.load_state_dict({"version": 1, "pass": 0, "position": 0, "seed": 0, "len": 6})
    with pytest.raises(DataError, match="outside the data"):
        loader.load_state_dict({"version": 1, "pass": 0, "position": 9, "seed": 0, "len": 5})
    with pytest.raises(DataError, match="not a saved loader state"):
        loader.load_state_dict({})


def test_two_iterators_at_once_are_refused() -> None:
    (loader,) = loaders(10, 1, 1)
    first, second = iter(loader), iter(loader)
    next(second)
    with pytest.raises(DataError, match="one iterator"):
        list(first)
