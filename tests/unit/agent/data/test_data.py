"""Loaders of indexed data and of streams: order, ends, states, refusals."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from pollux.data import stream as data_stream
from pollux.data.loader import ElasticLoader, elastic_loader
from pollux.data.place import RankShare
from pollux.data.plan import next_micro_batch, order_digest, pass_order
from pollux.data.stream import ElasticStream
from pollux.errors import BatchError, DataError
from tests.unit.agent.loading import Numbers, Stream, loaders


def test_the_order_is_a_permutation_that_changes_with_pass_and_seed() -> None:
    first, second, other = pass_order(50, 1, 0), pass_order(50, 1, 1), pass_order(50, 2, 0)
    assert sorted(first) == list(range(50))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    assert not np.array_equal(pass_order(50, 0, 0), first), "neighbouring seeds"
    assert np.array_equal(first, pass_order(50, 1, 0))


def test_a_seed_has_the_same_order_in_every_version_of_the_agent() -> None:
    """A checkpoint holds the seed and the place, and not the order."""
    assert pass_order(8, 7, 0).tolist() == [0, 6, 7, 2, 4, 5, 1, 3]
    assert pass_order(8, -1, 3).tolist() == [4, 3, 0, 1, 2, 7, 6, 5]
    assert order_digest(pass_order(8, 7, 0)) == 3025197119


def test_a_rank_without_samples_stands_in_with_weight_zero() -> None:
    micro = [next_micro_batch(10, 8, rank=rank, world_size=4, local_batch=2) for rank in range(4)]
    assert [m.local_samples for m in micro if m] == [2, 0, 0, 0]
    assert [m.weight for m in micro if m] == [4.0, 0.0, 0.0, 0.0]
    assert all(m and m.last and m.stand_ins == (8, 10) for m in micro)


def test_no_rank_has_one_example_where_it_can_be_shared() -> None:
    def sizes(length: int, world_size: int, local_batch: int) -> list[list[int]]:
        position, found = 0, []
        while position < length:
            micro = [
                next_micro_batch(length, position, rank=r, world_size=world_size, local_batch=local_batch)
                for r in range(world_size)
            ]
            spans = [(m.local_start, m.local_stop) for m in micro if m]
            taken = [i for start, stop in spans for i in range(start, stop)]
            assert micro[0] is not None
            assert taken == list(range(position, micro[0].stop))
            found.append([stop - start for start, stop in spans])
            position = micro[0].stop
        return found

    assert sizes(49, 1, 16) == [[16], [16], [15], [2]]
    assert sizes(66, 2, 32) == [[32, 32], [2, 0]], "as many examples per step as on any number of ranks"
    assert sizes(65, 2, 32) == [[32, 31], [2, 0]]
    assert sizes(65, 1, 64) == [[63], [2]]
    assert sizes(9, 4, 8) == [[3, 2, 2, 2]]
    assert sizes(7, 4, 8) == [[3, 2, 2, 0]]
    assert sizes(3, 1, 2) == [[2], [1]], "batches of two cannot share three"
    assert sizes(3, 1, 1) == [[1], [1], [1]], "the user's own batch of one"
    for world_size in range(1, 9):
        for local_batch in range(3, 9):
            for length in range(2, 120):
                found = sizes(length, world_size, local_batch)
                assert all(1 not in counts and max(counts) <= local_batch for counts in found)


def test_a_step_is_planned_as_its_micro_batches_come() -> None:
    (loader,) = loaders(49, 1, 16)
    planned = []
    for _ in loader:
        loader.commit()
        planned.append(loader.ahead(1))
    assert planned == [(1, 16), (1, 15), (1, 2), (1, 16)], "the last one is of the next pass"
    assert loader.ahead(9) == (4, 49)
    (dropping,) = loaders(49, 1, 16, drop_last=True)
    assert dropping.ahead(9) == (3, 48)


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
    assert [b.tolist() for b in loader] == [[3, 4, 5], [6, 7], [8, 9]]


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
        return ElasticLoader(numbers, RankShare(0, 1, 4), sampler=sampler)

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
        return ElasticLoader(Numbers(20), RankShare(0, 1, 4), sampler=Fickle(Numbers(20)))

    first = make()
    next(iter(first))
    first.commit()
    second = make()
    second.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="differs from its order"):
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
    other = {"version": 1, "pass": 0, "position": 2, "seed": 0, "len": 6}
    loader.load_state_dict(other)
    with pytest.raises(DataError, match="had 6 samples at the checkpoint and has 5 now"):
        loader.begin_pass()
    loader.load_state_dict(other | {"position": 0})
    loader.begin_pass()
    assert loader.length == 5
    loader.load_state_dict(other | {"position": 0, "len": 5})
    with pytest.raises(DataError, match="within the data"):
        loader.load_state_dict({"version": 1, "pass": 0, "position": 9, "seed": 0, "len": 5})
    with pytest.raises(DataError, match="expected a saved loader state"):
        loader.load_state_dict({})


def test_two_iterators_at_once_are_refused() -> None:
    (loader,) = loaders(10, 1, 1)
    first, second = iter(loader), iter(loader)
    next(second)
    with pytest.raises(DataError, match="one iterator"):
        list(first)


# -- streams ----------------------------------------------------------


def test_a_stateful_stream_is_not_read_again_from_the_start() -> None:
    (first,) = loaders(500, 1, 10, kind="stateful")
    seen: list[int] = []
    for count, batch in enumerate(first):
        seen += batch.tolist()
        first.commit()
        if count == 29:
            break
    ranks = loaders(500, 2, 7, kind="stateful")
    for loader in ranks:
        loader.load_state_dict(first.state_dict())
        assert loader.state_dict() == first.state_dict(), (
            "saved again before a sample is read: as good as before"
        )
    for batches in zip(*ranks, strict=True):
        for loader, batch in zip(ranks, batches, strict=True):
            seen += batch.tolist() if loader.local_samples else []
    assert sorted(seen) == list(range(500))
    assert ranks[0].dataset.read <= 200 + data_stream.REMEMBER_EVERY


def test_transform_runs_on_own_samples_alone() -> None:
    done: list[list[int]] = [[], []]

    def transform(rank: int) -> Any:
        def run(sample: int) -> int:
            done[rank].append(sample)
            return -sample

        return run

    ranks = [ElasticStream(Stream(10), RankShare(rank, 2, 3), transform=transform(rank)) for rank in range(2)]
    got = [[-number for batch in loader for number in batch.tolist()] for loader in ranks]
    assert got == done
    assert sorted(chain(*got)) == list(range(10))


def test_a_stateful_stream_remembers_no_more_than_it_needs() -> None:
    (loader,) = loaders(500, 1, 10, kind="stateful")
    saved = []
    for _ in loader:
        loader.commit()
        if loader.pass_index == 0:
            saved.append((loader.position, loader.state_dict().get("stream", [0])[0]))
    assert [position for position, _ in saved] == list(range(10, 500, 10))
    for position, remembered in saved:
        assert position - data_stream.REMEMBER_EVERY - 10 <= remembered <= position


def test_a_stream_may_be_read_in_a_worker_process() -> None:
    source: DataLoader[int] = DataLoader(Stream(20), batch_size=None, num_workers=1)
    loader = elastic_loader(source, RankShare(0, 1, 6), batch_size=6, length=20)
    assert [len(batch) for batch in loader] == [6, 6, 6, 2]
    assert isinstance(loader, ElasticStream)


def test_the_length_of_a_stream_is_found_or_told() -> None:
    stream = ElasticStream(Stream(20), RankShare(0, 1, 6))
    assert stream.length == 0
    assert len(list(stream)) == 4
    assert stream.length == 20
    with pytest.raises(DataError, match="length="):
        elastic_loader(Stream(20), RankShare(0, 1, 6), batch_size=6)


def test_a_stream_longer_than_its_length_goes_on_where_it_was() -> None:
    first = ElasticStream(Stream(50), RankShare(0, 1, 8), length=20)
    seen: list[int] = []
    for count, batch in enumerate(first):
        seen += batch.tolist()
        first.commit()
        if count == 3:
            break
    assert first.position == 32
    second = ElasticStream(Stream(50), RankShare(0, 1, 8), length=20)
    second.load_state_dict(first.state_dict())
    seen += [number for batch in second for number in batch.tolist()]
    assert sorted(seen) == list(range(50))


def test_streams_that_cannot_work_are_told() -> None:
    once = ElasticStream(iter(range(5)), RankShare(0, 1, 5))
    assert len(list(once)) == 1
    with pytest.raises(DataError, match="starts again"):
        list(once)
    short = ElasticStream(Stream(5), RankShare(0, 1, 5))
    short.load_state_dict({"version": 1, "pass": 0, "position": 9, "seed": 0, "len": 0})
    with pytest.raises(DataError, match="before the restored place 9"):
        list(short)
    dropping = ElasticStream(Stream(5), RankShare(0, 1, 6), drop_last=True)
    with pytest.raises(BatchError, match="no micro-batch"):
        list(dropping)


def test_a_pass_shorter_than_the_batch_size_is_refused_of_streams_too() -> None:
    for dataset in (Stream(5), Numbers(5)):
        with pytest.raises(BatchError, match="5 samples, fewer than the batch size of 6"):
            elastic_loader(
                dataset,
                RankShare(0, 1, 1),
                batch_size=6,
                **({"length": 5} if isinstance(dataset, Stream) else {}),
            )


def test_drop_last_on_a_stream() -> None:
    stream = ElasticStream(Stream(11), RankShare(0, 1, 4), drop_last=True)
    assert [batch.tolist() for batch in stream] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert stream.last_of_pass
    assert stream.pass_index == 1


def test_several_loaders_keep_their_own_places() -> None:
    (train,), (other,) = loaders(12, 1, 4, shuffle=False), loaders(6, 1, 4, shuffle=False)
    seen = []
    for batch in train:
        seen.append(batch.tolist())
        train.commit()
        assert [b.tolist() for b in other] == [[0, 1, 2, 3], [4, 5]]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert other.pass_index == 3
