"""The wait for joiners: their time begins when their nodes have booted."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pollux.resize import companion_job
from pollux.resize.companion_job import CompanionJob, RecruitmentFailed, Wanted

WAIT = 0.6


def waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, boots: float, joins: float) -> CompanionJob:
    """Return a companion job whose node boots for so many seconds, and whose joiner is ready so long after that."""
    begun = time.monotonic()

    def shown(_: str) -> str:
        state = "CONFIGURING" if time.monotonic() < begun + boots else "RUNNING"
        return f"JobId=7 JobState={state}"

    def value(key: str) -> Any:
        return {} if key.endswith("ready/0") and time.monotonic() >= begun + boots + joins else None

    monkeypatch.setattr(companion_job, "show_job", shown)
    monkeypatch.setattr(companion_job, "submit", lambda *_: "7")
    meeting: Any = SimpleNamespace(address="", port=0, secret="", value=value)
    return CompanionJob(Wanted(1, 1, 1, "nonce"), meeting, tmp_path, {}, {}, wait=WAIT)


def test_joiners_have_their_whole_time_once_their_nodes_have_booted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waiting(monkeypatch, tmp_path, boots=0.75 * WAIT, joins=0.75 * WAIT).bring()
    with pytest.raises(RecruitmentFailed, match="1 of 1 joiners were not ready"):
        waiting(monkeypatch, tmp_path / "late", boots=0.75 * WAIT, joins=10 * WAIT).bring()
