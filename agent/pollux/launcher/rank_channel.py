"""Connect a launcher and its workers, rank 0 above all.

By this connection nodes leave the job in order.

A socket pair for each worker, whose one end it inherits; POLLUX_LAUNCHER_FD names it as "DESCRIPTOR:PID". Rank 0 sends
Announce and AwaitLeavers, the launcher of node 0 answers Taken or Refused, and NodesLeft as launchers end (see
`messages`). Any other rank may become rank 0 where ranks are lost, also on another node: its launcher passes on what
it says of that.

Without an announcement an exit status of 76 or 77 is a failure like any: scripts have statuses of their own.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Mapping
from typing import Literal

from pollux.errors import LaunchError
from pollux.launcher.channel import Channel
from pollux.launcher.messages import (
    AnnounceMove,
    AwaitLeavers,
    CanMend,
    Mended,
    NodesLeft,
    Refused,
    Taken,
)

VARIABLE = "POLLUX_LAUNCHER_FD"
ANSWER_TIMEOUT_S = 10.0


class LauncherLine:
    """The worker's end; rank 0 uses it. One thread at a time may."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._gone: set[str] = set()
        self._announced = 0
        self._answers: dict[int, str] = {}
        """The launcher's answers to announcements: "" where it took them, else why not."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> LauncherLine | None:
        """The connection of this process.

        None unless `pollux run` has started it.
        """
        number, _, pid = environ.get(VARIABLE, "").partition(":")
        # A program that a worker starts inherits the variable, and under that number something else, if anything.
        if not number.isdigit() or pid != str(os.getpid()):
            return None
        try:
            return cls(Channel(socket.socket(fileno=os.dup(int(number))), 0))
        except OSError:  # the script has closed it
            return None

    def announce(
        self,
        move: int,
        path: Literal["resize", "relaunch"],
        leaving: Collection[str],
        *,
        lent: int = 0,
    ) -> None:
        """Announce that these nodes' ranks, or all ranks, are about to end.

        Call it before any of them does. In a relaunch all ranks end.

        `leaving` are Slurm's names; names that are not of this step (a companion's) are passed over. A move without
        any, as one that grows, is announced too: the launcher then forgets earlier failures. `lent` ranks of companions
        are part of the job after it. From the first end of a rank on, or from `gone`, the others that are to end have a
        few seconds. Raises LaunchError where the launcher does not take it: the move must not go on.
        """
        if path not in ("resize", "relaunch"):
            raise LaunchError(f"expected a move by resize or relaunch, got {path!r}")
        self._channel.send(AnnounceMove(move, path, tuple(sorted(leaving)), lent))
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while move not in self._answers:
            if not self._take(deadline):
                raise LaunchError(f"the launcher gave no answer to move {move}")
        why = self._answers.pop(move)
        if why:
            raise LaunchError(f"the launcher does not take move {move}: {why}")
        self._announced = move

    def can_mend(self, able: bool) -> None:
        """Say whether the ranks go on without one that is killed.

        Where they do, wait until the launcher has read it: a rank may be killed at once.
        """
        self._channel.send(CanMend(able))
        deadline = time.monotonic() + (ANSWER_TIMEOUT_S if able else 0.0)
        while self._channel.unread and time.monotonic() < deadline:
            time.sleep(0.001)

    def mended(self, names: Collection[str], without: Collection[int], *, lent: bool) -> None:
        """Say that the ranks have gone on, on these nodes.

        The launcher ends the ranks of other nodes, and the local ranks `without` on its own. `lent`: ranks of
        companions are among those that have gone on.
        """
        self._channel.send(Mended(tuple(sorted(set(names))), tuple(sorted(without)), lent))

    def gone(self, names: Collection[str], timeout_s: float) -> set[str]:
        """The nodes among `names` whose launchers have ended.

        Waits for all of them, or `timeout_s`.
        """
        self._channel.send(AwaitLeavers(self._announced))
        deadline, wanted = time.monotonic() + timeout_s, set(names)
        while not wanted <= self._gone and self._take(deadline):
            pass
        return wanted & self._gone

    def close(self) -> None:
        self._channel.close()

    def _take(self, deadline: float) -> bool:
        """Take in one message. False where none came in time."""
        match self._channel.receive(max(deadline - time.monotonic(), 0.0)):
            case None:
                return False
            case NodesLeft(names):
                self._gone.update(names)
            case Taken(move):
                self._answers[move] = ""
            case Refused(move, why):
                self._answers[move] = why or "no reason given"
        return True


def open_line() -> tuple[Channel, socket.socket]:
    """A new connection: (the launcher's end, rank 0's).

    Neither outlives an exec.
    """
    ours, theirs = socket.socketpair()
    return Channel(ours, 0), theirs
