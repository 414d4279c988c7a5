"""A trainer's checkpoints, by a clock of the test."""

from __future__ import annotations

import glob
import os

import pytest

from pollux.wrap.checkpoints import Checkpoints, matching


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def look(checkpoints, clock, seconds):
    clock.now += seconds
    checkpoints.look()


def test_a_checkpoint_counts_once_it_is_quiet(tmp_path, clock):
    checkpoints = Checkpoints(str(tmp_path / "step-*"), clock)
    ordered_at = clock.now
    file = tmp_path / "step-1"
    for size in range(1, 5):
        file.write_bytes(b"x" * size)
        os.utime(file, (size, size))
        look(checkpoints, clock, 1.0)
        assert not checkpoints.saved_since(ordered_at), "it still grows"
    look(checkpoints, clock, 1.0)
    assert not checkpoints.saved_since(ordered_at), "it was written for 3 s, and may pause as long"
    look(checkpoints, clock, 2.0)
    assert checkpoints.saved_since(ordered_at)
    assert checkpoints.age == 6.0, "what it holds is from when it was begun"
    assert not checkpoints.saved_since(clock.now)


def test_shards_that_follow_each_other_for_minutes_are_one_checkpoint(tmp_path, clock):
    checkpoints = Checkpoints(str(tmp_path / "step-1*"), clock)
    for shard in range(18):
        (tmp_path / f"step-1-{shard}").write_bytes(b"x")
        look(checkpoints, clock, 10.0)
        assert not checkpoints.saved_since(100.0), (
            "the first shards have not changed for minutes: others are missing"
        )
    look(checkpoints, clock, 60.0)
    assert checkpoints.saved_since(100.0)


@pytest.mark.parametrize("rank", ["", "-rank1"])
@pytest.mark.parametrize("kept", [1, 100])
def test_a_trainer_that_is_never_quiet_has_completed_those_before_its_newest(tmp_path, clock, kept, rank):
    """It saves faster than anybody looks; another rank's file may take longer, and is of the same checkpoint."""
    at = [0.0]
    checkpoints = Checkpoints(str(tmp_path / "step-*"), clock, step=lambda: at[0])
    for number in range(1, 10):
        at[0] += 10.0
        (tmp_path / f"step-{number}").write_bytes(b"x")
        if rank:
            (tmp_path / f"step-1{rank}").write_bytes(b"x" * number)
        if number > kept:
            (tmp_path / f"step-{number - kept}").unlink()
        look(checkpoints, clock, 1.0)
        assert checkpoints.saved_since(clock.now - 1.0) is (number > 2 and not rank)
    assert checkpoints.last_step == (0.0 if rank else 70.0)
    assert checkpoints.every == (None if rank else 10.0)


def test_that_matches_never_rest_is_said_once(tmp_path, clock, caplog):
    """A log in the same folder, say."""
    checkpoints = Checkpoints(str(tmp_path / "*"), clock)
    for size in range(20):
        (tmp_path / "events").write_bytes(b"x" * size)
        look(checkpoints, clock, 60.0)
    assert ["has changed all the time" in record.getMessage() for record in caplog.records] == [True]


def test_a_checkpoint_that_a_process_has_open_is_not_complete_however_long_it_pauses(tmp_path, clock):
    checkpoints = Checkpoints(str(tmp_path / "ckpt.pt"), clock)
    with (tmp_path / "ckpt.pt").open("wb") as file:
        file.write(b"half")
        file.flush()
        for _ in range(30):
            look(checkpoints, clock, 10.0)
        assert not checkpoints.saved_since(100.0)
    look(checkpoints, clock, 10.0)
    assert checkpoints.saved_since(100.0)


