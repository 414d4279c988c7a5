"""Collectives over plain values: every rank's value on every rank, or rank 0's on all.

torch's own collectives over objects unpickle what a peer sends, which runs code of the sender's choice. Here values
travel as JSON in tensors (see `plain_values`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pollux.errors import RankLost
from pollux.ranks.plain_values import dumps, loads

LARGEST = 1 << 28
"""Bytes of one rank's value; a larger announced length comes from no rank of this agent."""


def gather_values(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's value, by rank. Every rank of the gloo group calls it.

    Raises StateError where `value` is not plain, RankLost where a peer sends no plain value, and torch's RuntimeError
    where a rank left.
    """
    size = dist.get_world_size(group)
    text = dumps(value, "the value to share between ranks")
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text)]), group=group)
    counts = [_length(each) for each in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.empty(max(counts), dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(texts, padded, group=group)
    return [_value(each[:count], rank) for rank, (each, count) in enumerate(zip(texts, counts, strict=True))]


def as_rank_0(group: dist.ProcessGroup | None, value: Any) -> Any:
    """Return rank 0's value. Raises as `gather_values`. Without a group it is this rank's own."""
    return value if group is None else gather_values(value, group)[0]


def broadcast_bytes(text: bytes | None, group: dist.ProcessGroup, source: int = 0) -> bytes:
    """Return the `text` of rank `source` on every rank of the gloo group.

    The other ranks pass None. Raises as `gather_values`.
    """
    length = torch.tensor([0 if text is None else len(text)])
    dist.broadcast(length, src=source, group=group)
    content = torch.empty(_length(length), dtype=torch.uint8)
    if text is not None:
        content.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(content, src=source, group=group)
    return content.numpy().tobytes()


def _length(announced: Tensor) -> int:
    length = int(announced)
    if not 0 < length <= LARGEST:
        raise RankLost(f"expected a rank to send 1 to {LARGEST} bytes, it announces {length}")
    return length


def _value(content: Tensor, rank: int) -> Any:
    try:
        return loads(content.numpy().tobytes())
    except ValueError as error:
        raise RankLost(f"rank {rank} sent a value that this agent does not send: {error}") from error
