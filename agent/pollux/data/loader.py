"""A data loader whose place survives a change of ranks or batch size.

`ElasticLoader` yields this rank's micro-batches, through torch's own DataLoader where there are workers or pinning
(collation is torch's or the user's). Three positions in the pass's global order matter (see plan.py):

    committed <= cursor <= planned

Prefetching workers have reached `planned`. `cursor` stands after the last micro-batch handed out, and `committed` after
the last micro-batch that an optimizer step has used. A checkpoint holds `committed` alone: after a restart, with any
number of ranks, the loader yields again every sample that was not part of a step.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    default_collate,
)

from pollux.data.identity import Identity, difference, identity
from pollux.data.place import OTHER_LENGTH, ElasticData, RankShare, mix_seed
from pollux.data.plan import MicroBatch, Order, order_digest, pass_order
from pollux.data.stream import ElasticStream
from pollux.errors import BatchError, DataError

logger = logging.getLogger("pollux")

PLAIN = {"num_workers": 0, "pin_memory": False}
"""DataLoader's options at which it does no more than collate."""


def _begin_worker(begin: Callable[[int], None] | None, number: int) -> None:
    """Begin a worker that prints no trace when its rank is killed. `begin`: the script's `worker_init_fn`."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Of the thread that hands tensors to the rank (multiprocessing.resource_sharer).
        if not issubclass(kind, ConnectionError | EOFError):
            before(kind, error, trace)

    sys.excepthook = hook
    if begin is not None:
        begin(number)


def elastic_loader(dataset: Any, share: RankShare, *, batch_size: int, **options: Any) -> ElasticData:
    """Return an ElasticLoader for an indexed dataset, else an ElasticStream.

    `batch_size` is M0. Raises BatchError if a pass has fewer samples: no step would be whole at any number of ranks.
    """
    _check_undivided(dataset, options)
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not indexed:
        if isinstance(dataset, Iterator):
            raise DataError(
                f"expected a dataset that starts again with each iter(), got the iterator {type(dataset).__name__}"
            )
        unknown = sorted(set(options) & {"shuffle", "sampler", "num_workers"})
        if any(options[name] for name in unknown):
            raise DataError(
                f"an iterable dataset has its own order and is read in this process: leave out {', '.join(unknown)}, "
                "shuffle inside the dataset, and for workers pass DataLoader(dataset, batch_size=None)"
            )
        options = {k: v for k, v in options.items() if k not in unknown}
        stream = ElasticStream(dataset, share, **options)
        stream.batch_size = batch_size
        if not stream.length:
            raise DataError(
                f"{type(dataset).__name__} has no len(): give the approximate number of samples of a pass as "
                "length=..., so that the agent can count epochs and progress"
            )
        _check_length(stream.length, batch_size)
        return stream
    sampler = options.get("sampler")
    _check_length(_length_of(sampler if sampler is not None else dataset), batch_size)
    return ElasticLoader(dataset, share, **options)


def _check_undivided(dataset: Any, options: Mapping[str, Any]) -> None:
    """Raise DataError for data or options that already divide or order the samples."""
    stream = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    if {"num_samples", "from_beginning"} <= _arguments(getattr(stream, "state_dict", None)):
        raise DataError(
            f"expected data that the loader divides, got {type(stream).__name__}, a stream that divides itself by "
            "rank as Mosaic's StreamingDataset does: give the loader its samples by number, "
            "torch.utils.data.Subset(stream, range(stream.size))"
        )
    if isinstance(dataset, DataLoader) and (
        dataset.batch_size is not None or dataset.batch_sampler is not None
    ):
        raise DataError(
            "expected a dataset, got a DataLoader that makes batches: give its dataset, and its collate_fn, "
            "num_workers and so on as options (for a stream in workers, a DataLoader with batch_size=None)"
        )
    if isinstance(options.get("sampler"), DistributedSampler):
        raise DataError(
            "expected a sampler that gives every rank the same indices, got a DistributedSampler: leave it out; the "
            "loader shuffles, and divides the samples among the ranks"
        )
    for name, instead in {
        "batch_sampler": "give a sampler of single samples; the loader makes batches of any size from them",
        "generator": "the order follows attach(..., seed=...)",
        "divided": "give every rank the whole stream (webdataset's without split_by_node); the loader divides it",
    }.items():
        if options.get(name) is not None:
            raise DataError(f"expected no {name}: {instead}")


def _arguments(method: Any) -> set[str]:
    """Return the names of a method's arguments; none where they are not known."""
    try:
        return set(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return set()


def _check_length(length: int, batch_size: int) -> None:
    if length < batch_size:
        raise BatchError(
            f"the dataset has {length} samples, fewer than the batch size of {batch_size}; use a smaller batch size"
        )


class ElasticLoader(ElasticData):
    """Iterate over this rank's part of each pass over an indexed dataset.

    A `sampler` replaces the shuffled order; it must give every rank the same indices. The loader calls its
    `set_epoch(pass)` if it has one. Other keyword arguments go to torch's DataLoader. A pass over a dataset smaller
    than the global batch is one short micro-batch. Raises BatchError if no batch can be made, DataError if the dataset
    or the sampler is unusable.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        share: RankShare,
        *,
        seed: int = 0,
        shuffle: bool = True,
        sampler: Sampler[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        equal_parts: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(share, seed=seed, drop_last=drop_last, equal_parts=equal_parts)
        self.dataset = dataset
        self.num_workers: int = options.get("num_workers", 0)
        self._shuffle = shuffle
        self._sampler = sampler
        self._length = _length_of(sampler if sampler is not None else dataset)
        if share.local_batch > self._length:
            raise BatchError(
                f"the dataset has {self._length} samples, fewer than one rank's batch of {share.local_batch}; "
                "use a smaller batch size"
            )
        if drop_last and self._length < share.full:
            raise BatchError(
                f"drop_last with {self._length} samples leaves no batch of {share.world_size} ranks x "
                f"{share.local_batch}; use a smaller batch, or drop_last=False"
            )
        self._order: tuple[tuple[int, int], Order] | None = None
        self._expected_digest: int | None = None
        self._feed = _Feed(self)
        self._source: Iterator[Any] | None = None
        self._generator = torch.Generator()
        self._collate = collate_fn or default_collate if options.items() <= PLAIN.items() else None
        """Collates batches in this process, with less overhead than DataLoader; None: DataLoader makes them."""
        self._many = getattr(dataset, "__getitems__", None)
        self._keeps_workers: bool = options.get("persistent_workers", False)
        """Workers outlive a pass, as the script wants."""
        if self.num_workers > 0:
            # Within a pass they do in any case: they are reused when the batch size changes.
            options["persistent_workers"] = True
            # Forked workers outlive a SIGTERM to the whole step. Python 3.14 would start them by a server that ends.
            options.setdefault("multiprocessing_context", "fork")
            options["worker_init_fn"] = partial(_begin_worker, options.get("worker_init_fn"))
        self._make_loader: Callable[[], DataLoader[Any]] = lambda: DataLoader(
            dataset,
            batch_sampler=cast(Any, self._feed),
            collate_fn=collate_fn,
            generator=self._generator,
            **options,
        )
        self._loader = self._make_loader()
        self._restored = False
        """The place was restored, and no pass was begun since."""
        self._identity: Identity | None = None
        """What the data was known by when the job began."""
        self._loader_pass = 0
        """The pass that the workers began in."""

    def identity(self) -> list[Any] | None:
        if self._identity is None:
            whole = _length_of(self.dataset)
            self._identity = identity(self.dataset, whole, self.num_workers)
        return self._identity

    def begin_pass(self) -> None:
        """Follow a dataset or sampler whose length the script has changed between two passes."""
        if (self._cursor or self._committed) and not self._restored:
            return
        self._restored = False
        found = _length_of(self._sampler if self._sampler is not None else self.dataset)
        if self._committed and found != self._length:
            raise DataError(OTHER_LENGTH.format(self._length, found))
        if found == self._length:
            return
        if found < max(self._share.local_batch, self._share.full if self.drop_last else 0):
            raise BatchError(
                f"the dataset has {found} samples in pass {self._pass}, and had {self._length}: fewer than a batch of "
                f"{self._share.world_size} ranks x {self._share.local_batch}; make the loader for the smallest length"
            )
        self._length, self._order = found, None

    def _accept_length(self, saved: int) -> None:
        """Take over the saved length until the loop begins: the script may change its dataset before."""
        self._length, self._order, self._restored = saved, None, True

    def _fetch(self) -> tuple[Any, MicroBatch] | None:
        micro = self._plan(self._cursor, self._length)
        if micro is None:
            return None
        if self._collate is not None:
            chosen, data = self._indices(micro), self.dataset
            return self._collate(self._many(chosen) if self._many else [data[i] for i in chosen]), micro
        if self._source is None:
            if self._loader_pass != self._pass and not self._keeps_workers:
                # As torch does: new workers see what the script has changed in the dataset.
                self._loader, self._loader_pass = self._make_loader(), self._pass
            # Augmentation in workers depends on seed, pass, place and rank, and not on the global generator.
            self._generator.manual_seed(mix_seed(self._seed, self._pass, self._cursor, self._share.rank))
            self._source = iter(self._loader)
        batch = next(self._source)
        return batch, self._feed.planned.popleft()

    def whole(self) -> int:
        return max((self._length - self._cursor) // self._share.full - 3, 0)

    def _next(self) -> Any:
        order, start = self._order, self._cursor
        if self._collate is None or order is None:
            return super()._next()
        share = self._share
        local = share.local_batch
        own = start + share.rank * local
        chosen, data = order[1][own : own + local].tolist(), self.dataset
        batch = self._collate(self._many(chosen) if self._many else [data[i] for i in chosen])
        self._cursor = start + self.samples
        return batch

    def _moved(self) -> None:
        self._source = None

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._sampler is not None and self._committed:
            state["order"] = order_digest(self._current_order())
        if self._identity is not None:
            state["identity"] = self._identity
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        length = self._length
        super().load_state_dict(state)
        self._expected_digest = state.get("order")
        saved = state.get("identity")
        mine = None if saved is None else self.identity()
        if saved is None or mine is None:
            return
        if mine[0] != saved[0] and length != state["len"]:
            # A script may make its data longer before each pass: it begins with them as in its first start, or as now.
            raise DataError(OTHER_LENGTH.format(saved[0], mine[0]))
        number = difference(mine, saved)
        if number is None:
            return
        self.other_data = f"sample {number} of the dataset is another one"
        if self._share.rank == 0:
            logger.warning(
                "%s than at the checkpoint: the rest of the pass loses samples and repeats others. Make its order the "
                "same in each start (sort lists of files, give random_split a generator with a seed). Ignore this for "
                "data that the script draws at random",
                self.other_data,
            )

    def _indices(self, micro: MicroBatch) -> list[int]:
        """This rank's samples. Stand-ins are loaded like others and weigh nothing."""
        start, stop = micro.local_start, micro.local_stop
        if start == stop:
            start, stop = micro.stand_ins
        chosen: list[int] = self._current_order()[start:stop].tolist()
        return chosen

    def _current_order(self) -> Order:
        key = (self._seed, self._pass)
        if self._order is None or self._order[0] != key:
            self._order = (key, self._make_order())
        return self._order[1]

    def _make_order(self) -> Order:
        if self._sampler is None:
            return (
                pass_order(self._length, self._seed, self._pass) if self._shuffle else np.arange(self._length)
            )
        order = _sampler_order(self._sampler, mix_seed(self._seed, self._pass), self._pass)
        if len(order) != self._length:
            raise DataError(
                f"expected {self._length} indices from the sampler, as its len() says, got {len(order)}"
            )
        if (
            self._committed
            and self._expected_digest is not None
            and order_digest(order) != self._expected_digest
        ):
            raise DataError(
                f"the sampler's order for pass {self._pass} differs from its order before the restart, which would "
                "lose or repeat samples; make it depend on set_epoch(pass) or on its generator alone"
            )
        return order


class _Feed:
    """The batch sampler of the inner DataLoader; keeps the planned batches."""

    def __init__(self, loader: ElasticLoader) -> None:
        self._loader = loader
        self.planned: deque[MicroBatch] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.planned.clear()
        return self._plan_from(self._loader._cursor)

    def _plan_from(self, position: int) -> Iterator[list[int]]:
        loader = self._loader
        while (micro := loader._plan(position, loader.length)) is not None:
            self.planned.append(micro)
            position = micro.stop
            yield loader._indices(micro)

    def __len__(self) -> int:
        return len(self._loader)


def _length_of(sized: object) -> int:
    try:
        length = len(cast(Sized, sized))
    except TypeError as error:
        raise DataError(f"expected a dataset or sampler with len(), got {type(sized).__name__}") from error
    if length < 1:
        raise DataError("the dataset is empty")
    return length


def _sampler_order(sampler: Sampler[int], seed: int, pass_index: int) -> Order:
    """List a sampler's indices; they depend on seed and pass alone. The global random state stays as it was."""
    set_epoch = getattr(sampler, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(pass_index)
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    before = torch.random.get_rng_state()
    try:
        torch.default_generator.manual_seed(seed)
        return np.fromiter(sampler, dtype=np.int64)
    finally:
        torch.random.set_rng_state(before)
