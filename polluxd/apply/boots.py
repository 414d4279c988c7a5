"""Measure boots of nodes, and close nodes that failed to boot, for a growing while.

Slurm powers a node off again when it does not answer within ResumeTimeout, and then offers it as before. Without this,
each decision would place a job on the same broken node.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from polluxd.model import Node, Power

log = logging.getLogger(__name__)

FIRST_S = 60.0
"""A node that failed to boot is closed for as long as that took, and for this time at least."""
LONGEST_S = 4 * 3600.0
_MEASURED = 8
"""The mean is over so many boots of nodes that are alike."""
_Kind = tuple[str, frozenset[str]]
"""GPU type and features."""


class _Failures(NamedTuple):
    number: int
    until: float
    """POSIX time to which the node stays closed."""


class Boots:
    """The boots that nodes have failed, by the states in which Slurm shows the nodes.

    Args:
        seen: what `seen` of an earlier process returned.
    """

    def __init__(self, seen: Mapping[str, Any] | None = None) -> None:
        seen = seen or {}
        self._power: dict[str, Power] = {}
        self._failures = {name: _Failures(*known) for name, known in seen.get("failures", {}).items()}
        self._since: dict[str, float] = dict(seen.get("since", {}))
        """POSIX time at which a node that is not off was first seen to boot."""
        self._measured: set[str] = set()
        """Nodes whose boot this process saw begin: one that it did not look at may have been off in the meantime."""
        self._took: dict[_Kind, deque[float]] = {
            (gpu_type, frozenset(features)): deque(seconds, maxlen=_MEASURED)
            for gpu_type, features, seconds in seen.get("took", ())
        }
        """Seconds of the latest boots that succeeded."""

    def seen(self) -> dict[str, Any]:
        """Return what the next process is to know, as JSON has it."""
        took = [[kind, sorted(features), list(seconds)] for (kind, features), seconds in self._took.items()]
        return {
            "took": took,
            "failures": {name: list(known) for name, known in self._failures.items()},
            "since": dict(self._since),
        }

    def observe(self, nodes: Iterable[Node], now: float) -> tuple[Node, ...]:
        """Return the nodes: those that failed to boot not schedulable, those that are off with `boot_s`.

        A boot has failed when the node was booting, and is then out of service or off again. A boot that succeeds
        makes good for all failures before it.
        """
        former, self._power = self._power, {}
        found = []
        for node in nodes:
            was = former.get(node.name, node.power)
            if was == "booting" and (node.power == "off" or not node.schedulable):
                self._fail(node.name, now, now - self._since.get(node.name, now))
            elif was == "booting" and node.power == "on":
                self._failures.pop(node.name, None)
                if node.name in self._measured:
                    alike = self._took.setdefault(_kind(node), deque(maxlen=_MEASURED))
                    alike.append(max(now - self._since[node.name], 0.0))
            if node.power == "off":
                self._since.pop(node.name, None)
                self._measured.discard(node.name)
            elif was == "off":
                self._since[node.name] = now
                self._measured.add(node.name)
            self._power[node.name] = node.power if node.schedulable or node.power == "off" else "on"
            failures = self._failures.get(node.name)
            closed = failures is not None and now < failures.until and node.power == "off"
            took = self._took.get(_kind(node))
            shown = replace(node, schedulable=False) if closed else node
            if node.power == "off" and took:
                shown = replace(shown, boot_s=fmean(took))
            found.append(shown)
        return tuple(found)

    def _fail(self, name: str, now: float, took: float) -> None:
        number = 1 + (self._failures[name].number if name in self._failures else 0)
        seconds = min(max(FIRST_S, took) * 2.0 ** min(number - 1, 16), LONGEST_S)
        self._failures[name] = _Failures(number, now + seconds)
        log.warning(
            "node %s failed to boot (%d in a row): polluxd places no job there while it is powered down, for %.0f s",
            name,
            number,
            seconds,
        )


def _kind(node: Node) -> _Kind:
    return node.gpu_type, node.features
