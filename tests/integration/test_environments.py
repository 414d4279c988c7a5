"""`pollux run` in a batch script that sets its environment up.

The environment is a venv, or comes by environment modules.

The script runs again at each attempt, and srun takes its environment to all nodes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster
from polluxd.model import JobState
from polluxd.slurm.protocol import Geometry
from polluxd.slurm.scontrol import ScontrolClient

pytestmark = pytest.mark.slurm

VENV = Path(sys.executable).parents[1]
MODULES = Path("/usr/share/modules/init/bash")  # Debian: environment-modules
TRAIN = """
import os, shutil, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "uses", sys.prefix, shutil.which("pollux"),
      os.environ.get("FROM_MODULE"), flush=True)
time.sleep(600)
"""


def until(true: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + 90
    while not true():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


@pytest.mark.parametrize("kind", ["venv", "modules"])
def test_each_attempt_has_the_environment_on_all_nodes(
    kind: str, dev_cluster: DevCluster, scratch: Path
) -> None:
    folder = scratch / f"environment-{kind}"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    if kind == "venv":
        lines = [f"source {VENV}/bin/activate"]
    else:
        if not MODULES.exists():
            pytest.skip("needs the Debian package environment-modules")
        (folder / "training").write_text(
            f"#%Module1.0\nprepend-path PATH {VENV}/bin\nsetenv FROM_MODULE yes\n"
        )
        lines = [f"source {MODULES}", f"module use {folder}", "module load training"]
    script = folder / "job.sh"
    # The cluster's commands have the venv in their PATH, and sbatch passes it on.
    head = ["#!/bin/bash", "#POLLUX max-gpus=2 resize=requeue", "export PATH=/usr/bin:/bin"]
    script.write_text("\n".join([*head, *lines, f"cd {folder}", "pollux run train.py"]) + "\n")
    words = ("--gres=gpu:1", "--open-mode=append", f"--output={folder}/out")
    slurm = ScontrolClient(conf=dev_cluster.slurm_conf)
    job_id = int(dev_cluster.command("sbatch", "--parsable", *words, str(script)))

    def told() -> str:
        return (folder / "out").read_text() if (folder / "out").exists() else "nothing"

    try:
        for nodes in (("n1",), ("n2", "n3")):
            if slurm.jobs([job_id])[job_id].state is JobState.RUNNING:
                slurm.requeue(job_id)
                until(lambda: slurm.jobs([job_id])[job_id].state is JobState.PENDING, told)
                time.sleep(1.1)  # a start in the second of the requeue fails
            slurm.configure(job_id, Geometry(nodes, 1, 1), start=True)
            mark = "yes" if kind == "modules" else "None"
            lines = [
                f"rank {rank} of {len(nodes)} uses {VENV} {VENV}/bin/pollux {mark}"
                for rank in range(len(nodes))
            ]
            until(lambda lines=lines: all(line in told() for line in lines), told)
    finally:
        dev_cluster.command("scancel", str(job_id))
