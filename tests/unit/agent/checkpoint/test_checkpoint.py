"""One intact checkpoint exists at every instant, even if a save fails."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
from collections import Counter, defaultdict, deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pollux.checkpoint import file as checkpoint_file
from pollux.checkpoint.checkpoint_store import CheckpointStore
from pollux.errors import CheckpointError, ForeignCheckpoint


def state(step: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((1000,), float(step))},
        "step": step,
        "nested": [1, {"lr": 0.1}, (2, None)],
    }


def latest(store: CheckpointStore) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """State and meta of the newest intact checkpoint."""
    found = store.newest()
    return None if found is None else store.read(found)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "deep" / "er")
    assert latest(store) is None
    saved = store.save(state(3), meta={"step": 3})
    loaded = latest(store)
    assert loaded is not None
    found, meta = loaded
    assert torch.equal(found["model"]["w"], state(3)["model"]["w"])
    assert found["nested"] == [1, {"lr": 0.1}, (2, None)]
    assert meta["step"] == 3
    assert torch.load(saved / "state.pt")["step"] == 3  # plain torch reads it too
    assert [path.name for path in saved.iterdir()] == ["state.pt"], "one rank, one part"


def test_the_last_ones_are_kept_and_numbers_go_on(tmp_path: Path) -> None:
    for step in range(5):
        CheckpointStore(tmp_path).save(state(step), meta={"step": step})
    store = CheckpointStore(tmp_path)
    assert [path.name for path in store.paths()] == ["checkpoint-00000004", "checkpoint-00000005"]
    assert latest(store)[1]["step"] == 4  # type: ignore[index]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path, place: int | None = None) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 if place is None else place] ^= 1
    path.write_bytes(raw)


_flip_trailer = partial(_flip, place=-40)
DAMAGES = [_cut, _flip, _flip_trailer, lambda path: path.write_bytes(b"")]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_gives_way_to_the_one_before(
    tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), meta={"step": 1})
    damage(store.save(state(2), meta={"step": 2}) / "state.pt")
    with caplog.at_level(logging.WARNING, "pollux"):
        assert latest(store)[1]["step"] == 1  # type: ignore[index]
    assert "checkpoint-00000002" in caplog.text
    # The next save does not take the damaged one's number, and the intact one is not the one to go first.
    assert store.save(state(3), meta={"step": 3}).name == "checkpoint-00000003"


@pytest.mark.parametrize("damage", DAMAGES)
def test_where_all_are_damaged_a_person_decides(tmp_path: Path, damage: Any) -> None:
    store = CheckpointStore(tmp_path)
    damage(store.save(state(1), meta={}) / "state.pt")
    with pytest.raises(CheckpointError, match="move them away"):
        latest(store)


def test_a_foreign_checkpoint_is_refused_and_left(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, fingerprint="job 7").save(state(1), meta={})
    with pytest.raises(ForeignCheckpoint, match=r"'job 8'.*'job 7'"):
        latest(CheckpointStore(tmp_path, fingerprint="job 8"))
    assert latest(CheckpointStore(tmp_path, fingerprint="job 7")) is not None


def test_on_a_full_disk_the_previous_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), meta={"step": 1})
    original = checkpoint_file.HashingWriter.write
    written = 0

    def full(self: Any, data: Any) -> int:
        nonlocal written
        written += 1
        if written == 3:
            self.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, data)

    monkeypatch.setattr(checkpoint_file.HashingWriter, "write", full)
    with pytest.raises(CheckpointError, match="no space left"):
        store.save(state(2), meta={})
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000001"]
    assert latest(store)[1]["step"] == 1  # type: ignore[index]


def test_dev_full_is_told_as_a_full_disk() -> None:
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError, match="No space") as raised:
        checkpoint_file.write_checkpoint(full, state(1), {})
    assert raised.value.errno == errno.ENOSPC


@dataclasses.dataclass
class Own:
    """A class of the user's."""

    value: int = 3


