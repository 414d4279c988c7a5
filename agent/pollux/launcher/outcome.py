"""How one start of a job's workers ends.

Who failed first, and who goes on.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from typing import Any, Self

LONGEST = 4096  # characters of a text in a message


@dataclass(frozen=True, slots=True)
class Failure:
    """The first worker of a node, or of the job, that failed.

    `at` is a POSIX time, `status` a shell's.
    """

    at: float
    rank: int
    status: int
    why: str
    where: str

    @property
    def order(self) -> tuple[float, int]:
        """The least of several failures is the first."""
        return self.at, self.rank

    @classmethod
    def parse(cls, raw: Any) -> Self | None:
        """From a message. Raises ValueError."""
        match raw:
            case None:
                return None
            case {
                "at": int() | float() as at,
                "rank": int(rank),
                "status": int(status),
                "why": str(why),
                "where": str(where),
            } if is_count(rank) and is_count(status) and status < 256 and math.isfinite(at):
                if type(at) in (int, float) and max(len(why), len(where)) <= LONGEST:
                    return cls(float(at), rank, status, why, where)
        raise ValueError(f"expected a failure, got {raw!r:.200}")


@dataclass(frozen=True, slots=True)
class Resized:
    """The newest move that removed nodes or restarted all ranks.

    It is passed to the next start.
    """

    move_id: int = 0
    """polluxd's number of it; 0 where there was none."""
    left: tuple[str, ...] = ()
    """Slurm's names of the nodes that the move removed."""

    @property
    def environment(self) -> dict[str, str]:
        if not self.move_id:
            return {}
        return {"POLLUX_RESIZED": str(self.move_id), "POLLUX_LEFT": ",".join(self.left)}

    @classmethod
    def parse(cls, raw: Any) -> Self:
        """From a message. Raises ValueError."""
        match raw:
            case {"move_id": int(move_id), "left": [*left]} if is_count(move_id):
                if all(isinstance(name, str) and len(name) <= LONGEST for name in left):
                    return cls(move_id, tuple(left))
        raise ValueError(f"expected a move and the nodes that left, got {raw!r:.200}")


@dataclass(frozen=True, slots=True)
class Again:
    """The next start of the workers."""

    nodes: tuple[int, ...]
    """Who takes part, in order, by the numbers of the start before."""
    resized: Resized = Resized()
    asked: bool = False
    """A rank asked for it: it does not count as a restart after a failure."""
    port: int = 0
    """Its MASTER_PORT; 0 until node 0 has chosen one."""
    lost: bool = False
    """A node of the allocation takes no part any more: it was lost."""

    @classmethod
    def parse(cls, raw: Any) -> Self | None:
        """From a message. Raises ValueError."""
        match raw:
            case None:
                return None
            case {
                "nodes": [0, *more],
                "resized": resized,
                "asked": bool(asked),
                "port": int(port),
                "lost": bool(lost),
            }:
                nodes = (0, *more)
                whole = all(map(is_count, nodes)) and list(nodes) == sorted(set(nodes))
                if whole and is_count(port) and 0 < port < 65536:
                    return cls(nodes, Resized.parse(resized), asked, port, lost)
        raise ValueError(f"expected the next start, got {raw!r:.200}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a start of the workers ended."""

    failure: Failure | None = None
    ended_by: int | None = None
    """The signal that asked this launcher to end."""
    again: Again | None = None
    """The workers start again."""
    left: bool = False
    """This node has left the job."""

    @property
    def status(self) -> int:
        """Exit status of the launcher."""
        if self.ended_by is not None:
            return 128 + self.ended_by
        return self.failure.status if self.failure is not None else 0


def is_count(value: Any) -> bool:
    """Whether a value of JSON is a whole number from 0 that fits into 63 bits."""
    return type(value) is int and 0 <= value < 1 << 63


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
