"""How a start of a job's workers ended: who failed first, or who goes on."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Failure:
    """The first worker of a node, or of the job, that failed. `at` is a POSIX time, `status` a shell's."""

    at: float
    rank: int
    status: int
    why: str
    where: str

    @classmethod
    def from_message(cls, raw: Any) -> Self | None:
        """Of another launcher. Raises KeyError, TypeError and ValueError."""
        if raw is None:
            return None
        at, rank, status = float(raw["at"]), int(raw["rank"]), int(raw["status"])
        return cls(at, rank, status, str(raw["why"]), str(raw["where"]))


@dataclass(frozen=True, slots=True)
class Resized:
    """The newest move in which nodes left or all ranks began anew, for those who start after it."""

    move_id: int = 0
    """polluxd's number of it; 0 where there was none."""
    left: tuple[str, ...] = ()
    """Slurm's names of the nodes that left in it."""

    @property
    def environment(self) -> dict[str, str]:
        if not self.move_id:
            return {}
        return {"POLLUX_RESIZED": str(self.move_id), "POLLUX_LEFT": ",".join(self.left)}


@dataclass(frozen=True, slots=True)
class Again:
    """The next start of the workers."""

    port: int
    """Its MASTER_PORT."""
    nodes: tuple[int, ...]
    """Who takes part, in order, by the numbers of the start before."""
    resized: Resized = Resized()
    asked: bool = False
    """A rank has asked for it: it counts as no restart after a failure."""

    @classmethod
    def from_message(cls, raw: Mapping[str, Any] | None) -> Self | None:
        """Of another launcher. Raises KeyError, TypeError and ValueError."""
        if raw is None:
            return None
        resized = raw["resized"]
        left = tuple(str(name) for name in resized["left"])
        nodes = tuple(int(node) for node in raw["nodes"])
        moved = Resized(int(resized["move_id"]), left)
        return cls(int(raw["port"]), nodes, moved, bool(raw["asked"]))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a start of the workers ended."""

    failure: Failure | None = None
    ended_by: int | None = None
    """The signal that asked this launcher to end."""
    again: Again | None = None
    """The workers are to be started again."""
    left: bool = False
    """This node has left the job."""

    @property
    def status(self) -> int:
        """Exit status of the launcher."""
        if self.ended_by is not None:
            return 128 + self.ended_by
        return self.failure.status if self.failure is not None else 0

    def message(self) -> dict[str, Any]:
        """For the other launchers."""
        failure, again = self.failure, self.again
        return {
            "type": "outcome",
            "failure": asdict(failure) if failure else None,
            "again": asdict(again) if again else None,
        }

    @classmethod
    def from_message(cls, raw: Mapping[str, Any]) -> Self:
        """Of node 0. Raises KeyError, TypeError and ValueError."""
        return cls(Failure.from_message(raw["failure"]), again=Again.from_message(raw["again"]))


def describe_status(status: int) -> str:
    """Say in words how a process ended, from its shell-like exit status."""
    if status <= 128:
        return f"exited with status {status}"
    try:
        name = signal.Signals(status - 128).name
    except ValueError:
        return f"exited with status {status}"
    hint = " (out of memory, or someone's kill -9)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def describe(failure: Failure) -> str:
    """One line for the job's log."""
    return f"rank {failure.rank} ({failure.where}) failed first: {failure.why} (exit status {failure.status})"
