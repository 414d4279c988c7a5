"""Checkpoints in a folder that another user can change.

python -m contrib.attack.hands.checkpoints WHAT FOLDER [MORE]

    load           as today, load the newest checkpoint of FOLDER again and again, and print what became of it
    load-before    as an earlier version: check the owner by the path, then unpickle
    save           as today, save a checkpoint to FOLDER
    save-before    as an earlier version: write to a temporary file of a fixed name
    sound, bomb    write a checkpoint to FOLDER; a bomb creates the file MORE where it is unpickled
    flip           point the link FOLDER at the two folders in MORE (with a colon between), in turns, until it is ended
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from contrib.attack.hands.strangers import Bomb

NAME = "checkpoint-00000001.pt"
TRIES = 3000
SECONDS = 8.0


def load(folder: Path, *, before: bool) -> None:
    import torch  # noqa: PLC0415 - the attacker needs no torch

    from pollux.checkpoint.checkpoint_store import CheckpointStore  # noqa: PLC0415 - as torch
    from pollux.errors import CheckpointError  # noqa: PLC0415 - as torch

    print("ready", flush=True)
    done, unsafe, refused, end = 0, 0, "", time.monotonic() + SECONDS
    while (before or done < TRIES) and time.monotonic() < end:
        done += 1
        if before:
            with contextlib.suppress(Exception):
                if os.stat(folder / NAME).st_uid == os.geteuid():
                    torch.load(folder / NAME, weights_only=False)
            continue
        try:
            store = CheckpointStore(folder)
            found = store.newest()
            if found is not None:
                store.read(found)
        except CheckpointError as error:
            refused = str(error)
            unsafe += "belongs to uid" in refused or "may be written by" in refused
    print(f"{done} tries, {unsafe} refused as unsafe; the last: {refused}", flush=True)


def save(folder: Path, *, before: bool) -> None:
    if before:
        folder.mkdir(mode=0o700, exist_ok=True)
        temporary = folder / f".{NAME}.tmp"
        temporary.write_bytes(b"the state of alice's training")
        os.replace(temporary, folder / NAME)
        print("saved", flush=True)
        return
    from pollux.checkpoint.checkpoint_store import CheckpointStore  # noqa: PLC0415 - the attacker needs no torch
    from pollux.errors import CheckpointError  # noqa: PLC0415 - as above

    try:
        print(f"saved {CheckpointStore(folder).save({'model': {}}, meta={})}", flush=True)
    except CheckpointError as error:
        print(f"refused: {error}", flush=True)


def archive(folder: Path, content: object) -> None:
    """Write a checkpoint as torch.save does, by its final name."""
    import torch  # noqa: PLC0415 - the others may need no torch

    torch.save(content, folder / NAME)
    (folder / NAME).chmod(0o644)


def flip(link: Path, first: str, second: str) -> None:
    print("flips", flush=True)
    while True:
        for target in (first, second):
            spare = link.with_name(f".{link.name}-{os.getpid()}")
            spare.symlink_to(target)
            os.replace(spare, link)
            time.sleep(0.0002)


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    match what:
        case "load" | "load-before":
            load(folder, before=what == "load-before")
        case "save" | "save-before":
            save(folder, before=what == "save-before")
        case "sound":
            archive(folder, {"model": {}})
        case "bomb":
            archive(folder, Bomb(sys.argv[3]))
        case "flip":
            flip(folder, *sys.argv[3].split(":"))


if __name__ == "__main__":
    main()
