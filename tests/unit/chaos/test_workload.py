"""The chaos run submits each job once, even if sbatch's answer is lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from contrib.chaos.workload import Training, submit

ONE = Training("counted01", 0.0, 20)


@pytest.fixture
def slurm(tmp_path: Path) -> Mapping[str, str]:
    """Return an environment whose sbatch and squeue fail on demand.

    While a file `deaf` exists, sbatch submits the job and then fails. While a file `down` exists, squeue
    fails.
    """
    commands = {
        "sbatch": f"echo 41 >> {tmp_path}/queue\n[ ! -e {tmp_path}/deaf ] && echo '41;dev'",
        "squeue": f"[ ! -e {tmp_path}/down ] || exit 1\n[ ! -e {tmp_path}/queue ] || cat {tmp_path}/queue",
    }
    for name, body in commands.items():
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\n{body}\n")
        command.chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


def test_a_job_is_submitted_and_known_by_its_number(slurm: Mapping[str, str], tmp_path: Path) -> None:
    assert submit(ONE, tmp_path, slurm) == 41
    assert (tmp_path / "queue").read_text() == "41\n"


def test_a_submission_whose_answer_was_lost_is_not_made_again(
    slurm: Mapping[str, str], tmp_path: Path
) -> None:
    (tmp_path / "deaf").touch()
    assert submit(ONE, tmp_path, slurm) is None
    assert submit(ONE, tmp_path, slurm) == 41
    assert (tmp_path / "queue").read_text() == "41\n"


def test_nothing_is_submitted_while_slurm_does_not_say_what_it_has(
    slurm: Mapping[str, str], tmp_path: Path
) -> None:
    (tmp_path / "down").touch()
    assert submit(ONE, tmp_path, slurm) is None
    assert not (tmp_path / "queue").exists()