def test_removed_files_are_no_checkpoint(tmp_path, clock):
    """Trainers keep the last few, or the best ones: the newest may go, and a folder changes with what leaves it."""
    for number in (1, 2):
        (tmp_path / f"step-{number}").mkdir()
        (tmp_path / f"step-{number}" / "model").write_text("x")
    files, folders = (Checkpoints(str(tmp_path / name), clock) for name in ("step-*/model", "step-*"))
    (tmp_path / "step-2" / "model").unlink()
    for checkpoints in (files, folders):
        for _ in range(5):
            look(checkpoints, clock, 10.0)
        assert not checkpoints.saved_since(0.0)
        assert checkpoints.present
    (tmp_path / "step-3").write_text("half")
    look(folders, clock, 1.0)
    (tmp_path / "step-3").unlink()
    look(folders, clock, 10.0)
    assert not folders.saved_since(0.0), "one that was given up"


def test_a_checkpoint_dated_in_the_past_is_new(tmp_path, clock):
    """The clock of its file system was set back, or it was copied with its date."""
    (tmp_path / "step-1").write_text("x")
    checkpoints = Checkpoints(str(tmp_path / "step-*"), clock)
    (tmp_path / "step-2").write_text("x")
    os.utime(tmp_path / "step-2", (1, 1))
    look(checkpoints, clock, 1.0)
    look(checkpoints, clock, 1.0)
    assert checkpoints.saved_since(0.0)


def test_what_an_ended_trainer_wrote_is_complete_at_once(tmp_path, clock):
    checkpoints = Checkpoints(str(tmp_path / "step-*"), clock)
    checkpoints.look()
    (tmp_path / "step-1").write_text("x")
    checkpoints.look(ended=True)
    assert checkpoints.saved_since(clock.now - 1.0)


def test_the_rhythm_is_that_of_the_last_two_in_steps_of_this_size(tmp_path, clock):
    at = [0.0]
    checkpoints = Checkpoints(str(tmp_path / "*" / ".metadata"), clock, step=lambda: at[0])
    checkpoints.trains()
    for number in range(1, 4):
        at[0] += 30.0
        (tmp_path / f"step-{number}").mkdir()
        (tmp_path / f"step-{number}" / ".metadata").write_text("x")
        os.utime(tmp_path / f"step-{number}" / ".metadata", (number, number))
        for _ in range(3):
            look(checkpoints, clock, 10.0)
        assert checkpoints.every == 30.0, "the first step stands for the checkpoint that it went on from"
    assert checkpoints.last_step == 90.0


def test_a_folder_that_matches_changes_with_what_is_in_it(tmp_path, clock):
    folder = tmp_path / "checkpoint-40"
    folder.mkdir()
    os.utime(folder, (1, 1))
    checkpoints = Checkpoints(str(tmp_path / "checkpoint-*"), clock)
    (folder / "model").write_text("x")
    look(checkpoints, clock, 1.0)
    look(checkpoints, clock, 1.0)
    assert checkpoints.saved_since(100.0)


