"""A data loader whose place in the data survives any change of ranks and batch size.

`ElasticLoader` yields this rank's micro-batches through torch's own DataLoader (workers, pinning and
collation are torch's). Three positions in the pass's global order matter (see data_plan):

    committed <= cursor <= planned

`planned` is where prefetching workers have got to, `cursor` is after the last micro-batch handed out, and
`committed` is after the last one that an optimizer step has used. Only `committed` is saved: whatever was
prefetched, or handed out but not yet part of a step, comes again after a restart, at whatever world size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from pollux.data_plan import MicroBatch, Order, next_micro_batch, order_digest, pass_order
from pollux.errors import BatchError, DataError

STATE_VERSION = 1


class ElasticLoader:
    """Iterate over this rank's part of each pass over `dataset` (map-style: `len` and integer indexing).

    `local_batch` is samples per micro-batch and rank. `sampler` replaces the shuffled order by the user's
    own; it must give every rank the same indices, and its `set_epoch(pass)` is called where it has one. Other
    keyword arguments go to torch's DataLoader.

    Each `iter()` yields what is left of the current pass; when that has ended, the next `iter()` starts the
    next pass. Leaving the loop early keeps the place. A dataset smaller than the global batch makes passes of
    one short micro-batch.

    Raises BatchError when no batch can ever be made, DataError when the dataset or the sampler is unusable.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        rank: int,
        world_size: int,
        local_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        sampler: Sampler[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        self.dataset = dataset
        self.drop_last = drop_last
        self.num_workers = num_workers
        self._seed = seed
        self._shuffle = shuffle
        self._sampler = sampler
        self._rank, self._world_size, self._local_batch = rank, world_size, local_batch
        self._length = _length_of(sampler if sampler is not None else dataset)
        self._check_sizes(rank, world_size, local_batch)
        if drop_last and self._length < world_size * local_batch:
            raise BatchError(
                f"drop_last with {self._length} samples leaves no batch of {world_size} ranks x "
                f"{local_batch}; use a smaller batch, or drop_last=False"
            )
        self._pass = 0
        self._committed = 0
        self._cursor = 0
        self._ended = False
        self._current: MicroBatch | None = None
        self._iteration = 0
        self._order: tuple[tuple[int, int], Order] | None = None
        self._expected_digest: int | None = None
        self._feed = _Feed(self)
        self._source: Iterator[Any] | None = None
        self._generator = torch.Generator()
        if num_workers > 0:
            # Kept alive, the workers are reused when the batch size changes in mid-pass.
            options.setdefault("persistent_workers", True)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=cast(Any, self._feed),
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            generator=self._generator,
            **options,
        )

    # -- what the session reads ----------------------------------------

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def local_batch(self) -> int:
        """Samples per rank in a full micro-batch."""
        return self._local_batch

    @property
    def length(self) -> int:
        """Samples in a whole pass."""
        return self._length

    @property
    def pass_index(self) -> int:
        """The pass that the next sample to be committed belongs to; counts from 0."""
        return self._pass

    @property
    def position(self) -> int:
        """Samples of this pass already committed, over all ranks."""
        return self._committed

    @property
    def weight(self) -> float:
        """Factor of this rank's mean loss in the current micro-batch: 1 usually, 0 for a stand-in."""
        return 1.0 if self._current is None else self._current.weight

    @property
    def samples(self) -> int:
        """Samples of the current micro-batch over all ranks."""
        return 0 if self._current is None else self._current.samples

    @property
    def local_samples(self) -> int:
        """Samples of the current micro-batch on this rank, a stand-in not counted."""
        return 0 if self._current is None else self._current.local_samples

    @property
    def last_of_pass(self) -> bool:
        """True at the last micro-batch of the pass: an accumulation group ends here, however short."""
        return self._current is not None and self._current.last

    def __len__(self) -> int:
        """Micro-batches in a whole pass at the present sizes."""
        full = self._world_size * self._local_batch
        return self._length // full if self.drop_last else -(-self._length // full)

    # -- iteration ----------------------------------------

    def __iter__(self) -> Iterator[Any]:
        self._iteration += 1
        return self._run(self._iteration)

    def _run(self, iteration: int) -> Iterator[Any]:
        if self._plan_at(self._cursor) is None:
            # Restored at the very end of a pass, or where drop_last leaves nothing at the new size.
            self._advance()
        while True:
            batch = self._fetch()
            yield batch
            if iteration != self._iteration:
                raise DataError(
                    "expected one iterator of this loader at a time, but a newer one was started; "
                    "make a loader for each"
                )
            # A commit at the last micro-batch has already moved on to the next pass.
            if self._ended:
                self._advance()
                return
            if self._cursor == 0 and self._current is not None and self._current.last:
                return

    def _fetch(self) -> Any:
        if self._source is None:
            # Augmentation in workers follows (seed, pass, place, rank); the global generator is not touched.
            self._generator.manual_seed(_mix(self._seed, self._pass, self._cursor, self._rank))
            self._source = iter(self._loader)
        batch = next(self._source)
        self._current = self._feed.planned.popleft()
        self._cursor = self._current.stop
        self._ended = self._current.last
        return batch

    def commit(self) -> None:
        """Everything handed out so far is part of an optimizer step now; call it right after each step."""
        if self._ended:
            self._advance()
        else:
            self._committed = self._cursor

    def rewind(self) -> None:
        """Hand out again what was handed out since the last commit: for a group that failed half-way."""
        self._cursor = self._committed
        self._ended = False
        self._current = None
        self._source = None

    def set_batch(self, local_batch: int) -> None:
        """Change the samples per rank from the next micro-batch on; what was prefetched comes again."""
        self.resize(self._rank, self._world_size, local_batch)

    def resize(self, rank: int, world_size: int, local_batch: int) -> None:
        """Change rank, ranks and batch from the next micro-batch on; every rank does so at the same place."""
        self._check_sizes(rank, world_size, local_batch)
        if (rank, world_size, local_batch) != (self._rank, self._world_size, self._local_batch):
            self._rank, self._world_size, self._local_batch = rank, world_size, local_batch
            self._source = None

    # -- state ----------------------------------------

    def state_dict(self) -> dict[str, int]:
        """The committed place: independent of ranks and batch size, equal on every rank."""
        state = {
            "version": STATE_VERSION,
            "pass": self._pass,
            "position": self._committed,
            "seed": self._seed,
            "len": self._length,
        }
        if self._sampler is not None and self._committed:
            state["order"] = order_digest(self._current_order())
        return state

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a saved place, at whatever ranks and batch size this loader has. Raises DataError."""
        try:
            version, pass_index, position = state["version"], state["pass"], state["position"]
            seed, length = state["seed"], state["len"]
        except (KeyError, TypeError) as error:
            raise DataError(f"not a saved loader state: {state!r}") from error
        if version != STATE_VERSION:
            raise DataError(f"expected a loader state of version {STATE_VERSION}, found {version}")
        if length != self._length:
            raise DataError(
                f"the checkpoint was made with {length} samples, the dataset has {self._length} now: the "
                "place in the pass has no meaning in it; restore the dataset, or start without the checkpoint"
            )
        if not (pass_index >= 0 and 0 <= position <= length):
            raise DataError(
                f"a saved place outside the data: pass {pass_index}, position {position} of {length}"
            )
        # The saved seed rules: the rest of the pass must follow the order that its beginning followed.
        self._seed, self._pass = seed, pass_index
        self._committed = self._cursor = position
        self._ended = False
        self._current = None
        self._source = None
        self._expected_digest = state.get("order")

    # -- within ----------------------------------------

    def _check_sizes(self, rank: int, world_size: int, local_batch: int) -> None:
        if not 0 <= rank < world_size:
            raise BatchError(f"expected a rank in 0..{world_size - 1}, got {rank}")
        if local_batch < 1:
            raise BatchError(f"expected at least 1 sample per rank and micro-batch, got {local_batch}")
        if local_batch > self._length:
            raise BatchError(
                f"the dataset has {self._length} samples, fewer than one rank's batch of {local_batch}; "
                "use a smaller batch size"
            )

    def _advance(self) -> None:
        self._pass += 1
        self._committed = self._cursor = 0
        self._ended = False
        self._source = None

    def _plan_at(self, position: int) -> MicroBatch | None:
        return next_micro_batch(
            self._length,
            position,
            rank=self._rank,
            world_size=self._world_size,
            local_batch=self._local_batch,
            drop_last=self.drop_last,
        )

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
        order = _sampler_order(self._sampler, _mix(self._seed, self._pass), self._pass)
        if len(order) != self._length:
            raise DataError(f"the sampler promised {self._length} indices by len(), and gave {len(order)}")
        if (
            self._committed
            and self._expected_digest is not None
            and order_digest(order) != self._expected_digest
        ):
            raise DataError(
                f"the sampler gives another order for pass {self._pass} than before the restart, so samples "
                "would be lost or repeated; make it depend on set_epoch(pass) or on its generator alone"
            )
        return order


class _Feed:
    """The batch sampler of the inner DataLoader: plans from the cursor on, and remembers what it planned."""

    def __init__(self, loader: ElasticLoader) -> None:
        self._loader = loader
        self.planned: deque[MicroBatch] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.planned.clear()
        return self._plan(self._loader._cursor)

    def _plan(self, position: int) -> Iterator[list[int]]:
        order = self._loader._current_order()
        while (micro := self._loader._plan_at(position)) is not None:
            self.planned.append(micro)
            # A stand-in is any sample of this very micro-batch: loaded like the others, it weighs nothing.
            chosen = (
                slice(micro.local_start, micro.local_stop)
                if micro.local_samples
                else slice(micro.start, micro.start + 1)
            )
            position = micro.stop
            yield order[chosen].tolist()

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
    """List a sampler's indices so that they depend on seed and pass alone; keep the global generator."""
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


def _mix(*parts: int) -> int:
    """A 63-bit seed from several integers."""
    words = np.random.SeedSequence([part & (2**64 - 1) for part in parts]).generate_state(1, np.uint64)
    return int(words[0]) >> 1
