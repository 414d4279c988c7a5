"""The stand-in for pyslurm, put where workers look for it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from polluxd.slurm import pyslurm_process
from tests.unit.slurm.pyslurm_stand_in import StandIn


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> StandIn:
    made = StandIn(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/lib:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(pyslurm_process, "_GRACE_S", 60.0)  # however slow the machine
    caplog.set_level(logging.INFO, "polluxd.slurm.pyslurm_client")
    return made
