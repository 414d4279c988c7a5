"""Rank 0's end of the connection to its launcher, so that nodes leave in order.

Each worker inherits the end. POLLUX_LAUNCHER_FD names it as "DESCRIPTOR:PID". Without an announcement, an exit status
of 76 is an ordinary failure: scripts may use it, too.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Mapping

from pollux.errors import LaunchError
from pollux.launcher.messages import AnnounceMove, AwaitLeavers, Channel, Message, MoveAnswer, NodesLeft
from pollux.ranks.links import Link

VARIABLE = "POLLUX_LAUNCHER_FD"
ANSWER_TIMEOUT_S = 10.0


class LauncherLine:
    """Announces moves, and waits for nodes that leave. One thread at a time may use it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._gone: set[str] = set()
        self._announced = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> LauncherLine | None:
        """The connection of this process. None unless `pollux run` has started it."""
        number, _, pid = environ.get(VARIABLE, "").partition(":")
        # A program that a worker starts inherits the variable, but this descriptor is another file or closed.
        if not number.isdigit() or pid != str(os.getpid()):
            return None
        try:
            return cls(Channel(Link(socket.socket(fileno=os.dup(int(number))))))
        except OSError:  # the script has closed it
            return None

    def announce(self, move: int, leaving: Collection[str], *, lent: int = 0) -> None:
        """Announce that these nodes' ranks are about to end, before any of them does.

        `leaving` are Slurm's names of nodes; companions' are ignored. A growth, which removes none, is announced, too:
        the launcher then forgets earlier failures. After the move, the job has `lent` ranks of companions. When the
        first rank has ended, or after `gone`, the others have a few seconds. Raises LaunchError where it is refused.
        """
        self._channel.send(AnnounceMove(move, tuple(sorted(leaving)), lent))
        answer, deadline = None, time.monotonic() + ANSWER_TIMEOUT_S
        while not (isinstance(answer, MoveAnswer) and answer.move_id == move):
            answer = self._receive(deadline)
            if answer is None:
                raise LaunchError(f"the launcher gave no answer to move {move}")
        if answer.why:
            raise LaunchError(f"the launcher does not take move {move}: {answer.why}")
        self._announced = move

    def gone(self, names: Collection[str], timeout_s: float) -> set[str]:
        """The nodes among `names` whose launchers have ended. Waits for all of them, or `timeout_s`."""
        self._channel.send(AwaitLeavers(self._announced))
        deadline, wanted = time.monotonic() + timeout_s, set(names)
        while not wanted <= self._gone and self._receive(deadline) is not None:
            pass
        return wanted & self._gone

    def _receive(self, deadline: float) -> Message | None:
        """The next message; None where none came in time."""
        message = self._channel.receive(max(deadline - time.monotonic(), 0.0))
        if isinstance(message, NodesLeft):
            self._gone.update(message.names)
        return message
