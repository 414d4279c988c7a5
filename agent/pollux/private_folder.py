"""The one door to files: all that is read, written, renamed or removed on a user's behalf goes through this module.

A path can change between a check and its use, and a folder that others may write to can hold anything. So a folder is
opened component by component (`_walk`), and every file in it is reached through the descriptor that was checked.
openat(2). `contrib/checks/door.py` fails where a program opens files otherwise.

A `PrivateFolder` refuses
- a folder or a file that belongs to another user than this one or root, or that its group or everybody may write to.
  The group named as the user is the user's own, as many Linux distributions set it up;
- a file that is no regular file, or a link in place of a file.

The directories above may belong to another user or be writable for a group, as project directories often are. A user
who may write there can remove the folder, but can neither change its content nor lead elsewhere: of links on the way,
only those of this user or root are followed.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import logging
import os
import pwd
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Self

logger = logging.getLogger("pollux")

_MOST_LINKS = 40  # of one path; path_resolution(7)
_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_SECRET = 65536
"""Bytes of the largest file that holds a secret."""
_NAMED = 1 << 30
_STEM = 200
"""Bytes of a name that its temporary file's has, too: a name has at most 255."""


class UnsafePath(PermissionError):
    """Other users may change a file or a folder, or lead its path elsewhere."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EPERM, why)
        self.why = why

    def __str__(self) -> str:
        return self.why


class Folder:
    """An open folder of any owner. A context manager: leaving it closes the folder."""

    def __init__(self, path: Path, *, make: bool = False) -> None:
        """Open the folder; `make`: create it, and those above it, where they are missing.

        A folder that is made is for this user alone. Raises UnsafePath and other OSErrors.
        """
        self.path = path
        found = _walk(path, make=make)
        try:
            self.descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=found)
        finally:
            os.close(found)
        try:
            self._check(path, self.descriptor)
        except BaseException:
            os.close(self.descriptor)
            raise

    @classmethod
    def make(cls, path: Path) -> Self:
        return cls(path, make=True)

    def _check(self, path: Path, descriptor: int) -> None:
        """Raise UnsafePath where others may change an open file or folder, if that matters."""

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
        return self._opened(name, os.O_RDONLY, "rb")

    def change(self, name: str) -> IO[bytes]:
        """Open a file for reading and writing; create it where it is missing. Raises UnsafePath and other OSErrors."""
        return self._opened(name, os.O_RDWR | os.O_CREAT, "r+b")

    def _opened(self, name: str, access: int, mode: str) -> IO[bytes]:
        # No call blocks, not even on a FIFO under this name.
        flags = access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(_below(name), flags, 0o600, dir_fd=self.descriptor)
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise UnsafePath(f"{self.path / name} is not a regular file")
            if access != os.O_RDONLY and facts.st_nlink > 1:
                raise UnsafePath(f"{self.path / name} has another name (a hard link): copy it in its place")
            self._check(self.path / name, descriptor)
            return os.fdopen(descriptor, mode)
        except BaseException:
            os.close(descriptor)
            raise

    def write(
        self, name: str, fill: Callable[[IO[bytes]], object], *, mark: str = "", mode: int = 0o600
    ) -> None:
        """Write a file that appears under `name` whole or not at all; `fill` writes its content. Raises OSError.

        Temporary file, fsync, rename, fsync of the folder: after a crash at any point the old file, or none, or the
        whole new one is there. Writers that may come at the same time give their temporary files a `mark` each.
        """
        temporary = f".{os.fsdecode(os.fsencode(name)[:_STEM])}{mark}.tmp"
        # A crash left this file, or a user put a link there. Do not write to it.
        self.remove(temporary)
        try:
            self.create(temporary, fill, mode=mode)
            self.rename(temporary, name)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(temporary)
            raise
        self.sync()

    def create(self, name: str, fill: Callable[[IO[bytes]], object], *, mode: int = 0o600) -> None:
        """Write a new file, durably. Raises FileExistsError and other OSErrors."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(_below(name), flags, mode, dir_fd=self.descriptor), "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, name: str, new: str) -> None:
        os.rename(_below(name), _below(new), src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_below(name), dir_fd=self.descriptor)

    def remove_tree(self, name: str) -> None:
        """Remove a folder with all that is in it; no link is followed."""
        shutil.rmtree(_below(name), dir_fd=self.descriptor)

    def make_folder(self, name: str) -> None:
        os.mkdir(_below(name), 0o700, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Make the names in the folder durable (fsync).

        File systems without fsync of a directory ensure the order themselves.
        """
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            logger.debug("%s: fsync of the directory: %s", self.path, error)


class PrivateFolder(Folder):
    """An open folder that only this user, or root, may write to, and so its files."""

    def _check(self, path: Path, descriptor: int) -> None:
        facts = os.fstat(descriptor)
        if facts.st_uid not in (os.geteuid(), 0):
            raise UnsafePath(f"{path} belongs to uid {facts.st_uid}, expected {os.geteuid()} or root")
        # With an access control list, the group's rights are the most that any entry has; acl(5).
        shared = facts.st_mode & stat.S_IWGRP and (not _own_group(facts.st_gid) or _has_list(descriptor))
        if facts.st_mode & stat.S_IWOTH or shared:
            raise UnsafePath(
                f"{path} may be written by other users (mode {stat.S_IMODE(facts.st_mode):04o}): remove that right "
                "(chmod go-w)"
            )


def write_durably(path: Path, fill: Callable[[IO[bytes]], object], *, mark: str = "") -> None:
    """Write one file as `PrivateFolder.write` does; make its folder where it is missing. Raises OSError."""
    with PrivateFolder.make(path.parent) as folder:
        folder.write(path.name, fill, mark=mark)


def read_private(path: Path) -> bytes:
    """Return the content of a file in a private folder. Raises OSError."""
    with PrivateFolder(path.parent) as folder, folder.read(path.name) as file:
        return file.read()


def read_secret(path: Path) -> bytes:
    """Return the content of a private file that nobody else can read, of at most 64 KiB. Raises OSError."""
    with PrivateFolder(path.parent) as folder, folder.read(path.name) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        content = file.read(_SECRET + 1)
    if mode & 0o077:
        raise UnsafePath(f"expected mode 0600, its mode is {mode:04o}")
    if len(content) > _SECRET:
        raise OSError(errno.EFBIG, f"expected at most {_SECRET} bytes")
    return content


def remove(path: Path) -> None:
    """Remove one file of a private folder, if it is there. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), PrivateFolder(path.parent) as folder:
        folder.remove(path.name)


