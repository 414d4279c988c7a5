"""The line between node 0's launcher and rank 0, over which nodes are seen off.

A socket pair, whose one end rank 0 inherits; POLLUX_LAUNCHER_FD names it as "DESCRIPTOR:PID". Lines of JSON:

    rank 0 -> launcher   {"resize": ID, "path": "resize" | "relaunch", "leaving": [names of nodes], "lent": N}
                         {"hurry": ID} when it waits for nodes to leave
    launcher -> rank 0   {"taken": ID} or {"refused": ID, "why": text}; {"left": [names]} as launchers have ended

Without an announcement an exit status of 76 or 77 is a failure like any: scripts have statuses of their own.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from pollux.errors import LaunchError
from pollux.launcher.launcher_channel import Channel, Message

VARIABLE = "POLLUX_LAUNCHER_FD"
ANSWER_TIMEOUT_S = 10.0


class LauncherLine:
    """Rank 0's end. One thread at a time may use it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._gone: set[str] = set()
        self._announced = 0
        self._answers: dict[int, str] = {}
        """What the launcher said to announcements: "" where it took them, else why not."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> LauncherLine | None:
        """The line of this process; None unless it is rank 0 under `pollux run`."""
        number, _, pid = environ.get(VARIABLE, "").partition(":")
        # A program that rank 0 starts inherits the variable, and under that number something else, if anything.
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
        """Say that these nodes' ranks are about to end, or in a relaunch all ranks; before any of them does.

        `leaving` are Slurm's names; those that are not of this step (a companion's) are passed over. A move without
        any, as one that grows, is announced too: the launcher then forgets earlier failures. `lent` ranks of companions
        are part of the job after it. From the first end of a rank on, or from `gone`, the others that are to end have a
        few seconds. Raises LaunchError where the launcher does not take it: the move must not go on.
        """
        message = {"resize": move, "path": path, "leaving": sorted(leaving), "lent": lent}
        self._channel.send(message)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while move not in self._answers:
            if not self._take(deadline):
                raise LaunchError(f"the launcher gave no answer to move {move}")
        why = self._answers.pop(move)
        if why:
            raise LaunchError(f"the launcher does not take move {move}: {why}")
        self._announced = move

    def gone(self, names: Collection[str], timeout_s: float) -> set[str]:
        """Those of the nodes `names` whose launchers have ended; waits for all of them, or `timeout_s`."""
        self._channel.send({"hurry": self._announced})
        deadline, wanted = time.monotonic() + timeout_s, set(names)
        while not wanted <= self._gone and self._take(deadline):
            pass
        return wanted & self._gone

    def close(self) -> None:
        self._channel.close()

    def _take(self, deadline: float) -> bool:
        """Take in one message. False where none came in time."""
        message = self._channel.receive(max(deadline - time.monotonic(), 0.0))
        match message:
            case None:
                return False
            case {"left": [*names]}:
                self._gone |= {str(name) for name in names}
            case {"taken": int(move)}:
                self._answers[move] = ""
            case {"refused": int(move), "why": str(why)}:
                self._answers[move] = why or "no reason given"
        return True


def open_line() -> tuple[Channel, socket.socket]:
    """A new line: (the launcher's end, rank 0's). Neither outlives an exec."""
    ours, theirs = socket.socketpair()
    return Channel(ours, 0), theirs


def left(names: Sequence[str]) -> Message:
    """What the launcher says when nodes have left."""
    return {"left": list(names)}
