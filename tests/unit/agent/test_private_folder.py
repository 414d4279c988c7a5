"""Other users can neither inject checkpoints nor redirect writes.

No other user can make the agent read a checkpoint of theirs, or write a file through a link of theirs.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pollux.private_folder import (
    PrivateFolder,
    UnsafePath,
    folder_of_this_user,
    is_own,
    read_named,
    read_secret,
    require_named,
    write_durably,
    write_named,
)

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


# -- the way to the folder ------------------------------------------------------------------------------------------


def test_links_of_the_user_s_own_are_followed_wherever_they_stand(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "relative").symlink_to("above")
    (tmp_path / "absolute").symlink_to(folder)
    (folder / "up").symlink_to("../..")
    for path in ("relative/checkpoints", "absolute", "above/checkpoints/up/above/checkpoints"):
        assert read(tmp_path / path) == b"content"
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="symbolic links"):
        PrivateFolder(tmp_path / "round")


@root_only
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
def test_a_link_of_another_user_leads_nowhere(folder: Path, mode: int) -> None:
    """Not to another folder of this user, either: neither as the last component nor above it."""
    shared = folder.parent / "shared"
    shared.mkdir()
    shared.chmod(mode)
    (shared / "link").symlink_to(folder)
    (shared / "above").symlink_to(folder.parent)
    for name in ("link", "above"):
        os.chown(shared / name, OTHER, OTHER, follow_symlinks=False)
    for path in (shared / "link", shared / "above" / "checkpoints"):
        with pytest.raises(UnsafePath, match="is a link of uid 65534"):
            PrivateFolder(path)
        with pytest.raises(UnsafePath, match="is a link of uid 65534"):
            PrivateFolder.make(path / "new")
    assert sorted(each.name for each in folder.iterdir()) == ["file"]


def test_folders_are_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with PrivateFolder.make(tmp_path / "a" / "b"):
            pass
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]


def test_a_missing_folder_is_named_by_its_whole_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "b"):
        with pytest.raises(NotADirectoryError, match=str(path)):
            PrivateFolder(path)
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "a" / "b")):
        PrivateFolder(tmp_path / "a" / "b")


# -- the files of a folder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../precious", "/etc/passwd", "a/b", "..", ".", ""])
def test_names_stay_below_the_folder(folder: Path, name: str) -> None:
    (folder.parent / "precious").write_bytes(b"precious")
    with PrivateFolder(folder) as opened:
        for use in (
            opened.read,
            opened.change,
            opened.remove,
            opened.remove_tree,
            opened.make_folder,
            lambda name: opened.rename(name, "new"),
            lambda name: opened.rename("file", name),
            lambda name: opened.create(name, lambda file: file.write(b"x")),
        ):
            with pytest.raises(UnsafePath, match="expected the name of a file"):
                use(name)
    assert (folder.parent / "precious").read_bytes() == b"precious"


def test_a_file_with_a_second_name_is_not_changed_in_place(folder: Path) -> None:
    os.link(folder / "file", folder.parent / "other")
    with PrivateFolder(folder) as opened:
        with pytest.raises(UnsafePath, match="hard link"):
            opened.change("file")
        opened.write("file", lambda file: file.write(b"new"))
    assert (folder.parent / "other").read_bytes() == b"content"


def test_a_secret_is_for_this_user_alone(folder: Path) -> None:
    (folder / "file").chmod(0o600)
    assert read_secret(folder / "file") == b"content"
    (folder / "file").chmod(0o640)
    with pytest.raises(UnsafePath, match="expected mode 0600"):
        read_secret(folder / "file")
    (folder / "file").chmod(0o600)
    (folder / "file").write_bytes(bytes(65537))
    with pytest.raises(OSError, match="at most 65536 bytes"):
        read_secret(folder / "file")


# -- files that the user named ----------------------------------------------------------------------------------------


def test_what_the_user_named_is_written_beside_files_of_others(tmp_path: Path) -> None:
    write_named(tmp_path / "new" / "page.html", "first")
    page = tmp_path / "new" / "page.html"
    page.chmod(0o640)
    write_named(page, b"second")
    assert (page.read_bytes(), page.stat().st_mode & 0o777) == (b"second", 0o640)
    assert [each.name for each in page.parent.iterdir()] == ["page.html"]


@pytest.mark.parametrize("name", ["a" * 255, "ä" * 127 + "x"])
def test_a_name_may_be_as_long_as_linux_allows(name: str, tmp_path: Path) -> None:
    for content in ("first", "second"):
        require_named(tmp_path / name)
        write_named(tmp_path / name, content)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [(name, "second")]


@pytest.mark.parametrize("name", ["a" * 256, "ä" * 128, "folder", "..", "fifo"])
def test_what_cannot_be_written_is_refused_before_the_work(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for refuse in (require_named, lambda path: write_named(path, "content")):
        with pytest.raises(OSError, match=r"too long|expected a file|expected the name"):
            refuse(tmp_path / name)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["fifo", "folder"]


@pytest.mark.parametrize("put", ["link", "fifo", "folder", "other"])
def test_what_is_no_file_of_the_user_s_stays(put: str, tmp_path: Path) -> None:
    precious, page = tmp_path / "precious", tmp_path / "page.html"
    precious.write_bytes(b"precious")
    match put:
        case "link":
            page.symlink_to(precious)
        case "fifo":
            os.mkfifo(page)
        case "folder":
            page.mkdir()
        case _:
            if os.geteuid() != 0:
                pytest.skip("only root can give a file away")
            page.write_bytes(b"of another user")
            os.chown(page, OTHER, OTHER)
    before = os.lstat(page)
    with pytest.raises(UnsafePath, match="expected a file of uid"):
        write_named(page, "x")
    assert os.lstat(page) == before
    assert precious.read_bytes() == b"precious"


def test_a_pipe_under_a_name_does_not_block_its_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace.csv")
    with pytest.raises(UnsafePath, match="not a regular file"):
        read_named(tmp_path / "trace.csv")


def access_list(mode: int, uid: int) -> bytes:
    """An access control list as Linux stores it: with rights to write for one more user. acl(5)."""
    none = 0xFFFFFFFF
    entries = [(1, 7, none), (2, 7, uid), (4, mode, none), (16, 7, none), (32, 0, none)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@pytest.mark.parametrize("of", ["folder", "file"])
def test_an_access_control_list_gives_no_right_that_the_group_hides(folder: Path, of: str) -> None:
    """The group of a user's own may write; by a list, so may others, and the mode looks alike."""
    shared = folder if of == "folder" else folder / "file"
    shared.chmod(0o770)
    assert read(folder) == b"content"
    try:
        os.setxattr(shared, "system.posix_acl_access", access_list(7, OTHER))
    except OSError as error:
        pytest.skip(f"no access control lists here: {error}")
    assert shared.stat().st_mode & 0o777 == 0o770
    with pytest.raises(UnsafePath, match="may be written by other users"):
        read(folder)
    assert is_own(folder)
    assert not folder.stat().st_mode & 0o022, "a folder that the agent chose itself loses the right"


