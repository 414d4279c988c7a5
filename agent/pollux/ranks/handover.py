"""Hand a training's whole state to joining ranks.

Rank 0 sends the content of a checkpoint over the ranks' process groups: first the structure as JSON, with a number in
place of each tensor (see `plain_values`), then the bytes of all tensors as one stream, in pieces, from device to
device.

Tensors on a GPU are broadcast over NCCL to all ranks. Tensors on the host go from receiver to receiver, so that each
network link carries them once, and ranks that hold the state already stay out.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pollux.errors import RankLost
from pollux.ranks.control import lost_peer
from pollux.ranks.gathering import broadcast_bytes
from pollux.ranks.plain_values import decode, encode
from pollux.ranks.world import World

PIECE = 4 << 20
"""Bytes of one message: a receiver passes a piece on while it receives the next one."""
GPU_PIECE = 16 << 20
"""Bytes of one broadcast over NCCL, which has a fixed cost."""
UNDER_WAY = 8
"""Pieces that a rank sends at the same time."""


def hand_over(state: Any, world: World, receivers: Iterable[int], *, source: int = 0) -> Any:
    """Send the state of rank `source` to `receivers`, who return it; the other ranks return None.

    `state` is None on all ranks but `source`. Every rank of `world` calls it. Raises StateError on `source` where the
    state is not plain, and RankLost where a rank left.
    """
    assert world.control is not None
    tensors: list[Tensor] = []
    chain = [source, *receivers]
    receives = world.rank in chain[1:]
    try:
        text = _header(state, tensors) if world.rank == source else None
        structure, kinds = _understood(broadcast_bytes(text, world.control, source))
        if world.rank != source:
            tensors = [_room(kind, world, receives) for kind in kinds]
        if world.rank in chain:
            _pass_on([t for t, kind in zip(tensors, kinds, strict=True) if not kind[2]], chain, world)
        for parts in _pieces([t for t, kind in zip(tensors, kinds, strict=True) if kind[2]], GPU_PIECE):
            with _joined(parts, world.device, sends=world.rank == source, receives=receives) as piece:
                dist.broadcast(piece, src=source)
        return decode(structure, dict(enumerate(tensors)).__getitem__) if receives else None
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


def _understood(header: bytes) -> tuple[Any, list[list[Any]]]:
    """Raises ValueError."""
    try:
        match json.loads(header):
            case [structure, [*kinds]] if all(isinstance(kind, list) and len(kind) == 3 for kind in kinds):
                return structure, kinds
    except RecursionError:
        pass
    raise ValueError(f"not a header: {header!r:.200}")


def _room(kind: list[Any], world: World, receives: bool) -> Tensor:
    """Memory for a tensor; none on a rank that does not keep it. Raises ValueError."""
    match kind:
        case [[*shape], str(name), bool(cuda)]:
            dtype = getattr(torch, name, None)
            whole = all(type(length) is int and length >= 0 for length in shape)
            if whole and isinstance(dtype, torch.dtype):
                device = (world.device if cuda else "cpu") if receives else "meta"
                return torch.empty(shape, dtype=dtype, device=device)
    raise ValueError(f"expected a tensor's shape, dtype and device, got {kind!r:.200}")


def _pieces(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Cut the bytes of tensors into pieces of `size` bytes. A piece is a list of parts of tensors."""
    piece, room = list[Tensor](), size
    for tensor in tensors:
        rest = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        while rest.numel():
            piece.append(rest[:room])
            rest, room = rest[room:], room - piece[-1].numel()
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


@contextmanager
def _joined(
    parts: Sequence[Tensor], device: torch.device | str, *, sends: bool, receives: bool
) -> Iterator[Tensor]:
    """A piece as one message: to be sent, or to be received and copied into its parts afterwards."""
    if len(parts) == 1 and (sends or receives):
        yield parts[0]
        return
    sizes = [part.numel() for part in parts]
    piece = torch.cat(list(parts)) if sends else torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    yield piece
    if receives:
        for part, content in zip(parts, torch.split(piece, sizes), strict=True):
            part.copy_(content)


def _pass_on(tensors: Sequence[Tensor], chain: Sequence[int], world: World) -> None:
    """Receive the bytes of tensors from the rank before in `chain`, send them to the next."""
    at = chain.index(world.rank)
    sending: deque[tuple[Any, Tensor]] = deque()
    for parts in _pieces(tensors, PIECE):
        with _joined(parts, "cpu", sends=not at, receives=at > 0) as piece:
            if at:
                dist.recv(piece, src=chain[at - 1], group=world.control)
        if at + 1 < len(chain):
            sending.append((dist.isend(piece, dst=chain[at + 1], group=world.control), piece))
        if len(sending) > UNDER_WAY:
            sending.popleft()[0].wait()
    for work, _ in sending:
        work.wait()
