"""Restarts that come to nothing; texts that describe a checkpoint."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, cast

import pytest

from pollux.checkpoint.background import BackgroundSaver
from pollux.checkpoint.checkpoint_store import CheckpointStore
from pollux.checkpoint.file import Trailer
from pollux.checkpoint.fruitless import FruitlessRestarts
from pollux.checkpoint.keepers import ShardedKeeper
from pollux.checkpoint.names import CheckpointNames
from pollux.checkpoint.shard_files import Chunk
from pollux.errors import CheckpointError, ForeignCheckpoint, RestartLoop
from pollux.private_folder import PrivateFolder
from pollux.ranks.control import ControlExchange

# -- restarts -----------------------------------------------------------------------------------------------------


class Exchange:
    """One rank's exchange with the others; `told` is rank 0's word."""

    def __init__(self, rank: int = 0, told: str | None = None) -> None:
        self.rank, self._told = rank, told

    def gather(self, value: Any) -> list[Any]:
        return [value] if self.rank == 0 else [self._told, value]


def begin(
    folder: Path, environ: dict[str, str], *, most: int = 2, rank: int = 0, told: str | None = None
) -> Any:
    restarts = FruitlessRestarts(folder, most, environ)
    restarts.begin(cast(ControlExchange, Exchange(rank, told)))
    return restarts


@pytest.mark.parametrize("automatic", [{"SLURM_RESTART_COUNT": "3"}, {"POLLUX_RESTARTS": "1"}])
def test_too_many_restarts_without_a_checkpoint_end(tmp_path: Path, automatic: dict[str, str]) -> None:
    folder = tmp_path / "checkpoints"
    for count in (1, 2):
        begin(folder, automatic)
        assert json.loads((folder / "restarts.json").read_text()) == {"restarts": count}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.raises(
        RestartLoop, match="2 restarts in a row ended without a new checkpoint: expected at most 2"
    ):
        begin(folder, automatic)


@pytest.mark.parametrize("by_hand", [{}, {"SLURM_RESTART_COUNT": "0", "POLLUX_RESTARTS": ""}])
def test_a_start_by_hand_counts_as_none(tmp_path: Path, by_hand: dict[str, str]) -> None:
    begin(tmp_path, by_hand)
    assert [*tmp_path.iterdir()] == [], "no file without a restart"
    for _ in range(2):
        begin(tmp_path, {"SLURM_RESTART_COUNT": "1"})
    begin(tmp_path, by_hand)
    assert json.loads((tmp_path / "restarts.json").read_text()) == {"restarts": 0}


def test_a_checkpoint_ends_the_count(tmp_path: Path) -> None:
    automatic = {"SLURM_RESTART_COUNT": "1"}
    begin(tmp_path, automatic)
    begin(tmp_path, automatic).checkpointed()
    assert [*tmp_path.iterdir()] == []
    begin(tmp_path, automatic)
    begin(tmp_path, automatic)


@pytest.mark.parametrize(
    "text", ['{"restarts": -5}', '{"restarts": null}', "[]", "nonsense", '{"restarts": "x"}']
)
def test_a_file_that_is_no_count_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "restarts.json").write_text(text)
    begin(tmp_path, {"SLURM_RESTART_COUNT": "1"})
    assert json.loads((tmp_path / "restarts.json").read_text()) == {"restarts": 1}


def test_rank_0_alone_counts_and_all_ranks_hear(tmp_path: Path) -> None:
    begin(tmp_path, {"SLURM_RESTART_COUNT": "1"}, rank=1)
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(RestartLoop, match="too many"):
        begin(tmp_path, {}, rank=1, told="too many")


# -- what a checkpoint says of itself -----------------------------------------------------------------------------

TRAILER = {"meta": {"step": 1}, "size": 7, "sha256": "ab", "saved_at": 12.5}
CHUNK = ["w", [4, 2], "float32", [2, 0], [2, 2], "__1_0.distcp", 0, 64]


@pytest.mark.parametrize("change", [{}, {"size": 0}, {"saved_at": 12}])
def test_a_trailer_is_read(change: dict[str, Any]) -> None:
    found = Trailer.parse(json.dumps(TRAILER | change).encode())
    assert found == Trailer(**(TRAILER | change))


@pytest.mark.parametrize(
    "change",
    [{"size": -1}, {"size": True}, {"size": 1.0}, {"meta": []}, {"sha256": 3}, {"saved_at": float("inf")}],
)
def test_a_trailer_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected an object with meta"):
        Trailer.parse(json.dumps(TRAILER | change).encode())


def test_a_chunk_is_read() -> None:
    assert Chunk.parse(CHUNK) == Chunk("w", (4, 2), "float32", (2, 0), (2, 2), "__1_0.distcp", 0, 64)


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (1, [4, True]),
        (1, [4, -2]),
        (1, [4, 1 << 62]),
        (1, [4, 1 << 63]),
        (1, [4]),
        (1, ["4", 2]),
        (2, "Tensor"),
        (2, "no such type"),
        (3, [3, 0]),
        (4, [2, 3]),
        (5, "../etc/passwd"),
        (6, -1),
        (7, True),
    ],
)
def test_a_chunk_that_makes_no_sense_is_refused(place: int, wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected a chunk"):
        Chunk.parse([*CHUNK[:place], wrong, *CHUNK[place + 1 :]])


def test_a_saver_is_busy_while_it_writes_alone(tmp_path: Path) -> None:
    saver = BackgroundSaver(CheckpointStore(tmp_path))
    assert not saver.busy
    saver.save({"step": 1}, meta={})
    saver.wait()
    assert not saver.busy


# -- names --------------------------------------------------------------------------------------------------------


def test_checkpoints_are_found_by_name_and_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = CheckpointNames("pt")
    assert names.paths(tmp_path / "absent") == []
    for name in ("checkpoint-100000000.pt", "checkpoint-00000009.pt", "checkpoint-00000010.pt"):
        (tmp_path / name).touch()
    for other in (
        "checkpoint-1.pt",
        "checkpoint-00000011.shards",
        ".checkpoint-00000012.pt.tmp",
        "restarts.json",
    ):
        (tmp_path / other).touch()
    assert [int(path.stem.partition("-")[2]) for path in names.paths(tmp_path)] == [9, 10, 100_000_000]
    with PrivateFolder(tmp_path) as folder:
        assert names.next(folder) == "checkpoint-100000001.pt"
        assert names.temporary(folder) == [".checkpoint-00000012.pt.tmp"]
        assert CheckpointNames("shards").next(folder) == "checkpoint-00000012.shards"
    with PrivateFolder.make(tmp_path / "new") as folder:
        assert names.next(folder) == "checkpoint-00000001.pt"
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file cannot be read"):
        names.paths(tmp_path / "file")


# -- the newest checkpoint of a sharded training ------------------------------------------------------------------


class Shards:
    """A sharded store whose newest checkpoint a test names."""

    def __init__(self, directory: Path, newest: Path | None = None) -> None:
        self.directory, self._newest = directory, newest

    def newest(self) -> Path | None:
        return self._newest

    def read_rest(self, path: Path) -> Any:
        return {"from": path.name}, {"meta": "data"}


def test_rank_0_says_whether_the_folder_is_another_kind_of_model_s(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-00000001.pt").touch()
    with pytest.raises(ForeignCheckpoint, match="without fully_shard"):
        ShardedKeeper(Shards(tmp_path)).open(cast(ControlExchange, Exchange()))
    elsewhere = Exchange(rank=1, told=cast(Any, False))
    assert ShardedKeeper(Shards(tmp_path)).open(cast(ControlExchange, elsewhere)) is None
    found = ShardedKeeper(Shards(tmp_path, tmp_path / "checkpoint-00000002.shards"))
    assert found.open(cast(ControlExchange, Exchange())) == {"from": "checkpoint-00000002.shards"}
