"""Other users can neither inject checkpoints nor redirect writes.

No other user can make the agent read a checkpoint of theirs, or write a file through a link of theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pollux.private_folder import PrivateFolder, UnsafePath, write_durably

OTHER = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "above" / "checkpoints"
    made.mkdir(parents=True, mode=0o755)
    (made / "file").write_bytes(b"content")
    return made


def read(folder: Path, name: str = "file") -> bytes:
    with PrivateFolder(folder) as opened, opened.read(name) as file:
        return file.read()


def test_a_file_of_the_user_s_own_is_read(folder: Path) -> None:
    assert read(folder) == b"content"
    (folder.parent / "link").symlink_to("checkpoints")
    assert read(folder.parent / "link") == b"content", "links of the user's own lead to it, too"
    folder.parent.chmod(0o1777)
    assert read(folder) == b"content", "as in /tmp"
    folder.parent.chmod(0o775)
    assert read(folder) == b"content", "as in a project's directory"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda f: (f / "file").chmod(0o666), "may be written by other users"),
        (lambda f: f.chmod(0o777), "may be written by other users"),
        (lambda f: f.chmod(0o1777), "may be written by other users"),
        (lambda f: (f / "file").rename(f / "x") and (f / "file").symlink_to("x"), "symbolic link"),
        (lambda f: (f / "file").unlink() or os.mkfifo(f / "file"), "not a regular file"),
        (lambda f: (f / "file").unlink() or (f / "file").mkdir(), "not a regular file"),
    ],
)
def test_what_others_may_change_is_refused(folder: Path, spoil: Callable[[Path], object], why: str) -> None:
    spoil(folder)
    with pytest.raises(OSError, match=why):
        read(folder)


@root_only
def test_what_belongs_to_another_user_is_refused(folder: Path) -> None:
    os.chown(folder / "file", OTHER, OTHER)
    with pytest.raises(UnsafePath, match="belongs to uid 65534"):
        read(folder)
    os.chown(folder / "file", 0, 0)
    os.chown(folder, OTHER, OTHER)
    with pytest.raises(UnsafePath, match="belongs to uid 65534"):
        read(folder)
    os.chown(folder, 0, 0)
    os.chown(folder.parent, OTHER, OTHER)
    assert read(folder) == b"content", "a project's directory belongs to whoever leads it"
    os.chown(folder, -1, OTHER)
    folder.chmod(0o770)
    with pytest.raises(UnsafePath, match="may be written by other users"):
        read(folder)


def test_a_file_is_read_from_the_folder_that_was_checked(folder: Path) -> None:
    """Redirecting a path after the check changes nothing for its reader."""
    forged = folder.parent / "forged"
    forged.mkdir()
    (forged / "file").write_bytes(b"forged")
    with PrivateFolder(folder) as opened:
        folder.rename(folder.parent / "away")
        forged.rename(folder)
        with opened.read("file") as file:
            assert file.read() == b"content"
    assert (folder / "file").read_bytes() == b"forged", "whoever goes by the path reads this one"


def test_nothing_is_written_through_a_link_under_a_temporary_name(folder: Path) -> None:
    victim = folder.parent / "victim"
    victim.write_bytes(b"precious")
    (folder / ".new.tmp").symlink_to(victim)
    write_durably(folder / "new", lambda file: file.write(b"written"))
    assert victim.read_bytes() == b"precious"
    assert read(folder, "new") == b"written"
    assert not (folder / "new").is_symlink()
    assert (folder / "new").stat().st_mode & 0o777 == 0o600


def test_a_link_that_appears_while_the_file_is_made_is_not_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = folder.parent / "victim"
    victim.write_bytes(b"precious")
    remove = PrivateFolder.remove

    def race(self: PrivateFolder, name: str) -> None:
        remove(self, name)
        (folder / name).symlink_to(victim)

    monkeypatch.setattr(PrivateFolder, "remove", race)
    with pytest.raises(FileExistsError):
        write_durably(folder / "new", lambda file: file.write(b"written"))
    assert victim.read_bytes() == b"precious"
