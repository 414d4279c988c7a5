"""`python -m contrib.demo` as a command.

A small workload runs from sbatch to summary, fails, and is interrupted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contrib.devcluster.processes import pids_with_environment

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]

TRAINING = """
[[training]]
script = "{script}"
epochs = 2
batch_size = 32
per_gpu = [4, 128]
lr = 0.05
alpha_s = 0.02
beta_s = 0.001
sync_local_s = 0.01
sync_node_s = 0.02
"""
WORKLOAD = f"""
limit_s = 240.0
[cluster]
nodes = 1
gpus_per_node = 2
{TRAINING}
name = "small"
arrive_s = 0
max_batch_size = 256
{TRAINING}
name = "late"
arrive_s = 2
max_batch_size = 32
max_gpus = 1
adaptive = false
"""


@pytest.fixture
def demo(tmp_path):
    """Start the demo on a small workload, and kill its processes at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(script="contrib/examples/digits_mlp.py"):
        workload = tmp_path / "workload.toml"
        workload.write_text(WORKLOAD.format(script=script))
        words = ("--workload", str(workload), "--out", str(tmp_path / "out"))
        process = subprocess.Popen(
            [sys.executable, "-m", "contrib.demo", *words],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TERM": "dumb"},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.stdout.close()


def scratch_of(text):
    found = re.search(r"in (/\S*pollux-demo-\S+)", text)
    assert found is not None, text
    return Path(found[1])


def assert_nothing_left(text):
    scratch = scratch_of(text)
    assert not scratch.exists()
    assert pids_with_environment(f"SLURM_CONF={scratch}/cluster/etc/slurm.conf") == []


def test_a_small_workload_from_sbatch_to_summary(demo, tmp_path):
    text, _ = (process := demo()).communicate(timeout=500)
    assert process.returncode == 0, text
    assert "Live page, for one browser: http://127.0.0.1:" in text
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert set(summary) == {"jobs", "moves", "mean_jct_s", "idle_gpu_s", "lost_gpu_s"}
    assert summary["lost_gpu_s"] == 0
    assert [(job["name"], job["state"]) for job in summary["jobs"]] == [
        ("small", "COMPLETED"),
        ("late", "COMPLETED"),
    ]
    for job in summary["jobs"]:
        assert set(job) == {"name", "job_id", "state", "jct_s", "accuracy", "moves", "gpus", "batch_size"}
        assert job["accuracy"] > 0.5
        assert max(n for _, n in job["gpus"]) >= 1
        assert job["gpus"][-1][1] == 0
        assert job["batch_size"][0][1] == 32
    moves = (tmp_path / "out" / "moves.txt").read_text()
    for move in summary["moves"]:
        assert re.search(rf"^\s*\d+\s+{move['job_id']}\b", moves, re.MULTILINE), (move, moves)
    assert (tmp_path / "out" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "Under polluxd a training ended after" in text
    if shutil.which("chromium"):
        assert (tmp_path / "out" / "live-page.png").read_bytes().startswith(b"\x89PNG")
    assert_nothing_left(text)


def test_a_job_that_fails_ends_the_demo_with_its_log(demo, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('the data is not there')\n")
    text, _ = (process := demo(script=str(script))).communicate(timeout=300)
    assert process.returncode == 1
    # Both run the broken script; which of them Slurm sees fail first is the machine's affair.
    assert re.search(r"(small \(job 1\)|late \(job 2\)) ended in state FAILED", text)
    assert "the data is not there" in text
    assert "end of polluxd.log" in text
    assert_nothing_left(text)


def test_a_signal_stops_everything(demo):
    process = demo()
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "small" in line:
            break
    time.sleep(3)
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=150)
    assert process.returncode == 128 + signal.SIGTERM
    assert "everything stopped" in rest
    assert_nothing_left("".join(lines))
