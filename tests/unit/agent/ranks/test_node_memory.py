"""Copies in a node's memory: one is whole at any time, whenever the writer is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from pollux.ranks.node_memory import HEADER, NodeMemory, memory_limit


def write(memory: NodeMemory, step: int, size: int = 1 << 16) -> None:
    text = str(step).encode() * 10
    slot = memory.older()
    content = slot.room(HEADER + size + len(text))
    content[HEADER : HEADER + size] = bytes([step % 251]) * size
    slot.complete(step, HEADER + size, text)


def test_the_newest_copies_of_each_rank_are_found() -> None:
    memory = NodeMemory(2)
    assert memory.copies(0) == []
    for step in (3, 5, 9):
        write(memory, step, size=step << 12)
    assert [copy.step for copy in memory.copies(0)] == [9, 5]
    assert memory.copies(0)[0].slot.mapped()[HEADER] == 9
    assert memory.copies(1) == []
    memory.local_rank = 1
    write(memory, 7)
    assert [copy.step for copy in memory.copies(1)] == [7]


@pytest.mark.parametrize("seed", range(12))
def test_a_writer_killed_at_any_moment_leaves_a_whole_copy(seed: int) -> None:
    memory = NodeMemory(1)
    write(memory, 1)
    child = os.fork()
    if not child:
        for step in range(2, 1 << 30):
            write(memory, step)
            memory.note(copied=step)
    time.sleep(random.Random(seed).uniform(0.01, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    newest = memory.copies(0)[0]
    assert newest.step in (memory.copied, memory.copied + 1) or memory.copied == 0
    assert newest.text == str(newest.step).encode() * 10
    content = newest.slot.mapped()
    assert set(content[HEADER : HEADER + (1 << 16)]) == {newest.step % 251}


def test_what_is_damaged_counts_as_no_copy() -> None:
    memory = NodeMemory(1)
    write(memory, 4)
    (copy,) = memory.copies(0)
    content = copy.slot.mapped()
    content[HEADER + (1 << 16)] ^= 1
    assert memory.copies(0) == []
    content[HEADER + (1 << 16)] ^= 1
    assert len(memory.copies(0)) == 1
    content[16:24] = b"\xff" * 8
    assert memory.copies(0) == []


def test_workers_tell_the_launcher_what_new_ranks_would_find() -> None:
    memory = NodeMemory(1)
    assert (memory.restores, memory.copied, memory.saved) == (False, 0, 0)
    child = os.fork()
    if not child:
        memory.note(restores=True, copied=12)
        memory.note(saved=9)
        os._exit(0)
    os.waitpid(child, 0)
    assert (memory.restores, memory.copied, memory.saved) == (True, 12, 9)


def test_no_other_process_finds_the_memory() -> None:
    before = set(os.listdir("/dev/shm"))
    memory = NodeMemory(1)
    write(memory, 1)
    assert set(os.listdir("/dev/shm")) == before
    assert not os.get_inheritable(memory.slots[0][0].descriptor), (
        "a program that a rank starts must not have it"
    )


def test_the_limit_is_the_least_of_the_job_s_cgroups(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job_4/step_0\n9:memory:/job_4\n8:cpu:/x\n")
    machine = memory_limit(tmp_path)
    job = tmp_path / "sys/fs/cgroup/job_4"
    (job / "step_0").mkdir(parents=True)
    (job / "step_0/memory.max").write_text("max\n")
    assert memory_limit(tmp_path) == machine
    (job / "memory.max").write_text("7000000\n")
    assert memory_limit(tmp_path) == 7000000
    former = tmp_path / "sys/fs/cgroup/memory/job_4"
    former.mkdir(parents=True)
    (former / "memory.limit_in_bytes").write_text("5000000\n")
    assert memory_limit(tmp_path) == 5000000