def open_named(path: Path) -> IO[bytes]:
    """Open a file that the user named, of any owner: a regular file. Raises OSError."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UnsafePath(f"{path} is not a regular file")
    return file


def read_named(path: Path) -> bytes:
    """Return the content of a file that the user named, of at most 1 GiB. Raises OSError."""
    with open_named(path) as file:
        if os.fstat(file.fileno()).st_size <= _NAMED and len(content := file.read(_NAMED + 1)) <= _NAMED:
            return content
    raise OSError(errno.EFBIG, f"expected a file of at most {_NAMED} bytes")


def write_named(path: Path, content: str | bytes) -> None:
    """Write a file under a name that the user gave; make its folder where it is missing. Raises OSError.

    What has this name stays if it is a link, another user's, or no regular file.
    """
    with Folder.make(path.parent) as folder:
        mode = _mode_of_named(folder, path)
        data = content.encode() if isinstance(content, str) else content
        folder.write(path.name, lambda file: file.write(data), mark=f".{secrets.token_hex(4)}", mode=mode)


def require_named(path: Path) -> None:
    """Raise now, before long work, the OSError with which `write_named` would refuse its result."""
    with Folder.make(path.parent) as folder:
        _mode_of_named(folder, path)
        if not os.access(folder.reached, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path.parent))


def _mode_of_named(folder: Folder, path: Path) -> int:
    """Return the mode of a file that is to be written. Raises OSError where the name is too long, or taken."""
    try:
        facts = os.stat(_below(path.name), dir_fd=folder.descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return 0o666  # less the umask
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        raise UnsafePath(f"{path}: expected a file of uid {os.geteuid()}, or none")
    return stat.S_IMODE(facts.st_mode) & 0o777


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder of this user's alone in the machine's directory for such; removed on leaving."""
    # No TemporaryDirectory: each fork of this process would remove it at its end.
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def places_of_this_user(beside: Path) -> list[Path]:
    """Return the folders that can stand for `beside`: see `folder_of_this_user`."""
    numbered = beside.with_name(f"{beside.name}-{os.geteuid()}")
    return [numbered, beside, Path(os.path.expanduser("~"), beside.name)]


