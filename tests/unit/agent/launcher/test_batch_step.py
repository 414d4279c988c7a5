"""`pollux run` in a batch script stays beside srun, and returns how the training ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pollux.errors import LaunchError
from pollux.launcher.batch_step import begin_run, end_run, step_status
from pollux.slurm_job import runs
from pollux.slurm_job.trainings import PROCESS, RUN

JOB = {
    "SLURM_JOB_ID": "7",
    "POLLUX_SUBMITTED": "17",
    "POLLUX_GATEWAY": "https://head:9851",
    "PATH": "/bin:/usr/bin",
}


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    return JOB | {"POLLUX_CHECKPOINT_DIR": str(tmp_path)}


def test_a_kill_that_the_training_survived_is_no_failure(
    job: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """slurmstepd reports an out-of-memory kill at the step's end, and srun returns 1."""
    begun = job | begin_run(["train.py"], None, job)
    end_run(0, begun)  # node 0's launcher
    assert step_status(["sh", "-c", "exit 1"], begun) == 0
    assert "ended well" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 1, 75, 137])
def test_any_other_status_is_the_steps(job: dict[str, str], status: int, tmp_path: Path) -> None:
    begun = job | begin_run(["train.py"], None, job)
    if status == 75:
        end_run(75, begun)
    assert step_status(["sh", "-c", f"exit {status}"], begun) == status
    assert runs.status_of(tmp_path / "7-17", begun[PROCESS]) == status, "noted for the next run"


def test_outside_of_pollux_jobs_the_status_is_sruns() -> None:
    plain = {"PATH": "/bin:/usr/bin", "SLURM_JOB_ID": "7"}
    assert begin_run(["train.py"], None, plain) == {}
    assert begin_run(["train.py"], "a", plain) == {RUN: "a"}
    assert step_status(["sh", "-c", "kill -9 $$"], plain) == 137
    with pytest.raises(LaunchError, match="cannot be started"):
        step_status(["no-such-srun"], plain)


def test_the_ranks_of_a_second_run_know_its_name(
    job: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first = job | begin_run(["train.py", "--seed", "1"], None, job)
    assert step_status(["true"], first) == 0
    assert first[RUN] == ""
    assert begin_run(["train.py", "--seed", "2"], None, job)[RUN] == "2"
    assert f"with checkpoints in {tmp_path / '7-17' / 'run-2'}" in capsys.readouterr().err


BODY = """
import sys
from pollux.launcher.batch_step import step_status
sys.exit(step_status(["sh", "-c", sys.argv[1]], {"PATH": "/bin:/usr/bin"}))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2])
def test_a_signal_reaches_srun(number: signal.Signals, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    name = number.name.removeprefix("SIG")
    script = f"trap 'exit 7' {name}; touch {ready}; while :; do sleep 0.05; done"
    process = subprocess.Popen(
        [sys.executable, "-c", BODY, script],
        env={**os.environ, "PYTHONPATH": str(Path(runs.__file__).parents[2])},
        start_new_session=True,
    )
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, number)
    assert process.wait(60) == 7


def test_srun_ends_with_a_pollux_run_that_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    process = subprocess.Popen(
        [sys.executable, "-c", BODY, f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600"],
        env={**os.environ, "PYTHONPATH": str(Path(runs.__file__).parents[2])},
    )
    while not pid.exists():
        time.sleep(0.02)
    process.kill()
    process.wait(60)
    child = Path(f"/proc/{pid.read_text().strip()}/stat")
    deadline = time.monotonic() + 60
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)
