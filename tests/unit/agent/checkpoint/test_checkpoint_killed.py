"""Kill -9 at any point of a save, of any rank.

An intact checkpoint remains: the last one or the new one.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from pollux.checkpoint.checkpoint_store import CheckpointStore
from pollux.checkpoint.writer import CheckpointWriter
from pollux.errors import CheckpointError
from pollux.ranks.control import ControlExchange
from tests.unit.agent.killing import die_at, exit_codes, forked, leftovers, of_system

REFUSED = 3
"""Exit status of a rank that was told that no checkpoint could be written."""

ALL = bool(os.environ.get("POLLUX_SOAK"))
"""Every point of every kind of save: minutes."""


# -- one part, written by one rank ------------------------------------------------------------------------------------


def every_call(_frame: Any, event: str, argument: Any) -> bool:
    """Count each call into the system: only these change a file."""
    return of_system(event, argument)


class Weights:
    """A part of a training."""

    def __init__(self, step: int) -> None:
        self.w = torch.full((20_000,), float(step))

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w}


def save_part(directory: Path, step: int, at: int, *, beside: bool) -> int:
    writer, part = CheckpointWriter(torch.nn.Linear(1, 1), directory, 1), Weights(step)
    die_at(at, every_call)
    meta = {"optimizer_steps": step}
    writer.save({"part": part}, lambda: {"list": [step]}, meta, rank=0, durable=not beside)
    part.w.fill_(-1.0)  # the training goes on
    writer.wait()
    return 0


@pytest.mark.parametrize("beside", [False, True])
def test_killed_before_any_call_of_a_save(tmp_path: Path, beside: bool) -> None:
    """Kill the save, in the training thread or beside it, before each of its calls, one after the other."""
    for _ in range(2):
        assert exit_codes([forked(partial(save_part, tmp_path, 0, 0, beside=False))]) == [0]
    last, code, at, outcomes, interrupted = 0, -1, 1, set(), 0
    while code != 0:
        assert at < 1000, "no save came to its end"
        if not leftovers(tmp_path):
            # Each save then has the same leftovers to remove, and makes the same calls.
            (tmp_path / ".checkpoint-00000001.tmp").mkdir()
            (tmp_path / ".checkpoint-00000001.tmp/.state.pt.tmp").write_bytes(b"half")
        (code,) = exit_codes([forked(partial(save_part, tmp_path, last + 1, at, beside=beside))])
        assert code in (0, -signal.SIGKILL)
        interrupted += leftovers(tmp_path)
        store = CheckpointStore(tmp_path)
        newest = store.newest()
        assert newest is not None
        found, meta = store.read(newest)
        step = meta["optimizer_steps"]
        assert step == last + 1 if code == 0 else step in (last, last + 1)
        assert found["part"]["w"].eq(step).all()
        assert found["list"] == [step]
        if code:
            outcomes.add(step - last)
        last = step
        # Beside the training, a thread makes the same calls, so every second call is enough.
        at += 2 if beside and not ALL else 1
    assert at > 20, "hardly a point to be killed at"
    assert interrupted > 5
    assert outcomes == {0, 1}, "killed before the new checkpoint's name stood, and after"


# -- two parts, written by all ranks ---------------------------------------------------------------------------------

COLLECTIVES = frozenset({"all_gather_object", "all_gather", "gather", "scatter", "broadcast"})
NAMES = frozenset({"mkdir", "rename", "fsync"})
TRACES = frozenset({"open", "write", "flush", "close", "__exit__", "unlink", "rmdir"})


class Traces:
    """Count the calls whose effects another process can see.

    A kill between two such calls has the same effect as a kill before the second one. Of the many traces between two
    changes of names, syncs or collectives, only every fourth counts, unless `ALL`.
    """

    def __init__(self) -> None:
        self._writes = self._traces = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> bool:
        if event == "call":
            code = frame.f_code
            return code.co_name in COLLECTIVES and code.co_filename == dist.distributed_c10d.__file__
        if not of_system(event, argument):
            return False
        name = argument.__name__
        self._writes = self._writes + 1 if name == "write" else 0
        if name not in TRACES or (not ALL and self._writes & (self._writes - 1)):
            return name in NAMES  # of small writes in a row, the first, second, fourth, eighth
        self._traces += 1
        return ALL or self._traces % 4 == 0


def save_shards(directory: Path, rank: int, step: int, at: int, meeting: Path) -> int:
    """One rank of two; `at` is 0 on the one that is not to be killed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rendezvous = dist.FileStore(str(meeting), 2)
    dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2,))
    shards = {
        name: DTensor.from_local(torch.full((9_000,), float(step)), mesh, [Shard(0)]) for name in ("a", "b")
    }
    store = CheckpointStore(directory, sharded=True)
    # A rank killed while the other still connects would end the other outside the save.
    rendezvous.set(f"connected {rank}", "yes")
    rendezvous.wait(["connected 0", "connected 1"])
    die_at(at, Traces())
    try:
        store.save({"step": step}, shards, meta={}, exchange=ControlExchange(dist.group.WORLD, 0))
    except CheckpointError:
        return REFUSED
    finally:
        sys.setprofile(None)
    return 0


def both(directory: Path, step: int, victim: int, at: int) -> list[int]:
    """Save on two ranks, kill `victim` at `at`; return how each ended."""
    meeting = directory.with_name(f"meeting-{step}-{at}")
    points = [at if rank == victim else 0 for rank in range(2)]
    return exit_codes(
        [
            forked(partial(save_shards, directory, rank, step, point, meeting))
            for rank, point in enumerate(points)
        ]
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="fully_shard is supported from torch 2.13 on")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_before_any_trace_of_a_sharded_save(tmp_path: Path, victim: int) -> None:
    """The other rank hears of it and ends, and may publish nothing half."""
    directory = tmp_path / "checkpoints"
    for step in range(2):
        assert both(directory, step, victim, 0) == [0, 0]
    last, at, outcomes, interrupted = 1, 1, set(), 0
    codes: list[int] = []
    while codes != [0, 0]:
        assert at < 1000, "no save came to its end"
        if not leftovers(directory):
            left = directory / ".checkpoint-00000001.tmp"
            left.mkdir()
            for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "state.pt"):
                (left / name).write_bytes(b"half")
        codes = both(directory, last + 1, victim, at)
        assert codes[victim] in (0, -signal.SIGKILL)
        assert codes[1 - victim] in (0, REFUSED)
        interrupted += leftovers(directory)
        store = CheckpointStore(directory, sharded=True)
        newest = store.newest()
        assert newest is not None
        step = store.read(newest)[0]["step"]
        # A rank that was told so relies on the new one.
        assert step == last + 1 if 0 in codes else step in (last, last + 1)
        found = {name: torch.zeros(18_000) for name in ("a", "b")}
        store.read_shards(newest, found)
        assert all(bool(tensor.eq(step).all()) for tensor in found.values())
        if codes[victim]:
            outcomes.add(step - last)
        last = step
        at += 1
    assert at > 20, "hardly a point to be killed at"
    # Where rank 1 is lost, rank 0 removes at once what the save left.
    assert interrupted > (5 if victim == 0 else 0)
    assert outcomes == {0, 1}, "killed before the new checkpoint's name stood, and after"
