"""Which nodes a move takes from the job, as the launchers know it: rank 0 announces it to node 0's, that to all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from pollux.launcher_line import left
from pollux.link import Channel, Link, Message
from pollux.verdict import Resized


@dataclass(frozen=True, slots=True)
class Move:
    """A move that rank 0 has announced."""

    reallocation: int
    relaunch: bool
    """All ranks end, and those of the remaining nodes are started again."""
    leaving: frozenset[int]
    """Nodes, by number, whose ranks end for good."""
    lent: bool = False
    """Companions' ranks are part of the job now."""

    def ends(self, node: int) -> bool:
        """Whether the ranks of a node are to end now: however they do, it is no failure."""
        return self.relaunch or node in self.leaving

    def message(self) -> Message:
        return {
            "type": "move",
            "id": self.reallocation,
            "relaunch": self.relaunch,
            "leaving": sorted(self.leaving),
            "lent": self.lent,
        }

    @classmethod
    def from_message(cls, raw: Message) -> Self:
        """Of node 0. Raises KeyError, TypeError and ValueError."""
        leaving = frozenset(int(node) for node in raw["leaving"])
        return cls(int(raw["id"]), bool(raw["relaunch"]), leaving, bool(raw["lent"]))


class Roll:
    """Node 0's: who is still in. Nodes keep their numbers until the next start of all workers."""

    def __init__(self, link: Link, line: Channel | None, resized: Resized) -> None:
        self.resized = resized
        self.staying = set(range(len(link.workers)))
        self.leaving: set[int] = set()
        """Nodes that leave and whose launchers have not ended yet."""
        self._link = link
        self._line = line

    def announced(self) -> Iterator[Move | int]:
        """What rank 0 has announced since, if it makes sense, and it is told so, or why not.

        A number: it waits now for those who leave in the move of that number.
        """
        if self._line is None:
            return
        for message in self._line.pending():
            if isinstance(message.get("hurry"), int):
                yield message["hurry"]
            reallocation = message.get("resize")
            if not isinstance(reallocation, int):
                continue
            move = self._understood(reallocation, message)
            if isinstance(move, Move):
                self._take(move)
                yield move
                # Last: by now the other launchers have been told, whatever rank 0 does to this one.
                self._line.send({"taken": reallocation})
            else:
                self._line.send({"refused": reallocation, "why": move})

    def refuse(self, why: str) -> None:
        """Take no announcement any more."""
        if self._line is None:
            return
        for message in self._line.pending():
            if isinstance(message.get("resize"), int):
                self._line.send({"refused": message["resize"], "why": why})

    def gone(self, node: int) -> None:
        """The launcher of a node that leaves has ended."""
        self.leaving.discard(node)
        if self._line is not None:
            self._line.send(left([self._link.names[node]]))

    def _understood(self, reallocation: int, message: Message) -> Move | str:
        """The move, or what is wrong with it."""
        path, names = message.get("path"), message.get("leaving")
        if reallocation <= 0 or path not in ("resize", "relaunch") or not isinstance(names, list):
            return f"expected a number, resize or relaunch, and names of nodes, got {message!r:.200}"
        if reallocation == self.resized.reallocation:
            return "it is over already"
        leaving = frozenset(node for node in self.staying if self._link.names[node] in names)
        if 0 in leaving:
            return f"expected {self._link.names[0]}, where rank 0 is, to stay"
        return Move(reallocation, path == "relaunch", leaving, bool(message.get("lent")))

    def _take(self, move: Move) -> None:
        self.staying -= move.leaving
        self.leaving |= move.leaving
        if move.leaving or move.relaunch:
            names = tuple(self._link.names[node] for node in sorted(move.leaving))
            self.resized = Resized(move.reallocation, names)
