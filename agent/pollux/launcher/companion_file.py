"""What invites a companion's launchers to a job: a file of its rank 0, read by `pollux run --companion FILE`.

A companion is a job of worker nodes alone, that lends them to another job of the same user. It runs what that one runs,
where that one runs it, and ends with it: each of its launchers holds a connection to the other job's rank 0.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.errors import LaunchError
from pollux.launcher.launcher_channel import keep_alive, signal_arrivals
from pollux.slurm_job.ticket import Unusable, read_private

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class CompanionFile:
    """A launcher's part of the file."""

    address: str
    port: int
    """Where rank 0's store listens."""
    cwd: str
    argv: tuple[str, ...]
    """The arguments of the other job's `pollux run`."""


def read_invitation(path: Path) -> CompanionFile:
    """Read FILE. Raises LaunchError where it is gone, garbled, or open to others than its owner, who must be us."""
    try:
        document: Any = json.loads(read_private(path))
        match document:
            case {"address": str(address), "port": int(port), "cwd": str(cwd), "argv": [*argv]}:
                words = all(isinstance(word, str) for word in argv)
                if words and not isinstance(port, bool) and 0 < port < 65536:
                    return CompanionFile(address, port, cwd, tuple(argv))
        raise Unusable("expected an object with address, port, cwd and argv")
    except FileNotFoundError:
        raise LaunchError(
            f"{path} is gone: the job that this one is a companion of takes nobody in"
        ) from None
    except (OSError, ValueError, Unusable) as error:
        raise LaunchError(f"{path} invites nobody: {error}") from None


class Parent:
    """The connection to the other job's rank 0. It carries nothing; its end tells of that process's."""

    def __init__(self, invitation: CompanionFile) -> None:
        """Connect. Raises LaunchError where nobody listens."""
        where = (invitation.address, invitation.port)
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            try:
                self._socket = socket.create_connection(where, timeout=CONNECT_TIMEOUT_S)
                break
            except ConnectionRefusedError as error:
                # Nobody listens there any more.
                raise LaunchError(_nobody(invitation, error)) from error
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise LaunchError(_nobody(invitation, error)) from error
                time.sleep(0.2)
        keep_alive(self._socket)
        self._socket.setblocking(False)

    def signal_end(self) -> None:
        """Have this process sent SIGIO at the end."""
        signal_arrivals(self._socket)

    def gone(self) -> bool:
        """Whether rank 0's process has ended, or its node."""
        try:
            return not self._socket.recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._socket.close()


def _nobody(invitation: CompanionFile, error: OSError) -> str:
    return f"the job that this one is a companion of does not answer at {invitation.address}:{invitation.port}: {error}"
