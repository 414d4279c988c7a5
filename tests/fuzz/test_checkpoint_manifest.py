"""Fuzz damaged and forged checkpoints.

The reader neither crashes nor hangs, and loads only states that were saved.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pollux.checkpoint.file import MAGIC, CheckpointFile, Trailer, write_checkpoint
from pollux.checkpoint.shard_files import Chunk, parse_index
from pollux.errors import CheckpointError
from tests.fuzz.json_values import json_values

STATE = {"w": torch.arange(40.0), "step": 3, "nested": [1, {"lr": 0.1}]}


@pytest.fixture(scope="module")
def whole() -> bytes:
    file = io.BytesIO()
    write_checkpoint(file, STATE, {"step": 3})
    return file.getvalue()


def load(content: bytes) -> tuple[Trailer, dict[str, Any]] | None:
    try:
        file = CheckpointFile(io.BytesIO(content), Path("x"))
        file.verify()
        return file.trailer, file.state()
    except CheckpointError:
        return None


@given(st.data())
def test_a_changed_file_is_refused_or_is_what_was_saved(whole: bytes, data: st.DataObject) -> None:
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        stop = min(len(content), start + data.draw(st.integers(0, 40)))
        content[start:stop] = data.draw(st.binary(max_size=40))
    found = load(bytes(content))
    if found is not None:
        assert bytes(content) == whole
        assert torch.equal(found[1]["w"], STATE["w"])  # type: ignore[arg-type]


@given(
    st.binary(max_size=300),
    json_values
    | st.fixed_dictionaries(
        {"meta": json_values, "size": json_values, "sha256": json_values, "saved_at": json_values}
    ),
)
def test_any_trailer_is_refused_or_sensible(archive: bytes, trailer: Any) -> None:
    raw = json.dumps(trailer).encode()
    try:
        found = Trailer.parse(raw)
    except ValueError:
        pass
    else:
        assert found.size >= 0
        assert isinstance(found.meta, dict)
    content = archive + raw + struct.pack("<QI8s", len(raw), zlib.crc32(raw), MAGIC)
    assert load(content) is None


@given(st.binary(max_size=400))
def test_any_bytes_are_no_checkpoint(content: bytes) -> None:
    assert load(content) is None


chunk = st.tuples(
    st.text(max_size=5),
    st.lists(st.integers(-1, 9), max_size=2),
    st.sampled_from(["float32", "bfloat16", "load", "hub"]),
    st.lists(st.integers(-1, 9), max_size=2),
    st.lists(st.integers(-1, 9), max_size=2),
    st.sampled_from(["__0_0.distcp", "../__0_0.distcp", "/etc/passwd", "", "state.pt"]),
    st.integers(-1, 99) | st.booleans(),
    st.integers(-1, 99),
).map(list)


@given(
    st.binary(max_size=60)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.lists(chunk | json_values, max_size=3).map(
        lambda chunks: json.dumps({"version": 1, "chunks": chunks}).encode()
    )
)
def test_any_index_is_refused_or_names_parts_of_tensors_in_files_of_the_folder(text: bytes) -> None:
    try:
        found = parse_index(text)
    except ValueError:
        return
    for each in found:
        assert "/" not in each.file
        assert isinstance(getattr(torch, each.dtype), torch.dtype)
        for offset, size, all_of_it in zip(each.offsets, each.sizes, each.size, strict=True):
            assert 0 <= offset <= offset + size <= all_of_it
        assert each.offset >= 0
        assert each.length >= 0


def test_an_index_comes_back() -> None:
    one = Chunk("w", (4, 2), "float32", (2, 0), (2, 2), "__1_0.distcp", 0, 64)
    raw = [one.tensor, one.size, one.dtype, one.offsets, one.sizes, one.file, one.offset, one.length]
    assert parse_index(json.dumps({"version": 1, "chunks": [raw]}).encode()) == [one]
