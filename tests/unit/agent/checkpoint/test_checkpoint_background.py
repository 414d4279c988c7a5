"""A save beside the training writes the state of its call."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from pollux.checkpoint.background import BackgroundSaver, HostCopy
from pollux.checkpoint.checkpoint_store import CheckpointStore, SavedCheckpoint
from pollux.errors import CheckpointError


class SlowStore(CheckpointStore):
    """A store that writes only when the test allows it.

    The test decides what happens during the save.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.go = threading.Event()

    def save(self, state: Any, *, meta: Any) -> SavedCheckpoint:
        assert self.go.wait(30)
        return super().save(state, meta=meta)


def test_training_on_does_not_change_what_is_written(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    saver = BackgroundSaver(store)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    wanted = [parameter.detach().clone() for parameter in model.parameters()]
    meta = {"step": 1, "list": [1]}
    saver.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, meta=meta)
    assert saver.busy
    optimizer.step()
    meta["list"].append(2)  # type: ignore[attr-defined]
    store.go.set()
    saved = saver.wait()
    assert saved is not None
    state, found = store.load(saved.path)
    assert found["list"] == [1]
    assert all(torch.equal(a, b) for a, b in zip(state["model"].values(), wanted, strict=True))
    assert state["optimizer"]["state"][0]["step"] == 1
    assert not torch.equal(model.weight, wanted[0])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def test_one_save_at_a_time_each_with_its_own_state(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=10)
    saver = BackgroundSaver(store)
    values = torch.zeros(10)
    for step in range(5):
        values.fill_(step)
        saver.save({"v": values}, meta={"step": step})
    saver.wait()
    for step, path in enumerate(store.paths()):
        state, meta = store.load(path)
        assert meta["step"] == step
        assert state["v"].eq(step).all()


def test_a_failed_save_is_told_once_and_the_next_one_works(tmp_path: Path) -> None:
    blocker = tmp_path / "here"
    blocker.write_text("")
    saver = BackgroundSaver(CheckpointStore(blocker))
    assert saver.wait() is None
    saver.save({}, meta={})
    with pytest.raises(CheckpointError, match="could be written"):
        saver.save({}, meta={})
    blocker.unlink()
    saver.save({}, meta={})
    assert saver.wait() is not None


Pair = namedtuple("Pair", "a b")


def test_buffers_are_reused_and_structure_is_kept() -> None:
    copies = HostCopy()
    tied = torch.arange(6.0)
    state = {
        "a": tied,
        "b": tied,
        "ordered": OrderedDict(x=tied.view(2, 3).t()),
        "deep": [1, (2.5, None), Pair("s", torch.ones(1))],
        "set": {3},
        "empty": torch.zeros(0),
        "sparse": torch.eye(2).to_sparse(),
    }
    copies.prepare(state)
    first = copies.take(state)
    assert first["a"] is first["b"]
    assert first["a"].data_ptr() != tied.data_ptr()
    assert isinstance(first["ordered"], OrderedDict)
    assert isinstance(first["deep"][2], Pair)
    assert torch.equal(first["ordered"]["x"], tied.view(2, 3).t())
    assert first["set"] == {3}
    assert first["sparse"].is_sparse
    address = first["a"].data_ptr()
    tied += 1
    assert first["a"][0] == 0
    assert copies.take(state)["a"].data_ptr() == address
    state["a"] = state["b"] = torch.arange(3)  # another shape and type: another buffer
    assert torch.equal(copies.take(state)["a"], torch.arange(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_from_a_gpu_are_of_the_moment(tmp_path: Path) -> None:
    saver = BackgroundSaver(CheckpointStore(tmp_path))
    values = torch.zeros(1 << 24, device="cuda")
    for step in range(3):
        values.fill_(step)
        saver.save({"v": values}, meta={})
        values.fill_(-1.0)
        saved = saver.wait()
        assert saved is not None
        assert CheckpointStore(tmp_path).load(saved.path)[0]["v"].eq(step).all()
