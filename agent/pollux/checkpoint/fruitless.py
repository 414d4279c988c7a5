"""Limit automatic restarts in a row that make no checkpoint."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from pollux.checkpoint.folder_lock import FolderLock
from pollux.errors import RestartLoop
from pollux.private_folder import read_private, remove, write_durably
from pollux.ranks.control import ControlExchange

logger = logging.getLogger("pollux")


class FruitlessRestarts:
    """Counts automatic restarts since the newest checkpoint.

    Rank 0 keeps the count in a file beside the checkpoints. Without this limit, Slurm would restart a training that
    dies before its first checkpoint without end. Starts by a person do not count.
    """

    def __init__(self, directory: Path, most: int, environ: Mapping[str, str] = os.environ) -> None:
        self._path = directory / "restarts.json"
        self.holder = FolderLock(directory)
        self._automatic = any(
            environ.get(name, "0") not in ("", "0") for name in ("SLURM_RESTART_COUNT", "POLLUX_RESTARTS")
        )
        self._most = most
        self._counted = False

    def begin(self, exchange: ControlExchange) -> None:
        """Count an attempt that begins, and hold its folder.

        Raises on every rank: RestartLoop if too many attempts before it made no new checkpoint, CheckpointError if
        another training writes to the folder now.
        """
        self.holder.take(exchange)
        why = exchange.gather(self._count() if exchange.rank == 0 else "")[0]
        if why:
            raise RestartLoop(why)

    def _count(self) -> str:
        """Return why this attempt may not begin; empty where it may."""
        count = self._read() + 1 if self._automatic else 0
        if count > self._most:
            return (
                f"{count - 1} restarts in a row ended without a new checkpoint: expected at most {self._most} (since "
                f"{time.ctime(self._path.stat().st_mtime)}). Find out why from the job's output; then remove "
                f"{self._path}, or submit a new job, to train on from the newest checkpoint"
            )
        self._counted = count > 0 or self._path.exists()
        if self._counted:
            try:
                write_durably(self._path, lambda file: file.write(json.dumps({"restarts": count}).encode()))
            except OSError as error:
                logger.warning("restarts cannot be counted: %s", error)
        return ""

    def checkpointed(self) -> None:
        """Reset the count: this attempt has written a checkpoint."""
        if self._counted:
            self._counted = False
            with contextlib.suppress(OSError):
                remove(self._path)

    def _read(self) -> int:
        try:
            return max(int(json.loads(read_private(self._path))["restarts"]), 0)
        except (OSError, ValueError, KeyError, TypeError):
            return 0
