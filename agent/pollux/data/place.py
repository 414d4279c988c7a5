"""The place in the data that every loader keeps: pass, position, cursor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pollux.data.plan import MicroBatch, next_micro_batch
from pollux.errors import BatchError, DataError

STATE_VERSION = 1

OTHER_LENGTH = (
    "the dataset had {} samples at the checkpoint and has {} now, so the saved place is useless; restore the dataset, "
    "or start without the checkpoint"
)


@dataclass(frozen=True)
class RankShare:
    """One rank's share of each micro-batch. Raises BatchError for impossible sizes."""

    rank: int
    world_size: int
    local_batch: int
    """Samples per rank."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise BatchError(f"expected a rank in 0..{self.world_size - 1}, got {self.rank}")
        if self.local_batch < 1:
            raise BatchError(f"expected at least 1 sample per rank and micro-batch, got {self.local_batch}")

    @property
    def full(self) -> int:
        """Samples of a full micro-batch, over all ranks."""
        return self.world_size * self.local_batch


class ElasticData(ABC):
    """A loader as the training loop sees it; keeps the place in the data.

    Each `iter()` yields the remaining micro-batches of the current pass; the next `iter()` starts the next pass.
    Leaving the loop early keeps the place.
    """

    def __init__(
        self, share: RankShare, *, seed: int = 0, drop_last: bool = False, equal_parts: bool = False
    ) -> None:
        self.drop_last, self.equal_parts = drop_last, equal_parts
        self.num_workers = 0
        """Worker processes; they read their batches again when sizes change."""
        self._share = share
        self._seed = seed
        self._pass = 0
        self._committed = 0
        self._cursor = 0
        self._ended = False
        self._iteration = 0
        self._hold(None)
        self.other_data = ""
        """What the data has otherwise than at the restored checkpoint, in words; empty: nothing that was compared."""

    # -- supplied by each kind of loader ------------------------------

    _length: int
    """Samples in a whole pass."""

    @abstractmethod
    def _fetch(self) -> tuple[Any, MicroBatch] | None:
        """Load the micro-batch at the cursor; None at the end of the pass."""

    def _next(self) -> Any:
        """Load the micro-batch at the cursor, where `whole` has promised one, and go on behind it."""
        fetched = self._fetch()
        assert fetched is not None, "as `whole` has promised"
        self._cursor = fetched[1].stop
        return fetched[0]

    def begin_pass(self) -> None:
        """A loop over the data begins: see what the script has changed. Raises BatchError."""
        return

    @abstractmethod
    def _moved(self) -> None:
        """Discard read-ahead batches: the place or the sizes have changed."""

    def identity(self) -> list[Any] | None:
        """What the data is known by (see `identity`); None where it is not asked."""
        return None

    # -- read by the training loop ------------------------------------

    @property
    def length(self) -> int:
        """Samples in a whole pass."""
        return self._length

    @property
    def known_length(self) -> int:
        """The same where it is exact, else -1."""
        return self._length

    @property
    def rank(self) -> int:
        return self._share.rank

    @property
    def world_size(self) -> int:
        return self._share.world_size

    @property
    def local_batch(self) -> int:
        """Samples per rank in a full micro-batch."""
        return self._share.local_batch

    @property
    def pass_index(self) -> int:
        """The pass of the next sample to be committed; counts from 0."""
        return self._pass

    @property
    def position(self) -> int:
        """Committed samples of this pass, over all ranks."""
        return self._committed

    def _hold(self, micro: MicroBatch | None) -> None:
        """A micro-batch is the current one, or none is."""
        self._current = micro
        self.samples = 0 if micro is None else micro.stop - micro.start
        """Samples of the current micro-batch over all ranks."""
        self.weight = 1.0 if micro is None else micro.weight
        """Factor of this rank's mean loss: usually 1, for a stand-in 0."""
        self.last_of_pass = micro is not None and micro.last
        """Whether the current micro-batch is the last one of the pass."""
        self.alike = False
        """The next micro-batch is as the current one, behind it in the same pass; set by who has asked `whole`."""

    def whole(self) -> int:
        """Return how many micro-batches after the next one are surely full, and not the last of the pass."""
        return 0

    @property
    def local_samples(self) -> int:
        """This rank's samples in the current micro-batch; 0 for a stand-in."""
        return 0 if self._current is None else self._current.local_samples

    @property
    def uneven(self) -> bool:
        """Whether the ranks' parts of the current micro-batch differ in size."""
        now = self._current
        return now is not None and not now.equal and now.local_samples * now.world_size != now.samples

    def __len__(self) -> int:
        """Micro-batches in a whole pass at the present sizes."""
        full = self._share.full
        return self.length // full if self.drop_last else -(-self.length // full)

    def ahead(self, passes: int) -> tuple[int, int]:
        """Return the micro-batches and samples of the next step, over all ranks.

        At most `passes` micro-batches, by the length that is known so far.
        """
        full = self._share.world_size * self._share.local_batch
        position = self._cursor
        if self.length - position >= (passes + 1) * full:
            return passes, passes * full
        if self._plan(position, self.length) is None:
            position = 0  # the step begins the next pass
        made = samples = 0
        while made < passes and (micro := self._plan(position, self.length)) is not None:
            made, samples, position = made + 1, samples + micro.samples, micro.stop
        return (made, samples) if made else (passes, passes * full)

    # -- iteration ----------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        self._iteration += 1
        return self._run(self._iteration)

    def _run(self, iteration: int) -> Iterator[Any]:
        first = self._pass
        while True:
            if self.alike:
                self.alike = False
                batch = self._next()
            else:
                fetched = self._fetch()
                if fetched is None:
                    # The place is the end of a pass, or drop_last leaves no micro-batch of the new size.
                    if self._pass > first:
                        raise BatchError(
                            f"no micro-batch of {self.world_size} ranks x {self.local_batch} can be made from a pass; "
                            "use a smaller batch, or drop_last=False"
                        )
                    self._advance()
                    continue
                batch, micro = fetched
                self._hold(micro)
                self._cursor, self._ended = micro.stop, micro.last
            yield batch
            if iteration != self._iteration:
                raise DataError(
                    "expected one iterator of this loader at a time, but a newer one was started; "
                    "make a loader for each"
                )
            if self._ended:
                self._advance()
                return
            # A commit at the last micro-batch has already moved on to the next pass.
            if self._cursor == 0 and self.last_of_pass:
                return

    def commit(self) -> None:
        """Count all samples handed out as used; called after each optimizer step."""
        if self._ended:
            self._advance()
        else:
            self._committed = self._cursor

    def rewind(self) -> None:
        """Go back to the last commit, after a step that failed half-way."""
        self._cursor = self._committed
        self._ended = False
        self._hold(None)
        self._moved()

    def set_batch(self, local_batch: int) -> None:
        """Change the samples per rank, from the next micro-batch on."""
        if local_batch != self._share.local_batch:
            self.resize(replace(self._share, local_batch=local_batch))

    def resize(self, share: RankShare) -> None:
        """Change rank, ranks and batch, from the next micro-batch on. Every rank must do so at the same place."""
        if share != self._share:
            self._share = share
            self._moved()

    # -- state --------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the committed place; it is equal on every rank."""
        return {
            "version": STATE_VERSION,
            "pass": self._pass,
            "position": self._committed,
            "seed": self._seed,
            "len": self.length,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved place; ranks and batch size may differ. Raises DataError."""
        try:
            version, pass_index, position = state["version"], state["pass"], state["position"]
            seed, length = state["seed"], state["len"]
        except (KeyError, TypeError) as error:
            raise DataError(f"expected a saved loader state, got {state!r}") from error
        if version != STATE_VERSION:
            raise DataError(f"expected a loader state of version {STATE_VERSION}, found {version}")
        self._accept_length(length)
        if not (pass_index >= 0 and position >= 0 and self._reaches(position)):
            raise DataError(
                f"expected a saved place within the data, got pass {pass_index}, position {position} of {length}"
            )
        # The saved seed wins: a pass keeps the order in which it began.
        self._seed, self._pass = seed, pass_index
        self._committed = self._cursor = position
        self._ended = False
        self._hold(None)
        self._moved()

    # -- within -------------------------------------------------------

    def _accept_length(self, saved: int) -> None:
        """Raise DataError if a saved pass had another number of samples."""
        if saved != self.length:
            raise DataError(OTHER_LENGTH.format(saved, self.length))

    def _reaches(self, position: int) -> bool:
        """Whether a pass can have `position` samples."""
        return position <= self.length

    def _advance(self) -> None:
        self._pass += 1
        self._committed = self._cursor = 0
        self._ended = False
        self._moved()

    def _plan(self, position: int, length: int) -> MicroBatch | None:
        return next_micro_batch(
            length,
            position,
            rank=self._share.rank,
            world_size=self._share.world_size,
            local_batch=self._share.local_batch,
            drop_last=self.drop_last,
            equal_parts=self.equal_parts,
        )


def mix_seed(*parts: int) -> int:
    """Mix several integers into a 63-bit seed."""
    words = np.random.SeedSequence([part & (2**64 - 1) for part in parts]).generate_state(1, np.uint64)
    return int(words[0]) >> 1
