"""Checkpoints and searches in folders that other users can change."""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import time
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contrib.attack.hands import run
from contrib.attack.hands.strangers import Bomb

CHECKPOINT = "checkpoint-00000001"
TRIES = 3000
SECONDS = 8.0
SEARCH = "lr"
JOB = {"SLURM_JOB_ID": "123", "POLLUX_GATEWAY": "https://head:9851", "POLLUX_SUBMITTED": "1795764058"}


def choose(folder: Path) -> str:
    """Return the directory of the checkpoints of alice's job 123, which was submitted in the folder."""
    from pollux.slurm_job.environment import checkpoint_directory  # noqa: PLC0415 - the others need it not

    return str(checkpoint_directory(None, JOB | {"SLURM_SUBMIT_DIR": str(folder)}))


def save(folder: Path, times: int = 1) -> None:
    from pollux.checkpoint.checkpoint_store import CheckpointStore  # noqa: PLC0415 - the attacker needs no torch
    from pollux.errors import CheckpointError  # noqa: PLC0415 - as above

    try:
        store = CheckpointStore(folder)
        for _ in range(times):
            print(f"saved {store.save({'model': {}}, meta={})}", flush=True)
    except CheckpointError as error:
        print(f"refused: {error}", flush=True)


def load(folder: Path) -> str:
    """Load the newest checkpoint again and again; return what became of it."""
    from pollux.checkpoint.checkpoint_store import CheckpointStore  # noqa: PLC0415 - the attacker needs no torch
    from pollux.errors import CheckpointError  # noqa: PLC0415 - as above

    print("ready", flush=True)
    done, loaded, unsafe, refused, end = 0, 0, 0, "", time.monotonic() + SECONDS
    while done < TRIES and time.monotonic() < end:
        done += 1
        try:
            store = CheckpointStore(folder)
            found = store.newest()
            if found is not None:
                store.read(found)
                loaded += 1
        except CheckpointError as error:
            refused = str(error)
            unsafe += "belongs to uid" in refused or "may be written by" in refused
    return f"{done} tries, {loaded} loaded, {unsafe} refused as unsafe; the last: {refused}"


def bomb(folder: Path, mark: str) -> None:
    """Put a pickle that runs code into a checkpoint, whose checksum is right."""
    import torch  # noqa: PLC0415 - the others may need no torch

    from pollux.checkpoint import file  # noqa: PLC0415 - as above

    save(folder)
    content = io.BytesIO()
    torch.save({"model": Bomb(mark)}, content)
    state = folder / CHECKPOINT / "state.pt"
    with state.open("rb") as saved:
        trailer = asdict(file.CheckpointFile(saved, state).trailer)
    data = content.getvalue()
    raw = json.dumps(trailer | {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}).encode()
    state.write_bytes(data + raw + struct.pack("<QI8s", len(raw), zlib.crc32(raw), file.MAGIC))
    for path, mode in ((folder, 0o755), (folder / CHECKPOINT, 0o755), (state, 0o644)):
        path.chmod(mode)


def flip(name: Path, first: Path, second: Path) -> None:
    """Give the name to two folders in turns, until this is ended."""
    print("flips", flush=True)
    while True:
        for folder in (first, second):
            os.rename(folder, name)
            time.sleep(0.0002)
            os.rename(name, folder)


def trial(folder: Path) -> str:
    """Begin a trial as a task of alice's array that was submitted in the folder; return its learning rate."""
    from pollux.integrations import trial as trials  # noqa: PLC0415 - the others need no torch

    os.environ |= {
        "SLURM_ARRAY_JOB_ID": "77",
        "SLURM_ARRAY_TASK_ID": "1",
        "POLLUX_SEARCH": SEARCH,
        "RANK": "0",
    }
    # Slurm would say that there is no such array: it does not answer.
    os.environ |= {"SLURM_JOB_ID": "78", "SLURM_SUBMIT_DIR": str(folder), "SLURM_CONF": "/nowhere"}
    return f"lr = {trials.trial().suggest_float('lr', 1e-4, 1e-1, log=True)}"


def forge(folder: Path, order: dict[str, Any]) -> None:
    """Write a journal whose trials and commands are in the order."""
    from optuna.distributions import FloatDistribution  # noqa: PLC0415 - the others need it not
    from optuna.trial import TrialState, create_trial  # noqa: PLC0415 - as above

    from pollux.search.study import Search, SearchSettings  # noqa: PLC0415 - as above

    search = Search(folder / f"{SEARCH}.journal", SEARCH, SearchSettings(trials=9))
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
    (folder / f"{SEARCH}.journal").chmod(0o666)


def trusts(port: int, login_defs: Path) -> str:
    """Ask who listens on a port, as a client on loopback does."""
    from pollux.scheduler.listener import require_trusted_listener  # noqa: PLC0415 - the others need it not

    try:
        require_trusted_listener("127.0.0.1", port, login_defs=login_defs)
    except OSError as error:
        return f"refused: {error}"
    return "trusted"


if __name__ == "__main__":
    run(choose, save, load, bomb, flip, trial, forge, trusts)
