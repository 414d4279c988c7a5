"""The last checkpoints of one training. One directory each, with a part for every rank that writes.

    checkpoint-00000007/
        state.pt       rank 0's part, in the form of `pollux.checkpoint.file`; its trailer lists the other files with
                       their sizes and SHA-256
        __1_0.distcp   under fully_shard: the shards of rank 1,
        index-1.json   and what this file holds (see `shard_files`)

A plain training has `state.pt` alone. All files are written into a temporary directory, which is renamed once all of
them last. A directory under its own name is therefore whole, and a rank that is killed half-way leaves the checkpoint
before as it was: after the first save, at least one intact checkpoint exists at any time. The checksums are read before
a checkpoint is used, because a disk can lie. Any number of ranks reads it from a file system that all nodes share.
`private_folder` describes which folders are accepted.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from pollux.checkpoint.file import CheckpointFile, digest_of, write_checkpoint
from pollux.errors import CheckpointError, ForeignCheckpoint, RankLost
from pollux.private_folder import PrivateFolder
from pollux.ranks.control import ControlExchange

logger = logging.getLogger("pollux")

ALONE = ControlExchange(None, 0)
"""The exchange of one rank."""

_NAME = re.compile(r"checkpoint-(\d{8,})")
_TEMPORARY = re.compile(r"\.checkpoint-\d+\.tmp")
_STATE = "state.pt"
_PROBE = ".probe"

KEPT = 2
"""The newest checkpoints that stay."""


class CheckpointStore:
    """The newest checkpoints in `directory`.

    `fingerprint` names what the checkpoints belong to (job, model). Where both sides have one and they differ, a
    checkpoint is refused with ForeignCheckpoint, and so is one of a training of the other kind (`sharded`). The ranks
    of the `exchange` of a method call it alike, and each raises what one of them met. One save at a time.
    """

    def __init__(self, directory: str | Path, *, fingerprint: str = "", sharded: bool = False) -> None:
        self.directory = Path(directory)
        self.fingerprint = fingerprint
        self.sharded = sharded
        self.difference: Callable[[Mapping[str, Any]], str] = lambda state: ""
        """Says what a foreign state has otherwise, as a sentence."""

    def paths(self) -> list[Path]:
        """Return all checkpoints, oldest first, intact or not. Raises CheckpointError."""
        try:
            with PrivateFolder(self.directory) as folder:
                return [self.directory / name for name in _complete(folder)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint directory {self.directory} cannot be read: {error}"
            ) from error

    def standing(self) -> str:
        """Return what the error of a save adds where there are earlier checkpoints."""
        try:
            return "; earlier ones stand" if self.paths() else "; this training has no checkpoint"
        except CheckpointError:
            return ""

    def trouble(self) -> str:
        """Return why no checkpoint can be written to the directory; empty where one can. The directory is made.

        A write tries it: rights alone do not show a full disk, or one that may only be read.
        """
        try:
            with PrivateFolder.make(self.directory) as folder:
                folder.write(_PROBE, lambda file: file.write(bytes(4096)))
                folder.remove(_PROBE)
                return ""
        except OSError as error:
            return f"no checkpoint can be written to {self.directory}{self.standing()}: {error}"

    # -- writing ----------------------------------------------------------------------------------------------

    def save(
        self,
        state: Mapping[str, Any],
        shards: Mapping[str, Tensor] | None = None,
        *,
        meta: Mapping[str, Any],
        exchange: ControlExchange = ALONE,
    ) -> Path:
        """Write rank 0's `state` and every rank's `shards`, durable on return; drop checkpoints beyond `KEPT`.

        Raises CheckpointError (disk full, no right to write, state that cannot be saved). Earlier checkpoints then
        stay.
        """
        first = exchange.rank == 0
        name = str(self._together(exchange, lambda: self._begin() if first else "")[0])
        temporary = self.directory / f".{name}.tmp"
        try:
            lists = self._together(
                exchange, lambda: _write_shards(temporary, exchange.rank, shards) if shards else {}
            )
            files = {name: facts for part in lists for name, facts in part.items()}
            marked = {**meta, "fingerprint": self.fingerprint, "shards": files}
            self._together(exchange, lambda: self._publish(temporary, name, state, marked) if first else None)
        except CheckpointError:
            if first:  # at once: the remaining files may be what fills the disk
                self._drop(temporary.name)
            raise
        return self.directory / name

    def _begin(self) -> str:
        """Return the new checkpoint's name, with its temporary directory empty."""
        with PrivateFolder.make(self.directory) as folder:
            for left in filter(_TEMPORARY.fullmatch, folder.names()):
                # A save that was killed left it: no other save is under way.
                _remove(folder, left)
            before = _complete(folder)
            name = f"checkpoint-{_number(before[-1]) + 1 if before else 1:08d}"
            folder.make_folder(f".{name}.tmp")
        return name

    def _publish(self, temporary: Path, name: str, state: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Write the state and the list of files; then the directory takes its name."""
        with PrivateFolder(temporary) as folder:
            folder.write(_STATE, lambda file: write_checkpoint(file, state, meta))
        with PrivateFolder(self.directory) as folder:
            folder.rename(temporary.name, name)
            folder.sync()
            for old in _complete(folder)[:-KEPT]:
                _remove(folder, old)

    def _drop(self, name: str) -> None:
        try:
            with PrivateFolder(self.directory) as folder:
                _remove(folder, name)
        except OSError as error:
            logger.warning("%s was not removed: %s", self.directory / name, error)

    def _together(self, exchange: ControlExchange, body: Callable[[], Any]) -> list[Any]:
        """Return every rank's result. Raises CheckpointError on all ranks where one of them failed."""
        result, trouble = None, None
        try:
            result = body()
        except Exception as error:  # the other ranks must get it, and not wait
            trouble = _explained(error)
        try:
            answers = exchange.gather((result, trouble))
        except RankLost as error:
            raise CheckpointError(f"a rank left while a checkpoint was written: {error}") from error
        for rank, (_, text) in enumerate(answers):
            if text is not None:
                where = f"rank {rank}: " if len(answers) > 1 else ""
                raise CheckpointError(
                    f"no checkpoint could be written to {self.directory}{self.standing()}. {where}{text}"
                )
        return [answer for answer, _ in answers]

    # -- reading ----------------------------------------------------------------------------------------------

    def newest(self, exchange: ControlExchange = ALONE) -> Path | None:
        """Return the newest intact checkpoint, the same on every rank; None where there is none at all.

        Each rank reads its share of the files against their checksums. Damaged checkpoints are passed over with a
        warning. Raises ForeignCheckpoint. Raises CheckpointError if all are damaged: a person has to decide whether to
        start again from the beginning.
        """
        names, trouble = exchange.gather(self._names() if exchange.rank == 0 else ([], None))[0]
        if trouble is not None:
            raise CheckpointError(trouble)
        damaged: list[str] = []
        for name in reversed(names):
            path = self.directory / str(name)
            answers = exchange.gather(self._trouble(path, exchange.rank, exchange.size))
            troubles = [answer for answer in answers if answer is not None]
            if not troubles:
                return path
            for kind, text in troubles:
                if kind == "foreign":
                    raise ForeignCheckpoint(text)
            if answers[0] is None and any(kind == "absent" for kind, _ in troubles):
                raise CheckpointError(
                    f"rank 0 found {name}, but not every rank can read it: the checkpoint directory must lie on a file "
                    f"system that all nodes share. {troubles[0][1]}"
                )
            damaged.append(troubles[0][1])
            if exchange.rank == 0:
                logger.warning("checkpoint passed over, using the one before it: %s", troubles[0][1])
        if damaged:
            raise CheckpointError(
                f"none of the {len(names)} checkpoint(s) in {self.directory} is intact; to start the training "
                f"afresh, move them away. {'; '.join(damaged)}"
            )
        return None

    def _names(self) -> tuple[list[str], str | None]:
        """Return the names of all checkpoints, or why they cannot be listed."""
        try:
            return [path.name for path in self.paths()], None
        except CheckpointError as error:
            return [], str(error)

    def _trouble(self, path: Path, rank: int, size: int) -> tuple[str, str] | None:
        """Return what is wrong with this rank's share of a checkpoint: its kind, and a sentence."""
        try:
            with opened(path) as (folder, file):
                files = file.trailer.meta.get("shards", {})
                if foreign := self._foreign(path, file, bool(files), rank):
                    return "foreign", foreign
                if rank == 0:
                    file.verify()
                for number, (name, (length, digest)) in enumerate(sorted(files.items())):
                    if number % size == rank and _facts(folder, name) != (length, digest):
                        return "damaged", f"{path / name} is damaged: it does not match its checksum"
        except CheckpointError as error:
            return "damaged" if os.path.lexists(path) else "absent", str(error)
        except (TypeError, ValueError, AttributeError) as error:
            return "damaged", f"{path} is damaged: {type(error).__name__}: {error}"
        return None

    def _foreign(self, path: Path, file: CheckpointFile, sharded: bool, rank: int) -> str:
        """Return why a checkpoint is of another training; empty where it is of this one."""
        theirs = file.trailer.meta.get("fingerprint", "")
        if self.fingerprint and theirs and theirs != self.fingerprint:
            difference = self.difference(file.state()) if rank == 0 else ""
            return (
                f"{path} belongs to another training: expected fingerprint {self.fingerprint!r}, found {theirs!r}. "
                f"{difference}Use another checkpoint directory, or move it away"
            )
        if sharded == self.sharded:
            return ""
        found, expected = ("under", "without") if sharded else ("without", "under")
        return (
            f"{path} is of a model {found} fully_shard, expected one {expected} it: change the model, or use another "
            "checkpoint directory"
        )

    def read(self, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return state and meta of a checkpoint that `newest` has found. Raises CheckpointError."""
        with opened(path) as (_, file):
            return file.state(), file.trailer.meta

    def read_shards(self, path: Path, into: dict[str, Tensor], exchange: ControlExchange = ALONE) -> None:
        """Fill DTensors of any sharding from a checkpoint that `newest` has found. Raises CheckpointError."""
        from pollux.checkpoint.shard_files import read_shards  # noqa: PLC0415 - loads torch's sharding

        trouble = None
        try:
            with PrivateFolder(path) as folder:
                read_shards(folder, into)
        except Exception as error:  # torch raises many types
            trouble = f"{type(error).__name__}: {error}"
        troubles = [found for found in exchange.gather(trouble) if found]
        if troubles:
            raise CheckpointError(f"{path} cannot be loaded: {troubles[0]}")


def _write_shards(temporary: Path, rank: int, shards: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Write this rank's shards; return its files, each [size in bytes, SHA-256]."""
    from pollux.checkpoint.shard_files import write_shards  # noqa: PLC0415 - loads torch's sharding

    with PrivateFolder(temporary) as folder:
        return {name: list(_facts(folder, name)) for name in write_shards(folder, rank, shards)}


def _facts(folder: PrivateFolder, name: str) -> tuple[int, str]:
    """A file's size in bytes and its SHA-256."""
    with folder.read(name) as file:
        size = os.fstat(file.fileno()).st_size
        return size, digest_of(file, size)


@contextmanager
def opened(path: Path) -> Iterator[tuple[PrivateFolder, CheckpointFile]]:
    """A checkpoint's folder and its `state.pt`. Raises CheckpointError, also for OSErrors of the body that reads it."""
    at = path / _STATE
    try:
        with PrivateFolder(at.parent) as folder, folder.read(at.name) as file:
            yield folder, CheckpointFile(file, at)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _complete(folder: PrivateFolder) -> list[str]:
    """The names of the checkpoints in a folder, oldest first."""
    return sorted(filter(_NAME.fullmatch, folder.names()), key=_number)


def _number(name: str) -> int:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1])


def _remove(folder: PrivateFolder, name: str) -> None:
    """Remove a checkpoint, or the rest of one. One that stays does no harm: a failure is logged."""
    try:
        folder.remove(name)  # a file or a link
        return
    except OSError:
        pass
    try:
        # Renamed first: what is half removed must not look like a checkpoint.
        hidden = name if name.startswith(".") else f".{name}.tmp"
        if hidden != name:
            folder.rename(name, hidden)
        folder.remove_tree(hidden)
    except OSError as error:
        logger.warning("%s was not removed: %s", folder.path / name, error)


def _explained(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left: free some, or set POLLUX_CHECKPOINT_DIR to a larger filesystem ({error})"
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
