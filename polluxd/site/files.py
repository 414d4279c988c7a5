"""Files as they should be, compared with files as they are.

`differences` looks, `apply` changes. Every file that is changed or removed is copied first.
"""

from __future__ import annotations

import difflib
import os
import shutil
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polluxd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FileState:
    """How a file should be."""

    path: Path
    content: str
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    kept: bool = True
    """Whether a copy of the old file is kept. Pollux' own scripts need none."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A file that is not as it should be."""

    wanted: FileState
    faults: str
    """What differs, for people."""
    diff: str = ""
    """The change of the content, as a unified diff."""


def read_text(path: Path) -> str | None:
    """Return a file's text; None where there is none. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): run the command as root") from None


def differences(states: Sequence[FileState]) -> list[Difference]:
    """Return the files that are not as they should be, in order."""
    return [found for found in map(_difference, states) if found is not None]


def _difference(wanted: FileState) -> Difference | None:
    present = read_text(wanted.path)
    if present == wanted.content:
        found = wanted.path.stat()
        faults = []
        if stat.S_IMODE(found.st_mode) != wanted.mode:
            faults.append(f"mode {stat.S_IMODE(found.st_mode):04o}, should be {wanted.mode:04o}")
        if (found.st_uid, found.st_gid) != (wanted.uid, wanted.gid):
            faults.append(f"owner {found.st_uid}:{found.st_gid}, should be {wanted.uid}:{wanted.gid}")
        return Difference(wanted, "; ".join(faults)) if faults else None
    verb = "missing" if present is None else "differs"
    diff = difflib.unified_diff(
        (present or "").splitlines(keepends=True),
        wanted.content.splitlines(keepends=True),
        f"{wanted.path} (now)",
        f"{wanted.path} (wanted)",
    )
    return Difference(wanted, verb, "".join(diff))


def apply(found: Sequence[Difference]) -> list[Path]:
    """Bring the files into their state; return the copies of the old ones.

    A file is replaced at once, by a rename: a reader sees the old one or the new one. Raises ConfigError.
    """
    copies = []
    for difference in found:
        wanted = difference.wanted
        try:
            if wanted.kept and wanted.path.exists():
                copies.append(_copied(wanted.path))
            _write(wanted)
        except OSError as error:
            raise ConfigError(f"{wanted.path}: {error.strerror}: run the command as root") from None
    return copies


def _copied(path: Path) -> Path:
    copy = path.with_name(f"{path.name}.{time.strftime('%Y%m%dT%H%M%S')}.pollux-old")
    copy.touch(mode=0o600)  # never readable for more users than the file itself
    shutil.copy2(path, copy)
    old = path.stat()
    os.chown(copy, old.st_uid, old.st_gid)
    return copy


def _write(wanted: FileState) -> None:
    path = wanted.path.resolve()  # slurm.conf may be a link; the link stays
    for folder in reversed(path.parents):
        if not folder.exists():
            folder.mkdir(mode=0o755)
            folder.chmod(0o755)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(wanted.content)
            os.fchown(file.fileno(), wanted.uid, wanted.gid)
            os.fchmod(file.fileno(), wanted.mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
