"""A pass uses every sample exactly once, whatever happens in between.

One process simulates all ranks.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pollux.data import stream as data_stream
from pollux.data.place import RankShare
from tests.unit.agent.loading import DATA, loaders, one_rank


def step(ranks: list[Any], iterators: list[Any], micro_steps: int) -> list[int] | None:
    """Make one optimizer step of all ranks, without a commit.

    Return the samples that it used, or None at the end of the pass.
    """
    used: list[int] = []
    for micro in range(micro_steps):
        batches: list[Any] = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            assert all(batch is None for batch in batches)
            assert micro == 0
            return None
        counts = [loader.local_samples for loader in ranks]
        together = ranks[0].samples
        assert max(counts) - min(counts) <= 1 or (together < 2 * len(ranks) and 1 not in counts)
        # One example stops batch normalisation: none is alone where the ranks can share.
        if ranks[0].local_batch > 2 and together > 1:
            assert 1 not in counts
        assert sum(counts) == together
        assert sum(loader.weight for loader in ranks) == pytest.approx(len(ranks))
        for loader, batch in zip(ranks, batches, strict=True):
            assert len(batch) == (loader.local_samples or min(together, 2))
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
    st.sampled_from(["resize", "restart", "lose", "batch", "rewind"]),
)

EXAMPLES = 200


@pytest.mark.parametrize("kind", list(DATA))
def test_every_sample_exactly_once_over_any_resizes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random sequences of each kind of data."""
    monkeypatch.setattr(data_stream, "REMEMBER_EVERY", 7)
    sequences, changes, sizes = 0, 0, set()

    # A busy machine is slow to draw, too: that is no fault of the loader.
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        length=st.integers(9, 100), seed=st.integers(0, 5), events=st.lists(EVENTS, min_size=1, max_size=8)
    )
    def histogram_is_flat(length: int, seed: int, events: list[Any]) -> None:
        nonlocal sequences, changes
        training = Simulated(kind, length, seed)
        training.run(events)
        sequences += 1
        changes += training.changes
        sizes.update(training.sizes)

    histogram_is_flat()
    assert sequences >= EXAMPLES
    assert changes > EXAMPLES // 20, "hardly a change of ranks in mid-pass"
    assert len(sizes) > 8


class Simulated:
    """A training whose ranks come, go, fail and start again. All of its samples are counted."""

    def __init__(self, kind: str, length: int, seed: int) -> None:
        self.kind, self.length, self.seed = kind, length, seed
        self.ranks: list[Any] = []
        self.iterators: list[Any] = []
        self.seen: dict[int, Counter[int]] = {}
        """Samples used in committed steps, by pass."""
        self.sizes: set[int] = set()
        self.changes = 0
        """Number of times that the number of ranks changed in mid-pass."""

    def run(self, events: list[Any]) -> None:
        """Train through all events, then finish some passes. Each pass must have used each sample once."""
        state: dict[str, Any] | None = None
        lost = False
        for world_size, local_batch, micro_steps, steps, event in [*events, (3, 8, 1, 10**6, "restart")]:
            if event == "restart" or lost or not self.ranks:
                self.restart(world_size, local_batch, state)
            elif event == "resize":
                self.resize(world_size, local_batch)
            elif event == "batch":
                for loader in self.ranks:
                    loader.set_batch(local_batch)
            else:
                for iterator in self.iterators:
                    next(iterator, None)
                for loader in self.ranks:
                    loader.rewind()
            lost = self.train(micro_steps, steps, lose=event == "lose")
            states = [loader.state_dict() for loader in self.ranks]
            assert all(each == states[0] for each in states)
            state = states[0]
        for number in range(self.ranks[0].pass_index):
            assert self.seen[number] == Counter(range(self.length))

    def restart(self, world_size: int, local_batch: int, state: dict[str, Any] | None) -> None:
        """Restart all ranks from the saved state."""
        before = len(self.ranks)
        self.ranks = loaders(self.length, world_size, local_batch, seed=self.seed, kind=self.kind)
        for loader in self.ranks:
            if state is not None:
                loader.load_state_dict(state)
        self.iterators = [iter(loader) for loader in self.ranks]
        self.note(before)

    def resize(self, world_size: int, local_batch: int) -> None:
        """Resize in place.

        The first rank leaves if there are others. The remaining ranks take new numbers, and new ranks join.
        """
        before = len(self.ranks)
        state = self.ranks[0].state_dict()
        left = slice(min(1, before - 1), None)
        self.ranks = self.ranks[left][:world_size]
        # As in the training: iterators end with a pass, and continue in mid-pass.
        going_on = self.iterators[left][:world_size] if self.ranks[0].position else map(iter, self.ranks)
        self.iterators = list(going_on)
        for rank, loader in enumerate(self.ranks):
            loader.resize(RankShare(rank, world_size, local_batch))
        for rank in range(len(self.ranks), world_size):
            loader = one_rank(self.kind, self.length, rank, world_size, local_batch, seed=self.seed)
            loader.load_state_dict(state)
            self.ranks.append(loader)
            self.iterators.append(iter(loader))
        self.note(before)

    def note(self, before: int) -> None:
        self.sizes.add(len(self.ranks))
        self.changes += bool(before and before != len(self.ranks) and self.ranks[0].position)

    def train(self, micro_steps: int, steps: int, *, lose: bool) -> bool:
        """Make `steps` optimizer steps.

        Return whether the last one was lost: its ranks were killed before the commit.
        """
        for number in range(steps):
            this_pass = self.ranks[0].pass_index
            if steps > 10**5 and this_pass >= 2 and self.ranks[0].position == 0:
                break
            used = step(self.ranks, self.iterators, micro_steps)
            if used is None:
                self.iterators = [iter(loader) for loader in self.ranks]
                continue
            if lose and number == steps - 1:
                return True
            self.seen.setdefault(this_pass, Counter()).update(used)
            for loader in self.ranks:
                loader.commit()
        return False
