"""Read streams that divide themselves by rank, and divide the rest of a pass again at another number of ranks.

Mosaic's StreamingDataset is one: it tells its place as a number of samples over all ranks. All ranks take equally many
samples per micro-batch, so rank 0's place is that of all. Other streams that divide themselves (webdataset's
`split_by_node`, Hugging Face's `split_dataset_by_node`) go on at the same number of ranks alone: the loader refuses
them, since a job that cannot move is none for this agent.

Parts of a stream may differ in length, and `length` may be wrong. A rank's stream therefore does not end with the pass:
where it has no more samples, it begins again. Each rank sees all its samples before it sees one of them again.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from pollux.data.place import ElasticData, RankShare
from pollux.data.plan import MicroBatch, next_micro_batch
from pollux.errors import DataError
from pollux.ranks.plain_values import encode
from pollux.ranks.torch_internals import pin_memory


class DividedStream(ElasticData):
    """Iterate over this rank's own stream.

    `length` is the number of samples of a pass over all ranks. The other options are those of ElasticStream. Raises
    DataError if the stream is empty.
    """

    divided = True

    def __init__(
        self,
        dataset: Iterable[Any],
        share: RankShare,
        *,
        length: int,
        seed: int = 0,
        transform: Callable[[Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(share, seed=seed, drop_last=drop_last)
        if share.ranks_per_replica > 1:
            raise DataError(
                f"expected a stream that the loader divides, got divided=True, where {share.ranks_per_replica} ranks "
                "hold a replica of the model together and take the same samples: leave divided=True out, and give "
                "every rank the same stream"
            )
        self.dataset = dataset
        self._length = length
        self._transform = transform
        self._collate = collate_fn or default_collate
        self._pin = pin_memory and torch.cuda.is_available()
        self._stateful = _stateful(dataset)
        """What has the stream's state."""
        self._source: Iterator[Any] | None = None
        self._round = 0
        """How often the stream has begun again."""
        self._read = 0
        """Samples read since it began; with `_before`, of the whole stream."""
        self._before = 0
        """Samples over all ranks in this round before the state that the stream went on from."""
        self._buffer: deque[Any] = deque()
        """Samples read and not committed."""
        self._handed = 0
        """Of them, samples in micro-batches that were handed out."""
        self._mark: tuple[int, int, Any] = (0, 0, None)
        """Round, `_before` and the stream's state at a place; without a state, at the stream's start."""
        self._since = 0
        """This rank's committed samples since the mark."""
        self._first = True

    @property
    def length(self) -> int:
        return self._length

    def commit(self) -> None:
        super().commit()
        self._use()

    def rewind(self) -> None:
        self._handed = 0
        super().rewind()

    def state_dict(self) -> dict[str, Any]:
        if not self._buffer and self._source is not None:
            # The stream stands exactly where the last commit was.
            self._mark, self._since = (self._round, self._samples(), self._state()), 0
        began, before, state = self._mark
        place = {"round": began, "before": before, "state": state, "since": self._since * self.world_size}
        return super().state_dict() | {"stream": place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        places: Sequence[Mapping[str, Any]] = state.get("ranks") or ()
        if "stream" in state:
            place, ranks = state["stream"], 1
        elif places:  # a checkpoint of version 0.1.0
            place, ranks = places[0], len(places)
        else:
            raise DataError(
                "expected the place of a stream that divides itself by rank, but the checkpoint is of data that the "
                "agent divided: restore the script's loader, or train into another checkpoint directory"
            )
        self._source = None
        self._buffer.clear()
        self._handed = 0
        self._mark = (place["round"], place["before"], place["state"])
        self._since = -(-place["since"] * ranks // self.world_size)

    # -- within -------------------------------------------------------

    def _accept_length(self, saved: int) -> None:
        """Accept any saved length: the streams themselves know their places."""

    def _reaches(self, position: int) -> bool:
        """Return True: with all ranks' equal shares, a pass may exceed its length."""
        return True

    def _moved(self) -> None:
        """Do nothing: no sample is read before its micro-batch is due."""

    def _advance(self) -> None:
        super()._advance()
        self._use()

    def _use(self) -> None:
        for _ in range(self._handed):
            self._buffer.popleft()
        self._since += self._handed
        self._handed = 0

    def _plan(self, position: int, length: int) -> MicroBatch | None:
        """Plan equal shares: no rank can take another one's samples."""
        ranks = self.world_size
        each = next_micro_batch(
            -(-(length - position) // ranks),
            0,
            rank=0,
            world_size=1,
            local_batch=self.local_batch,
            drop_last=self.drop_last,
        )
        if each is None:
            return None
        start = position + self.rank * each.stop
        return MicroBatch(position, position + each.stop * ranks, start, start + each.stop, ranks, each.last)

    def _fetch(self) -> tuple[Any, MicroBatch] | None:
        micro = self._plan(self._cursor, self._length)
        if micro is None:
            return None
        wanted = self._handed + micro.local_samples
        while len(self._buffer) < wanted:
            self._buffer.append(self._next())
        own = list(itertools.islice(self._buffer, self._handed, wanted))
        self._handed = wanted
        if self._transform is not None:
            own = [self._transform(sample) for sample in own]
        batch = self._collate(own)
        return (pin_memory(batch) if self._pin else batch), micro

    def _next(self) -> Any:
        if self._source is None:
            self._go_on()
        empty = False
        while True:
            assert self._source is not None
            for sample in self._source:
                self._read += 1
                if self._first:
                    self._first = False
                    # Now, and not at the first save.
                    encode(self._state(), lambda _: None, "the stream's state_dict()")
                return sample
            if empty:
                raise DataError(
                    f"the data stream of rank {self.rank} is empty: expected a stream that gives every rank samples, "
                    "and starts again with each iter()"
                )
            empty, self._round, self._before = True, self._round + 1, 0
            self._open(None)

    def _go_on(self) -> None:
        """Open the stream at its mark, and skip what was used since."""
        self._round, self._before, state = self._mark
        self._open(state)
        for _ in range(self._since):
            self._next()

    def _open(self, state: Any) -> None:
        sampler = getattr(self.dataset, "sampler", None)
        set_epoch = getattr(self.dataset, "set_epoch", None) or getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._round)
        if state is not None:
            self._stateful.load_state_dict(copy.deepcopy(state))
        self._source, self._read = iter(self.dataset), 0

    def _samples(self) -> int:
        """Samples over all ranks that were read in this round."""
        return self._before + self._read * self.world_size

    def _state(self) -> Any:
        return copy.deepcopy(self._stateful.state_dict(self._samples(), True))


def reshards(stream: Any) -> bool:
    """Tell whether a stream's state holds at any number of ranks.

    Mosaic's StreamingDataset: `state_dict(num_samples, from_beginning)` counts samples over all ranks.
    """
    stateful = _stateful(stream)
    try:
        options = inspect.signature(stateful.state_dict).parameters
    except (AttributeError, TypeError, ValueError):
        return False
    return {"num_samples", "from_beginning"} <= options.keys()


def _stateful(stream: Any) -> Any:
    """Return what has the state of a stream, None where nothing has.

    A DataLoader's dataset of Mosaic's kind: its own loader counts batches.
    """
    inner = stream.dataset if isinstance(stream, DataLoader) else None
    for each in (inner, stream):
        stateful = hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
        if stateful and (each is stream or reshards(each)):
            return each
    return None
