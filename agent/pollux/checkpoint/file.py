"""The file of a checkpoint that holds its state: an archive of torch.save, and a trailer that tells whose it is.

    torch's zip archive | trailer: JSON (meta, length, SHA-256) | length of the JSON, its CRC-32, magic

The archive is the training state: one dictionary, which `torch.load(path)["model"]` reads without this agent. It is
loaded with `weights_only`, so that loading runs no code of the file's; `ALLOWED` lists what may stand in it beside what
torch allows itself. The trailer comes last, so that the archive is hashed while it is written, and a file cut short has
no trailer. The JSON can be read without torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import struct
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import torch

from pollux.errors import CheckpointError, StateError
from pollux.ranks.plain_values import encode

ALLOWED: list[Any] = [
    frozenset,
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDG"},
    *(np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]),  # numpy's own functions that rebuild both
]
"""Types in a checkpoint beside those of torch: numpy's numbers and arrays, and frozenset. None of them runs code. Each
can also pass between ranks (`pollux.ranks.plain_values`)."""

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

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Raises ValueError."""
        try:
            match json.loads(text):
                case {
                    "meta": dict(meta),
                    "size": int(size),
                    "sha256": str(sha256),
                    "saved_at": int() | float() as at,
                } if type(size) is int and size >= 0 and math.isfinite(at):
                    return cls(meta, size, sha256, float(at))
        except (RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from error
        raise ValueError("expected an object with meta, size, sha256 and saved_at")


class CheckpointFile:
    """A checkpoint file that is open for reading. Whoever opened it closes it."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        """Read the trailer. Messages name `path`. Raises CheckpointError and OSError."""
        self._file, self.path = file, path
        self.trailer = self._read_trailer()

    def verify(self) -> None:
        """Read the whole file against its checksum. Raises CheckpointError and OSError."""
        self._file.seek(0)
        if digest_of(self._file, self.trailer.size) != self.trailer.sha256:
            raise CheckpointError(f"{self.path} is damaged: its state does not match its checksum")

    def state(self) -> dict[str, Any]:
        """Load the state, tensors on CPU. Raises CheckpointError."""
        try:
            self._file.seek(0)
            torch.serialization.add_safe_globals(ALLOWED)
            state = torch.load(self._file, map_location="cpu", weights_only=True)
        except Exception as error:
            # torch.load raises many types on a damaged archive.
            raise CheckpointError(f"{self.path} cannot be loaded: {type(error).__name__}: {error}") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{self.path} holds a {type(state).__name__}, not a training state")
        return state

    def _read_trailer(self) -> Trailer:
        file = self._file
        end = file.seek(0, os.SEEK_END)
        if end < _TAIL.size:
            raise CheckpointError(f"{self.path} is cut short: {end} bytes")
        file.seek(end - _TAIL.size)
        length, crc, magic = _TAIL.unpack(file.read(_TAIL.size))
        if magic != MAGIC or length > min(MAX_TRAILER, end - _TAIL.size):
            raise CheckpointError(f"{self.path} is cut short, or is not a checkpoint of this agent")
        file.seek(end - _TAIL.size - length)
        raw = file.read(length)
        if zlib.crc32(raw) != crc:
            raise CheckpointError(f"{self.path} is damaged: its trailer does not match its checksum")
        try:
            trailer = Trailer.parse(raw)
        except ValueError as error:
            raise CheckpointError(f"{self.path} has a trailer of another form: {error}") from error
        held = end - length - _TAIL.size
        if trailer.size != held:
            raise CheckpointError(
                f"{self.path} is damaged: expected {trailer.size} bytes of state, found {held}"
            )
        return trailer


def check_state(state: Any, place: str = "state") -> None:
    """Raise StateError where `state` cannot be in a checkpoint. `place` is its name in the message."""
    encode(state, lambda _: None, place)


def write_checkpoint(file: IO[bytes], state: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Write state and meta. The caller flushes and syncs. Raises OSError.

    `state` holds what `pollux.ranks.plain_values` can encode; `meta` must be JSON. Raises CheckpointError otherwise.
    """
    writer = HashingWriter(file)
    try:
        check_state(dict(state))
        torch.save(dict(state), writer)  # type: ignore[arg-type]
    except (StateError, pickle.PicklingError, TypeError, AttributeError) as error:
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


def digest_of(file: IO[bytes], size: int) -> str:
    """The SHA-256 of the next `size` bytes, or of as many as there are."""
    digest = hashlib.sha256()
    while size > 0 and (chunk := file.read(min(CHUNK, size))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()


class HashingWriter:
    """A file that hashes what is written, and remembers its first error.

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
