"""The file of a search: Optuna's journal, made safe against writers that are killed.

A file on the file system that checkpoints need anyway: a search needs no service, its user's file permissions protect
it, and it survives whatever ends a job.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from pollux.errors import SearchError
from pollux.search.tasks import FOLDER

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Of a search; the submission hook has it, too."""
_TAIL = 1 << 16
"""Bytes of the longest line, and more."""


def journal_path(name: str, folder: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a search's file. Raises SearchError for a name that is none."""
    if not NAME.fullmatch(name):
        raise SearchError(
            "expected the name of a search to be at most 64 letters, digits, dots, dashes and underscores, "
            f"beginning with a letter or a digit; got {name!r}"
        )
    return Path(folder).absolute() / FOLDER / f"{name}.journal"


class LineLock(JournalFileOpenLock):  # type: ignore[misc]
    """Optuna's lock by an exclusively created file, whose holder finds whole lines only.

    SIGKILL may end a writer between two pages of one line. Optuna would append the next line to this half, and nobody
    could read the journal any more. A writer that died keeps the lock; Optuna takes it away after 30 s.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def acquire(self) -> bool:
        super().acquire()
        cut_half_line(self._path)
        return True


def cut_half_line(path: Path) -> None:
    """Remove what follows the last line's end."""
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        start = file.seek(max(end - _TAIL, 0))
        tail = file.read()
        kept = tail.rfind(b"\n") + 1
        if kept < len(tail):
            file.truncate(start + kept)


def open_journal(path: Path) -> JournalStorage:
    """Open the file of a search, and create it where there is none. Raises SearchError."""
    try:
        # Only the user may read what the user's trainings found.
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        return JournalStorage(JournalFileBackend(str(path), lock_obj=LineLock(path)))
    except (OSError, ValueError) as error:
        raise SearchError(f"the journal {path} of the search cannot be used: {error}") from error
