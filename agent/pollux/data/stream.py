"""Read iterable datasets: every sample once, over any resizes.

Every rank reads the same stream and keeps its slices. A stream has no index and often no length, so its place is a
count of samples. All ranks read the stream in the same order and one micro-batch ahead: they see its end at the same
place without communication. Costly work (decoding, augmentation) belongs in `transform`, which runs on this rank's
samples alone.

A stateful stream (`state_dict` and `load_state_dict`, as Hugging Face datasets and torchdata's loaders have them)
returns to a place from the last remembered state before it, and skips the few samples between. Any other stream is read
again from the start of the pass.

A checkpoint holds checksums of the last samples before its place. The first to be read again must match them: else the
stream gives other samples, or another order, and the rest of the pass would lose some and repeat others. A state that
leaves out a shuffle buffer shows in the same way: the pass is then read from its start, and such states are not used
again.
"""

from __future__ import annotations

import copy
import itertools
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from pollux.data.place import ElasticData, RankShare
from pollux.data.plan import FEWEST, MicroBatch
from pollux.errors import DataError
from pollux.ranks.torch_internals import pin_memory as pinned

logger = logging.getLogger("pollux")

CHECKED = 4
"""Samples before a place by which it is known again."""

REMEMBER_EVERY = 64
"""Least number of samples between remembered states of a stateful stream: a state may cost as much as a sample."""


