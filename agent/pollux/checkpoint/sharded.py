"""Checkpoints of a sharded training: a directory each, written by all ranks, read by any number of them.

    checkpoint-00000007.shards/
        __0_0.distcp ...   each rank's shards, and .metadata: torch.distributed.checkpoint's own form
        state.pt           the rest, in the form of checkpoint_file; its trailer lists the other files and their SHA-256

Everything is written into a temporary directory, which is renamed once all of it lasts: a directory under its own
name is whole, and a rank that is killed half-way leaves the checkpoint before as it was. Unlike rename, a disk can
lie: the checksums are read before a checkpoint is used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pollux.checkpoint.file import (
    CHUNK,
    own,
    read_state,
    read_trailer,
    sync_directory,
    verify,
    write_checkpoint,
    write_durably,
)
from pollux.checkpoint.store import SavedCheckpoint
from pollux.errors import CheckpointError, ForeignCheckpoint

logger = logging.getLogger("pollux")

_NAME = re.compile(r"checkpoint-(\d{8,})\.shards")
_STATE = "state.pt"


class ShardedStore:
    """The sharded checkpoints in `directory`, of which the newest `keep` stay.

    `group` is a process group of all ranks that nothing else uses meanwhile; None with one rank. Every method but
    `paths` is called by all ranks alike, and raises on all of them what one of them met.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        group: dist.ProcessGroup | None,
        keep: int = 2,
        fingerprint: str = "",
    ) -> None:
        self.directory = Path(directory)
        self.keep = keep
        self.fingerprint = fingerprint
        self._group = group
        self._rank = dist.get_rank(group) if group is not None else 0
        self._size = dist.get_world_size(group) if group is not None else 1

    def paths(self) -> list[Path]:
        """All checkpoints, oldest first, intact or not."""
        try:
            found = [(int(m[1]), p) for p in self.directory.iterdir() if (m := _NAME.fullmatch(p.name))]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint directory {self.directory} cannot be read: {error}"
            ) from error
        return [path for _, path in sorted(found)]

    # -- writing ----------------------------------------------------------------------------------------------

    def save(
        self, shards: Mapping[str, Tensor], state: Mapping[str, Any], *, meta: Mapping[str, Any]
    ) -> SavedCheckpoint:
        """Write every rank's `shards` and rank 0's `state`; durable on return, those beyond `keep` dropped.

        Raises CheckpointError; the checkpoints before stand.
        """
        begun = time.monotonic()
        name = self._together(self._begin)[0]
        path = self.directory / str(name)
        temporary = path.with_name(f".{path.name}.tmp")
        digests = self._together(lambda: self._write_shards(temporary, shards))
        files = {name: digest for part in digests for name, digest in part.items()}
        marked = {**meta, "fingerprint": self.fingerprint, "shards": files}
        sizes = self._together(lambda: self._publish(temporary, path, state, marked))
        return SavedCheckpoint(path, time.monotonic() - begun, int(sizes[0]))

    def _begin(self) -> str:
        """On rank 0: the new checkpoint's name, its temporary directory empty."""
        if self._rank:
            return ""
        if not self.directory.is_dir():
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_directory(self.directory.parent)
        for left in self.directory.glob(".checkpoint-*.shards.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        before = self.paths()
        number = int(_NAME.fullmatch(before[-1].name)[1]) + 1 if before else 1  # type: ignore[index]
        name = f"checkpoint-{number:08d}.shards"
        (self.directory / f".{name}.tmp").mkdir(mode=0o700)
        return name

    def _write_shards(self, temporary: Path, shards: Mapping[str, Tensor]) -> dict[str, list[Any]]:
        """This rank's files, each [size in bytes, SHA-256]."""
        writer = FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True, thread_count=1)
        save(dict(shards), storage_writer=writer, process_group=self._group, no_dist=self._group is None)
        mine = list(temporary.glob(f"__{self._rank}_*.distcp"))
        if self._rank == 0:
            mine.append(temporary / ".metadata")
        return {path.name: [path.stat().st_size, _digest(path)] for path in mine}

    def _publish(self, temporary: Path, path: Path, state: Mapping[str, Any], meta: Mapping[str, Any]) -> int:
        """On rank 0: the rest of the state and the list of files; then the directory takes its name."""
        if self._rank:
            return 0
        size = write_durably(temporary / _STATE, lambda file: write_checkpoint(file, state, meta))
        temporary.rename(path)
        sync_directory(self.directory)
        for old in self.paths()[: -self.keep]:
            # Renamed first: what is half removed must not look like a checkpoint.
            away = old.with_name(f".{old.name}.tmp")
            with contextlib.suppress(OSError):
                old.rename(away)
                shutil.rmtree(away, ignore_errors=True)
        return size + sum(int(length) for length, _ in meta["shards"].values())

    def _together(self, body: Callable[[], Any]) -> list[Any]:
        """Every rank's result. Raises CheckpointError on all ranks where one of them failed."""
        result, trouble = None, None
        try:
            result = body()
        except (Exception, CheckpointException) as error:  # the others must hear of it, not wait
            trouble = self._explain(error)
        answers = self._gather((result, trouble))
        troubles = [f"rank {rank}: {said}" for rank, (_, said) in enumerate(answers) if said]
        if troubles:
            raise CheckpointError(
                f"no checkpoint could be written to {self.directory}; earlier ones stand. {troubles[0]}"
            )
        return [answer for answer, _ in answers]

    def _explain(self, error: BaseException) -> str:
        failures = getattr(error, "failures", None)  # torch's own gathers those of all ranks
        if failures:
            error = next(iter(failures.values()))[0]
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left: free some, or set POLLUX_CHECKPOINT_DIR to a larger filesystem ({error})"
        return f"{type(error).__name__}: {error}"

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise CheckpointError(f"a rank left while a checkpoint was written or read: {error}") from error
        return values

    # -- reading ----------------------------------------------------------------------------------------------

    def newest(self) -> Path | None:
        """The newest intact checkpoint, the same on every rank; None where there is none at all.

        Each rank reads its share of the files against their checksums. Damaged checkpoints are passed over with a
        warning. Raises ForeignCheckpoint, and CheckpointError where all are damaged.
        """
        names = self._gather([path.name for path in self.paths()] if self._rank == 0 else [])[0]
        damaged: list[str] = []
        for name in reversed(names):
            troubles = [found for found in self._gather(self._trouble(self.directory / name)) if found]
            for error in troubles:
                if isinstance(error, ForeignCheckpoint):
                    raise error
            if not troubles:
                return self.directory / str(name)
            damaged.append(str(troubles[0]))
            if self._rank == 0:
                logger.warning("checkpoint passed over, using the one before it: %s", troubles[0])
        if damaged:
            raise CheckpointError(
                f"none of the {len(names)} checkpoint(s) in {self.directory} is intact; to start the training "
                f"afresh, move them away. {'; '.join(damaged)}"
            )
        return None

    def _trouble(self, path: Path) -> CheckpointError | None:
        """What is wrong with this rank's share of a checkpoint."""
        try:
            trailer = (verify if self._rank == 0 else read_trailer)(path / _STATE)
            theirs = trailer.meta.get("fingerprint", "")
            if self.fingerprint and theirs and theirs != self.fingerprint:
                return ForeignCheckpoint(
                    f"{path} belongs to another training: expected a model of {self.fingerprint}, found {theirs}; "
                    "use another checkpoint directory, or move it away"
                )
            for number, (name, (size, digest)) in enumerate(sorted(trailer.meta["shards"].items())):
                if number % self._size != self._rank:
                    continue
                file = path / name
                if file.stat().st_size != size or _digest(file) != digest:
                    return CheckpointError(f"{file} is damaged: it does not match its checksum")
        except CheckpointError as error:
            return error
        except (OSError, KeyError, TypeError, ValueError) as error:
            return CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}")
        return None

    def read_rest(self, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Rank 0's `state`, on every rank, and the meta."""
        return read_state(path / _STATE), read_trailer(path / _STATE).meta

    def read_shards(self, path: Path, into: dict[str, Tensor]) -> None:
        """Fill DTensors of any sharding from a checkpoint that `newest` has found. Raises CheckpointError."""
        if not own(path / ".metadata"):
            raise CheckpointError(
                f"{path} holds Python objects and others may have written it; give it to yourself alone "
                "(chown, chmod go-w) to load it"
            )
        try:
            load(
                into,
                storage_reader=FileSystemReader(path),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except (Exception, CheckpointException) as error:
            # torch raises many types, among them one, not an Exception, that gathers all ranks' errors.
            raise CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
