"""The last checkpoints of one training: written so that one intact checkpoint stands at every instant.

Rank 0 writes, every rank reads the same file from a shared filesystem. A checkpoint is numbered; the newest that
is whole counts. See checkpoint_file for the form of a file.
"""

from __future__ import annotations

import errno
import logging
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.checkpoint.file import (
    Trailer,
    read_state,
    read_trailer,
    sync_directory,
    verify,
    write_checkpoint,
    write_durably,
)
from pollux.errors import CheckpointError, ForeignCheckpoint

logger = logging.getLogger("pollux")

_NAME = re.compile(r"checkpoint-(\d{8,})\.pt")
_TEMPORARY = ".checkpoint-*.tmp"


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is durable. `seconds` is what the save took, `size` is in bytes."""

    path: Path
    seconds: float
    size: int


class CheckpointStore:
    """The checkpoints in `directory`, of which the newest `keep` stay.

    `fingerprint` names what the checkpoints belong to (job, model). Where both sides have one and they differ, a
    checkpoint is refused with ForeignCheckpoint. One process at a time may save.
    """

    def __init__(self, directory: str | Path, keep: int = 2, *, fingerprint: str = "") -> None:
        if keep < 1:
            raise CheckpointError(f"expected to keep at least 1 checkpoint, got keep={keep}")
        self.directory = Path(directory)
        self.keep = keep
        self.fingerprint = fingerprint
        self._saving = threading.Lock()

    def paths(self) -> list[Path]:
        """All checkpoints, oldest first, intact or not."""
        try:
            found = [
                (int(match[1]), path)
                for path in self.directory.iterdir()
                if (match := _NAME.fullmatch(path.name))
            ]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint directory {self.directory} cannot be read: {error}"
            ) from error
        return [path for _, path in sorted(found)]

    def save(self, state: Mapping[str, Any], *, meta: Mapping[str, Any]) -> SavedCheckpoint:
        """Write a new checkpoint, durable on return, then drop those beyond `keep`.

        Raises CheckpointError (disk full, no right to write, state that cannot be saved); those before it stand.
        """
        begun = time.monotonic()
        with self._saving:
            try:
                self._make_directory()
                self._drop_temporaries()
                before = self.paths()
                number = int(_NAME.fullmatch(before[-1].name)[1]) + 1 if before else 1  # type: ignore[index]
                path = self.directory / f"checkpoint-{number:08d}.pt"
                marked = {**meta, "fingerprint": self.fingerprint}
                size = write_durably(path, lambda file: write_checkpoint(file, state, marked))
            except OSError as error:
                raise CheckpointError(self._explain(error)) from error
            for old in before[: max(len(before) + 1 - self.keep, 0)]:
                self._drop(old)
        return SavedCheckpoint(path, time.monotonic() - begun, size)

    def newest(self) -> tuple[Path, Trailer] | None:
        """The newest intact checkpoint, read whole against its checksum; None where there is none at all.

        Damaged ones are passed over with a warning. Raises ForeignCheckpoint, and CheckpointError where all are
        damaged: starting afresh is for a person to decide.
        """
        damaged: list[str] = []
        paths = self.paths()
        for path in reversed(paths):
            try:
                trailer = read_trailer(path)
                self._refuse_foreign(path, trailer)
                verify(path)
            except ForeignCheckpoint:
                raise
            except CheckpointError as error:
                damaged.append(str(error))
                logger.warning("checkpoint passed over, using the one before it: %s", error)
            else:
                return path, trailer
        if damaged:
            raise CheckpointError(
                f"none of the {len(paths)} checkpoint(s) in {self.directory} is intact; to start the training "
                f"afresh, move them away. {'; '.join(damaged)}"
            )
        return None

    def load(self, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """State and meta of a checkpoint that `newest` has found intact, perhaps on another rank."""
        trailer = read_trailer(path)
        self._refuse_foreign(path, trailer)
        return read_state(path), trailer.meta

    def _refuse_foreign(self, path: Path, trailer: Trailer) -> None:
        theirs = trailer.meta.get("fingerprint", "")
        if self.fingerprint and theirs and theirs != self.fingerprint:
            raise ForeignCheckpoint(
                f"{path} belongs to another training: expected fingerprint {self.fingerprint!r}, found {theirs!r}; "
                "use another checkpoint directory, or move it away"
            )

    def _make_directory(self) -> None:
        if not self.directory.is_dir():
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_directory(self.directory.parent)

    def _drop_temporaries(self) -> None:
        """What a killed save left; this process holds the lock, so no save of its own is among them."""
        for path in self.directory.glob(_TEMPORARY):
            self._drop(path)

    def _drop(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            # An extra old checkpoint does no harm; the save itself stands.
            logger.warning("old checkpoint not removed: %s", error)

    def _explain(self, error: OSError) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"no space left for a checkpoint in {self.directory}; earlier checkpoints stand. Free space, or set "
                f"POLLUX_CHECKPOINT_DIR to a larger filesystem ({error})"
            )
        return f"no checkpoint could be written to {self.directory}; earlier ones stand ({error})"
