"""A save beside the training writes the state of its call."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from pollux.checkpoint.checkpoint_store import CheckpointStore
from pollux.checkpoint.host_copy import HostCopy
from pollux.checkpoint.writer import CheckpointWriter
from pollux.slurm_job.job_memory import RESERVE


class Values:
    """A part of a training: one tensor."""

    def __init__(self, device: str = "cpu", size: int = 10) -> None:
        self.values = torch.zeros(size, device=device)

    def state_dict(self) -> dict[str, Any]:
        return {"v": self.values}


def writer_of(directory: Path) -> CheckpointWriter:
    return CheckpointWriter(torch.nn.Linear(1, 1), directory, 1)


def save(writer: CheckpointWriter, parts: dict[str, Any], step: int, rest: Any = dict) -> None:
    writer.save(parts, rest, {"optimizer_steps": step}, rank=0, durable=False)


def test_training_on_does_not_change_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread writes only when the test allows it."""
    go = threading.Event()
    writer = writer_of(tmp_path)
    write = writer.store.save

    def slowly(*args: Any, **options: Any) -> Path:
        assert go.wait(30)
        return write(*args, **options)

    monkeypatch.setattr(writer.store, "save", slowly)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    wanted = [parameter.detach().clone() for parameter in model.parameters()]
    seen = [1]
    save(writer, {"model": model, "optimizer": optimizer}, 1, lambda: {"seen": seen})
    assert (writer.busy, writer.saved) == (True, None)
    optimizer.step()
    seen.append(2)
    go.set()
    writer.wait()
    assert (writer.saved, writer.trouble, writer.written) == (1, "", True)
    (path,) = writer.store.paths()
    state, _ = writer.store.read(path)
    assert state["seen"] == [1]
    assert all(torch.equal(a, b) for a, b in zip(state["model"].values(), wanted, strict=True))
    assert state["optimizer"]["state"][0]["step"] == 1
    assert not torch.equal(model.weight, wanted[0])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def test_one_save_at_a_time_each_with_its_own_state(tmp_path: Path) -> None:
    writer, part = writer_of(tmp_path), Values()
    for first in (0, 2, 4):  # two are kept
        for step in (first, first + 1):
            part.values.fill_(step)
            save(writer, {"part": part}, step)
        writer.wait()
        assert not writer.busy
        for step, path in enumerate(writer.store.paths(), first):
            state, meta = writer.store.read(path)
            assert meta["optimizer_steps"] == step
            assert state["part"]["v"].eq(step).all()
        assert step == first + 1


def test_a_failed_save_is_logged_and_the_next_one_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "here"
    blocker.write_text("")
    writer = writer_of(blocker)
    writer.wait()
    assert caplog.text == ""
    save(writer, {}, 1)
    writer.wait()
    assert "could be written" in caplog.text
    assert "could be written" in writer.trouble
    assert "stand" not in writer.trouble
    assert (writer.saved, writer.written) == (None, False)
    blocker.unlink()
    save(writer, {}, 2)
    writer.wait()
    assert (writer.saved, writer.trouble, writer.written) == (2, "", True)
    monkeypatch.setattr(writer.store, "save", lambda *_, **__: 1 / 0)
    save(writer, {}, 3)
    writer.wait()
    assert "could be written; earlier ones stand (ZeroDivisionError" in writer.trouble


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
    writer, part = writer_of(tmp_path), Values("cuda", 1 << 24)
    writer.prepare({"part": part}, rank=0)
    for step in range(3):
        part.values.fill_(step)
        save(writer, {"part": part}, step)
        part.values.fill_(-1.0)
        writer.wait()
        newest = CheckpointStore(tmp_path).newest()
        assert newest is not None
        assert CheckpointStore(tmp_path).read(newest)[0]["part"]["v"].eq(step).all()


def test_without_memory_for_a_copy_the_training_waits_for_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory of the job that the kernel would have to take from a rank."""
    writer, values = writer_of(tmp_path), Values(size=1000)
    monkeypatch.setattr("pollux.checkpoint.writer.memory_left", lambda: RESERVE + 3999)
    writer.prepare({"values": values}, rank=0)
    assert "Ask for more memory (--mem)" in caplog.text
    save(writer, {"values": values}, 1)
    assert (writer.busy, writer.saved, writer.written) == (False, 1, True)
    assert not writer.copies.held
    monkeypatch.setattr("pollux.checkpoint.writer.memory_left", lambda: RESERVE + 4000)
    monkeypatch.setattr("pollux.checkpoint.writer.SMALL", 3999)
    writer.prepare({"values": values}, rank=0)
    writer.wait()
    assert writer.copies.held
    assert not writer.small


def test_the_copy_of_a_small_state_is_gone_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, values = writer_of(tmp_path), Values(size=1000)
    writer.prepare({"values": values}, rank=0)
    assert writer.small
    for step in (1, 2):
        save(writer, {"values": values}, step)
        values.values += 1
        writer.wait()
        assert not writer.copies.held
        state, _ = writer.store.read(writer.store.paths()[-1])
        assert float(state["values"]["v"][0]) == step - 1
