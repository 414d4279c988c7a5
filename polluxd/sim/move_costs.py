"""The product's way to a new placement in a simulation, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from pollux.goodput import BatchLimits
from polluxd.apply import paths
from polluxd.model import JobState, Placement, Report
from polluxd.slurm.protocol import SlurmJob

_PATHS = paths.MoveRules(frozenset({"resize", "requeue"}), can_shrink=True)


Cost = Annotated[float, Field(ge=0, lt=86400)]


@dataclass(
    frozen=True,
    slots=True,
    config=ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True),
)
class MoveCosts:
    """Seconds that a move costs, from the last optimizer step before it to the first after it."""

    resize: Cost = 0.4
    """In place."""
    requeue: Cost = 5.0
    """Through Slurm's queue."""
    start: Cost = 5.0
    """Of a job that held nothing."""

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
        path, ordered = paths.choose(source, target, self._job(source), _REPORT, _PATHS)
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
