"""The names of numbered checkpoints in a directory."""

from __future__ import annotations

import re
from pathlib import Path

from pollux.errors import CheckpointError
from pollux.private_folder import PrivateFolder


class CheckpointNames:
    """Names such as `checkpoint-00000012.pt`, for one `ending`.

    A checkpoint that is being written has the name `.NAME.tmp`.
    """

    def __init__(self, ending: str) -> None:
        self._ending = ending
        self._complete = re.compile(rf"checkpoint-(\d{{8,}})\.{ending}")
        self._temporary = re.compile(rf"\.checkpoint-\d+\.{ending}\.tmp")

    def complete(self, folder: PrivateFolder) -> list[str]:
        """Return the names of the checkpoints in a folder, oldest first."""
        return sorted(filter(self._complete.fullmatch, folder.names()), key=self._number)

    def temporary(self, folder: PrivateFolder) -> list[str]:
        """Return the names of checkpoints whose writing did not end."""
        return [name for name in folder.names() if self._temporary.fullmatch(name)]

    def next(self, folder: PrivateFolder) -> str:
        """Return the name of a checkpoint newer than those in the folder."""
        before = self.complete(folder)
        return f"checkpoint-{self._number(before[-1]) + 1 if before else 1:08d}.{self._ending}"

    def paths(self, directory: Path) -> list[Path]:
        """Return all checkpoints, oldest first, intact or not.

        Raises CheckpointError for a directory that cannot be read.
        """
        try:
            with PrivateFolder(directory) as folder:
                return [directory / name for name in self.complete(folder)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"the checkpoint directory {directory} cannot be read: {error}") from error

    def _number(self, name: str) -> int:
        match = self._complete.fullmatch(name)
        assert match is not None
        return int(match[1])
