"""Handing a training's whole state to ranks that come in: its structure once, its tensors one after the other.

What a checkpoint holds is sent over the ranks' own groups, from rank 0's memory into the joiners'. Only the
structure is pickled: dictionaries, lists and plain values, with a number in the place of each tensor. Tensors go as
they are, on the device that they are on; small ones bundled, since each message costs the same. Ranks that hold the
state already take part and keep nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pollux.errors import RankLost
from pollux.ranks.control import lost_peer
from pollux.ranks.world import World

BUNDLE = 16 << 20
"""Bytes sent in one message, where single tensors are smaller."""

_ALIGNED = 16  # bytes: no dtype is wider


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for a tensor in the structure."""

    index: int


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a tensor is, beside its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cuda: bool

    @property
    def bytes(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count * self.dtype.itemsize


def hand_over(state: Any, world: World, *, joiners: int) -> Any:
    """Send `state` (rank 0's; None on the others) to the last `joiners` ranks; they return it, the others None.

    Every rank of `world` calls it. Raises RankLost where one left meanwhile.
    """
    assert world.control is not None
    tensors: list[Tensor] = []
    try:
        header: list[Any] = [None]
        if world.rank == 0:
            structure = _taken_out(state, tensors, {})
            kinds = [_Kind(tuple(t.shape), t.dtype, t.is_cuda) for t in tensors]
            header = [(structure, kinds)]
        dist.broadcast_object_list(header, src=0, group=world.control)
        structure, kinds = header[0]
        receives = world.rank >= world.size - joiners
        received: dict[int, Tensor] = {}
        for bundle in _bundles(kinds):
            chunk = _send(bundle, kinds, tensors, world)
            if receives:
                received.update(_cut(chunk, bundle, kinds))
    except RuntimeError as error:
        if lost_peer(error):
            raise RankLost(f"a rank left while joiners were given the training's state: {error}") from error
        raise
    return _put_in(structure, received) if receives else None


def _bundles(kinds: Sequence[_Kind]) -> Iterator[list[int]]:
    """Indices of tensors to be sent together: of one device, up to BUNDLE bytes, or a single larger one."""
    bundle: list[int] = []
    held = 0
    # An optimizer's counts lie on the host, between moments that lie on the device.
    for index, kind in sorted(enumerate(kinds), key=lambda each: each[1].cuda):
        if bundle and (kinds[bundle[0]].cuda != kind.cuda or held + kind.bytes > BUNDLE):
            yield bundle
            bundle, held = [], 0
        bundle.append(index)
        held += kind.bytes
    if bundle:
        yield bundle


def _length(kind: _Kind) -> int:
    return -(-kind.bytes // _ALIGNED) * _ALIGNED


def _total(bundle: list[int], kinds: Sequence[_Kind]) -> int:
    """Bytes of a message; a tensor that goes alone goes as it is."""
    if len(bundle) == 1:
        return kinds[bundle[0]].bytes
    return sum(_length(kinds[index]) for index in bundle)


def _send(bundle: list[int], kinds: Sequence[_Kind], tensors: Sequence[Tensor], world: World) -> Tensor:
    """One message: rank 0 sends the bundle's bytes, the others return them."""
    cuda = kinds[bundle[0]].cuda
    total = _total(bundle, kinds)
    if world.rank == 0 and len(bundle) == 1:
        chunk = tensors[bundle[0]].detach().contiguous().reshape(-1).view(torch.uint8)
    else:
        device = world.device if cuda else torch.device("cpu")
        chunk = torch.empty(total, dtype=torch.uint8, device=device)
    if world.rank == 0 and len(bundle) > 1:
        start = 0
        for index in bundle:
            size = kinds[index].bytes
            if size:
                flat = tensors[index].detach().contiguous().reshape(-1).view(torch.uint8)
                chunk[start : start + size].copy_(flat)
            start += _length(kinds[index])
    if total:
        dist.broadcast(chunk, src=0, group=None if cuda else world.control)
    return chunk


def _cut(chunk: Tensor, bundle: list[int], kinds: Sequence[_Kind]) -> Iterator[tuple[int, Tensor]]:
    start = 0
    for index in bundle:
        kind = kinds[index]
        flat = chunk[start : start + kind.bytes]
        # A copy where there are several: a tensor kept would else keep the whole bundle.
        flat = flat.clone() if len(bundle) > 1 else flat
        yield index, flat.view(kind.dtype).reshape(kind.shape)
        start += _length(kind)


def _taken_out(value: Any, tensors: list[Tensor], seen: dict[int, _Slot]) -> Any:
    """The structure: `value` with slots for its tensors, which are appended to `tensors`, each once."""
    if isinstance(value, Tensor):
        slot = seen.get(id(value))
        if slot is None:
            slot = seen[id(value)] = _Slot(len(tensors))
            tensors.append(value)
        return slot
    return _rebuilt(value, lambda part: _taken_out(part, tensors, seen))


def _put_in(value: Any, tensors: dict[int, Tensor]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.index]
    return _rebuilt(value, lambda part: _put_in(part, tensors))


def _rebuilt(value: Any, of: Any) -> Any:
    """A container with `of` each of its parts; anything else as it is."""
    if type(value) is OrderedDict:
        made = OrderedDict((key, of(part)) for key, part in value.items())
        made.__dict__.update(vars(value))  # a module's versions, for its load_state_dict
        return made
    if isinstance(value, dict):
        return {key: of(part) for key, part in value.items()}
    if type(value) is list:
        return [of(part) for part in value]
    if isinstance(value, tuple):
        parts = [of(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
