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
def sbatch(plugin: Path, dev_cluster: DevCluster, scratch: Path) -> Iterator[Sbatch]:
    """Submit a script that holds `head`; the jobs end with the test."""
    submitted: list[str] = []
    script = scratch / "spank.sh"

    def submit(head: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        script.write_text(f"#!/bin/bash\n#SBATCH --gres=gpu:1\n{head}\nsleep 60\n")
        done = subprocess.run(
            ["sbatch", "--parsable", "--chdir=/tmp", f"--output={scratch}/spank.out", *options, str(script)],
            env={**dev_cluster.client_environment, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            submitted.append(done.stdout.strip())
        return done

    yield submit
    if submitted:
        dev_cluster.command("scancel", *submitted)


def admin_comment(cluster: DevCluster, job: str) -> str:
    shown = cluster.command("scontrol", "show", "job", "-o", job)
    return shown.partition("AdminComment=")[2].partition("  ")[0]


def test_sbatch_lists_the_option(plugin: Path, dev_cluster: DevCluster) -> None:
    assert "--pollux=" in dev_cluster.command("sbatch", "--help")


def test_the_option_opts_in_and_the_command_line_wins_over_the_script(
    sbatch: Sbatch, dev_cluster: DevCluster
) -> None:
    done = sbatch("#SBATCH --pollux=min-gpus=2", "--pollux=min-gpus=3 max-gpus=4")
    assert done.returncode == 0, done.stderr
    assert "pollux:v1 min-gpus=3 max-gpus=4 " in admin_comment(dev_cluster, done.stdout.strip())
    assert "open-mode" not in done.stderr  # the filter has set --open-mode=append

    again = sbatch("#SBATCH --pollux=min-gpus=2")
    assert "pollux:v1 min-gpus=2 " in admin_comment(dev_cluster, again.stdout.strip())


def test_the_environment_opts_in(sbatch: Sbatch, dev_cluster: DevCluster) -> None:
    done = sbatch("", SBATCH_POLLUX="max-gpus=2")
    assert done.returncode == 0, done.stderr
    assert "max-gpus=2 " in admin_comment(dev_cluster, done.stdout.strip())


def test_a_job_without_the_option_stays_plain(sbatch: Sbatch, dev_cluster: DevCluster) -> None:
    done = sbatch("")
    assert "pollux:v1" not in admin_comment(dev_cluster, done.stdout.strip())


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


def test_steps_know_the_option(sbatch: Sbatch, dev_cluster: DevCluster) -> None:
    """The plugin registers its option in slurmstepd too.

    slurmstepd refuses a step with an option that it does not know.
    """
    done = subprocess.run(
        ["srun", "--quiet", "-n1", "--pollux=yes", "true"],
        env={**dev_cluster.client_environment, "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
