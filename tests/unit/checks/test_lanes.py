"""`make test` runs its parts in lanes."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

LANES = str(Path(__file__).parents[3] / "contrib/checks/lanes.sh")


def test_every_command_runs_and_a_failure_is_the_status(tmp_path: Path) -> None:
    done = subprocess.run(
        [LANES, "2", "echo one; exit 0", "sh -c 'echo two; exit 3'", "echo three", "echo four"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 3
    said = done.stdout.splitlines()
    assert {"one", "two", "three", "four"} <= set(said)
    assert [line.rpartition(": ")[2] for line in said if "status 3" in line] == ["sh -c 'echo two; exit 3'"]
    assert said.index("two") + 1 == next(n for n, line in enumerate(said) if "status 3" in line)


def test_a_lane_that_is_free_takes_the_next_command(tmp_path: Path) -> None:
    """The first command ends only after the other lane has run both others."""
    first = f"sh -c 'until [ -e {tmp_path}/c ]; do sleep 0.01; done'"
    third = f"sh -c '[ -e {tmp_path}/b ] && touch {tmp_path}/c'"
    done = subprocess.run([LANES, "2", first, f"touch {tmp_path}/b", third], check=False, timeout=60)
    assert done.returncode == 0


def test_an_end_from_outside_lets_the_commands_clean_up(tmp_path: Path) -> None:
    cleans = f"sh -c 'trap \"touch {tmp_path}/cleaned; exit 1\" INT; touch {tmp_path}/up; while :; do sleep 0.01; done'"
    lanes = subprocess.Popen([LANES, "1", cleans, f"touch {tmp_path}/next"])
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        lanes.send_signal(signal.SIGTERM)
        assert lanes.wait(60) == 143
    finally:
        lanes.kill()
    assert (tmp_path / "cleaned").exists()
    assert not (tmp_path / "next").exists()
