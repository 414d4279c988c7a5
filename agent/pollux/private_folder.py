"""Read and write files in a folder that other users cannot change.

A path can change between a check and its use. `PrivateFolder` therefore walks down from the root directory one
component at a time, checks each by its descriptor, and reaches every file in the folder through the folder's own
descriptor. A checked file is read through the descriptor that was checked. openat(2), path_resolution(7).

What is refused:
- an ancestor that everybody may write to, unless its sticky bit is set (as /tmp's is);
- a folder or a link in such a sticky directory that belongs to another user;
- a folder or a file that belongs to another user than this one or root, or that its group or everybody may write to.
  The group named as the user is the user's own, as many Linux distributions set it up;
- a file that is no regular file, or a link in place of a file.

An ancestor may belong to another user or be writable for a group, as project directories often are. A user who may
write there can remove the folder, but cannot change its content.
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

MAX_LINKS = 40  # as Linux follows, path_resolution(7)


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
        self.descriptor = _open_folder(path)

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

    def write(self, name: str, fill: Callable[[IO[bytes]], int], *, mark: str = "") -> int:
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
                size = fill(file)
                file.flush()
                os.fsync(file.fileno())
            self.rename(temporary, name)
        except BaseException:
            self.remove(temporary)
            raise
        self.sync()
        return size

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


def write_durably(path: Path, fill: Callable[[IO[bytes]], int], *, mark: str = "") -> int:
    """Write one file as `PrivateFolder.write` does. Raises OSError."""
    with PrivateFolder(path.parent) as folder:
        return folder.write(path.name, fill, mark=mark)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable, with any owner."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        logger.debug("%s: fsync of the directory: %s", directory, error)
    finally:
        os.close(descriptor)


def _open_folder(path: Path) -> int:
    """A descriptor of the folder, every component on the way checked."""
    left = [part for part in reversed(Path(os.path.abspath(path)).parts) if part != "/"]
    links = 0
    here = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while left:
            name = left.pop()
            sticky = _check_ancestor(path, os.fstat(here))
            found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            facts = os.fstat(found)
            if sticky and facts.st_uid not in (os.geteuid(), 0) and name != "..":
                os.close(found)
                raise UnsafePath(
                    f"{path} leads through {name!r}, which uid {facts.st_uid} owns in a directory that everybody may "
                    "write to: choose a directory of your own"
                )
            if not stat.S_ISLNK(facts.st_mode):
                os.close(here)
                here = found
                continue
            target = os.readlink("", dir_fd=found)
            os.close(found)
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            left += [part for part in reversed(Path(target).parts) if part != "/"]
            if target.startswith("/"):
                os.close(here)
                here = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        _check_own(path, os.fstat(here))
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
    finally:
        os.close(here)


def _check_ancestor(path: Path, facts: os.stat_result) -> bool:
    """Whether everybody may add names to the directory. Raises UnsafePath where everybody may change them, too."""
    if not facts.st_mode & stat.S_IWOTH:
        return False
    if not facts.st_mode & stat.S_ISVTX:
        raise UnsafePath(
            f"{path} lies in a directory that everybody may write to: remove that right (chmod o-w), or choose another "
            "directory"
        )
    return True


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
