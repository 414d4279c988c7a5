"""What Slurm writes in a notation of its own: node lists, GPUs in gres expressions, durations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from polluxd.errors import SlurmGarbled

_NO_NAME = re.compile(r"[\s!&^/]|\d{19}")
"""No node name has these: the library reads them as set operators or steps, or fails on the number."""
_MOST_NODES = 1 << 17
"""Twice the number of nodes that Slurm supports."""
_PART = re.compile(r"(?:[^,\[]|\[[^\]]*\]?)+")
"""Of a list: names and brackets up to the next comma outside of brackets."""
_PARENTHESES = re.compile(r"\([^)]*\)")
_PREFIX = re.compile(r"^gres[:/]")
_COUNT = re.compile(r"(\d{1,9})([KMG]?)")
_TYPE = re.compile(r"\w[\w.+-]*")
_SCALE = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MOST = 1 << 20
"""GPUs of a job or node; Slurm itself stops far below."""


@lru_cache(maxsize=8192)
def node_names(text: str) -> tuple[str, ...]:
    """Expand a node list into its names, sorted; `(null)` has none. Raises SlurmGarbled."""
    if text in ("", "(null)", "None", "N/A"):
        return ()
    if _NO_NAME.search(text) or _size(text) > _MOST_NODES:
        raise SlurmGarbled(f"expected a node list of at most {_MOST_NODES} names, got {text[:80]!r}")
    try:
        # Without a group resolver a name with "@" cannot make the library run commands of the machine's configuration.
        return tuple(NodeSet(text, resolver=RESOLVER_NOGROUP))
    except (NodeSetException, AssertionError, ValueError, OverflowError) as error:
        # The library asserts that a number fits, with the digits after the brackets.
        raise SlurmGarbled(f"expected a node list, got {text[:80]!r}: {error}") from error


def _size(text: str) -> int:
    """Estimate the number of names without expanding the list, in a time that grows with its length alone."""
    names = 0
    for part in _PART.findall(text):
        product = 1
        for brackets in re.findall(r"\[([^\[\]]*)\]", part):
            ranges = re.findall(r"(\d{1,18})-(\d{1,18})", brackets)
            product *= max(1, brackets.count(",") + 1 + sum(int(last) - int(first) for first, last in ranges))
            if product > _MOST_NODES:
                break  # it may grow to a number of a million digits
        names += product
    return names


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


@lru_cache(maxsize=4096)
def duration(text: str) -> float | None:
    """Seconds of `D-HH:MM:SS`, `HH:MM:SS` or `MM:SS`; None: no limit."""
    if text in ("UNLIMITED", "NOT_SET", "Partition_Limit", "PARTITION_LIMIT", "N/A", "INVALID"):
        return None
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not re.fullmatch(r"\d{1,9}(:\d{1,9}){0,2}", clock) or (dash and not re.fullmatch(r"\d{1,9}", days)):
        raise SlurmGarbled(f"expected a duration D-HH:MM:SS, got {text[:40]!r}")
    seconds = 0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return float(seconds + 86400 * int(days or 0))
