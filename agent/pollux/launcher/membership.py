"""Which nodes a move takes from the job, as the launchers know it: rank 0 announces it to node 0's, that to all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from pollux.launcher.launcher_channel import Channel, Link, Message
from pollux.launcher.outcome import Resized
from pollux.launcher.rank_channel import left


@dataclass(frozen=True, slots=True)
class Departure:
    """A move that rank 0 has announced."""

    move_id: int
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
            "id": self.move_id,
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

    def announced(self) -> Iterator[Departure | int]:
        """What rank 0 has announced since, if it makes sense, and it is told so, or why not.

        A number: it waits now for those who leave in the move of that number.
        """
        if self._line is None:
            return
        for message in self._line.pending():
            if isinstance(message.get("hurry"), int):
                yield message["hurry"]
            move_id = message.get("resize")
            if not isinstance(move_id, int):
                continue
            move = self._understood(move_id, message)
            if isinstance(move, Departure):
                self._take(move)
                yield move
                # Last: by now the other launchers have been told, whatever rank 0 does to this one.
                self._line.send({"taken": move_id})
            else:
                self._line.send({"refused": move_id, "why": move})

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

    def _understood(self, move_id: int, message: Message) -> Departure | str:
        """The move, or what is wrong with it."""
        path, names = message.get("path"), message.get("leaving")
        if move_id <= 0 or path not in ("resize", "relaunch") or not isinstance(names, list):
            return f"expected a number, resize or relaunch, and names of nodes, got {message!r:.200}"
        if move_id == self.resized.move_id:
            return "it is over already"
        leaving = frozenset(node for node in self.staying if self._link.names[node] in names)
        if 0 in leaving:
            return f"expected {self._link.names[0]}, where rank 0 is, to stay"
        return Departure(move_id, path == "relaunch", leaving, bool(message.get("lent")))

    def _take(self, move: Departure) -> None:
        self.staying -= move.leaving
        self.leaving |= move.leaving
        if move.leaving or move.relaunch:
            names = tuple(self._link.names[node] for node in sorted(move.leaving))
            self.resized = Resized(move.move_id, names)
