"""GPUs in Slurm's gres expressions.

`Gres=` and `GresUsed=` of scontrol(1), `tres-per-node` of squeue(1).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from polluxd.errors import SlurmGarbled

_PARENTHESES = re.compile(r"\([^)]*\)")
_PREFIX = re.compile(r"^gres[:/]")
_COUNT = re.compile(r"(\d{1,9})([KMG]?)")
_TYPE = re.compile(r"\w[\w.+-]*")
_SCALE = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MOST = 1 << 20
"""GPUs of a job or node; Slurm itself stops far below."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of a gres expression.

    `type` is empty where none is named. Several types are one of their own, such as `a40+rtx`.
    """

    count: int
    type: str = ""


@lru_cache(maxsize=4096)
def parse_gpus(text: str) -> Gpus:
    """Count the GPUs in a gres list.

    Examples: `gpu:4`, `gres/gpu:a100:2(IDX:0-1),gres/nic:1`, `gpu:1g.5gb:4(S:0)`. The last part of an item is its count
    wherever it is a number, so a type may begin with a digit (`2080ti`, `1g.5gb`) or be a number (`gpu:4090:8`).

    Raises:
        SlurmGarbled: an item names GPUs in an unknown form.
    """
    total, types = 0, set[str]()
    for kind, count in _items(text, "gpu"):
        total += count
        types.add(kind)
    if total > _MOST:
        raise SlurmGarbled(f"expected at most {_MOST} GPUs, got {text[:80]!r}")
    return Gpus(total, "" if "" in types else "+".join(sorted(types)))


def gpus_in_use(used: str, gpus: int) -> int:
    """Count a node's GPUs in use, whole or as shards, by its `GresUsed=`.

    A GPU with one shard in use cannot be given to a job as a whole. Slurm does not say how the shards are spread
    over the GPUs, so each shard in use counts as a GPU, up to the node's `gpus`.

    Raises:
        SlurmGarbled: an item is of an unknown form.
    """
    shards = sum(count for _, count in _items(used, "shard"))
    return min(gpus, parse_gpus(used).count + shards)


def _items(text: str, wanted: str) -> list[tuple[str, int]]:
    """List (type, count) of the items of one gres name."""
    found = []
    for item in _PARENTHESES.sub("", text).split(","):
        name, *rest = re.split("[:=]", _PREFIX.sub("", item))
        if name != wanted:
            continue
        count = _COUNT.fullmatch(rest[-1]) if rest else None
        kinds = rest[:-1] if count else rest
        if len(kinds) > 1 or (kinds and not _TYPE.fullmatch(kinds[0])):
            raise SlurmGarbled(f"expected {wanted}[:type][:count], got {item[:80]!r}")
        found.append((kinds[0] if kinds else "", int(count[1]) * _SCALE[count[2]] if count else 1))
    return found
