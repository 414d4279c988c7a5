"""Ranks are killed in mid-training; the others go on in their processes.

Each rank writes down the samples of its completed steps; real ranks talk over gloo.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before the forks: each rank would else import it
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset, TensorDataset

from pollux import attach
from pollux.errors import RankLost
from pollux.launcher.state import Graces
from pollux.launcher.store_process import StoreProcess
from pollux.loop import mending
from pollux.ranks import rendezvous
from pollux.ranks.control import Decision
from pollux.ranks.torch_internals import gloo_timeout_changes, set_group_timeout
from pollux.ranks.value_store import VARIABLE
from pollux.resize.capability import ResizeCapability
from pollux.resize.machine import ResizePhase, ResizeState
from pollux.resize.requests import ResizeRequest
from tests.unit.agent.conftest import _free_port, skip_unless_gloo_sums

EXAMPLES = 203
PATIENCE = 100.0


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Also as a stream the data is longer than the script says."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return (self.data[i] for i in range(len(self.data)))


Trouble = Callable[[Any, int, str], None]
"""Called with the job, the optimizer step and where the step is: "begin", "middle" or "end"."""


def train(folder: Path, trouble: Trouble, kind: str, passes: int) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(EXAMPLES, 4, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(EXAMPLES))
    hook = (None, fp16_compress_hook) if kind == "hook" else None
    job = attach(network, optimizer, checkpoint_dir=folder / "checkpoints", comm_hook=hook)
    more = {"length": 150} if kind == "stream" else {}
    loader = job.loader(Stream(data) if kind == "stream" else data, 24, per_gpu=(1, 12), **more)
    used: dict[int, list[tuple[int, int]]] = {}
    first = job.rank
    found: dict[str, Any] = {"pid": os.getpid(), "first": first}
    try:
        for _ in job.epochs(passes, passes=True):
            for a, b, ids in loader:
                step, place = job.progress.optimizer_steps, job.stepper.training.data
                mine = [(place.pass_index, int(i)) for i in ids] if place.local_samples else []
                trouble(job, step, "begin")
                with job.micro_batch():
                    loss = mse_loss(job.model(a), b)
                    trouble(job, step, "middle")
                    job.backward(loss)
                if job.sync_gradients:
                    optimizer.step()
                    optimizer.zero_grad()
                    used[step] = mine
                    (folder / f"used-{first}").write_text(json.dumps(list(used.items())))
                    trouble(job, step, "end")
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found |= {
        "steps": job.progress.optimizer_steps,
        "size": job.world.size,
        "samples": job.progress.samples,
        "weights": torch.cat([p.detach().flatten() for p in network.parameters()]).tolist(),
        "report": job.report()["gpus"],
    }
    (folder / f"found-{first}").write_text(json.dumps(found))
    os._exit(0)


def run(
    folder: Path,
    size: int,
    trouble: Trouble,
    *,
    kind: str = "map",
    nodes: int = 1,
    passes: int = 2,
    **more: str,
) -> list[Any]:
    """Train on forked ranks; return what each found, None of a killed one.

    The ranks' store is in a process of its own. `more` are variables of their environment.
    """
    store = StoreProcess(lambda: None)
    context, port = multiprocessing.get_context("fork"), str(_free_port())
    per_node = size // nodes
    processes = []
    for rank in range(size):
        environ = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % per_node),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
            "SLURMD_NODENAME": f"n{rank // per_node}",
            "POLLUX_LAUNCHED_AT": repr(time.time()),
            **store.environment,
            **more,
        }

        def body(environ: dict[str, str] = environ) -> None:
            os.environ.update(environ)
            torch.set_num_threads(1)
            train(folder, trouble, kind, passes)

        processes.append(context.Process(target=body))
        processes[-1].start()
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.1))
    silent = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    store.end()
    assert not silent, f"silent: {silent}"
    paths = [folder / f"found-{rank}" for rank in range(size)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def assert_each_once(folder: Path, passes: int = 2) -> None:
    """Each sample is part of one completed step in each pass."""
    steps: Counter[tuple[int, int]] = Counter()
    for path in folder.glob("used-*"):
        for _, samples in json.loads(path.read_text()):
            steps.update((number, sample) for number, sample in samples)
    assert set(steps.values()) == {1}, [s for s, n in steps.items() if n != 1][:5]
    assert len(steps) == passes * EXAMPLES


def die(*ranks: int, step: int, where: str) -> Trouble:
    def trouble(job: Any, now: int, place: str) -> None:
        if (now, place) == (step, where) and job.rank in ranks and job.world.size > 2:
            os.kill(os.getpid(), signal.SIGKILL)

    return trouble


@pytest.mark.parametrize(
    ("kind", "nodes", "lost", "where", "left"),
    [
        ("map", 1, (3,), "middle", 3),
        ("stream", 4, (2, 3), "begin", 2),
        ("hook", 2, (3,), "end", 2),
    ],
)
def test_the_others_go_on_where_a_rank_is_killed(
    kind: str, nodes: int, lost: tuple[int, ...], where: str, left: int, tmp_path: Path
) -> None:
    if kind == "hook":
        skip_unless_gloo_sums(torch.float16)
    found = run(tmp_path, 4, die(*lost, step=5, where=where), kind=kind, nodes=nodes)
    here = [rank for rank in found if rank is not None]
    assert [rank["error"] for rank in here if "error" in rank] == (["SystemExit: 76"] if nodes == 2 else [])
    stayed = [rank for rank in here if "error" not in rank]
    assert {(rank["size"], rank["report"]) for rank in stayed} == {(left, left)}
    assert len({(rank["steps"], rank["samples"], tuple(rank["weights"])) for rank in stayed}) == 1
    assert stayed[0]["samples"] == 2 * EXAMPLES
    assert_each_once(tmp_path)


def test_ranks_behind_take_over_the_state_of_the_furthest(tmp_path: Path) -> None:
    """Rank 1 has completed the step in which another was lost; rank 0 has not."""

    def trouble(job: Any, step: int, where: str) -> None:
        if (step, where) == (5, "middle") and job.world.size == 3:
            # As if its connections had failed alone, after the others' reduction was over.
            if job.rank == 2:
                assert rendezvous.until((tmp_path / "ahead").exists, 60.0)
                os.kill(os.getpid(), signal.SIGKILL)
            if job.rank == 1:
                job.optimizer.step()
                job.stepper.commit_in_hand()
                (tmp_path / "ahead").touch()

    found = run(tmp_path, 3, trouble)
    assert found[2] is None
    assert all("error" not in rank for rank in found[:2])
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["samples"] == found[1]["samples"] == 2 * EXAMPLES


def test_two_losses_one_after_the_other(tmp_path: Path) -> None:
    def trouble(job: Any, step: int, where: str) -> None:
        if where == "middle" and (job.world.size, job.rank, step) in ((4, 3, 4), (3, 1, 7)):
            os.kill(os.getpid(), signal.SIGKILL)

    found = run(tmp_path, 4, trouble)
    assert [None if rank is None else rank.get("error", rank["size"]) for rank in found] == [2, None, 2, None]
    assert_each_once(tmp_path)


@pytest.mark.skipif(not gloo_timeout_changes(), reason="this gloo keeps its first timeout of half an hour")
@pytest.mark.parametrize("hangs", [2, 0])
def test_the_others_go_on_without_a_rank_that_hangs(hangs: int, tmp_path: Path) -> None:
    """A timeout tells them; the rank that hangs leaves when it wakes up."""
    leads, follows = sorted({0, 1, 2} - {hangs})

    def trouble(job: Any, step: int, where: str) -> None:
        if (step, where, job.world.size) == (5, "middle", 3):
            if job.rank == hangs:
                (tmp_path / "pid").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            if job.rank == leads:
                heard, until = job.coordinator.groups.rendezvous.heard, mending.until
                # Both that do not hang, however slow this machine is.
                came = f"came/0/{follows}"
                mending.until = lambda all_came, _: until(lambda: heard(came) and not all_came(), 60.0)
                mending.LEAD_WAIT = 0.0
            set_group_timeout(timedelta(seconds=2))
        if (step, where, job.rank) == (7, "end", 0):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT)
            assert rendezvous.until((tmp_path / f"found-{hangs}").exists, 60.0)

    found = run(tmp_path, 3, trouble)
    assert found[hangs]["error"] == "SystemExit: 76"
    assert [found[rank].get("error", found[rank]["size"]) for rank in (leads, follows)] == [2, 2]
    assert found[leads]["weights"] == found[follows]["weights"]
    assert_each_once(tmp_path)


@pytest.mark.parametrize("how", ["rank 0", "by itself", "in another collective"])
def test_a_loss_that_cannot_be_mended_ends_all(how: str, tmp_path: Path) -> None:
    def trouble(job: Any, step: int, where: str) -> None:
        if (step, where) == (5, "middle"):
            if how == "rank 0" and job.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "by itself" and job.rank == 1:
                job.coordinator.mender.leave()  # as at the interpreter's exit
                os._exit(1)
            if how == "in another collective" and job.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "in another collective" and job.rank == 2:
                assert not job.coordinator.mend("an evaluation"), "rank 0 will not come into it"
                raise RankLost

    # Without a launcher rank 0 keeps the store.
    found = run(tmp_path, 3, trouble, **{VARIABLE: ""} if how == "rank 0" else {})
    errors = [rank["error"].split(":")[0] for rank in found if rank is not None]
    assert errors == [RankLost.__name__] * 2


def test_over_nccl_and_outside_pollux_run_a_loss_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Never:
        def gather(self, _: Any) -> Any:
            raise AssertionError("the ranks exchange nothing for it")

    network = nn.Linear(2, 1)
    job = attach(network, torch.optim.SGD(network.parameters(), lr=0.1))
    monkeypatch.setattr(job.coordinator.mender, "_exchange", Never())
    job.coordinator.mender.arm()
    assert not job.coordinator.mender.mend()
    job.close()
    assert Graces().mend > mending.COME_WAIT, "before the launcher ends them all"


def test_a_rank_that_becomes_rank_0_takes_over_what_it_alone_does() -> None:
    # Its reports, the watch over the time limit, the search for a batch size; not what the lost one was told.
    network = nn.Linear(2, 1)
    job = attach(network, torch.optim.SGD(network.parameters(), lr=0.1))
    data = TensorDataset(torch.zeros(40, 2))
    job.loader(data, 4, max_batch_size=8)
    coordinator, training = job.coordinator, job.training
    assert training.advisor is not None
    training.advisor.close()
    training.advisor = None
    led: list[str] = []
    coordinator.line.lead = lambda collect, deliver: led.append("reports")
    coordinator.endings.lead = lambda: led.append("limit")
    coordinator.exchange.send(Decision(move=7))
    after = training.world
    training.world = replace(after, rank=1, size=2)

    def mend(where: str) -> bool:
        training.world = after
        return True

    coordinator.mender.mend = mend
    assert coordinator.mend()
    assert led == ["reports", "limit"]
    assert training.advisor is not None
    assert coordinator.drains.wanted() == 0
    assert coordinator.resizer.capability is ResizeCapability.REQUEUE
    job.close()


def test_orders_that_the_lost_decision_carried_are_not_lost() -> None:
    network = nn.Linear(2, 1)
    job = attach(network, torch.optim.SGD(network.parameters(), lr=0.1))
    coordinator = job.coordinator
    coordinator.exchange.send(Decision(move=7))
    order = ResizeRequest(8, "resize", "shrink", ("n0",), 1, begins=True)
    coordinator.resizer.state = ResizeState(ResizePhase.ACTING, order)
    coordinator.mender.mend = lambda _: True
    assert coordinator.mend()
    assert coordinator.drains.wanted() == 7
    assert coordinator.resizer.refused == {"id": 8, "why": "ranks were lost"}
    assert coordinator.exchange.take() is None
    coordinator.resizer.capability = ResizeCapability.IN_PLACE
    coordinator.resizer.lost(own=0)
    assert coordinator.resizer.report()["resize"] == "in-place"
    coordinator.resizer.lost(own=1)  # the allocation has more GPUs than ranks
    assert "resize" not in coordinator.resizer.report()
    job.close()
