"""Where a job's checkpoints go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pollux.private_folder import Folder
from pollux.slurm_job.environment import checkpoint_directory

JOB = {"SLURM_JOB_ID": "1", "POLLUX_GATEWAY": "https://head:9851"}
OTHER = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "home"
    made.mkdir()
    monkeypatch.setenv("HOME", str(made))
    return made


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that all users submit from."""
    made = tmp_path / "shared"
    made.mkdir()
    made.chmod(0o777)
    return made


def directory(submitted_from: Path, **environ: str) -> Path | None:
    job = {**JOB, "SLURM_SUBMIT_DIR": str(submitted_from), "POLLUX_SUBMITTED": "17"}
    return checkpoint_directory(None, job | environ)


def test_a_reused_job_id_does_not_find_another_jobs_checkpoint(shared: Path) -> None:
    first = directory(shared, POLLUX_SUBMITTED="1700000000")
    second = directory(shared, POLLUX_SUBMITTED="1800000000")
    assert first == shared / "pollux-checkpoints/1-1700000000"
    assert first != second


def test_an_argument_is_taken_as_it_is_and_a_shared_variable_is_divided() -> None:
    named = {**JOB, "POLLUX_SUBMITTED": "1700000000", "POLLUX_CHECKPOINT_DIR": "/scratch/a"}
    assert checkpoint_directory("/scratch/b", named) == Path("/scratch/b")
    assert checkpoint_directory(None, named) == Path("/scratch/a/1-1700000000")
    assert checkpoint_directory(None, {"POLLUX_CHECKPOINT_DIR": "/scratch/a"}) == Path("/scratch/a")


@root_only
@pytest.mark.parametrize("what", ["folder", "folder for all", "link", "link to an own folder", "file"])
def test_what_another_user_put_there_is_not_used(shared: Path, home: Path, what: str) -> None:
    """Under the names of the folder, and of the one with the user's number in its name."""
    own = home / "of-another-training"
    own.mkdir()

    def put(path: Path) -> None:
        if what.startswith("folder"):
            path.mkdir()
            path.chmod(0o777 if what == "folder for all" else 0o755)
        elif what == "file":
            path.touch()
        else:
            path.symlink_to(own if what == "link to an own folder" else home / "nowhere")
        os.chown(path, OTHER, OTHER, follow_symlinks=False)

    put(shared / "pollux-checkpoints")
    numbered = shared / f"pollux-checkpoints-{os.getuid()}"
    assert directory(shared) == numbered / "1-17"
    assert numbered.stat().st_mode & 0o777 == 0o700
    numbered.rmdir()
    put(numbered)
    assert directory(shared) == home / "pollux-checkpoints" / "1-17"


@root_only
def test_a_link_under_the_name_of_the_job_is_not_followed(shared: Path, home: Path) -> None:
    """squeue tells everybody the name."""
    first = shared / "pollux-checkpoints"
    first.mkdir()
    (first / "1-17").symlink_to(home)
    os.chown(first / "1-17", OTHER, OTHER, follow_symlinks=False)
    assert directory(shared) == shared / f"pollux-checkpoints-{os.getuid()}" / "1-17"


@root_only
def test_a_link_above_the_folder_is_not_followed(shared: Path, home: Path) -> None:
    """The directory that the job was submitted from is the other user's, who put a link in its place."""
    (home / "pollux-checkpoints").mkdir()
    other = home.parent / "other"
    (other / "pollux-checkpoints").mkdir(parents=True)
    (shared / "work").symlink_to(other)
    os.chown(shared / "work", OTHER, OTHER, follow_symlinks=False)
    assert directory(shared / "work") == home / "pollux-checkpoints" / "1-17"


def test_a_restart_finds_the_checkpoints_wherever_the_first_start_had_to_put_them(
    shared: Path, home: Path
) -> None:
    first, numbered = shared / "pollux-checkpoints", shared / f"pollux-checkpoints-{os.getuid()}"
    first.symlink_to(home / "nowhere")
    numbered.symlink_to(home / "nowhere")
    away = directory(shared)
    assert away == home / "pollux-checkpoints" / "1-17"
    away.mkdir()
    first.unlink()
    numbered.unlink()
    assert directory(shared) == away
    assert directory(shared, POLLUX_SUBMITTED="18") == first / "1-18", "another job has none there"


def test_rights_of_others_by_a_generous_umask_are_taken_away(shared: Path) -> None:
    first = shared / "pollux-checkpoints"
    first.mkdir()
    first.chmod(0o775)
    assert directory(shared) == first / "1-17"
    assert first.stat().st_mode & 0o777 == 0o755


def test_of_two_users_in_the_same_second_each_has_one(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other user's is made between the look and the making."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    make = Folder.make

    def after_another(path: Path) -> Folder:
        if path.name == "pollux-checkpoints":
            path.mkdir()
            os.chown(path, OTHER, OTHER)
        return make(path)

    monkeypatch.setattr(Folder, "make", after_another)
    assert directory(shared) == shared / f"pollux-checkpoints-{os.getuid()}" / "1-17"


def test_a_companion_s_is_its_parent_s() -> None:
    lent = {
        **JOB,
        "POLLUX_COMPANION": "/scratch/a/1-1700000000/companion-7.json",
        "POLLUX_CHECKPOINT_DIR": "/x",
    }
    assert checkpoint_directory(None, lent) == Path("/scratch/a/1-1700000000")


def test_outside_a_pollux_job_none_is_written_unasked() -> None:
    assert checkpoint_directory(None, {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": "/home/ann"}) is None
    assert checkpoint_directory(None, {}) is None
