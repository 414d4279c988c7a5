"""Keep the last checkpoints of one training.

After the first save, at least one intact checkpoint exists at any time. Rank 0 writes, and every rank reads the same
file from a shared file system. Checkpoints are numbered, and a restart takes the newest intact one.
`pollux.checkpoint.file` describes the format of a file. `private_folder` describes which folders are accepted.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.checkpoint.file import CheckpointFile, Trailer, write_checkpoint
from pollux.checkpoint.names import CheckpointNames
from pollux.errors import CheckpointError, ForeignCheckpoint
from pollux.private_folder import PrivateFolder

logger = logging.getLogger("pollux")

_NAMES = CheckpointNames("pt")


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is durable.

    `seconds` is what the save took, `size` is in bytes.
    """

    path: Path
    seconds: float
    size: int


class CheckpointStore:
    """The checkpoints in `directory`, the newest `keep` of them.

    `fingerprint` names what the checkpoints belong to (job, model). Where both sides have one and they differ, a
    checkpoint is refused with ForeignCheckpoint. One process at a time may save.
    """

    def __init__(self, directory: str | Path, keep: int = 2, *, fingerprint: str = "") -> None:
        if keep < 1:
            raise CheckpointError(f"expected to keep at least 1 checkpoint, got keep={keep}")
        self.directory = Path(directory)
        self.keep = keep
        self.fingerprint = fingerprint
        self.difference: Callable[[Mapping[str, Any]], str] = lambda state: ""
        """Says what a foreign state has otherwise, as a sentence."""
        self._saving = threading.Lock()

    def paths(self) -> list[Path]:
        """All checkpoints, oldest first, intact or not."""
        return _NAMES.paths(self.directory)

    def save(self, state: Mapping[str, Any], *, meta: Mapping[str, Any]) -> SavedCheckpoint:
        """Write a new checkpoint, durable on return; drop those beyond `keep`.

        Raises CheckpointError (disk full, no right to write, state that cannot be saved). Earlier checkpoints then
        stay.
        """
        begun = time.monotonic()
        with self._saving:
            try:
                with PrivateFolder.make(self.directory) as folder:
                    for left in _NAMES.temporary(folder):
                        # A save that was killed left it: no other save is under way.
                        self._drop(folder, left)
                    before, name = _NAMES.complete(folder), _NAMES.next(folder)
                    marked = {**meta, "fingerprint": self.fingerprint}
                    size = folder.write(name, lambda file: write_checkpoint(file, state, marked))
                    for old in before[: max(len(before) + 1 - self.keep, 0)]:
                        self._drop(folder, old)
            except OSError as error:
                raise CheckpointError(self._explain(error)) from error
        path = self.directory / name
        return SavedCheckpoint(path, time.monotonic() - begun, size)

    def newest(self) -> tuple[Path, Trailer] | None:
        """The newest intact checkpoint, read whole against its checksum.

        None where there is none at all.

        Damaged checkpoints are skipped with a warning. Raises ForeignCheckpoint. Raises CheckpointError if all are
        damaged: a person has to decide whether to start again from the beginning.
        """
        damaged: list[str] = []
        paths = self.paths()
        for path in reversed(paths):
            try:
                with self._opened(path) as file:
                    file.verify()
                    return path, file.trailer
            except ForeignCheckpoint:
                raise
            except CheckpointError as error:
                damaged.append(str(error))
                logger.warning("checkpoint passed over, using the one before it: %s", error)
        if damaged:
            raise CheckpointError(
                f"none of the {len(paths)} checkpoint(s) in {self.directory} is intact; to start the training "
                f"afresh, move them away. {'; '.join(damaged)}"
            )
        return None

    def load(self, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Load state and meta of a checkpoint that `newest` has found intact.

        Another rank may have found it.
        """
        with self._opened(path) as file:
            return file.state(), file.trailer.meta

    @contextmanager
    def _opened(self, path: Path) -> Iterator[CheckpointFile]:
        """A checkpoint of this training, opened once for all that is read.

        Raises CheckpointError.
        """
        try:
            with PrivateFolder(self.directory) as folder, CheckpointFile(folder, path.name) as file:
                theirs = file.trailer.meta.get("fingerprint", "")
                if self.fingerprint and theirs and theirs != self.fingerprint:
                    raise ForeignCheckpoint(
                        f"{path} belongs to another training: expected fingerprint {self.fingerprint!r}, found "
                        f"{theirs!r}. {self.difference(file.state())}Use another checkpoint directory, or move it away"
                    )
                yield file
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def _drop(self, folder: PrivateFolder, name: str) -> None:
        try:
            folder.remove(name)
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
