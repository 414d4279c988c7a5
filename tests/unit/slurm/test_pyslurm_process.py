"""The worker's process: workers that hang, foreign programs, orphans.

One worker hangs at once, one program is no worker, and one worker ends when its polluxd is gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polluxd.slurm.pyslurm_process import PyslurmProcess, WorkerFailed, WorkerHung
from tests.unit.slurm.pyslurm_stand_in import StandIn


def test_an_import_that_hangs_is_killed(stand_in: StandIn) -> None:
    stand_in.fault(**{"import": "hang"})
    with pytest.raises(WorkerHung, match=r"no answer within 0\.5 s"):
        PyslurmProcess({**os.environ, "SLURM_CONF": str(stand_in.conf)}, start_s=0.5)


HELLO = 'import os, sys, time; print(\'{"pyslurm": "22.05.2"}\', flush=True); line = sys.stdin.readline()\n'


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (
            "print('hello', flush=True); import time; time.sleep(100)",
            "expected one JSON object a line, got b'hello'",
        ),
        ("print('[' * 100000)", "expected one JSON object a line"),
        ("print('{\"version\": 1}')", "it began with"),
        ("", "the process ended (exit status 0): without a word"),
        ("import sys; sys.exit('a' * 1000)", "the process ended (exit status 1): aaa"),
        (HELLO, "the process ended (exit status 0)"),
        (HELLO + "print('{\"id\": 1, \"done\": [1, 2', end='')", "the process ended (exit status 0)"),
        (HELLO + 'print(\'{"id": 2, "done": 1}\')', "expected the answer to request 1"),
        (HELLO + 'print(\'{"id": 1, "don": 1}\')', "jobs: None"),
        (HELLO + "print('x' * 5000)", "an answer of more than 4096 bytes"),
        (HELLO + "os.close(1); os.close(2); time.sleep(100)", "its pipe closed"),
    ],
)
def test_garbage_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    (tmp_path / "worker.py").write_text(program)
    limits: dict[str, Any] = {"grace_s": 0.5 if "close" in program else 60.0}
    if "5000" in program:
        limits["longest_answer"] = 4096
    before = children()
    with pytest.raises(WorkerFailed) as caught:
        PyslurmProcess(os.environ, start_s=60, worker=tmp_path / "worker.py", **limits).ask("jobs", 60)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 500
    wait_for(lambda: children() <= before)


def children() -> set[int]:
    """Pids of our children that live."""
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return {pid for pid in pids if alive(pid) and stat(pid)[1:2] == [str(os.getpid())]}


def alive(pid: int) -> bool:
    return stat(pid)[:1] not in ([], ["Z"])


def stat(pid: int) -> list[str]:
    """From the state on, proc(5); nothing for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def test_a_worker_outlives_no_polluxd(stand_in: StandIn) -> None:
    code = (
        "import os, sys\n"
        "from polluxd.slurm.pyslurm_process import PyslurmProcess\n"
        f"worker = PyslurmProcess({{**os.environ, 'SLURM_CONF': {str(stand_in.conf)!r}}}, start_s=60)\n"
        "print(worker.process.pid, flush=True)\n"
        "os._exit(0)\n"  # as if killed: nothing is tidied up
    )
    path = os.pathsep.join([os.environ["PYTHONPATH"], *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=True
    )
    pid = int(done.stdout)
    wait_for(lambda: not alive(pid))


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
