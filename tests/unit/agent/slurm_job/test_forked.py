"""Loops beyond a fork are of what has started the process: a driver that tries again names no training."""

import subprocess
import sys

import pytest

TRAIN = """
def train():
    from pollux.slurm_job.call_site import call_site
    print([call_site().loops, len(call_site().lines)], flush=True)
for retry in range(2):
"""
BY_HAND = f"import os, pollux{TRAIN}    os.waitpid(os.fork() or (train(), os._exit(0)), 0)"
BY_LIBRARY = f"from multiprocessing import Process as P{TRAIN}    p = P(target=train); p.start(); p.join()"


@pytest.mark.parametrize("script", [BY_HAND, BY_LIBRARY])
def test_a_fork_in_a_loop_before_torch_is_the_same_place_each_time(script: str) -> None:
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["['', 1]"] * 2
