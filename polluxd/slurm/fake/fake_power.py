"""Power saving of the fake Slurm: nodes that boot for a job, and go off again (SuspendTime in slurm.conf)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from polluxd.model import Node, Power


@dataclass(slots=True)
class PowerSaving:
    """The nodes that are off at first: each boots when a job is placed there."""

    boot_s: float
    """From the placement of the job to the node's first answer [s]."""
    idle_s: float
    """A node without a job goes off after this [s]."""
    node_seconds: float = 0.0
    """For which nodes have been on or booting, the cluster's other nodes included."""
    _saved: set[str] = field(default_factory=set)
    _ready: dict[str, float] = field(default_factory=dict)
    """When the boot of each booting node ends."""
    _unused: dict[str, float] = field(default_factory=dict)
    """Since when a node that is on has had no job."""

    def keep(self, nodes: Iterable[Node]) -> None:
        """Take charge of the nodes that are off."""
        self._saved = {node.name for node in nodes if node.power == "off"}

    def boot(self, name: str, now: float) -> None:
        """Boot a node."""
        self._ready[name] = now + self.boot_s

    def changes(self, nodes: Mapping[str, Node], used: Collection[str], now: float) -> dict[str, Power]:
        """Return the new power of each node for which it changes: those that have booted, and those without a job."""
        found: dict[str, Power] = {name: "on" for name, at in self._ready.items() if at <= now}
        for name in found:
            del self._ready[name]
        for name in sorted(self._saved):
            if name in used or (nodes[name].power != "on" and name not in found):
                self._unused.pop(name, None)
            elif now >= self._unused.setdefault(name, now) + self.idle_s:
                del self._unused[name]
                found[name] = "off"
        return found

    def count(self, nodes: Iterable[Node], seconds: float) -> None:
        """Count the time that has passed."""
        self.node_seconds += seconds * sum(node.power != "off" for node in nodes)

    def events(self) -> Iterator[float]:
        """Yield when the power of a node may change by itself."""
        yield from self._ready.values()
        for since in self._unused.values():
            yield since + self.idle_s
