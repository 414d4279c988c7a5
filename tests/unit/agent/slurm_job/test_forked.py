"""Loops and calls beyond a fork are of what has started the process: a driver that tries again names no training."""

from __future__ import annotations

import subprocess
import sys

import pytest

BY_HAND = """
import os
import pollux
def train():
    from pollux.slurm_job.call_site import call_site
    site = call_site()
    print(repr(site.loops), len(site.lines), flush=True)
for retry in range(2):
    pid = os.fork()
    if not pid:
        train()
        os._exit(0)
    os.waitpid(pid, 0)
"""
BY_MULTIPROCESSING = """
import multiprocessing
def train():
    from pollux.slurm_job.call_site import call_site
    site = call_site()
    print(repr(site.loops), len(site.lines), flush=True)
for retry in range(2):
    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    child.join()
"""


@pytest.mark.parametrize("script", [BY_HAND, BY_MULTIPROCESSING], ids=["by hand", "by multiprocessing"])
def test_a_fork_in_a_loop_before_torch_is_the_same_place_each_time(script: str) -> None:
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["'' 1"] * 2
