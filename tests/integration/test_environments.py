"""`pollux run` in a batch script that sets its environment up.

The environment is a venv, or comes by environment modules.

The script runs again at each attempt, and srun takes its environment to all nodes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.slurm_jobs import SlurmJobs

pytestmark = pytest.mark.slurm

VENV = Path(sys.executable).parents[1]
MODULES = Path("/usr/share/modules/init/bash")  # Debian: environment-modules
TRAIN = """
import os, shutil, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "uses", sys.prefix, shutil.which("pollux"),
      os.environ.get("FROM_MODULE"), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["venv", "modules"])
def test_each_attempt_has_the_environment_on_all_nodes(kind: str, jobs: SlurmJobs) -> None:
    folder = jobs.folder
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
    # The cluster's commands have the venv in their PATH, and sbatch passes it on.
    head = ["#!/bin/bash", "#POLLUX max-gpus=2 resize=requeue", "export PATH=/usr/bin:/bin"]
    script = "\n".join([*head, *lines, f"cd {folder}", "pollux run train.py"]) + "\n"
    job_id = jobs.submit(script, "--gres=gpu:1", "--open-mode=append")
    mark = "yes" if kind == "modules" else "None"
    for attempt, nodes in enumerate((("n1",), ("n2", "n3"))):
        if attempt:
            jobs.requeue(job_id)
        jobs.start(job_id, nodes, 1)
        uses = f"of {len(nodes)} uses {VENV} {VENV}/bin/pollux {mark}"
        told = [f"rank {rank} {uses}" for rank in range(len(nodes))]
        jobs.until_output(job_id, lambda text, told=told: all(line in text for line in told))
