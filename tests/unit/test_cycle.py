"""The control cycle: what it says of records of Slurm that make no sense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polluxd.slurm.protocol import ClusterState
from tests.unit.test_gpu_types import Cycle


def test_records_that_make_no_sense_are_named_in_the_log_once_and_in_the_note(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycle = Cycle()
    unreadable = {f"job {i}": "expected UserID as a number, got 'x'" for i in range(1, 8)}
    observe = cycle.slurm.observe

    def garbled() -> ClusterState:
        return replace(observe(), unreadable=unreadable)

    notes: list[str] = []
    store = cycle.controller._store
    record = store.record_cycle

    def recorded(*words: Any, note: str, **more: Any) -> int:
        notes.append(note)
        return record(*words, note=note, **more)

    monkeypatch.setattr(cycle.slurm, "observe", garbled)
    monkeypatch.setattr(store, "record_cycle", recorded)
    cycle.step()
    cycle.step()
    named = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(named) == 7
    assert "leaves job 3 alone" in named[2]
    assert "expected UserID" in named[2]
    assert notes[0] == notes[1]
    assert "job 5: expected UserID" in notes[0]
    assert notes[0].endswith("and 2 more")
    unreadable.clear()
    cycle.step()
    assert notes[-1] == ""
