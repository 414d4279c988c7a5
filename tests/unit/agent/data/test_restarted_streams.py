"""Streams after a restart: each sample once, or a DataError; with webdataset and datasets, where they are there."""

from __future__ import annotations

import io
import logging
import random
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from pollux.data.place import RankShare
from pollux.data.stream import ElasticStream
from pollux.errors import DataError

SAMPLES, BATCH = 240, 8


def read(stream: Any, ranks: int, batches: int, state: Any = None) -> tuple[Counter[int], Any]:
    """Read so many more batches of BATCH samples on `ranks` ranks; return the samples of each pass, and the place."""
    seen: Counter[int] = Counter()
    loaders = [
        ElasticStream(stream(), RankShare(rank, ranks, BATCH // ranks), length=SAMPLES)
        for rank in range(ranks)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
        left, iterator = batches, iter(loader)
        while left:
            for batch in iterator:
                seen.update((loader.pass_index, int(i)) for i in batch["i"])  # type: ignore[misc]
                loader.commit()
                left -= 1
                if not left:
                    break
            iterator = iter(loader)
    return seen, loaders[0].state_dict()


def lives(stream: Callable[[], Any], stop: int, then: int) -> Counter[int]:
    """Read two passes; stop after so many batches, and go on with other objects on `then` ranks."""
    whole = 2 * SAMPLES // BATCH
    first, state = read(stream, 1, stop)
    second, _ = read(stream, then, whole - stop, state)
    return first + second


ONCE = Counter((number, i) for number in range(2) for i in range(SAMPLES))


class Numbers(IterableDataset[dict[str, int]]):
    """Shuffled in each pass of this process, as webdataset's detshuffle."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        order = random.Random(self.passes).sample(range(SAMPLES), SAMPLES)
        self.passes += 1
        return iter([{"i": i} for i in order])


class Buffered(Numbers):
    """Its state counts what was read, and leaves out its shuffle buffer."""

    def __init__(self) -> None:
        self.passes, self.read, self.start = 0, 0, 0

    def set_epoch(self, number: int) -> None:
        self.passes = number

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["read"]

    def __iter__(self) -> Iterator[dict[str, int]]:
        chosen, buffer = random.Random(self.passes), []
        self.read, self.start = self.start, 0
        for i in range(self.read, SAMPLES):
            self.read += 1
            buffer.append(i)
            if len(buffer) > 50:
                yield {"i": buffer.pop(chosen.randrange(len(buffer)))}
        while buffer:
            yield {"i": buffer.pop(chosen.randrange(len(buffer)))}


@pytest.mark.parametrize("stop", [8, 16, 38, 46])
@pytest.mark.parametrize("then", [1, 2])
def test_a_shuffle_buffer_that_a_state_leaves_out_loses_no_sample(
    stop: int, then: int, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("pollux").propagate = True
    assert lives(Buffered, stop, then) == ONCE


def test_an_order_of_the_process_is_refused_after_a_restart() -> None:
    assert lives(Numbers, 11, 1) == ONCE, "in its first pass a new process has the same order"
    with pytest.raises(DataError, match=r"of pass 1 is another one .* set_epoch\(pass\).*repeatable=False"):
        lives(Numbers, 40, 1)


def test_a_stream_that_draws_its_samples_is_not_compared() -> None:
    _, state = read(Numbers, 1, 40)
    loader = ElasticStream(Numbers(), RankShare(0, 1, BATCH), length=SAMPLES, repeatable=False)
    loader.load_state_dict(state)
    assert len(next(iter(loader))["i"]) == BATCH


class InWorkers(Numbers):
    """Its order follows `set_epoch`, which reaches it behind a DataLoader."""

    def set_epoch(self, number: int) -> None:
        self.passes = number


def test_workers_of_a_stream_follow_set_epoch() -> None:
    assert lives(lambda: DataLoader(InWorkers(), batch_size=None), 40, 2) == ONCE


def test_webdataset_goes_on_by_the_recipe(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset", reason="needs webdataset")
    urls = []
    for shard in range(6):
        urls.append(str(tmp_path / f"{shard}.tar"))
        with tarfile.open(urls[-1], "w") as archive:
            for i in range(40 * shard, 40 * shard + 40):
                info = tarfile.TarInfo(f"{i:06d}.cls")
                info.size = len(str(i))
                archive.addfile(info, io.BytesIO(str(i).encode()))

    class Shards(IterableDataset[Any]):
        def __init__(self) -> None:
            self.epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            order = list(urls)
            random.Random(self.epoch).shuffle(order)
            pipeline = wds.WebDataset(order, shardshuffle=False, nodesplitter=lambda urls: urls)
            return iter(
                pipeline.shuffle(60, rng=random.Random(self.epoch)).map(lambda s: {"i": int(s["cls"])})
            )

    class Plain(Shards):
        def __iter__(self) -> Iterator[Any]:
            if not hasattr(self, "pipeline"):
                options = {"shardshuffle": 6, "detshuffle": True, "seed": 3}
                self.pipeline = wds.WebDataset(urls, nodesplitter=lambda urls: urls, **options)
            return iter(self.pipeline.map(lambda s: {"i": int(s["cls"])}))

    for stop, then in ((8, 1), (40, 2)):
        assert lives(Shards, stop, then) == ONCE
    with pytest.raises(DataError):
        lives(Plain, 40, 1)


@pytest.mark.parametrize(("stop", "then"), [(8, 1), (40, 2)])
def test_hugging_face_datasets_with_a_shuffle_buffer(stop: int, then: int) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    table = datasets.Dataset.from_dict({"i": list(range(SAMPLES))})
    assert lives(lambda: table.to_iterable_dataset(6).shuffle(seed=1, buffer_size=60), stop, then) == ONCE
