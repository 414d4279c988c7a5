"""Measure boots of nodes, and close nodes that failed to boot, for a growing while.

Slurm powers a node off again when it does not answer within ResumeTimeout, and then offers it as before. Without this,
each decision would place a job on the same broken node.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean

from polluxd.model import Node, Power

log = logging.getLogger(__name__)

FIRST_S = 300.0
LONGEST_S = 4 * 3600.0
_MEASURED = 8
"""The mean is over so many boots of nodes that are alike."""
_Kind = tuple[str, frozenset[str]]
"""GPU type and features."""


@dataclass(frozen=True, slots=True)
class _Failures:
    number: int
    until: float
    """POSIX time to which the node stays closed."""


class Boots:
    """The boots that nodes have failed, by the states in which Slurm shows the nodes."""

    def __init__(self) -> None:
        self._power: dict[str, Power] = {}
        self._failures: dict[str, _Failures] = {}
        self._since: dict[str, float] = {}
        """POSIX time at which a node that boots was first seen to."""
        self._took: dict[_Kind, deque[float]] = {}
        """Seconds of the latest boots that succeeded."""

    def observe(self, nodes: Iterable[Node], now: float) -> tuple[Node, ...]:
        """Return the nodes. Those that failed to boot are not schedulable; those that are off have `boot_s`.

        A boot has failed when the node was booting, and is then out of service or off again. A boot that succeeds
        makes good for all failures before it.
        """
        former, self._power = self._power, {}
        found = []
        for node in nodes:
            was = former.get(node.name, node.power)
            if was == "booting" and (node.power == "off" or not node.schedulable):
                self._fail(node.name, now)
            elif was == "booting" and node.power == "on":
                self._failures.pop(node.name, None)
                if node.name in self._since:
                    alike = self._took.setdefault(_kind(node), deque(maxlen=_MEASURED))
                    alike.append(max(now - self._since[node.name], 0.0))
            if node.power != "booting":
                self._since.pop(node.name, None)
            elif was == "off":
                self._since[node.name] = now
            self._power[node.name] = node.power if node.schedulable or node.power == "off" else "on"
            failures = self._failures.get(node.name)
            closed = failures is not None and now < failures.until and node.power == "off"
            took = self._took.get(_kind(node)) if node.power == "off" else None
            shown = replace(node, schedulable=False) if closed else node
            found.append(replace(shown, boot_s=fmean(took)) if took else shown)
        return tuple(found)

    def _fail(self, name: str, now: float) -> None:
        number = 1 + (self._failures[name].number if name in self._failures else 0)
        seconds = min(FIRST_S * 2.0 ** min(number - 1, 16), LONGEST_S)
        self._failures[name] = _Failures(number, now + seconds)
        log.warning(
            "node %s failed to boot (%d in a row): polluxd places no job there while it is powered down, for %.0f s",
            name,
            number,
            seconds,
        )


def _kind(node: Node) -> _Kind:
    return node.gpu_type, node.features
