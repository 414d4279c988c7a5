"""Run real ranks in tests: forked processes that talk over gloo.

gloo uses the loopback interface.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from contrib.devcluster.processes import free_ports
from pollux.launcher.node import PRELOAD
from pollux.slurm_job import call_site
from pollux.slurm_job.trainings import Attached, NamedTraining

os.environ.setdefault("OMP_NUM_THREADS", "1")

PATIENCE = 100.0


@functools.cache
def _ports() -> Iterator[int]:
    """Ports that no other process takes before the ranks of a test do.

    When a port's turn comes again, the ranks that had it are gone.
    """
    return itertools.cycle(free_ports(32))


def _free_port() -> int:
    return next(_ports())


def _rank(body: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], pipe: Any) -> None:
    os.environ.update(env)
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send_bytes(pickle.dumps((True, body(*args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    pipe.close()
    os._exit(0)  # no interpreter shutdown: pytest's own exit handlers are not this process's


def run_ranks(
    size: int, body: Callable[..., Any], *args: Any, nodes: int = 1, env: dict[str, str] | None = None
) -> list[Any]:
    """Run `body(*args)` on `size` forked ranks; return the results by rank.

    `nodes` spreads the ranks over that many nodes, in name only.
    """
    # Before the forks: each rank would import them, at several seconds of CPU time.
    for name in PRELOAD:
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    port = str(_free_port())
    running = []
    for rank in range(size):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % (size // nodes)),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size // nodes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
            **(env or {}),
        }
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(body, args, place, there))
        process.start()
        there.close()
        running.append((process, here))
    results, troubles = [], []
    for rank, (process, pipe) in enumerate(running):
        try:
            good, value = (
                pickle.loads(pipe.recv_bytes())
                if pipe.poll(PATIENCE)
                else (False, f"silent for {PATIENCE} s")
            )
        except EOFError:
            good, value = False, "died without a word"
        (results if good else troubles).append(value if good else f"rank {rank}: {value}")
        process.join(0 if troubles else 5)
    for process, _ in running:
        if process.is_alive():
            process.kill()
    assert not troubles, "\n".join(troubles)
    return results


def _sum(dtype: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1, dtype=dtype))


@functools.cache
def _gloo_sums(dtype: Any) -> bool:
    try:
        run_ranks(2, _sum, dtype)
    except AssertionError:
        return False
    return True


def skip_unless_gloo_sums(dtype: Any) -> None:
    """Skip the test where this build of torch cannot reduce the type on a CPU.

    Debian's torch 2.14 reduces no type of 16 bits.
    """
    if not _gloo_sums(dtype):
        pytest.skip(f"gloo of this build of torch does not sum {dtype}")


@pytest.fixture(autouse=True)
def no_advice_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the batch size to the test.

    The advisor's thread first looks after a second, which a busy machine may need for some steps. Forked ranks inherit
    the setting.
    """
    monkeypatch.setattr("pollux.tuning.batch_choice.FIRST_REFIT", 1e6)


@pytest.fixture(autouse=True)
def a_test_is_no_part_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test starts the same script at several of its lines, and in its loops."""
    frames = call_site.frames_of_the_user

    def of_the_script(frame: Any) -> Iterator[Any]:
        return (each for each in frames(frame) if not each.f_code.co_name.startswith("test_"))

    monkeypatch.setattr(call_site, "frames_of_the_user", of_the_script)


@pytest.fixture(autouse=True)
def each_attach_is_of_a_new_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a test's next `attach` go on from the checkpoint of the one before, as after a restart.

    Tests marked `one_process` attach several trainings, as a script does.
    """
    if request.node.get_closest_marker("one_process") is None:

        def add(self: Attached, folder: Any, name: str | None, **_: Any) -> NamedTraining:
            if name is not None:
                return NamedTraining(f"attach-{name}")
            return NamedTraining(site=replace(call_site.call_site(), arguments={}))

        monkeypatch.setattr(Attached, "add", add)
    else:
        monkeypatch.setattr("pollux.slurm_job.attempt.attached", Attached())


@pytest.fixture
def read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read samples of the noise at the next step, not some seconds later.

    Forked ranks inherit the setting.
    """
    monkeypatch.setenv("POLLUX_EXCHANGES_PER_READING", "0")


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    return run_ranks


@pytest.fixture
def free_port() -> Callable[[], int]:
    return _free_port
