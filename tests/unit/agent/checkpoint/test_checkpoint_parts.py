"""Restarts that come to nothing; texts that describe a checkpoint."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pollux.checkpoint.checkpoint_store import CheckpointStore
from pollux.checkpoint.file import Trailer
from pollux.checkpoint.fruitless import FruitlessRestarts
from pollux.checkpoint.shard_files import Chunk
from pollux.errors import CheckpointError, ForeignCheckpoint, RestartLoop
from pollux.ranks.control import ControlExchange

# -- restarts -----------------------------------------------------------------------------------------------------


class Exchange:
    """One rank's exchange with the others; `told` are rank 0's words: on the folder's lock, then on restarts."""

    def __init__(self, rank: int = 0, told: tuple[str, str] = ("", "")) -> None:
        self.rank, self._told = rank, iter(told)

    def gather(self, value: Any) -> list[Any]:
        return [value] if self.rank == 0 else [next(self._told), value]


def begin(
    folder: Path, environ: dict[str, str], *, most: int = 2, rank: int = 0, told: tuple[str, str] = ("", "")
) -> Any:
    restarts = FruitlessRestarts(folder, most, environ)
    restarts.begin(cast(ControlExchange, Exchange(rank, told)))
    return restarts


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    assert files(tmp_path) == [".in-use"], "no count without a restart"
    for _ in range(2):
        begin(tmp_path, {"SLURM_RESTART_COUNT": "1"})
    begin(tmp_path, by_hand)
    assert json.loads((tmp_path / "restarts.json").read_text()) == {"restarts": 0}


def test_a_checkpoint_ends_the_count(tmp_path: Path) -> None:
    automatic = {"SLURM_RESTART_COUNT": "1"}
    begin(tmp_path, automatic)
    begin(tmp_path, automatic).checkpointed()
    assert files(tmp_path) == [".in-use"]
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
    assert files(tmp_path) == []
    with pytest.raises(RestartLoop, match="too many"):
        begin(tmp_path, {}, rank=1, told=("", "too many"))
    with pytest.raises(CheckpointError, match="process 7 on n1"):
        begin(tmp_path, {}, rank=1, told=("process 7 on n1", ""))


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


# -- names --------------------------------------------------------------------------------------------------------


def test_checkpoints_are_found_by_name_and_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert CheckpointStore(tmp_path / "absent").paths() == []
    names = ["checkpoint-00000009", "checkpoint-00000011", "checkpoint-100000000"]
    for name in (*reversed(names), "checkpoint-1", "checkpoint-00000012.pt", "restarts.json"):
        (tmp_path / name).mkdir()
    assert [path.name for path in store.paths()] == names
    assert store.save({}, meta={}).name == "checkpoint-100000001"
    assert CheckpointStore(tmp_path / "new").save({}, meta={}).name == "checkpoint-00000001"
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file cannot be read"):
        CheckpointStore(tmp_path / "file").paths()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_of_the_other_kind_of_model_is_refused(tmp_path: Path, sharded: bool) -> None:
    shards = {"model.weight": torch.ones(3)} if sharded else {}
    CheckpointStore(tmp_path, sharded=sharded).save({}, shards, meta={})
    found, expected = ("under", "without") if sharded else ("without", "under")
    with pytest.raises(ForeignCheckpoint, match=f"{found} fully_shard, expected one {expected} it"):
        CheckpointStore(tmp_path, sharded=not sharded).newest()
    assert CheckpointStore(tmp_path, sharded=sharded).newest() is not None
