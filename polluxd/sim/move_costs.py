"""The product's way to a new placement in a simulation, and its cost."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from pollux.goodput import BatchLimits
from polluxd.apply import paths
from polluxd.errors import ConfigError
from polluxd.model import JobState, Placement, Report
from polluxd.slurm.protocol import SlurmJob

_MEANS = paths.PathOptions(frozenset({"resize", "requeue"}), can_shrink=True)


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """Seconds that a move costs, by path.

    From the last optimizer step before the move to the first after it.
    """

    resize: float = 0.4
    requeue: float = 5.0
    start: float = 5.0

    @classmethod
    def read(cls, path: Path) -> MoveCosts:
        """Read seconds by path from JSON (`.json`) or TOML. Raises ConfigError."""
        names = [f.name for f in fields(cls)]
        try:
            text = path.read_text(encoding="utf-8")
            found: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from None
        except ValueError as error:
            raise ConfigError(f"{path}: is neither JSON (.json) nor TOML ({error})") from None
        if not isinstance(found, dict) or not found:
            raise ConfigError(f"{path}: expected seconds by path; the paths are {', '.join(names)}")
        for name, seconds in found.items():
            if name not in names:
                raise ConfigError(f"{path}: {name}: no such path; the paths are {', '.join(names)}")
            number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if not number or not isfinite(seconds) or not 0 <= seconds < 86400:
                raise ConfigError(f"{path}: {name} = {seconds!r}: expected seconds from 0 to 86400")
        return cls(**(asdict(cls()) | {name: float(seconds) for name, seconds in found.items()}))

    def of(self, path: str) -> float:
        """The seconds that a move on this path costs."""
        return float(getattr(self, path))


class HeldNodes:
    """One job's Slurm allocation: its own nodes, and companions' nodes."""

    def __init__(self) -> None:
        self.own: tuple[str, ...] = ()
        """The batch host first."""
        self.lent: list[tuple[str, ...]] = []
        """Nodes of each companion, the longest-lent first."""

    @property
    def keeps(self) -> tuple[str, ...]:
        """Nodes in the order in which a shrink leaves them to the job.

        Empty for a job on one node.
        """
        nodes = (*self.own, *(name for nodes in self.lent for name in nodes))
        return nodes if len(nodes) > 1 else ()

    def move(self, source: Placement, target: Placement) -> str:
        """Change the allocation; return the path that the product takes."""
        path, ordered = paths.choose(source, target, self._job(source), _REPORT, _MEANS)
        if path in ("start", "requeue"):
            self.own, self.lent = tuple(sorted(ordered.nodes)), []
        elif path == "park":
            self.own, self.lent = (), []
        elif len(target.nodes) > len(source.nodes):
            self.lent.append(tuple(n for n in ordered.nodes if n not in source.nodes))
        else:
            kept = set(target.nodes)
            self.own = tuple(n for n in self.own if n in kept)
            self.lent = [nodes for nodes in self.lent if kept.issuperset(nodes)]
        return path

    def _job(self, source: Placement) -> SlurmJob:
        """The job as Slurm would show it."""
        held = _held(source.nodes, source.gpus_per_node)
        return SlurmJob(
            **_ANYBODY,
            nodes=source.nodes,
            gpus_per_node_held=held,
            batch_host=self.own[0] if self.own else "",
            companions=tuple(
                SlurmJob(**_ANYBODY, gpus_per_node_held=_held(nodes, source.gpus_per_node))
                for nodes in self.lent
            ),
        )


def _held(nodes: Sequence[str], gpus: int) -> dict[str, int]:
    return dict.fromkeys(nodes, gpus)


_ANYBODY: dict[str, Any] = {
    **dict.fromkeys(("name", "user", "account", "partition", "qos", "raw_state", "reason"), ""),
    **dict.fromkeys(("job_id", "uid", "restart_count"), 0),
    "state": JobState.RUNNING,
    "submit_time": 0.0,
}
_REPORT = Report(0, 0.0, BatchLimits(1, 1, 1, 1), resize="in-place")
