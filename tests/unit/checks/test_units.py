"""systemd's units, by systemd's own check, and what they say twice."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.build import config

UNITS = Path(__file__).resolve().parents[3] / "contrib" / "systemd"


def words(unit: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", (UNITS / unit).read_text(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_finds_no_fault(tmp_path: Path) -> None:
    units = tmp_path / "etc" / "systemd" / "system"
    units.mkdir(parents=True)
    for unit in (*UNITS.glob("*.service"), *UNITS.glob("*.socket")):
        shutil.copy(unit, units)
    for program in ("usr/bin/polluxd", "bin/kill"):
        made = tmp_path / program
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text("#!/bin/sh\n")
        made.chmod(0o755)
    names = sorted(unit.name for unit in units.iterdir())
    assert "polluxd-gateway.socket" in names
    command = ["systemd-analyze", "verify", f"--root={tmp_path}", "--recursive-errors=no", "--man=no", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_socket_is_the_gateway_s_and_stays() -> None:
    assert words("polluxd-gateway.socket", "ListenStream") == [config().gateway.listen]
    assert words("polluxd-gateway.service", "Requires") == ["polluxd-gateway.socket"]
    # After a limit of starts, systemd closes the socket, too, and another user could take the port.
    assert words("polluxd-gateway.service", "StartLimitIntervalSec") == ["0"]
