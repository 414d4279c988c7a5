"""Slurm's compressed lists of node names, such as `n[1-3,7],gpu-a`."""

from __future__ import annotations

import re
from functools import lru_cache

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from polluxd.errors import SlurmGarbled

_NO_NAME = re.compile(r"[\s!&^/]|\d{19}")
"""No node name has these: the library reads them as set operators or steps, or fails on the number."""
_MOST_NODES = 1 << 17
"""Twice the number of nodes that Slurm supports."""


@lru_cache(maxsize=8192)
def node_names(text: str) -> tuple[str, ...]:
    """Expand a node list into its names, sorted; `(null)` has none.

    Raises:
        SlurmGarbled: the text is no node list.
    """
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
    """Estimate the number of names without expanding the list."""
    names = 0
    for part in re.split(r",(?![^\[]*\])", text):
        product = 1
        for brackets in re.findall(r"\[([^\]]*)\]", part):
            ranges = re.findall(r"(\d{1,18})-(\d{1,18})", brackets)
            product *= max(1, brackets.count(",") + 1 + sum(int(last) - int(first) for first, last in ranges))
        names += product
    return names