def folder_of_this_user(beside: Path, name: str, *, make: bool = False) -> Path:
    """Return the folder that holds `name`, or is to hold it: `beside`, if that is this user's, and no link.

    Users may share the directory around it, where each of them can make anything first. Then there is one with the
    user's number in its name, and where that cannot be had, one at home. Where `name` is there already, such as a
    job's checkpoints, it stays in use. `make`: make the folder.
    """
    places = places_of_this_user(beside)
    for place in places:
        if is_own(place) and is_own(place / name):
            return place
    # Once made, the numbered one stays in use.
    for place in [*places[: is_own(places[0])], beside, *places]:
        if make:
            # Not looked at first: making it decides which of two users who come in the same second has it.
            with contextlib.suppress(OSError):
                Folder.make(place).__exit__(None, None, None)
        # Nothing else is asked of a path that another user's link may lead elsewhere.
        if not (is_own(place) and os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)):
            continue
        if is_own(place / name) or not os.path.lexists(place / name):
            return place
    return beside


def is_own(path: Path) -> bool:
    """Whether a file or folder is there, belongs to this user, and is reached by no link of another one.

    From a folder that others may write to, by a generous umask, that right is taken away.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        above = _walk(path.parent)
        try:
            descriptor = os.open(path.name, flags, dir_fd=above)
        finally:
            os.close(above)
    except OSError:
        return False
    try:
        facts = os.fstat(descriptor)
        if facts.st_uid == os.geteuid() and stat.S_ISDIR(facts.st_mode) and facts.st_mode & 0o022:
            os.fchmod(descriptor, stat.S_IMODE(facts.st_mode) & ~0o022)
        return facts.st_uid == os.geteuid()
    finally:
        os.close(descriptor)


def led_by_others(folder: Path) -> bool:
    """Whether a link of another user stands on the way to a folder."""
    try:
        os.close(_walk(folder))
    except UnsafePath:
        return True
    except OSError:
        pass  # whoever looks there finds nothing
    return False


def _walk(path: Path, *, make: bool = False) -> int:
    """Return a descriptor of a folder for use as dir_fd (O_PATH), found component by component.

    A link on the way is followed if it is this user's or root's. Whoever may write to a directory can put one there
    that leads to another folder of this user.
    """
    left = list(reversed(path.parts))
    links = 0
    at = os.open(".", _PATH)
    try:
        while left:
            name = left.pop()
            try:
                found = _component(name, at)
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):  # it is looked at, whoever made it
                    os.mkdir(name, 0o700, dir_fd=at)
                found = _component(name, at)
            facts = os.fstat(found)
            if not stat.S_ISLNK(facts.st_mode):
                os.close(at)
                at = found
                continue
            try:
                links += 1
                if facts.st_uid not in (os.geteuid(), 0):
                    raise UnsafePath(
                        f"{path}: {name} is a link of uid {facts.st_uid}, expected one of {os.geteuid()} or root: name "
                        "the folder that it leads to"
                    )
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                left += reversed(Path(os.readlink("", dir_fd=found)).parts)
            finally:
                os.close(found)
        if not stat.S_ISDIR(os.fstat(at).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return at
    except OSError as error:
        os.close(at)
        error.filename = None if isinstance(error, UnsafePath) else str(path)
        raise


def _component(name: str, at: int) -> int:
    """Return a descriptor of what has the name in a directory, links included."""
    found = os.open(name, _PATH, dir_fd=at)
    facts = os.fstat(found)
    if stat.S_ISDIR(facts.st_mode):
        with contextlib.suppress(OSError):
            # An automounter mounts now what it would not for O_PATH; open(2).
            if not os.path.samestat(os.stat(f"{name}/.", dir_fd=at), facts):
                mounted = os.open(name, _PATH, dir_fd=at)
                os.close(found)
                return mounted
    return found


def _below(name: str) -> str:
    """Return a name that stays in its folder. Raises UnsafePath."""
    if "/" in name or name in ("", ".", ".."):
        raise UnsafePath(f"expected the name of a file in its folder, got {name!r}")
    return name


def _has_list(descriptor: int) -> bool:
    """Whether an open file or folder has an access control list."""
    try:
        return bool(os.getxattr(descriptor, "system.posix_acl_access"))
    except OSError:
        return False


def _own_group(gid: int) -> bool:
    """Whether the group is root's, or the one named as this user."""
    try:
        return gid == 0 or grp.getgrgid(gid).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
