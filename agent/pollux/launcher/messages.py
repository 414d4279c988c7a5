"""Define the messages between launchers, and between rank 0 and its launcher, and carry them.

Node 0's launcher decides, and orders. The others report what happens on their nodes, and obey.

Each message is a frozen dataclass of plain values. `pack` turns it into JSON. `parse` checks JSON and returns the
message, or raises ValueError: such a text comes from another version of this program, or not from this job.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from pollux.ranks.links import Link

LONGEST = 4096  # characters of a text in a message


# -- node 0's orders ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start the workers."""

    node: int
    """The receiver's number in this start."""
    first_rank: int
    """The rank of the receiver's first worker."""
    env: dict[str, str]
    """Variables that are the same for all workers."""


@dataclass(frozen=True, slots=True)
class EndWorkers:
    """End the workers: SIGTERM and SIGKILL after so many seconds."""

    term_after: float
    kill_after: float


@dataclass(frozen=True, slots=True)
class Stop:
    """A signal asks the job to end: all workers are to save and end."""


@dataclass(frozen=True, slots=True)
class Leave:
    """A move removes this node: end when the workers have ended, however they end."""


@dataclass(frozen=True, slots=True)
class Over:
    """The last start is over; the launcher's exit status."""

    status: int


# -- the other nodes' reports ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """A launcher comes to node 0's."""

    node: int
    workers: int
    name: str
    """What Slurm calls the node."""


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker has ended."""

    local_rank: int
    status: int
    """As a shell gives it: 128 + n after signal n."""
    at: float
    """POSIX time of its end, or of its failure where it has noted that."""
    where: str = ""
    why: str = ""
    """What the worker noted of its failure; empty where it noted nothing."""
    lost: bool = False
    """Somebody else has ended it, by a signal that is no reaction to another rank's failure."""
    asked: bool = False
    """Its launcher had begun to end the workers."""


@dataclass(frozen=True, slots=True)
class Signalled:
    """A signal asked this launcher to end."""

    number: int


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
class MoveAnswer:
    """The launcher: it knows of the move, or, with a reason, the move must not go on."""

    move_id: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class NodesLeft:
    """The launcher: the launchers of these nodes have ended."""

    names: tuple[str, ...]


Order = Start | EndWorkers | Stop | Leave | Over
Message = Order | Hello | WorkerEnded | Signalled | AnnounceMove | AwaitLeavers | MoveAnswer | NodesLeft


# -- as text --------------------------------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    """Whether a value of JSON is a whole number from 0 that fits into 63 bits."""
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST


_VALID: dict[Any, Callable[[Any], bool]] = {
    "int": _is_count,
    "float": lambda value: type(value) in (int, float) and 0 <= value < math.inf,
    "bool": lambda value: isinstance(value, bool),
    "str": _is_text,
    "tuple[str, ...]": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "dict[str, str]": lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
}
"""Whether a value of JSON is one of a field, by the field's annotation."""
_KINDS: dict[str, Callable[..., Message]] = {kind.__name__: kind for kind in get_args(Message)}


def pack(message: Message) -> bytes:
    """The message as JSON."""
    return json.dumps({"type": type(message).__name__} | asdict(message)).encode()


def parse(text: bytes) -> Message:
    """Return the message of a text that `pack` made. Raises ValueError."""
    try:
        raw = json.loads(text)
        kind = _KINDS[raw.pop("type")]
        types = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
        if raw.keys() == types.keys() and all(_VALID[types[name]](value) for name, value in raw.items()):
            return kind(**{n: tuple(value) if isinstance(value, list) else value for n, value in raw.items()})
    except (RecursionError, KeyError, TypeError, AttributeError, OverflowError):
        pass
    raise ValueError(f"not a message of this program: {text!r:.200}")


class Channel:
    """A connection over which whole messages come: to another launcher, or between rank 0 and its launcher."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.open = True

    def send(self, message: Message) -> None:
        """Send a message.

        If the other side is gone, this raises nothing: `receive` reports the end of the connection.
        """
        try:
            self.link.send(pack(message))
        except OSError:
            self.open = False

    def receive(self, timeout: float) -> Message | None:
        """Wait for the next message. None where the connection has ended or nothing came."""
        deadline = time.monotonic() + timeout
        while self.open:
            try:
                return parse(self.link.receive(max(deadline - time.monotonic(), 0.0)))
            except TimeoutError:
                return None
            except OSError:
                self.open = False
            except ValueError:
                # The connection is authenticated, so this is another version of this program: exit statuses suffice.
                continue
        return None

    def pending(self) -> Iterator[Message]:
        """Messages that are here already."""
        while (message := self.receive(0.0)) is not None:
            yield message

    def close(self) -> None:
        self.open = False
        self.link.close()