class ElasticStream(ElasticData):
    """Iterate over this rank's part of each pass over an iterable dataset.

    Each `iter()` of the dataset must start a pass. The dataset must give every rank the same samples in the same order:
    it must not divide itself by rank. Its `set_epoch(pass)` is called before each pass if it has one. To read in worker
    processes, pass a DataLoader of the dataset with `batch_size=None`. `length` is the number of samples of a pass, for
    epochs and progress; without it, `length` is 0 until one pass has been read.

    A rank holds the samples that are read and not committed: those of one step over all ranks, before `transform`.
    Other arguments are those of `ElasticData`: seed, drop_last, equal_parts.
    `repeatable=False` says that the samples are drawn at random in each reading, as from a simulator: none is compared.
    Raises DataError if the stream is empty, ends before a restored place, or gives other samples before it.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        share: RankShare,
        *,
        length: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        repeatable: bool = True,
        **place: Any,
    ) -> None:
        super().__init__(share, **place)
        if length is not None and length < 1:
            raise DataError(f"expected a stream of at least 1 sample, got length={length}")
        self.dataset = dataset
        self._length = length if length is not None else _stated_length(dataset)
        self._transform = transform
        self._collate = collate_fn or default_collate
        # Without a device there is nothing to pin for, as in torch's DataLoader.
        self._pin = pin_memory and torch.cuda.is_available()
        self._repeatable = repeatable
        """Each reading of a pass gives the same samples in the same order."""
        self._recent: deque[tuple[int, Any]] = deque(maxlen=CHECKED)
        """The last committed samples of this pass, with their numbers."""
        self._expected: dict[int, int] = {}
        """Checksums of samples before the restored place, by their numbers; empty once they were compared."""
        self._fresh: Any = None
        """The state in which this process found a stateful stream."""
        self._trusted = True
        """The stream's own state brings it back to its place."""
        self._source: Iterator[Any] | None = None
        self._source_pass = -1
        """The pass of the buffer and of the remembered states."""
        self._buffer: deque[Any] = deque()
        """Samples read and not committed; the first one is sample number `_base`."""
        self._base = 0
        self._exhausted = False
        self._remembered: deque[tuple[int, Any]] = deque()
        """States of the stream with the samples read before each; the oldest one serves to come back."""
        self.batch_size = 0
        """M0, where the job knows it."""
        self.first_read: tuple[int, int, int] | None = None
        """Pass and number of the first sample that this rank has read, and its checksum."""

    def commit(self) -> None:
        super().commit()
        self._drop_committed()
        while len(self._remembered) > 1 and self._remembered[1][0] <= self._committed - CHECKED:
            self._remembered.popleft()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        here = self._source_pass == self._pass
        if self._remembered and here and self._remembered[0][0] <= self._committed - CHECKED:
            state["stream"] = list(self._remembered[0])
        if here and self._repeatable:
            known = [
                [number, checksum(sample)] for number, sample in self._recent if number < self._committed
            ]
            known = known or [list(item) for item in self._expected.items()]
            if known:
                state["before"] = known
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._forget()
        self._expected = dict(state.get("before", ())) if self._repeatable else {}
        # A checkpoint that is taken before anything is read keeps the remembered state.
        self._source_pass = self._pass
        remembered = state.get("stream")
        if remembered is not None and self._stateful and remembered[0] <= self._committed:
            self._remembered.append((int(remembered[0]), remembered[1]))

    @property
    def known_length(self) -> int:
        return -1

    # -- within -------------------------------------------------------

    def _accept_length(self, saved: int) -> None:
        """Accept any saved length: a stream's length need not be known."""
        self._length = self._length or saved

    def _reaches(self, position: int) -> bool:
        """Return True: a pass may be longer than the user's estimate. Only reading finds where the pass ends."""
        return True

    @property
    def _stateful(self) -> bool:
        return self._trusted and all(
            hasattr(self.dataset, name) for name in ("state_dict", "load_state_dict")
        )

    def _fetch(self) -> tuple[Any, MicroBatch] | None:
        full = self._share.full
        # Some samples more than the micro-batch tell whether it is the last; with drop_last, a whole batch more.
        self._read_to(self._cursor + full + (full if self.drop_last else FEWEST))
        known = self._base + len(self._buffer)
        micro = self._plan(self._cursor, known)
        if micro is None:
            if known == 0:
                raise DataError(
                    f"the iterable dataset gave no sample in pass {self._pass}: expected a dataset that starts again "
                    "with each iter(), and not a generator"
                )
            if self._cursor > known:
                raise DataError(
                    f"the stream ended after {known} samples, before the restored place {self._cursor}: make it give "
                    "the same samples in the same order after a restart"
                )
            return None
        start, stop = (micro.local_start, micro.local_stop) if micro.local_samples else micro.stand_ins
        own = list(itertools.islice(self._buffer, start - self._base, stop - self._base))
        if self._transform is not None:
            own = [self._transform(sample) for sample in own]
        batch = self._collate(own)
        return (pinned(batch) if self._pin else batch), micro

    def _moved(self) -> None:
        """Keep the buffer within a pass: it holds all samples not committed."""
        if self._source_pass != self._pass:
            self._forget()

    def _forget(self) -> None:
        self._source = None
        self._buffer.clear()
        self._remembered.clear()
        self._recent.clear()
        self._expected = {}
        self._base = 0
        self._exhausted = False

    def _read_to(self, wanted: int) -> None:
        """Read up to sample number `wanted`, or to the end of the stream."""
        if self._source is None:
            self._open()
        assert self._source is not None
        buffer = self._buffer
        while not self._exhausted and (read := self._base + len(buffer)) < wanted:
            # Every rank reads the samples of all ranks, so many at a time.
            until = min(wanted, self._remember(read))
            buffer.extend(itertools.islice(self._source, until - read))
            if self.first_read is None and len(buffer):
                self.first_read = self._pass, self._base, checksum(buffer[0])
                self._doubt_sample(buffer[0])
            reached = self._base + len(buffer)
            if reached < until:
                self._exhausted = True
                self._length = reached
            self._drop_committed()  # while skipping to a restored place
            if self._expected and self._base == self._committed and not self._as_before():
                self._open()

    def _doubt_sample(self, sample: Any) -> None:
        """Warn where the stream seems to give whole batches (DALI, FFCV, graph loaders)."""
        rows = _rows(sample)
        stated = getattr(self.dataset, "batch_size", None)
        several = isinstance(stated, int) and stated > 1
        if self._share.rank or not (several or (rows > 1 and self.batch_size in (1, rows))):
            return
        logger.warning(
            "each sample of the stream has %s rows in all its tensors: if it gives whole batches, they are stacked, "
            "and count as one sample each. Make it give single samples (batch_size=None, or `for batch in loader: "
            "yield from zip(*batch)`), with length= in samples",
            rows or stated,
        )

    def _drop_committed(self) -> None:
        """Remove committed samples from the buffer."""
        for _ in range(min(self._committed - self._base, len(self._buffer))):
            self._recent.append((self._base, self._buffer.popleft()))
            self._base += 1

    def _as_before(self) -> bool:
        """Whether the samples before a restored place are those of the checkpoint; False: read again from the start.

        Raises DataError where they are not, however the stream is read.
        """
        expected, self._expected = self._expected, {}
        read = [(number, sample) for number, sample in self._recent if number in expected]
        other = next((number for number, sample in read if checksum(sample) != expected[number]), None)
        if other is None:
            return True
        if self._remembered and self._remembered[0][0]:
            logger.warning(
                "the state of %s leaves out a part of its place (a shuffle buffer, for instance): after a restart "
                "the pass is read again from its start",
                type(self.dataset).__name__,
            )
            self._trusted = False
            self._forget()
            self._expected = expected
            self.dataset.load_state_dict(self._fresh)  # type: ignore[attr-defined]
            return False
        raise DataError(
            f"sample {other} of pass {self._pass} is another one than before the restart, so the rest of the pass "
            "would lose samples and repeat others: make the order depend on set_epoch(pass) and a seed alone (the page "
            "on data has recipes), and move random augmentation to job.loader(..., transform=...). For "
            "samples that are drawn at random in each reading give job.loader(..., repeatable=False)"
        )

    def _open(self) -> None:
        """Start the pass's stream, from a remembered state if there is one."""
        for each in (
            self.dataset,
            getattr(self.dataset, "dataset", None),
        ):  # a DataLoader, then what it reads
            set_epoch = getattr(each, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._pass)
                break
        if self._remembered:
            self._base, state = self._remembered[0]
            self._fresh = copy.deepcopy(self.dataset.state_dict())  # type: ignore[attr-defined]
            # A copy: streams keep the dictionary and write into it.
            self.dataset.load_state_dict(copy.deepcopy(state))  # type: ignore[attr-defined]
        self._source = iter(self.dataset)
        self._source_pass = self._pass
        self._exhausted = False

    def _remember(self, read: int) -> int:
        """Remember the stream's state if due; return the sample to ask at next."""
        if not self._stateful:
            return read + REMEMBER_EVERY
        last = self._remembered[-1][0] if self._remembered else 0
        if read - last < REMEMBER_EVERY:
            return last + REMEMBER_EVERY
        self._remembered.append((read, copy.deepcopy(self.dataset.state_dict())))  # type: ignore[attr-defined]
        return read + REMEMBER_EVERY