@root_only
def test_nothing_is_asked_of_what_another_user_s_link_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lead to a server that is away, or that mounts what is asked for."""
    far = tmp_path / "far"
    far.mkdir()
    for name in ("pollux-checkpoints", f"pollux-checkpoints-{os.geteuid()}"):
        (tmp_path / name).symlink_to(far)
        os.lchown(tmp_path / name, OTHER, OTHER)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    asked: list[str] = []
    for module, function in ((os, "stat"), (os, "access"), (os.path, "isdir"), (os.path, "lexists")):
        original = getattr(module, function)

        def told(path: object, *args: object, original: Callable[..., Any] = original, **words: Any) -> Any:
            at = words.get("dir_fd")
            above = "" if at is None else os.readlink(f"/proc/self/fd/{at}")
            asked.append(os.path.join(above, os.fspath(path)))  # type: ignore[call-overload]
            return original(path, *args, **words)

        monkeypatch.setattr(module, function, told)
    found = folder_of_this_user(tmp_path / "pollux-checkpoints", "7-1", make=True)
    assert not is_own(tmp_path / "pollux-checkpoints" / "deeper" / "still")
    monkeypatch.undo()
    assert found == tmp_path / "home" / "pollux-checkpoints"
    assert asked
    assert not [path for path in asked if f"{tmp_path}/pollux-checkpoints" in path or "/far" in path]


def test_a_file_with_a_hole_of_a_terabyte_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "log.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="expected a file of at most 1073741824 bytes"):
        read_named(tmp_path / "log.json")
