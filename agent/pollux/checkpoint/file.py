"""One checkpoint file: what torch.save wrote, followed by a trailer that tells whether it is whole and whose it is.

    torch's zip archive | trailer: JSON (meta, length, SHA-256) | length of the JSON, its CRC-32, magic

The trailer comes last, so the archive is hashed while it is written, and a file cut short has none. torch.load
finds the archive in front of it and opens the file as it is. The JSON can be read without torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from pollux.errors import CheckpointError

logger = logging.getLogger("pollux")

MAGIC = b"POLLUXC1"
_TAIL = struct.Struct("<QI8s")
MAX_TRAILER = 1 << 20
CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Trailer:
    """What a checkpoint says of itself. `size` is the archive's, in bytes; `saved_at` a POSIX time."""

    meta: dict[str, Any]
    size: int
    sha256: str
    saved_at: float


class _HashingWriter:
    """A file that hashes what is written, and remembers the first error instead of raising it.

    torch's zip writer turns an exception in a write into an error of its own that hides the cause.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if self.error is None:
            try:
                self._file.write(view)
            except OSError as error:
                self.error = error
            else:
                self.hash.update(view)
                self.size += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        return


def write_checkpoint(file: IO[bytes], state: Mapping[str, Any], meta: Mapping[str, Any]) -> int:
    """Write state and meta, and return the size in bytes. The caller flushes and syncs. Raises OSError.

    `state` is what torch.save takes; `meta` must be JSON. Raises CheckpointError where one of them is not.
    """
    writer = _HashingWriter(file)
    try:
        torch.save(dict(state), writer)  # type: ignore[arg-type]
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the training state holds something that cannot be saved: {error}") from error
    if writer.error is not None:
        raise writer.error
    trailer = {
        "meta": dict(meta),
        "size": writer.size,
        "sha256": writer.hash.hexdigest(),
        "saved_at": time.time(),
    }
    try:
        raw = json.dumps(trailer).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"expected checkpoint meta that JSON can hold: {error}") from error
    if len(raw) > MAX_TRAILER:
        raise CheckpointError(f"checkpoint meta of {len(raw)} bytes is over the limit of {MAX_TRAILER}")
    file.write(raw + _TAIL.pack(len(raw), zlib.crc32(raw), MAGIC))
    return writer.size + len(raw) + _TAIL.size


def read_trailer(path: Path) -> Trailer:
    """Read the trailer alone. Raises CheckpointError where the file is cut short or is no checkpoint."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            if end < _TAIL.size:
                raise CheckpointError(f"{path} is cut short: {end} bytes")
            file.seek(end - _TAIL.size)
            length, crc, magic = _TAIL.unpack(file.read(_TAIL.size))
            if magic != MAGIC or length > min(MAX_TRAILER, end - _TAIL.size):
                raise CheckpointError(f"{path} is cut short, or is not a checkpoint of this agent")
            file.seek(end - _TAIL.size - length)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if zlib.crc32(raw) != crc:
        raise CheckpointError(f"{path} is damaged: its trailer does not match its checksum")
    try:
        found = json.loads(raw)
        trailer = Trailer(
            dict(found["meta"]), int(found["size"]), str(found["sha256"]), float(found["saved_at"])
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has a trailer of another form: {error}") from error
    if trailer.size + length + _TAIL.size != end:
        raise CheckpointError(
            f"{path} is damaged: expected {trailer.size} bytes of state, found {end - length}"
        )
    return trailer


def verify(path: Path) -> Trailer:
    """Read the whole file against its checksum. Raises CheckpointError."""
    trailer = read_trailer(path)
    digest = hashlib.sha256()
    left = trailer.size
    try:
        with path.open("rb") as file:
            while left > 0:
                chunk = file.read(min(CHUNK, left))
                if not chunk:
                    break
                digest.update(chunk)
                left -= len(chunk)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if digest.hexdigest() != trailer.sha256:
        raise CheckpointError(f"{path} is damaged: its state does not match its checksum")
    return trailer


def read_state(path: Path) -> dict[str, Any]:
    """Load the state of a verified file, tensors on CPU. Raises CheckpointError.

    Objects that torch does not deem safe (a user's own classes) are unpickled only where nobody but this user or
    root can have written the file: unpickling runs code.
    """
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            if not own(path):
                raise CheckpointError(
                    f"{path} holds Python objects and others may have written it; give it to yourself alone "
                    f"(chown, chmod go-w) to load it: {error}"
                ) from error
            state = torch.load(path, map_location="cpu", weights_only=False)
    except CheckpointError:
        raise
    except Exception as error:
        # torch.load raises many types on a class that has moved or a module that is gone.
        raise CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a training state")
    return state


def own(path: Path) -> bool:
    """Whether nobody but this user or root can have written the file."""
    return all(
        status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o022
        for status in (path.stat(), path.parent.stat())
    )


def write_durably(path: Path, write: Callable[[IO[bytes]], int], *, mark: str = "") -> int:
    """Let `write` fill a new file that appears under `path` whole or not at all, and lasts. Raises OSError.

    Writers that may come at the same time give their temporary files a `mark` each.

    Temporary file, fsync, rename, fsync of the directory: after a crash at any point the old file, or none, or
    the whole new one is there.
    """
    temporary = path.with_name(f".{path.name}{mark}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            size = write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return size


def sync_directory(directory: Path) -> None:
    """Make names in a directory last. Filesystems that know no fsync of a directory order this themselves."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        logger.debug("%s: fsync of the directory: %s", directory, error)
    finally:
        os.close(descriptor)