def checksum(sample: Any) -> int:
    """Return the CRC-32 of a sample's tensors, arrays, texts and numbers."""
    match sample:
        case {"__key__": str(key)}:
            return zlib.crc32(key.encode())  # webdataset's: the rest may be augmented at random
        case torch.Tensor():
            return zlib.crc32(repr(sample.detach().flatten()[:64].tolist()).encode())
        case np.ndarray():
            return zlib.crc32(repr(sample.flatten()[:64].tolist()).encode())
        case dict():
            parts = [part for item in sample.items() for part in item]
        case list() | tuple():
            parts = list(sample)
        case bytes() | str() | int() | float() | np.generic() | None:
            return zlib.crc32(repr(sample).encode())
        case _ if callable(getattr(sample, "tobytes", None)):
            return zlib.crc32(sample.tobytes()[:4096])  # an image
        case _:
            parts = [part for item in getattr(sample, "__dict__", {}).items() for part in item]
    return zlib.crc32(repr([checksum(part) for part in parts]).encode())


def _rows(sample: Any) -> int:
    """Return the first dimension that all tensors of a sample have in common, if there are several; else 0."""
    parts = (
        sample.values() if isinstance(sample, dict) else sample if isinstance(sample, list | tuple) else []
    )
    arrays = [part for part in parts if isinstance(part, torch.Tensor | np.ndarray)]
    rows = {part.shape[0] if part.ndim else 0 for part in arrays}
    return int(rows.pop()) if len(rows) == 1 and len(arrays) > 1 else 0


def _stated_length(dataset: Iterable[Any]) -> int:
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        return 0
