"""Read and write files in a folder that other users cannot change.

A path can change between a check and its use. `PrivateFolder` therefore checks the folder by its descriptor, and
reaches every file in the folder through it. A checked file is read through the descriptor that was checked. openat(2).

What is refused:
- a folder or a file that belongs to another user than this one or root, or that its group or everybody may write to.
  The group named as the user is the user's own, as many Linux distributions set it up;
- a file that is no regular file, or a link in place of a file.

The directories above may belong to another user or be writable for a group, as project directories often are. A user
who may write there can remove the folder, but cannot change its content. Linux itself follows no link of another user
in a directory like /tmp (fs.protected_symlinks, proc_sys_fs(5)).
"""

from __future__ import annotations

import contextlib
import errno
import grp
import logging
import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

logger = logging.getLogger("pollux")


class UnsafePath(PermissionError):
    """Other users may change a file or a folder."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EPERM, why)
        self.why = why

    def __str__(self) -> str:
        return self.why


class PrivateFolder:
    """An open folder that only this user, or root, may write to. A context manager: leaving it closes the folder."""

    def __init__(self, path: Path) -> None:
        """Open the folder. Raises UnsafePath and other OSErrors."""
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check_own(path, os.fstat(self.descriptor))
        except BaseException:
            os.close(self.descriptor)
            raise

    @classmethod
    def make(cls, path: Path) -> Self:
        """Open the folder. Create it first, for this user alone, where it is missing."""
        if not path.is_dir():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_directory(path.parent)
        return cls(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.descriptor)

    @property
    def reached(self) -> Path:
        """Return a path to this very folder, for libraries that take paths.

        It is valid while the folder is open. proc(5).
        """
        return Path(f"/proc/self/fd/{self.descriptor}")

    def names(self) -> list[str]:
        return os.listdir(self.descriptor)

    def read(self, name: str) -> IO[bytes]:
        """Open a file of the folder for reading. Raises UnsafePath and other OSErrors."""
        # No call blocks, not even on a FIFO under this name.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self.descriptor)
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise UnsafePath(f"{self.path / name} is not a regular file")
            _check_own(self.path / name, facts)
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise

    def write(self, name: str, fill: Callable[[IO[bytes]], object], *, mark: str = "") -> None:
        """Write a file that appears under `name` whole or not at all.

        `fill` writes its content. Raises OSError.

        Temporary file, fsync, rename, fsync of the folder: after a crash at any point the old file, or none, or the
        whole new one is there. Writers that may come at the same time give their temporary files a `mark` each.
        """
        temporary = f".{name}{mark}.tmp"
        # A crash left this file, or a user put a link there. Do not write to it.
        self.remove(temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600, dir_fd=self.descriptor)
        try:
            with os.fdopen(descriptor, "wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            self.rename(temporary, name)
        except BaseException:
            self.remove(temporary)
            raise
        self.sync()

    def rename(self, name: str, new: str) -> None:
        os.rename(name, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def make_folder(self, name: str) -> None:
        os.mkdir(name, 0o700, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Make the names in the folder durable (fsync).

        File systems without fsync of a directory ensure the order themselves.
        """
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            logger.debug("%s: fsync of the directory: %s", self.path, error)


def write_durably(path: Path, fill: Callable[[IO[bytes]], object], *, mark: str = "") -> None:
    """Write one file as `PrivateFolder.write` does. Raises OSError."""
    with PrivateFolder(path.parent) as folder:
        folder.write(path.name, fill, mark=mark)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable, with any owner."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        logger.debug("%s: fsync of the directory: %s", directory, error)
    finally:
        os.close(descriptor)


def _check_own(path: Path, facts: os.stat_result) -> None:
    if facts.st_uid not in (os.geteuid(), 0):
        raise UnsafePath(f"{path} belongs to uid {facts.st_uid}, expected {os.geteuid()} or root")
    shared = facts.st_mode & stat.S_IWGRP and not _own_group(facts.st_gid)
    if facts.st_mode & stat.S_IWOTH or shared:
        raise UnsafePath(
            f"{path} may be written by other users (mode {stat.S_IMODE(facts.st_mode):04o}): remove that right "
            "(chmod go-w)"
        )


def _own_group(gid: int) -> bool:
    """Whether the group is root's, or the one named as this user."""
    try:
        return gid == 0 or grp.getgrgid(gid).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
