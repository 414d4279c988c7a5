"""Read the file by which a job's rank 0 invites a companion's launchers and ranks.

`pollux run --companion FILE` reads it. A companion is a job that lends its nodes to another job of the same user. It
runs the same script as that job, in the same directory, and ends with that job: each of the companion's launchers holds
a connection to the job's rank 0. The file holds the key of this connection. The key between the companion's launchers
derives from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pollux.errors import LaunchError
from pollux.launcher.messages import Channel
from pollux.private_folder import read_secret
from pollux.ranks.links import RANKS, NoAnswer, reach

CONNECT_TIMEOUT_S = 10.0


class CompanionFileGone(LaunchError):
    """The job that this one is a companion of takes nobody in any more."""


@dataclass(frozen=True, slots=True)
class CompanionFile:
    """What is in the file."""

    path: Path
    address: str
    port: int
    """Where rank 0's store listens."""
    cwd: str
    argv: tuple[str, ...]
    """The arguments of the other job's `pollux run`."""
    secret: str = field(repr=False)
    """The key of rank 0's store."""
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """All of it: ranks read more (`pollux.resize.joining`)."""


def read_companion_file(path: Path) -> CompanionFile:
    """Read FILE.

    Raises CompanionFileGone where it is missing, and LaunchError if it is damaged, or if anybody except this user owns
    it or can read it.
    """
    try:
        document: Any = json.loads(read_secret(path))
        match document:
            case {
                "address": str(address),
                "port": int(port),
                "cwd": str(cwd),
                "argv": [*argv],
                "secret": str(secret),
            }:
                words = all(isinstance(word, str) for word in argv)
                if words and not isinstance(port, bool) and 0 < port < 65536 and secret:
                    return CompanionFile(path, address, port, cwd, tuple(argv), secret, document)
        raise ValueError("expected an object with address, port, cwd, argv and secret")
    except FileNotFoundError:
        raise CompanionFileGone(
            f"{path} is gone: the job that this one is a companion of takes nobody in"
        ) from None
    except (OSError, ValueError) as error:
        raise LaunchError(f"{path} invites nobody: {error}") from None


def reach_parent(file: CompanionFile) -> Channel:
    """Connect to the other job's rank 0. Raises LaunchError where it does not answer.

    No data flow over the connection. Its end shows that the process of rank 0 has ended, or its node.
    """
    try:
        return Channel(reach(file.address, [file.port], file.secret.encode(), RANKS, CONNECT_TIMEOUT_S))
    except NoAnswer as error:
        raise LaunchError(
            f"the job that this one is a companion of does not answer at {file.address}: {error}"
        ) from error
