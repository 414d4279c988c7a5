"""Hand a training's whole state to joining ranks.

The structure first, then the tensors.

Rank 0 sends the content of a checkpoint over the ranks' process groups. The structure is JSON, with a number in place
of each tensor (see `plain_values`). Tensors go unchanged from device to device. Small tensors are bundled, because each
message has a fixed cost.

Tensors on a GPU are broadcast over NCCL to all ranks. Tensors on the host go from receiver to receiver, so that each
network link carries them once, and ranks that hold the state already stay out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from pollux.errors import RankLost
from pollux.ranks.control import lost_peer
from pollux.ranks.gathering import broadcast_bytes
from pollux.ranks.plain_values import decode, encode
from pollux.ranks.world import World

BUNDLE = 16 << 20
"""Bytes sent in one message, where single tensors are smaller."""

PIECE = 4 << 20
"""Bytes that a receiver has before it passes them on to the next one."""

_ALIGNED = 16  # bytes: no dtype is wider


@dataclass(frozen=True, slots=True)
class _Kind:
    """A tensor's shape, dtype and device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cuda: bool

    @classmethod
    def parse(cls, raw: Any) -> Self:
        """Raises ValueError."""
        match raw:
            case [[*shape], str(name), bool(cuda)]:
                dtype = getattr(torch, name, None)
                whole = all(type(length) is int and length >= 0 for length in shape)
                if whole and isinstance(dtype, torch.dtype):
                    return cls(tuple(shape), dtype, cuda)
        raise ValueError(f"expected a tensor's shape, dtype and device, got {raw!r:.200}")

    @property
    def bytes(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count * self.dtype.itemsize


def hand_over(
    state: Any, world: World, *, joiners: int = 0, receivers: Collection[int] = (), source: int = 0
) -> Any:
    """Send the state of rank `source` to `receivers` and the last `joiners`.

    They return it, the others None. `state` is None on all ranks but `source`.

    Every rank of `world` calls it. Raises StateError on `source` where the state is not plain, and RankLost where a
    rank left.
    """
    assert world.control is not None
    tensors: list[Tensor] = []
    try:
        text = _header(state, tensors) if world.rank == source else None
        header = broadcast_bytes(text, world.control, source)
        structure, kinds = _understood(header)
        chain = [source, *sorted({*receivers, *range(world.size - joiners, world.size)} - {source})]
        receives = world.rank in chain[1:]
        received: dict[int, Tensor] = {}
        for bundle in _bundles(kinds):
            cuda = kinds[bundle[0]].cuda
            if not cuda and world.rank not in chain:
                continue
            chunk = _message(bundle, kinds, tensors, world, source)
            if cuda:
                dist.broadcast(chunk, src=source)
            else:
                _pass_on(chunk, chain, world)
            if receives:
                received.update(_cut(chunk, bundle, kinds))
        return decode(structure, received.__getitem__) if receives else None
    except ValueError as error:
        raise RankLost(f"rank 0 handed over a state that this agent does not send: {error}") from error
    except RuntimeError as error:
        if lost_peer(error):
            raise RankLost(f"a rank left while joiners received the training's state: {error}") from error
        raise


def _header(state: Any, tensors: list[Tensor]) -> bytes:
    """The state's structure and what its tensors are, as JSON. Each tensor is appended to `tensors` once."""
    places: dict[int, int] = {}

    def put(tensor: Tensor) -> int:
        if id(tensor) not in places:
            places[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return places[id(tensor)]

    structure = encode(state, put)
    kinds = [[list(t.shape), str(t.dtype).removeprefix("torch."), t.is_cuda] for t in tensors]
    return json.dumps([structure, kinds]).encode()


def _understood(header: bytes) -> tuple[Any, list[_Kind]]:
    """Raises ValueError."""
    try:
        structure, raw = json.loads(header)
        return structure, [_Kind.parse(each) for each in raw]
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not a header: {error}") from error


def _bundles(kinds: Sequence[_Kind]) -> Iterator[list[int]]:
    """Indices of tensors to be sent together. Of one device, up to BUNDLE bytes, or a single larger one."""
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
    """Return the bytes of a message; several tensors are aligned, one is not."""
    if len(bundle) == 1:
        return kinds[bundle[0]].bytes
    return sum(_length(kinds[index]) for index in bundle)


def _message(
    bundle: list[int], kinds: Sequence[_Kind], tensors: Sequence[Tensor], world: World, source: int
) -> Tensor:
    """The bundle's bytes on rank `source`, memory for them on the others."""
    if world.rank == source and len(bundle) == 1:
        return _flat(tensors[bundle[0]])
    device = world.device if kinds[bundle[0]].cuda else torch.device("cpu")
    chunk = torch.empty(_total(bundle, kinds), dtype=torch.uint8, device=device)
    if world.rank == source:
        start = 0
        for index in bundle:
            size = kinds[index].bytes
            if size:
                chunk[start : start + size].copy_(_flat(tensors[index]))
            start += _length(kinds[index])
    return chunk


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _pass_on(chunk: Tensor, chain: Sequence[int], world: World) -> None:
    """Receive `chunk` from the rank before in `chain`, send it to the next.

    The first rank of the chain holds it already.
    """
    at = chain.index(world.rank)
    sending = []
    for start in range(0, chunk.numel(), PIECE):
        piece = chunk[start : start + PIECE]
        if at:
            dist.recv(piece, src=chain[at - 1], group=world.control)
        if at + 1 < len(chain):
            sending.append(dist.isend(piece, dst=chain[at + 1], group=world.control))
    for work in sending:
        assert work is not None
        work.wait()


def _cut(chunk: Tensor, bundle: list[int], kinds: Sequence[_Kind]) -> Iterator[tuple[int, Tensor]]:
    start = 0
    for index in bundle:
        kind = kinds[index]
        flat = chunk[start : start + kind.bytes]
        # Copy each of several tensors: otherwise one of them would keep the whole bundle in memory.
        flat = flat.clone() if len(bundle) > 1 else flat
        yield index, flat.view(kind.dtype).reshape(kind.shape)
        start += _length(kind)
