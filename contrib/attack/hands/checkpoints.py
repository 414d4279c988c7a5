"""Checkpoints in a folder that another user can change."""

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

from contrib.attack.hands import run
from contrib.attack.hands.strangers import Bomb

NAME = "checkpoint-00000001"
TRIES = 3000
SECONDS = 8.0


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


def save(folder: Path) -> None:
    from pollux.checkpoint.checkpoint_store import CheckpointStore  # noqa: PLC0415 - the attacker needs no torch
    from pollux.errors import CheckpointError  # noqa: PLC0415 - as above

    try:
        print(f"saved {CheckpointStore(folder).save({'model': {}}, meta={})}", flush=True)
    except CheckpointError as error:
        print(f"refused: {error}", flush=True)


def bomb(folder: Path, mark: str) -> None:
    """Put a pickle that runs code into a checkpoint, whose checksum is right."""
    import torch  # noqa: PLC0415 - the others may need no torch

    from pollux.checkpoint import file  # noqa: PLC0415 - as above

    save(folder)
    content = io.BytesIO()
    torch.save({"model": Bomb(mark)}, content)
    state = folder / NAME / "state.pt"
    with state.open("rb") as saved:
        trailer = asdict(file.CheckpointFile(saved, state).trailer)
    data = content.getvalue()
    raw = json.dumps(trailer | {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}).encode()
    state.write_bytes(data + raw + struct.pack("<QI8s", len(raw), zlib.crc32(raw), file.MAGIC))
    for path, mode in ((folder, 0o755), (folder / NAME, 0o755), (state, 0o644)):
        path.chmod(mode)


def flip(name: Path, first: Path, second: Path) -> None:
    """Give the name to two folders in turns, until this is ended."""
    print("flips", flush=True)
    while True:
        for folder in (first, second):
            os.rename(folder, name)
            time.sleep(0.0002)
            os.rename(name, folder)


if __name__ == "__main__":
    run(load, save, bomb, flip)
