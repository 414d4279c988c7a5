"""Send rank 0's decisions to all ranks.

All ranks act on a decision after the same optimizer step. After one step, rank 0 broadcasts a small vector over a
separate gloo group, asynchronously. Every rank reads it after the next step. It has arrived by then, because an
all-reduce lies between. So no rank waits for a decision, and no rank acts before the others. The vector also has the
number of steps until the next exchange, which keeps the cost small for short steps. If a step takes seconds, the ranks
do wait for the decision, for some milliseconds, because they may have to end within seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pollux.errors import LoopMistake, RankLost
from pollux.goodput import BatchChoice, NoiseScale
from pollux.ranks.gathering import gather_values


@dataclass(frozen=True)
class Decision:
    """Rank 0's decision for all ranks; equal on all of them once taken."""

    move: int = 0
    """Drain for the move of this id: checkpoint, acknowledge, wait; 0: go on."""
    resize: int = 0
    """Carry out the resize of this move; rank 0 then sends its order; 0: none."""
    checkpoint: bool = False
    """Write a periodic checkpoint."""
    copy: bool = False
    """Copy the state into the nodes' memory."""
    end: int = 0
    """Write a checkpoint and end, for the reason of this number (`loop.endings.Reason`); 0: go on."""
    local_batch: int = 0
    """m; 0 leaves it."""
    accumulation: int = 0
    """s"""
    sampling: int = 1
    """Optimizer steps from one measured gradient to the next."""
    next_exchange: int = 1
    """Optimizer steps until the next exchange; 0: one step, and all ranks wait for that decision."""
    epoch: int = -1
    """The epoch, on each rank its own; -1: not given."""
    sample: int = -1
    """Samples used in the present pass, on each rank its own; -1: not given."""
    length: int = -1
    """Samples of a pass through the data, on each rank its own; -1: not given, or known only roughly."""
    noise: tuple[NoiseScale | None, ...] = field(default=())
    """Per parameter group, one model's after the other's; None while unknown."""

    @property
    def choice(self) -> BatchChoice:
        """The batch size in it; only where `local_batch` is set."""
        return BatchChoice(self.local_batch, self.accumulation)

    def with_choice(self, choice: BatchChoice) -> Decision:
        """The same, with a new batch size."""
        return replace(self, local_batch=choice.local_batch, accumulation=choice.accumulation)

    def encode(self, groups: int) -> list[float]:
        """All fields as numbers, in their order."""
        noise = self.noise if len(self.noise) == groups else (None,) * groups
        scales = [x for n in noise for x in (n if n is not None else (-1.0, -1.0))]
        return [float(getattr(self, name)) for name in _NUMBERS] + scales

    @classmethod
    def decode(cls, values: list[float]) -> Decision:
        numbers, scales = values[: len(_NUMBERS)], values[len(_NUMBERS) :]
        pairs = zip(scales[::2], scales[1::2], strict=True)
        noise = tuple(NoiseScale(q, v) if q >= 0 else None for q, v in pairs)
        return cls(**dict(zip(_NUMBERS, map(int, numbers), strict=True)), noise=noise)  # type: ignore[arg-type]


_NUMBERS = tuple(each.name for each in fields(Decision) if each.name != "noise")


OTHER_PLACE = (
    "rank 0 is in epoch {} at sample {}, rank {} in epoch {} at sample {}: one of them has left out a pass, or has "
    "left the loop over the loader alone. Every rank has to make every pass, and to leave the loop after the same "
    "step: let all ranks decide alike on a `break`, for instance by an all-reduced number"
)

OTHER_DATA = (
    "rank 0 has {} samples in a pass through the data, rank {} has {}: every rank has to give job.loader the same "
    "data, of the same length"
)

_GLOO_SIGNS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport"),
    "caused pair closure",  # what a collective ends with after another one of its group timed out
)


