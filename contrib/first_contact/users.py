"""Ordinary users of the private cluster, and their trainings."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from contrib.demo.workload import batch_script, load
from contrib.devcluster import DevCluster

ADA, BOB = (pwd.getpwnam(name) for name in ("nobody", "games"))


def home_of(user: pwd.struct_passwd, folder: Path) -> Path:
    """Return the user's own folder below `folder`."""
    home = folder / user.pw_name
    if not home.exists():
        home.mkdir()
        os.chown(home, user.pw_uid, user.pw_gid)
    return home


def as_user(
    user: pwd.struct_passwd, words: Sequence[str], cluster: DevCluster, folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a client command of the cluster as an ordinary user, in a folder of that user."""
    home = home_of(user, folder)
    env = {**cluster.client_environment, "HOME": str(home), "COLUMNS": "200", **variables}
    return subprocess.run(
        list(words), env=env, cwd=home, capture_output=True, text=True, check=False, timeout=600,
        user=user.pw_uid, group=user.pw_gid, extra_groups=[],
    )  # fmt: skip


def train(
    cluster: DevCluster, root: Path, folder: Path, user: pwd.struct_passwd, name: str, least: int = 1
) -> int:
    """Submit a long training of the demo as a user; return its job id."""
    work = load(root / "contrib/demo/workload.toml")
    training = replace(work.trainings[0], name=name, epochs=500, min_gpus=least)
    home = home_of(user, folder)
    script = home / f"{name}.sbatch"
    # One node's GPUs are as many as sbatch takes; polluxd gives min-gpus, over several nodes.
    text = batch_script(training, root=root, folder=home)
    script.write_text(re.sub(r"--gpus-per-node=\d+", "--gpus-per-node=1", text))
    done = as_user(user, ["sbatch", "--parsable", str(script)], cluster, folder)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split(";")[0])


def many(cluster: DevCluster, folder: Path, jobs: int) -> tuple[int, int]:
    """Submit so many held jobs of ada and bob, a job of ada's that is killed, and a plain one; return the last two."""
    for user in (ADA, BOB):
        script = home_of(user, folder) / "held.sh"
        script.write_text("#!/bin/bash\n#POLLUX max-gpus=2\npollux run train.py\n")
        submit = "sbatch --parsable --hold --job-name=held-$n held.sh >/dev/null || exit"
        loop = f"for n in $(seq {jobs // 2}); do {submit}; done"
        done = as_user(user, ["bash", "-c", loop], cluster, folder)
        assert done.returncode == 0, done.stderr
    dies = home_of(ADA, folder) / "dies.sh"
    dies.write_text("#!/bin/bash\n#POLLUX max-gpus=1\n# no `pollux run` is reached\nkill -9 $$\n")
    found = []
    for words in ([str(dies)], ["--hold", "--wrap", "true"]):
        done = as_user(ADA, ["sbatch", "--parsable", *words], cluster, folder)
        assert done.returncode == 0, done.stderr
        found.append(int(done.stdout.split(";")[0]))
    end = time.monotonic() + 300
    show = ("scontrol", "show", "job", str(found[0]))
    while time.monotonic() < end and "JobState=FAILED" not in cluster.command(*show):
        time.sleep(1)
    return found[0], found[1]
