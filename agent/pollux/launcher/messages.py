"""Define the messages of launchers and of rank 0.

Launchers exchange messages with each other; rank 0 does with the launcher of its node.

Each message is a frozen dataclass. `pack` turns it into JSON. `parse` checks JSON and returns the message, or raises
ValueError: such a text comes from another version of this program, or not from this job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pollux.launcher.outcome import LONGEST, Again, Failure, is_count

MAX_NODES = 1 << 16


# -- between launchers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Node 0: all launchers have met; the workers start."""

    workers: tuple[int, ...]
    """Workers of each node."""
    names: tuple[str, ...]
    """What Slurm calls each node."""
    port: int
    """MASTER_PORT."""


@dataclass(frozen=True, slots=True)
class MoveNotice:
    """Node 0: rank 0 has announced a move."""

    move_id: int
    leaving: frozenset[int]
    """Nodes, by number, whose ranks end for good."""
    lent: bool = False
    """Companions' ranks are part of the job now."""

    def ends(self, node: int) -> bool:
        """Whether the ranks of a node must end now.

        No end of these ranks counts as a failure.
        """
        return node in self.leaving


@dataclass(frozen=True, slots=True)
class StartGrace:
    """The grace period of the workers that this move removes begins."""

    move_id: int


@dataclass(frozen=True, slots=True)
class AskForMove:
    """A worker ended as in a move, but this node knows of no move."""


@dataclass(frozen=True, slots=True)
class Alert:
    """A rank has failed: the others cannot go on."""

    lost: bool = False
    """To node 0: the rank was killed. From node 0: its place is taken at once, so all other ranks are killed."""


@dataclass(frozen=True, slots=True)
class Stop:
    """This launcher was asked to end: all workers are to save and end."""


@dataclass(frozen=True, slots=True)
class Done:
    """This node's workers have ended; `failure` is the first among them."""

    failure: Failure | None


@dataclass(frozen=True, slots=True)
class Left:
    """This node's workers have ended for a move, and its launcher ends, too."""


@dataclass(frozen=True, slots=True)
class StartDecided:
    """Node 0: how the start ended, and whether another follows."""

    failure: Failure | None
    again: Again | None


LauncherMessage = Start | MoveNotice | StartGrace | AskForMove | Alert | Stop | Done | Left | StartDecided


# -- between rank 0 and its launcher --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnnounceMove:
    """Rank 0: these nodes' ranks are about to end."""

    move_id: int
    leaving: tuple[str, ...]
    """Slurm's names of nodes."""
    lent: int
    """Ranks of companions in the job after the move."""


@dataclass(frozen=True, slots=True)
class AwaitLeavers:
    """Rank 0 waits for the nodes that the move removes."""

    move_id: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The launcher: every launcher knows of the move."""

    move_id: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The launcher: the move must not go on."""

    move_id: int
    why: str


@dataclass(frozen=True, slots=True)
class NodesLeft:
    """The launcher: the launchers of these nodes have ended."""

    names: tuple[str, ...]


RankMessage = AnnounceMove | AwaitLeavers | Taken | Refused | NodesLeft
Message = LauncherMessage | RankMessage


# -- as text --------------------------------------------------------------------------------------------------


def pack(message: Message) -> bytes:
    """The message as one line of JSON."""
    raw = asdict(message)
    if isinstance(message, MoveNotice):
        raw["leaving"] = sorted(message.leaving)
    return json.dumps({"type": type(message).__name__} | raw).encode()


def parse(text: bytes) -> Message:
    """Return the message of a text that `pack` made. Raises ValueError."""
    try:
        raw = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if isinstance(raw, dict) and isinstance(raw.get("type"), str):
        read = _READERS.get(raw["type"])
        found = None if read is None else read(raw)
        if found is not None:
            return found
    raise ValueError(f"not a message of this program: {text!r:.200}")


def _start(raw: Mapping[str, Any]) -> Start | None:
    match raw:
        case {"workers": [*workers], "names": [*names], "port": int(port)}:
            counts = all(is_count(count) and 0 < count < MAX_NODES for count in workers)
            if counts and len(workers) == len(names) <= MAX_NODES and _names(names):
                return Start(tuple(workers), tuple(names), port) if _port(port) else None
    return None


def _move(raw: Mapping[str, Any]) -> MoveNotice | None:
    match raw:
        case {
            "move_id": int(move_id),
            "leaving": [*leaving],
            "lent": bool(lent),
        }:
            nodes = all(is_count(node) and 0 < node < MAX_NODES for node in leaving)
            if is_count(move_id) and move_id and nodes and len(leaving) <= MAX_NODES:
                return MoveNotice(move_id, frozenset(leaving), lent)
    return None


def _announce(raw: Mapping[str, Any]) -> AnnounceMove | None:
    match raw:
        case {
            "move_id": int(move_id),
            "leaving": [*leaving],
            "lent": int(lent),
        } if _names(leaving) and is_count(move_id) and is_count(lent):
            return AnnounceMove(move_id, tuple(leaving), lent)
    return None


def _refused(raw: Mapping[str, Any]) -> Refused | None:
    match raw:
        case {"move_id": int(move_id), "why": str(why)} if is_count(move_id) and len(why) <= LONGEST:
            return Refused(move_id, why)
    return None


def _of_move(kind: Callable[[int], Message]) -> Callable[[Mapping[str, Any]], Message | None]:
    return lambda raw: kind(raw["move_id"]) if is_count(raw.get("move_id")) else None


def _names(names: list[Any]) -> bool:
    return all(isinstance(name, str) and len(name) <= LONGEST for name in names)


def _port(port: int) -> bool:
    return is_count(port) and 0 < port < 65536


_READERS: dict[str, Callable[[Mapping[str, Any]], Message | None]] = {
    "Start": _start,
    "MoveNotice": _move,
    "StartGrace": _of_move(StartGrace),
    "AskForMove": lambda _: AskForMove(),
    "Alert": lambda raw: Alert(raw["lost"]) if isinstance(raw.get("lost"), bool) else None,
    "Stop": lambda _: Stop(),
    "Done": lambda raw: Done(Failure.parse(raw.get("failure"))),
    "Left": lambda _: Left(),
    "StartDecided": lambda raw: StartDecided(
        Failure.parse(raw.get("failure")), Again.parse(raw.get("again"))
    ),
    "AnnounceMove": _announce,
    "AwaitLeavers": _of_move(AwaitLeavers),
    "Taken": _of_move(Taken),
    "Refused": _refused,
    "NodesLeft": lambda raw: (
        NodesLeft(tuple(names)) if isinstance(names := raw.get("names"), list) and _names(names) else None
    ),
}
