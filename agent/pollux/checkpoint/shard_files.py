"""A rank's shards in a file, and the list of what every rank's file holds.

torch.distributed.checkpoint plans, writes and reads the shards. Its own coordination is left out, because it exchanges
pickled plans between ranks and stores a pickled index. Here each rank writes an index of its own, in JSON:

    {"version": 1, "chunks": [[tensor, size, dtype, offsets, sizes, file, offset, length], ...]}

A chunk is a part of a tensor: `size` is the whole tensor's, `offsets` and `sizes` say which part this is; `offset` and
`length` are bytes of the file. A reader takes all ranks' indices together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from pollux.private_folder import PrivateFolder

VERSION = 1
MAX_INDEX = 1 << 28
"""Bytes of one rank's index."""
_FILE = re.compile(r"__\d+_\d+\.distcp")
_INDEX = re.compile(r"index-\d+\.json")
_LARGEST = 1 << 62


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor, and where it stands."""

    tensor: str
    size: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int

    @classmethod
    def parse(cls, raw: Any) -> Self:
        """Raises ValueError."""
        match raw:
            case [
                str(tensor),
                [*size],
                str(dtype),
                [*offsets],
                [*sizes],
                str(file),
                int(offset),
                int(length),
            ] if _FILE.fullmatch(file) and isinstance(getattr(torch, dtype, None), torch.dtype):
                numbers = (*size, *offsets, *sizes, offset, length)
                whole = all(type(number) is int and 0 <= number < _LARGEST for number in numbers)
                axes = len(size) == len(offsets) == len(sizes)
                if whole and axes and all(a + b <= c for a, b, c in zip(offsets, sizes, size, strict=True)):
                    return cls(tensor, tuple(size), dtype, tuple(offsets), tuple(sizes), file, offset, length)
        raise ValueError(f"expected a chunk of a tensor, got {raw!r:.200}")


def write_shards(folder: PrivateFolder, rank: int, shards: Mapping[str, Tensor]) -> list[str]:
    """Write this rank's shards and their index, durably; return the names of the files. Raises as torch does."""
    with _one_error():
        index = _write_shards(folder.reached, rank, shards)
    folder.write(f"index-{rank}.json", lambda file: file.write(index))
    mine = re.compile(rf"__{rank}_\d+\.distcp|index-{rank}\.json")
    return list(filter(mine.fullmatch, folder.names()))


@contextmanager
def _one_error() -> Iterator[None]:
    """Raise the first of the errors that torch gathers. Its class for them is no Exception."""
    try:
        yield
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise (first if isinstance(first, Exception) else RuntimeError(repr(first))) from error


def _write_shards(folder: Path, rank: int, shards: Mapping[str, Tensor]) -> bytes:
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(shards), None, is_coordinator=False)
    writer.set_up_storage_writer(False)
    # The writer names files by the plan's place among all ranks' plans.
    local = writer.prepare_local_plan(planner.create_local_plan())
    plan = planner.finish_plan(writer.prepare_global_plan([local] * (rank + 1))[rank])
    stored = {result.index: result.storage_data for result in writer.write_data(plan, planner).wait()}
    chunks = []
    for item in plan.items:
        data, place = item.tensor_data, stored[item.index]
        assert data is not None
        chunk = Chunk(
            item.index.fqn,
            tuple(data.size),
            str(data.properties.dtype).removeprefix("torch."),
            tuple(data.chunk.offsets),
            tuple(data.chunk.sizes),
            place.relative_path,
            place.offset,
            place.length,
        )
        chunks.append(astuple(chunk))
    return json.dumps({"version": VERSION, "chunks": chunks}).encode()


def parse_index(text: bytes) -> list[Chunk]:
    """Read one rank's index. Raises ValueError."""
    try:
        match json.loads(text):
            case {"version": 1, "chunks": [*chunks]}:
                return [Chunk.parse(raw) for raw in chunks]
    except RecursionError as error:
        raise ValueError(str(error)) from error
    raise ValueError(f"expected an index of version {VERSION} with chunks")


def read_shards(folder: PrivateFolder, into: dict[str, Tensor]) -> None:
    """Fill DTensors of any sharding from all ranks' chunks. Raises as torch does, ValueError for a missing one."""
    chunks: list[Chunk] = []
    for name in filter(_INDEX.fullmatch, folder.names()):
        with folder.read(name) as file:
            chunks += parse_index(file.read(MAX_INDEX))
    index = _metadata(chunks)
    missing = into.keys() - index.state_dict_metadata.keys()
    if missing:
        raise ValueError(f"the checkpoint has no {sorted(missing)[0]!r}")
    with _one_error():
        load(into, storage_reader=_Reader(folder.reached, index), no_dist=True)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a chunk stands, by the names that FileSystemReader reads."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class _Reader(FileSystemReader):
    """Reads chunks by an index that is at hand."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._index


def _metadata(chunks: Iterable[Chunk]) -> Metadata:
    """The chunks in torch's own terms. Raises ValueError where ranks disagree on a tensor."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _Place] = {}
    for chunk in chunks:
        properties = TensorProperties(dtype=getattr(torch, chunk.dtype))
        whole = TensorStorageMetadata(properties, torch.Size(chunk.size), [])
        known = tensors.setdefault(chunk.tensor, whole)
        if (known.size, known.properties.dtype) != (whole.size, properties.dtype):
            raise ValueError(f"ranks disagree on the size or the dtype of {chunk.tensor!r}")
        place = MetadataIndex(chunk.tensor, torch.Size(chunk.offsets))
        if place not in places:  # with replicas several ranks hold the same
            known.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
            places[place] = _Place(chunk.file, chunk.offset, chunk.length)
    return Metadata(dict(tensors), storage_data=places)
