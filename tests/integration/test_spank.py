"""The SPANK plugin on a real Slurm: `sbatch --pollux` as users write it.

The tests check the job that slurmctld makes of the option.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster
from tests.integration.slurm_jobs import SlurmJobs

pytestmark = pytest.mark.slurm

SOURCE = Path(__file__).parents[2] / "slurm_hooks" / "spank"

Sbatch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def plugin(dev_cluster: DevCluster) -> Iterator[Path]:
    """Build the plugin against this machine's Slurm and configure it.

    The cluster's plugstack.conf names the plugin.
    """
    etc = dev_cluster.slurm_conf.parent
    built = subprocess.run(
        ["make", "-s", "-C", str(SOURCE), "install", f"DESTDIR={etc}", "PLUGIN_DIR="],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    configuration = etc / "plugstack.conf"
    configuration.write_text(f"required {etc}/spank_pollux.so\n")
    yield etc / "spank_pollux.so"
    configuration.unlink()


@pytest.fixture
def sbatch(plugin: Path, jobs: SlurmJobs) -> Sbatch:
    """Submit a script that holds `head`."""

    def submit(head: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        script = f"#!/bin/bash\n#SBATCH --gres=gpu:1\n{head}\nsleep 60\n"
        return jobs.sbatch(script, *options, **environment)

    return submit


def test_sbatch_lists_the_option(plugin: Path, dev_cluster: DevCluster) -> None:
    assert "--pollux=" in dev_cluster.command("sbatch", "--help")


def test_the_option_opts_in_and_the_command_line_wins_over_the_script(
    sbatch: Sbatch, jobs: SlurmJobs
) -> None:
    done = sbatch("#SBATCH --pollux=min-gpus=2", "--pollux=min-gpus=3 max-gpus=4")
    assert done.returncode == 0, done.stderr
    assert "pollux:v1 min-gpus=3 max-gpus=4 " in jobs.job(jobs.ids[-1]).admin_comment
    assert "open-mode" not in done.stderr  # the filter has set --open-mode=append

    sbatch("#SBATCH --pollux=min-gpus=2")
    assert "pollux:v1 min-gpus=2 " in jobs.job(jobs.ids[-1]).admin_comment


def test_the_environment_opts_in(sbatch: Sbatch, jobs: SlurmJobs) -> None:
    done = sbatch("", SBATCH_POLLUX="max-gpus=2")
    assert done.returncode == 0, done.stderr
    assert "max-gpus=2 " in jobs.job(jobs.ids[-1]).admin_comment


def test_a_job_without_the_option_stays_plain(sbatch: Sbatch, jobs: SlurmJobs) -> None:
    sbatch("")
    assert "pollux:v1" not in jobs.job(jobs.ids[-1]).admin_comment


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("min-gpu=2", "--pollux: unknown key 'min-gpu'"),
        ("min-gpus=\x1b[31m2", "--pollux: expected printable ASCII characters, got byte 0x1b at position 10"),
        ("min-gpus=1 " * 100, "--pollux: expected at most 1024 characters, got 1100"),
    ],
)
def test_a_wrong_option_stops_sbatch_and_says_why(sbatch: Sbatch, text: str, said: str) -> None:
    done = sbatch("", f"--pollux={text}")
    assert done.returncode != 0
    assert said in done.stderr


def test_steps_know_the_option(sbatch: Sbatch, jobs: SlurmJobs) -> None:
    """The plugin registers its option in slurmstepd too.

    slurmstepd refuses a step with an option that it does not know.
    """
    done = jobs.run("srun", "--quiet", "-n1", "--pollux=yes", "true", HOME=os.environ.get("HOME", "/"))
    assert (done.returncode, done.stderr) == (0, "")
