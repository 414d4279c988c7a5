"""Where a job's checkpoints go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pollux.slurm_job.environment import checkpoint_directory

JOB = {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": "/home/ann", "POLLUX_GATEWAY": "https://head:9851"}


def test_a_reused_job_id_does_not_find_another_jobs_checkpoint() -> None:
    first = checkpoint_directory(None, {**JOB, "POLLUX_SUBMITTED": "1700000000"})
    second = checkpoint_directory(None, {**JOB, "POLLUX_SUBMITTED": "1800000000"})
    assert first == Path("/home/ann/pollux-checkpoints/1-1700000000")
    assert first != second


def test_an_argument_is_taken_as_it_is_and_a_shared_variable_is_divided() -> None:
    named = {**JOB, "POLLUX_SUBMITTED": "1700000000", "POLLUX_CHECKPOINT_DIR": "/scratch/a"}
    assert checkpoint_directory("/scratch/b", named) == Path("/scratch/b")
    assert checkpoint_directory(None, named) == Path("/scratch/a/1-1700000000")
    assert checkpoint_directory(None, {"POLLUX_CHECKPOINT_DIR": "/scratch/a"}) == Path("/scratch/a")


def test_a_second_user_of_a_shared_folder_has_an_own_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {**JOB, "SLURM_SUBMIT_DIR": str(tmp_path), "POLLUX_SUBMITTED": "17"}
    first, own = tmp_path / "pollux-checkpoints", tmp_path / f"pollux-checkpoints-{os.getuid()}"
    assert checkpoint_directory(None, job) == first / "1-17"
    first.mkdir()
    assert checkpoint_directory(None, job) == first / "1-17"
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert checkpoint_directory(None, job) == own / "1-17"
    own.mkdir()
    first.rmdir()
    assert checkpoint_directory(None, job) == own / "1-17"


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
