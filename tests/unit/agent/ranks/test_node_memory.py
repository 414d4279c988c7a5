"""Copies in a node's memory: one is whole at any time, whenever the writer is killed."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch

from pollux.ranks.node_memory import HEADER, NodeMemory


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
            memory.shared.copied = step
    time.sleep(random.Random(seed).uniform(0.01, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    newest = memory.copies(0)[0]
    copied = memory.shared.copied
    assert newest.step in (copied, copied + 1) or copied == 0
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
    shared = NodeMemory(1).shared
    assert (shared.restores, shared.copied, shared.saved) == (False, 0, 0)
    child = os.fork()
    if not child:
        shared.restores, shared.copied, shared.saved = True, 12, 9
        os._exit(0)
    os.waitpid(child, 0)
    assert (shared.restores, shared.copied, shared.saved) == (True, 12, 9)


def test_no_other_process_finds_the_memory() -> None:
    before = set(os.listdir("/dev/shm"))
    memory = NodeMemory(1)
    write(memory, 1)
    assert set(os.listdir("/dev/shm")) == before
    assert not os.get_inheritable(memory.slots[0][0].descriptor), (
        "a program that a rank starts must not have it"
    )


class Registered:
    """CUDA's register of host memory, with its rules: no range twice, and all of a mapping as long as it lasts."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.ranges, self.refuses, self.errors = dict[int, int](), refuses, 0

    def cudaHostRegister(self, start: int, length: int, flags: int) -> int:  # noqa: N802
        if self.refuses or any(start < at + n and at < start + length for at, n in self.ranges.items()):
            self.errors += 1
            return 712
        self.ranges[start] = length
        return 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        del self.ranges[start]
        return 0


def test_memory_that_grows_is_registered_with_cuda_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Registered()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    first, second = NodeMemory(1).slots[0]
    for size in (8192, 8192, 8200, 1 << 20, 1 << 22, 4096):
        for slot in (first, second):
            slot.room(size)
            slot.pin()
            slot.pin()
        assert sorted(cuda.ranges.values()) == sorted(len(slot.mapped()) for slot in (first, second))
    first.free()
    assert (len(cuda.ranges), cuda.errors) == (1, 0)


def test_memory_that_cuda_does_not_register_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, launched = Registered(refuses=True), []

    def launch(*size: int, device: str) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch, "ones", launch)
    slot = NodeMemory(1).slots[0][0]
    slot.room(8192)
    slot.pin()
    slot.pin()
    assert (cuda.errors, launched) == (1, ["cuda"]), "CUDA's error is taken off: no later launch raises it"
    slot.room(1 << 20)