def lost_peer(error: BaseException) -> bool:
    """Tell whether a collective failed because another rank is gone."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _GLOO_SIGNS)


class ControlExchange:
    """The ranks' control channel. With one rank the same protocol runs without messages."""

    def __init__(self, group: dist.ProcessGroup | None, groups: int) -> None:
        self.group = group
        self.groups = groups
        """Parameter groups of all models together; not to be changed after the first exchange."""
        self._pending: tuple[torch.Tensor, Any, tuple[int, int, int]] | None = None
        """The decision under way, its transfer, and this rank's epoch, sample and length when it was sent."""
        self.countdown = 1
        """Steps until the next exchange."""
        self._prompt = False
        self._options = dist.BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0
        self._options.asyncOp = True

    def change_group(self, group: dist.ProcessGroup | None) -> None:
        """Go on in the group of other ranks. Nothing may be under way in the old one."""
        assert self._pending is None
        self.group, self.countdown, self._prompt = group, 1, False

    def step(self, decide: Callable[[], Decision]) -> Decision | None:
        """Count one optimizer step; return the decision sent at the last one's end, where one was.

        Where an exchange is due, rank 0 sends what `decide` gives, and the others expect it.
        """
        taken = None if self._pending is None else self.take()
        if taken is not None:
            self._note(taken)
            if self._prompt:
                return taken  # the next one is sent, and taken, after the next step
        self.countdown -= 1
        if self.countdown <= 0:
            self.send(decide())
            if self._prompt:
                # The step takes so long that the wait does not matter, and one step later would be too late.
                taken = self.take()
                assert taken is not None
                self._note(taken)
        return taken

    def quiet(self) -> int:
        """Return how many coming steps neither send nor take a decision. Who leaves `step` out counts them down."""
        return 0 if self._pending is not None or self._prompt else self.countdown - 1

    def _note(self, taken: Decision) -> None:
        self._prompt, self.countdown = taken.next_exchange == 0, max(taken.next_exchange, 1)

    def send(self, decision: Decision) -> None:
        """Send rank 0's decision, without waiting for it."""
        self._pending = self._sent(decision)

    def take(self) -> Decision | None:
        """The decision under way, waited for. Raises RankLost where a rank has left."""
        pending, self._pending = self._pending, None
        return None if pending is None else self._received(*pending)

    def agree(self, decision: Decision) -> Decision:
        """Rank 0's decision on every rank at once, waiting for it. Raises RankLost where a rank has left."""
        return self._received(*self._sent(decision))

    def _sent(self, decision: Decision) -> tuple[torch.Tensor, Any, tuple[int, int, int]]:
        vector = torch.tensor(decision.encode(self.groups), dtype=torch.float64)
        try:
            # The group's own method: the function of torch.distributed takes at least twice as long.
            work = None if self.group is None else self.group.broadcast([vector], self._options)
        except RuntimeError as error:
            raise RankLost(f"a rank left before the control exchange: {error}") from error
        return vector, work, (decision.epoch, decision.sample, decision.length)

    def _received(self, vector: torch.Tensor, work: Any, own: tuple[int, int, int]) -> Decision:
        """Return rank 0's decision. Raises LoopMistake if its place differs from this rank's `own`."""
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise RankLost(f"a rank left during the control exchange: {error}") from error
        decision = Decision.decode(vector.tolist())
        theirs = decision.epoch, decision.sample
        epoch, sample, length = own
        if -1 not in (length, decision.length) and length != decision.length:
            raise LoopMistake(OTHER_DATA.format(decision.length, self.rank, length))
        if any(
            mine != other and -1 not in (mine, other)
            for mine, other in zip((epoch, sample), theirs, strict=True)
        ):
            raise LoopMistake(OTHER_PLACE.format(*theirs, self.rank, epoch, sample))
        return decision

    @property
    def under_way(self) -> Decision | None:
        """On rank 0: what was sent last and is not acted on yet."""
        return None if self._pending is None else Decision.decode(self._pending[0].tolist())

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's plain value (see `plain_values`), by rank. Raises RankLost where a rank left."""
        if self.group is None:
            return [value]
        try:
            return gather_values(value, self.group)
        except RuntimeError as error:
            raise RankLost(f"a rank left while the ranks exchanged values: {error}") from error

    def barrier(self, timeout: timedelta) -> None:
        """Wait for every rank. Raises RankLost after `timeout`."""
        if self.group is None:
            return
        try:
            dist.barrier(group=self.group, async_op=True).wait(timeout)
        except RuntimeError as error:
            raise RankLost(
                f"a rank did not come back within {timeout.total_seconds():.0f} s: {error}"
            ) from error
