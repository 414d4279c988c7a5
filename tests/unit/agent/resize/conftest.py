"""A stage of ranks that are resized in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pollux.resize import capability, companion_job, resizer
from tests.unit.agent.resizing import Stage


@pytest.fixture
def stage(tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> Stage:
    # The ranks are forked: what is set here holds in them.
    monkeypatch.setattr(resizer, "resizes_in_place", lambda *_: True)
    monkeypatch.setattr(companion_job, "submit", lambda *_: "1")
    # What other tests of this process have left does not count.
    monkeypatch.setattr(capability, "DistributedSampler", type("Unused", (), {}))
    monkeypatch.setattr(capability.shutil, "which", lambda _: "/bin/true")
    monkeypatch.setenv("POLLUX_GONE_WAIT", "1")
    monkeypatch.setenv("POLLUX_EXCHANGE_INTERVAL", "0")
    return Stage(tmp_path, free_port)
