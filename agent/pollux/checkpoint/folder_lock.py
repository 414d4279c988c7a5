"""A folder of checkpoints is held by one running training.

Two at the same time, as tasks of an array that share one `checkpoint_dir`, would restore each other's checkpoints.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from pollux.errors import CheckpointError
from pollux.private_folder import PrivateFolder
from pollux.ranks.control import ControlExchange

FILE = ".in-use"
_LONGEST = 4096


class FolderLock:
    """Holds a folder for as long as this process lives, or until `release`. fcntl(2): a fork holds nothing."""

    def __init__(self, directory: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._directory = directory
        self._mine = {
            "job": environ.get("SLURM_JOB_ID", ""),
            "attempt": environ.get("SLURM_RESTART_COUNT", "0"),
            "where": f"process {os.getpid()} on {socket.gethostname()}",
        }
        self._descriptor: int | None = None

    def take(self, exchange: ControlExchange) -> None:
        """Rank 0 takes the folder. Raises CheckpointError on every rank if another training has it."""
        if why := exchange.gather(self._taken() if exchange.rank == 0 else "")[0]:
            raise CheckpointError(
                f"another training writes its checkpoints to {self._directory} now, {why}: give each a folder of its "
                "own, as attach(..., checkpoint_dir=...), or a name, as attach(..., name=...)"
            )

    def _taken(self) -> str:
        """Take the folder; return who has it, empty where nobody has."""
        try:
            with PrivateFolder.make(self._directory) as folder, folder.change(FILE) as file:
                descriptor = os.dup(file.fileno())
        except OSError:
            return ""  # the first save names it
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            theirs = _read(descriptor)
            os.close(descriptor)
            # The lock of an attempt whose node was lost stands for a while on some file systems; others know no locks.
            own = theirs.get("job") == self._mine["job"] and theirs.get("attempt") != self._mine["attempt"]
            if own or not isinstance(error, BlockingIOError | PermissionError):
                return ""
            return f"{theirs.get('where')}{' of job ' * bool(theirs.get('job'))}{theirs.get('job', '')}"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(self._mine).encode(), 0)
        self._descriptor = descriptor
        return ""

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _read(descriptor: int) -> dict[str, str]:
    try:
        found = json.loads(os.pread(descriptor, _LONGEST, 0))
    except (OSError, ValueError):
        found = None
    return found if isinstance(found, dict) else {"where": "a process that it does not name"}
