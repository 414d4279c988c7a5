"""Searches and checkpoints in a folder that users share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from contrib.attack.hands import run

NAME = "lr"
JOB = {"SLURM_JOB_ID": "123", "POLLUX_GATEWAY": "https://head:9851", "POLLUX_SUBMITTED": "1795764058"}


def trial(folder: Path) -> str:
    """Begin a trial as a task of alice's array that was submitted in the folder; return its learning rate."""
    from pollux.integrations import trial as trials  # noqa: PLC0415 - the others need no torch

    os.environ |= {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "1", "POLLUX_SEARCH": NAME, "RANK": "0"}
    # Slurm would say that there is no such array: it does not answer.
    os.environ |= {"SLURM_JOB_ID": "78", "SLURM_SUBMIT_DIR": str(folder), "SLURM_CONF": "/nowhere"}
    return f"lr = {trials.trial().suggest_float('lr', 1e-4, 1e-1, log=True)}"


def choose(folder: Path) -> str:
    """Return the directory of the checkpoints of alice's job 123, which was submitted in the folder."""
    from pollux.slurm_job.environment import checkpoint_directory  # noqa: PLC0415 - the others need it not

    return str(checkpoint_directory(None, JOB | {"SLURM_SUBMIT_DIR": str(folder)}))


def save(directory: Path) -> None:
    from pollux.checkpoint.checkpoint_store import CheckpointStore  # noqa: PLC0415 - the others need no torch

    store = CheckpointStore(directory)
    for _ in range(3):
        print(store.save({"model": {}}, meta={}), flush=True)


def forge(folder: Path, order: dict[str, Any]) -> None:
    """Write a journal whose trials and commands are in the order."""
    from optuna.distributions import FloatDistribution  # noqa: PLC0415 - the others need it not
    from optuna.trial import TrialState, create_trial  # noqa: PLC0415 - as above

    from pollux.search.study import Search, SearchSettings  # noqa: PLC0415 - as above

    search = Search(folder / f"{NAME}.journal", NAME, SearchSettings(trials=9))
    for name, value in order.get("study", {}).items():
        search.study.set_user_attr(name, value)
    search.study.add_trial(
        create_trial(
            state=getattr(TrialState, order.get("state", "RUNNING")),
            params={"lr": 1e6},
            distributions={"lr": FloatDistribution(1e-4, 1e9, log=True)},
            user_attrs={"task": "77_1", **order.get("trial", {})},
        )
    )
    (folder / f"{NAME}.journal").chmod(0o666)


def trusts(port: int, login_defs: Path) -> str:
    """Ask who listens on a port, as a client on loopback does."""
    from pollux.scheduler.listener import require_trusted_listener  # noqa: PLC0415 - the others need it not

    try:
        require_trusted_listener("127.0.0.1", port, login_defs=login_defs)
    except OSError as error:
        return f"refused: {error}"
    return "trusted"


if __name__ == "__main__":
    run(trial, choose, save, forge, trusts)
