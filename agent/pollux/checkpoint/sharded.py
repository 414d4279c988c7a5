"""Checkpoints of a sharded training.

A directory each, written by all ranks, read by any number of them.

    checkpoint-00000007.shards/
        __0_0.distcp ...   each rank's shards
        index-0.json ...   what each rank's file holds (see `shard_files`)
        state.pt           the rest, in the form of `pollux.checkpoint.file`; its trailer lists the other files with
                           their sizes and SHA-256

All files are written into a temporary directory, which is renamed once all of them last. A directory under its own
name is therefore whole, and a rank that is killed half-way leaves the checkpoint before as it was. The checksums are
read before a checkpoint is used, because a disk can lie.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from pollux.checkpoint.checkpoint_store import SavedCheckpoint
from pollux.checkpoint.file import CheckpointFile, digest_of, write_checkpoint
from pollux.checkpoint.names import CheckpointNames
from pollux.checkpoint.shard_files import MAX_INDEX, Chunk, parse_index, read_shards, write_shards
from pollux.errors import CheckpointError, ForeignCheckpoint, RankLost
from pollux.private_folder import PrivateFolder
from pollux.ranks.gathering import gather_values

logger = logging.getLogger("pollux")

_NAMES = CheckpointNames("shards")
_STATE = "state.pt"
_INDEX = re.compile(r"index-\d+\.json")


class ShardedStore:
    """The sharded checkpoints in `directory`, the newest `keep` of them.

    `group` is a process group of all ranks that nothing else uses at the same time; None with one rank. All ranks call
    every method except `paths` alike, and each raises on all of them what one of them met.
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
        self.change_group(group)

    def change_group(self, group: dist.ProcessGroup | None) -> None:
        """Go on among the ranks of another group."""
        self._group = group
        self._rank = dist.get_rank(group) if group is not None else 0
        self._size = dist.get_world_size(group) if group is not None else 1

    def paths(self) -> list[Path]:
        """All checkpoints, oldest first, intact or not."""
        return _NAMES.paths(self.directory)

    # -- writing ----------------------------------------------------------------------------------------------

    def save(
        self, shards: Mapping[str, Tensor], state: Mapping[str, Any], *, meta: Mapping[str, Any]
    ) -> SavedCheckpoint:
        """Write every rank's `shards` and rank 0's `state`.

        Durable on return, those beyond `keep` dropped.

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
        with PrivateFolder.make(self.directory) as folder:
            for left in _NAMES.temporary(folder):
                shutil.rmtree(left, ignore_errors=True, dir_fd=folder.descriptor)
            name = _NAMES.next(folder)
            folder.make_folder(f".{name}.tmp")
        return name

    def _write_shards(self, temporary: Path, shards: Mapping[str, Tensor]) -> dict[str, list[Any]]:
        """This rank's files, each [size in bytes, SHA-256]."""
        with PrivateFolder(temporary) as folder:
            index = write_shards(folder.reached, self._rank, shards)
            folder.write(f"index-{self._rank}.json", lambda file: file.write(index))
            mine = re.compile(rf"__{self._rank}_\d+\.distcp|index-{self._rank}\.json")
            return {name: list(_facts(folder, name)) for name in filter(mine.fullmatch, folder.names())}

    def _publish(self, temporary: Path, path: Path, state: Mapping[str, Any], meta: Mapping[str, Any]) -> int:
        """On rank 0: the rest of the state and the list of files.

        Then the directory takes its name.
        """
        if self._rank:
            return 0
        with PrivateFolder(temporary) as folder:
            size = folder.write(_STATE, lambda file: write_checkpoint(file, state, meta))
        with PrivateFolder(self.directory) as folder:
            folder.rename(temporary.name, path.name)
            folder.sync()
            for old in _NAMES.complete(folder)[: -self.keep]:
                # Renamed first: what is half removed must not look like a checkpoint.
                with contextlib.suppress(OSError):
                    folder.rename(old, f".{old}.tmp")
                    shutil.rmtree(f".{old}.tmp", ignore_errors=True, dir_fd=folder.descriptor)
        return size + sum(int(length) for length, _ in meta["shards"].values())

    def _together(self, body: Callable[[], Any]) -> list[Any]:
        """Every rank's result.

        Raises CheckpointError on all ranks where one of them failed.
        """
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
        try:
            return gather_values(value, self._group)
        except (RankLost, RuntimeError) as error:
            raise CheckpointError(f"a rank left while a checkpoint was written or read: {error}") from error

    # -- reading ----------------------------------------------------------------------------------------------

    def newest(self) -> Path | None:
        """The newest intact checkpoint, the same on every rank.

        None where there is none at all.

        Each rank reads its share of the files against their checksums. Damaged checkpoints are passed over with a
        warning. Raises ForeignCheckpoint, and CheckpointError where all are damaged.
        """
        names, why = self._gather(self._names() if self._rank == 0 else ([], None))[0]
        if why is not None:
            raise CheckpointError(why)
        damaged: list[str] = []
        for name in reversed(names):
            troubles = [found for found in self._gather(self._trouble(self.directory / name)) if found]
            for what, foreign in troubles:
                if foreign:
                    raise ForeignCheckpoint(what)
            if not troubles:
                return self.directory / str(name)
            damaged.append(troubles[0][0])
            if self._rank == 0:
                logger.warning("checkpoint passed over, using the one before it: %s", troubles[0][0])
        if damaged:
            raise CheckpointError(
                f"none of the {len(names)} checkpoint(s) in {self.directory} is intact; to start the training "
                f"afresh, move them away. {'; '.join(damaged)}"
            )
        return None

    def _names(self) -> tuple[list[str], str | None]:
        """Names of all checkpoints, or why they cannot be listed."""
        try:
            return [path.name for path in self.paths()], None
        except CheckpointError as error:
            return [], str(error)

    def _trouble(self, path: Path) -> tuple[str, bool] | None:
        """Say what is wrong with this rank's share of a checkpoint.

        The second value tells whether it is another training's.
        """
        try:
            with PrivateFolder(path) as folder, CheckpointFile(folder, _STATE) as file:
                if self._rank == 0:
                    file.verify()
                theirs = file.trailer.meta.get("fingerprint", "")
                if self.fingerprint and theirs and theirs != self.fingerprint:
                    return (
                        f"{path} belongs to another training: expected a model of {self.fingerprint}, found {theirs}; "
                        "use another checkpoint directory, or move it away"
                    ), True
                for number, (name, (size, digest)) in enumerate(sorted(file.trailer.meta["shards"].items())):
                    if number % self._size == self._rank and _facts(folder, name) != (size, digest):
                        return f"{path / name} is damaged: it does not match its checksum", False
        except CheckpointError as error:
            return str(error), False
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            return f"{path} is damaged: {type(error).__name__}: {error}", False
        return None

    def read_rest(self, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Rank 0's `state`, on every rank, and the meta."""
        try:
            with PrivateFolder(path) as folder, CheckpointFile(folder, _STATE) as file:
                return file.state(), file.trailer.meta
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def read_shards(self, path: Path, into: dict[str, Tensor]) -> None:
        """Fill DTensors of any sharding from a checkpoint that `newest` has found.

        Raises CheckpointError.
        """
        why = None
        try:
            with PrivateFolder(path) as folder:
                read_shards(folder.reached, _chunks(folder), into)
        except (Exception, CheckpointException) as error:
            # torch raises many types, among them one, not an Exception, that gathers all ranks' errors.
            why = f"{type(error).__name__}: {error}"
        troubles = [found for found in self._gather(why) if found]
        if troubles:
            raise CheckpointError(f"{path} cannot be loaded: {troubles[0]}")


def _facts(folder: PrivateFolder, name: str) -> tuple[int, str]:
    """A file's size in bytes and its SHA-256."""
    with folder.read(name) as file:
        size = os.fstat(file.fileno()).st_size
        return size, digest_of(file, size)


def _chunks(folder: PrivateFolder) -> list[Chunk]:
    """What all ranks' files hold. Raises OSError and ValueError."""
    found: list[Chunk] = []
    for name in filter(_INDEX.fullmatch, folder.names()):
        with folder.read(name) as file:
            found += parse_index(file.read(MAX_INDEX))
    return found
