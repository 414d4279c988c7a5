"""The file of a search: Optuna's journal, made safe against writers that are killed.

A file on the file system that checkpoints need anyway: a search needs no service, its user's file permissions protect
it, and it survives whatever ends a job.
"""

from __future__ import annotations

import os
import re
import weakref
from pathlib import Path
from typing import IO

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from pollux.errors import SearchError
from pollux.private_folder import PrivateFolder, folder_of_this_user
from pollux.search.tasks import FOLDER

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Of a search; the submission hook has it, too."""
_RECORD = b'{"op_code":'
"""How each line begins. A file that begins otherwise is none of a search's, and is never cut."""
_TAIL = 1 << 16
"""Bytes of the longest line, and more."""


def journal_path(name: str, folder: str | os.PathLike[str], *, make: bool = False) -> Path:
    """Return the absolute path of a search's file. Raises SearchError for a name that is none.

    See `folder_of_this_user`: where the folder's name is another user's, the path is elsewhere. `make`: the folder.
    """
    if not NAME.fullmatch(name):
        raise SearchError(
            "expected the name of a search to be at most 64 letters, digits, dots, dashes and underscores, "
            f"beginning with a letter or a digit; got {name!r}"
        )
    file = f"{name}.journal"
    return folder_of_this_user(Path(folder).absolute() / FOLDER, file, make=make) / file


class LineLock(JournalFileOpenLock):  # type: ignore[misc]
    """Optuna's lock by an exclusively created file, whose holder finds whole lines only.

    SIGKILL may end a writer between two pages of one line. Optuna would append the next line to this half, and nobody
    could read the journal any more. A writer that died keeps the lock; Optuna takes it away after 30 s.
    """

    def __init__(self, folder: PrivateFolder, name: str) -> None:
        super().__init__(str(folder.reached / name))
        self._folder, self._name = folder, name
        # Optuna's paths lead through the descriptor, whatever takes the folder's name in the meantime.
        weakref.finalize(
            self, os.close, folder.descriptor
        ).atexit = False  # a trial may end in an atexit function

    def acquire(self) -> bool:
        super().acquire()
        with self._folder.change(self._name) as file:
            cut_half_line(file)
        return True


def cut_half_line(file: IO[bytes]) -> None:
    """Remove what follows the last line's end."""
    end = file.seek(0, os.SEEK_END)
    start = file.seek(max(end - _TAIL, 0))
    tail = file.read()
    kept = tail.rfind(b"\n") + 1
    if kept < len(tail):
        file.truncate(start + kept)


def open_journal(path: Path) -> JournalStorage:
    """Open the file of a search, and create it where there is none. Raises SearchError."""
    try:
        folder = PrivateFolder.make(path.parent)
        lock = LineLock(folder, path.name)
        with folder.change(path.name) as file:
            begins = file.read(len(_RECORD))
        if not _RECORD.startswith(begins):
            raise ValueError("it does not begin with a record of Optuna's")
        return JournalStorage(JournalFileBackend(str(folder.reached / path.name), lock_obj=lock))
    except (OSError, ValueError) as error:
        raise SearchError(f"the journal {path} of the search cannot be used: {error}") from error
