"""Ordinary mistakes, and the words that each has to bring."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from contrib.devcluster import DevCluster

from .blocks import Environment
from .users import ADA, as_user

BIN = Path(sys.executable).parent

_BEFORE = """import pollux, torch
data = torch.utils.data.TensorDataset(torch.randn(512, 4), torch.randn(512, 1))
model, other = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
loss_fn = torch.nn.functional.mse_loss
"""
_OPEN = "pollux.attach(model, optimizer).loader(data, "
_JOB = """job = pollux.attach(model, optimizer, scheduler)
loader = job.loader(data, batch_size=32, max_batch_size=256)
"""
_LOOP = "for epoch in job.epochs(2):\n    for x, y in loader:\n        "
_COUNTED = "for epoch in job.epochs(20):\n    seen = 0\n    for x, y in loader:\n        "
_OWN = "optimizer.zero_grad(); loss_fn(job.model(x), y).backward(); optimizer.step(); scheduler.step()\n"
_STEP = "job.step(lambda: loss_fn(job.model(x), y))\n"

OF_SCRIPTS: dict[str, tuple[str, str]] = {
    "attach(optimizer, model)": ("pollux.attach(optimizer, model)", "expected a torch.nn.Module as"),
    "attach twice": (f"{_JOB}pollux.attach(model, optimizer)", "was attached before"),
    "an optimizer of another model": (
        f"optimizer = torch.optim.SGD(other.parameters(), lr=0.01); scheduler = None\n{_JOB}{_LOOP}{_STEP}",
        "in no optimizer that the agent knows",
    ),
    "per_gpu=64": (f"{_OPEN}batch_size=32, per_gpu=64)", r"expected per_gpu=\(least, most\)"),
    "batch_size='32'": (f"{_OPEN}batch_size='32')", "expected batch_size as a whole number"),
    "job.step(loss)": (f"{_JOB}{_LOOP}job.step(loss_fn(model(x), y))\n", r"expected job.step\(lambda"),
    "scheduler.step() too": (f"{_JOB}{_LOOP}{_STEP}        scheduler.step()\n", "was called 2 times"),
    "range() for job.epochs": (
        f"{_JOB}for epoch in range(2):\n    for x, y in loader:\n        {_STEP}",
        "not one over job.epochs",
    ),
    "loss.backward() for job.step": (f"{_JOB}{_LOOP}{_OWN}", "makes its backward passes itself"),
    "the same, 2 ranks": (
        f"{_JOB}{_COUNTED}{_OWN}        seen += 2 * len(x)\n"
        "        assert 2 * len(x) == job.batch_size or seen == len(data), (len(x), job.batch_size)\n"
        "print('every batch size was true, up to', job.batch_size)",
        r"makes its backward passes itself.*every batch size was true, up to (?!32\D)\d+",
    ),
    "model(x), 2 ranks": (f"{_JOB}{_LOOP}job.step(lambda: loss_fn(model(x), y))\n", "job.model"),
    "max_batch_size below batch_size": (f"{_OPEN}batch_size=32, max_batch_size=8)", "is below the initial"),
    "a DataLoader": (
        "pollux.attach(model, optimizer).loader(torch.utils.data.DataLoader(data, 32), batch_size=32)",
        "expected a dataset, got a DataLoader",
    ),
}

OF_DIRECTIVES = {
    "#POLLUX min_gpus=1": "did you mean min-gpus",
    "#POLLUX max-gpu=4": "did you mean max-gpus",
    "#POLLUX --min-gpus=1": "did you mean min-gpus",
    "#POLLUX min-gpus = 2": "without spaces around the =",
    "#POLLUX min-gpus=1,max-gpus=16": "separate directives by spaces",
    "#POLUX max-gpus=4": "line 2 has no effect; did you mean",
    "#SBATCH --gres=gpu:4\n#POLLUX max-gpus=1": "max-gpus=1 is below the 4 GPUs",
    "#POLLUX min-gpus=8 max-gpus=4": "min-gpus=8 is above max-gpus=4",
    "#POLLUX max-gpus=four": "allowed: a whole number",
    "#POLLUX adaptive=false": "allowed: yes or no",
    "#POLLUX min-gpus=64": "above the 16 GPUs of this cluster",
    "# POLLUX max-gpus=4": "line 2 has no effect; did you mean",
    "#pollux max-gpus=4": "line 2 has no effect; did you mean",
    "#POLLUX max-gpus=4\n#SBATCH --no-requeue": "leave the option out",
    "#POLLUX max-gpus=4\n#SBATCH --gpus-per-task=1": "--gpus-per-task",
    "echo hello\n#POLLUX max-gpus=4": "comes after the first command",
}

OF_COMMANDS = {
    "polluxctl expalin 7": "did you mean 'explain'",
    "polluxctl explain": "Missing argument 'JOB'",
    "polluxctl explain abc": "expected a job id",
    "polluxctl explain 999999": "is not known to polluxd",
    "polluxctl pin 4x": "expected a job id",
    "polluxctl top 4": "polluxctl explain 4 --watch",
    "polluxctl jobs --sort gpus": "No such option: --sort",
    "polluxctl settings set --kapa 3": "--kappa",
    "polluxctl settings set --kappa banana": "expected a number from 0 to 1000",
    "polluxctl settings set --account-weight vision": "expected NAME=WEIGHT",
    "polluxctl tune start nofile.sh --trials 3 --metric accuracy --max": "'nofile.sh' does not exist",
    "polluxctl simulate nofile.csv": "check the path",
    "polluxctl simulate /etc/hostname": "the header must name",
    "polluxctl simulate --generate 10 --policy polux": "no such policy; there are",
    "polluxctl --versoin": "--version",
    "polluxctl --version": "polluxctl [0-9]",
    "polluxd --version": "polluxd [0-9]",
    "pollux --version": "pollux [0-9]",
    "pollux run": "expected a SCRIPT to run",
    "SLURM_CONF=/proc/nowhere/slurm.conf polluxctl jobs": "no Slurm answers here",
    f"PATH=/proc/nowhere {BIN}/polluxctl usage 1": "no Slurm answers here",
    "POLLUX_GATEWAY=http://127.0.0.1:1 polluxctl jobs": "polluxd's gateway does not answer",
}


def _row(mistake: str, said: str, expected: str) -> dict[str, Any]:
    flat = " ".join(said.split())
    found = re.search(expected, flat)
    message = flat[max(found.start() - 60, 0) : found.end() + 160] if found else flat[-300:]
    return {"mistake": mistake, "message": message, "ok": found is not None}


def agent_rows(fresh: Environment, folder: Path) -> list[dict[str, Any]]:
    """Make the mistakes of scripts."""
    rows = []
    for number, (mistake, (body, expected)) in enumerate(OF_SCRIPTS.items()):
        place = folder / f"mistake-{number}"
        place.mkdir()
        (place / "train.py").write_text(_BEFORE + body)
        done = fresh.run(place, "train.py", ranks=2 if "2 ranks" in mistake else 1)
        rows.append(_row(mistake, done.stdout, expected))
    missing = fresh.run(folder, "-m", "pollux.launcher.launch", "run", "trian.py")
    return [*rows, _row("pollux run trian.py", missing.stdout, "trian.py")]


def directive_rows(cluster: DevCluster, folder: Path) -> list[dict[str, Any]]:
    """Submit each directive by real sbatch."""
    rows = []
    for line, expected in OF_DIRECTIVES.items():
        script = folder / "wrong.sh"
        script.write_text(f"#!/bin/bash\n{line}\ntrue\n")
        done = as_user(ADA, ["sbatch", "--hold", str(script)], cluster, folder)
        rows.append(_row(line, done.stderr, expected))
    as_user(ADA, ["scancel", "-u", ADA.pw_name], cluster, folder)
    return rows


def command_rows(cluster: DevCluster) -> list[dict[str, Any]]:
    """Type commands wrongly, and where there is no Slurm."""
    env = {**cluster.client_environment, "POLLUX_GATEWAY": cluster.gateways.addresses[0]}
    rows = []
    for typed, expected in OF_COMMANDS.items():
        done = subprocess.run(
            ["/usr/bin/env", *typed.split()], env=env, capture_output=True, text=True, check=False, cwd="/",
            user=ADA.pw_uid, group=ADA.pw_gid, extra_groups=[], timeout=60,
        )  # fmt: skip
        rows.append(_row(typed, done.stdout + done.stderr, expected))
    return rows