def test_numbers_and_containers_come_back_as_they_were(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    kept = {
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "number": np.float64(2.5),
        "complex": 1 + 2j,
        "counts": Counter("aab"),
        "sets": ({1, 2}, frozenset({3})),
        "bytes": b"\x00\xff",
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "generator": np.random.default_rng(3).bit_generator.state,
    }
    store.save(kept, meta={})
    found = latest(store)[0]  # type: ignore[index]
    np.testing.assert_array_equal(found.pop("array"), kept.pop("array"))  # type: ignore[arg-type]
    assert found == kept
    assert {name: type(value) for name, value in found.items()} == {n: type(v) for n, v in kept.items()}


@pytest.mark.parametrize("value", [Own(), {1: [Own()]}, lambda: 3, Path("/"), deque(), defaultdict(list)])
def test_an_object_that_loading_would_have_to_run_code_for_is_refused_when_it_is_saved(
    tmp_path: Path, value: Any
) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"cannot be saved: state\['mine'\].* which a checkpoint cannot hold"
    ):
        store.save({"mine": value}, meta={})
    assert latest(store) is None


class Attack:
    """Unpickled, it runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def forge(path: Path, attack: Attack) -> None:
    """Replace a checkpoint by an intact one that runs code if unpickled."""
    with pytest.MonkeyPatch.context() as patch, path.open("wb") as file:
        patch.setattr(checkpoint_file, "check_state", lambda *_: None)
        checkpoint_file.write_checkpoint(file, {"attack": attack}, {"fingerprint": ""})


def test_loading_runs_no_code_even_from_a_file_of_the_user_s_own(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    saved = store.save(state(1), meta={}) / "state.pt"
    forge(saved, Attack(tmp_path / "attacked"))
    assert store.newest() is not None, "its checksum is right"
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        latest(store)
    assert not (tmp_path / "attacked").exists()
    torch.load(saved, weights_only=False)
    assert (tmp_path / "attacked").exists(), "the attack works where pickle is trusted"


def test_meta_that_cannot_be_saved_is_told(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="meta that JSON"):
        store.save(state(1), meta={"x": object()})
    assert latest(store) is None


def test_a_directory_that_takes_no_checkpoint_is_named_before_the_first_save(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert CheckpointStore(tmp_path / "new").trouble() == ""
    assert (tmp_path / "new").is_dir()
    trouble = CheckpointStore(tmp_path / "file" / "new").trouble()
    assert trouble.startswith(f"no checkpoint can be written to {tmp_path / 'file' / 'new'}")
    assert "Not a directory" in trouble


def test_a_write_shows_that_a_directory_of_ones_own_takes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert CheckpointStore(tmp_path).trouble() == ""
    assert list(tmp_path.iterdir()) == [], "nothing of it stays"
    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in CheckpointStore(tmp_path).trouble()


def test_only_earlier_checkpoints_that_are_there_are_said_to_stand(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "new")
    with pytest.raises(
        CheckpointError,
        match=r"could be written to .*/new; this training has no checkpoint\. .*cannot be saved",
    ):
        store.save({"f": lambda: None}, meta={})
    store.save(state(1), meta={})
    with pytest.raises(CheckpointError, match=r"/new; earlier ones stand\. .*cannot be saved"):
        store.save({"f": lambda: None}, meta={})


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could be written"):
        CheckpointStore(tmp_path / "file" / "below").save(state(1), meta={})


def test_leftovers_of_a_killed_save_go(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint-00000008.tmp").write_bytes(b"half")
    for name in (".checkpoint-00000009.tmp", ".checkpoint-00000010.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index-7.json").write_text("of a rank that is gone")
    saved = CheckpointStore(tmp_path).save(state(1), meta={})
    assert [*tmp_path.iterdir()] == [saved]
    assert [path.name for path in saved.iterdir()] == ["state.pt"]
    assert latest(CheckpointStore(tmp_path))[1] == {"fingerprint": "", "shards": {}}  # type: ignore[index]


def test_a_link_in_place_of_a_temporary_directory_is_removed_and_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".checkpoint-00000001.tmp").symlink_to(other)
    saved = CheckpointStore(tmp_path / "run").save(state(1), meta={})
    assert [*(tmp_path / "run").iterdir()] == [saved]
    assert not saved.is_symlink()
    assert [path.name for path in other.iterdir()] == ["mine"]