def test_quotes_keep_no_home_and_no_variable_out_of_a_pattern(tmp_path, clock, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RUN", "my run")
    (tmp_path / "my run").mkdir()
    (tmp_path / "my run" / "step-1").write_text("x")
    assert Checkpoints("~/$RUN/step-*", clock).present


def test_files_that_vanish_while_they_are_looked_at_are_none(tmp_path, clock):
    (tmp_path / "step-1").symlink_to(tmp_path / "gone")
    checkpoints = Checkpoints(str(tmp_path / "step-*"), clock)
    look(checkpoints, clock, 1.0)
    assert not checkpoints.present


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("what", ["file", "link", "file in a folder"])
def test_another_users_files_are_no_checkpoint(tmp_path, clock, what):
    """In a directory that users share, anybody may put one there."""
    (tmp_path / "log").write_text("the trainer's own")
    checkpoints = Checkpoints(str(tmp_path / "step-*"), clock)
    theirs = tmp_path / "step-9"
    if what == "link":
        theirs.symlink_to(tmp_path / "log")
    elif what == "file":
        theirs.write_text("x")
    else:
        theirs.mkdir()
        os.utime(theirs, (1, 1))
        checkpoints = Checkpoints(str(tmp_path / "step-*"), clock)
        theirs = theirs / "model"
        theirs.write_text("x")
        os.utime(theirs.parent, (1, 1))
    os.chown(theirs, 12345, 12345, follow_symlinks=False)
    for _ in range(3):
        look(checkpoints, clock, 1.0)
    assert not checkpoints.saved_since(100.0)
    assert not checkpoints.present


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("pattern", ["*/last.pt", "run/last.pt", "run/step-*"])
@pytest.mark.parametrize("owner", [0, 12345])
def test_what_another_users_link_leads_to_is_no_checkpoint(tmp_path, clock, pattern, owner):
    """The user's other training saves there all the time."""
    other, shared = tmp_path / "other", tmp_path / "shared"
    (other / "step-1").mkdir(parents=True)
    shared.mkdir()
    checkpoints = Checkpoints(f"{shared}/{pattern}", clock)
    (shared / "run").symlink_to(other)
    os.chown(shared / "run", owner, owner, follow_symlinks=False)
    for path in (other / "last.pt", other / "step-1" / "model"):
        path.write_text("x")
    for _ in range(3):
        look(checkpoints, clock, 1.0)
    assert checkpoints.saved_since(100.0) == checkpoints.present == (owner == 0)


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        "a*",
        "**",
        "**/*.pt",
        "a/**/*.pt",
        "a/b/x.pt",
        "*/*",
        "a/[bc]/*",
        ".*",
        "**/.h*",
        "*/b/**",
        "no/*",
        "**/b",
    ],
)
def test_a_pattern_matches_what_glob_matches(tmp_path, monkeypatch, pattern):
    for name in ("a/b/x.pt", "a/b/.hidden", "a/c/d/e/y.pt", "z.pt", ".dot/w.pt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    for root in ("", f"{tmp_path}/"):
        found = {
            os.path.normpath(name)
            for name in matching(root + pattern, iter(range(1000)))
            if os.path.exists(name)
        }
        wanted = {os.path.normpath(name) for name in glob.glob(root + pattern, recursive=True) if name}
        assert found == wanted


def test_loops_of_links_and_many_names_take_a_bounded_number_of_steps(tmp_path, clock, monkeypatch, caplog):
    """Two links to their own folder make 2 ** 40 paths; another user may put them into a shared folder."""
    for name in ("a", "b", "c"):
        (tmp_path / name).symlink_to(".")
    deep = tmp_path
    for _ in range(300):
        deep /= "deep"
        deep.mkdir()
    (deep / "step-1.pt").write_text("x")
    assert Checkpoints(f"{tmp_path}/**/*.pt", clock).present
    assert not Checkpoints(f"{tmp_path}/**/none", clock).present
    assert not Checkpoints(f"{tmp_path}/*/*/*/*/*/*/*/*/*/*/*/*/none", clock).present
    monkeypatch.setattr("pollux.wrap.checkpoints.MOST_NAMES", 3)
    for number in range(10):
        (tmp_path / "many").mkdir(exist_ok=True)
        (tmp_path / "many" / str(number)).write_text("x")
    left = iter(range(3))
    assert len(list(matching(f"{tmp_path}/many/*", left))) < 3
    caplog.clear()
    many = Checkpoints(f"{tmp_path}/many/*", clock)
    look(many, clock, 10.0)
    assert [record.getMessage().partition(" passes ")[2][:6] for record in caplog.records] == ["more t"], (
        "once"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_others_make_touch_and_remove_is_no_checkpoint(tmp_path, clock):
    folder = tmp_path / "step-1"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    for name, at in (("old", 5), ("new", 9)):
        (folder / name).write_text("x")
        os.utime(folder / name, (at, at))
    os.utime(folder, (9, 9))
    checkpoints = Checkpoints(f"{tmp_path}/step-*", clock)

    def saved():
        before = clock.now
        for _ in range(3):
            look(checkpoints, clock, 1.0)
        return checkpoints.saved_since(before)

    (folder / "theirs").write_text("x")  # changes the time of the folder, too
    os.chown(folder / "theirs", 65534, 65534)
    assert not saved()
    (folder / "theirs").unlink()
    assert not saved()
    (folder / "new").rename(tmp_path / "away")
    assert not saved(), "the newest one is gone"
    (tmp_path / "away").rename(folder / "new")
    assert not saved()
    (folder / "newer").write_text("x")
    assert saved()
