"""The parts of a resize, each tested by itself.

These are abilities, orders, the recruitment command, joining and the handover.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

from pollux import attach
from pollux.errors import LEFT_STATUS, LaunchError, PolluxAgentError
from pollux.goodput import NoiseScale
from pollux.ranks import handover, rendezvous
from pollux.ranks.world import World, join
from pollux.resize import groups as groups_module
from pollux.resize.capability import may_grow, resizes_in_place
from pollux.resize.companion_job import RecruitmentFailed, Wanted, clean, submit
from pollux.resize.joining import Joiner
from pollux.resize.parent_options import parent_options
from pollux.resize.requests import ResizeRequest, objection
from pollux.resize.resizer import ResizePhase
from pollux.scheduler.drains import Drains
from pollux.scheduler.line import SchedulerLine
from pollux.scheduler.publisher import Publisher
from pollux.slurm_job.access import GatewayAccess
from pollux.slurm_job.code_version import code_version
from pollux.slurm_job.environment import CHOSEN_INTERFACE
from pollux.slurm_job.trainings import NamedTraining
from pollux.training.growing_model import GrowingModel

LAUNCHED = {"POLLUX_LAUNCHED_AT": "1.0"}


# -- abilities ------------------------------------------------------------------------------------------------


def training(models: int = 1, *, managed: bool = True, own: bool = True, **changes: Any) -> Any:
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    first = SimpleNamespace(**{"model": wrapped, "module": nn.Linear(1, 1), "comm_hook": None} | changes)
    world, step = SimpleNamespace(own=own, control=None), SimpleNamespace(managed=managed)
    return SimpleNamespace(
        models=[first] * models, step=step, world=world, on_ranks=None, followed=[], tied="", script_part=None
    )


def started(**changes: Any) -> Any:
    own = {"access": "one", "directory": Path("/somewhere"), "training": NamedTraining(), "unshared": ""}
    return SimpleNamespace(**own | changes)


@pytest.fixture(autouse=True)
def _sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("asked", "able"), [("", True), ("in-place", True), ("requeue", False), ("x", False)]
)
def test_the_directive_bounds_what_a_job_is_able_to(asked: str, able: bool) -> None:
    assert resizes_in_place(training(), started(), LAUNCHED | {"POLLUX_RESIZE": asked}) is able


def test_without_a_launcher_a_scheduler_checkpoints_or_a_node_a_job_can_only_be_requeued() -> None:
    assert not resizes_in_place(training(), started(), LAUNCHED | {"POLLUX_LOST": "1"})
    assert not resizes_in_place(training(), started(), {})
    assert not resizes_in_place(training(), started(access=None), LAUNCHED)
    assert not resizes_in_place(training(), started(directory=None), LAUNCHED)


def test_without_sbatch_no_companion_can_be_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert not resizes_in_place(training(), started(), LAUNCHED)


def test_what_holds_the_number_of_ranks_elsewhere_is_requeued() -> None:
    obstacles = {
        "two models": training(2),
        "a loop of its own": training(managed=False),
        "a hook with a state": training(comm_hook=(object(), len)),
        "a plain model": training(model=nn.Linear(1, 1)),
        "a process group of the script's": training(own=False),
    }
    for name, found in obstacles.items():
        assert not resizes_in_place(found, started(), LAUNCHED), name
    for able in (training(), training(comm_hook=(None, len))):
        assert resizes_in_place(able, started(), LAUNCHED)
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)  # type: ignore[var-annotated,arg-type]
    found = training()
    assert not resizes_in_place(found, started(), LAUNCHED)
    found.followed = [sampler]
    assert resizes_in_place(found, started(), LAUNCHED), "a library's own"


def test_ranks_may_join_an_only_rank_where_the_job_can_be_resized_in_place() -> None:
    alone, two = SimpleNamespace(distributed=False), SimpleNamespace(distributed=True)
    assert may_grow(alone, started(), LAUNCHED)  # type: ignore[arg-type]
    assert not may_grow(two, started(), LAUNCHED)  # type: ignore[arg-type]
    for where in ({}, LAUNCHED | {"POLLUX_RESIZE": "requeue"}):
        assert not may_grow(alone, started(), where)  # type: ignore[arg-type]
    assert not may_grow(alone, started(directory=None), LAUNCHED)  # type: ignore[arg-type]
    assert not may_grow(alone, started(unshared="/tmp is this job's own"), LAUNCHED)  # type: ignore[arg-type]
    later = started(training=NamedTraining("attach-2", first=False))
    assert not may_grow(alone, later, LAUNCHED), "joiners would join at the script's first training"  # type: ignore[arg-type]
    grown = training(model=GrowingModel(nn.Linear(1, 1)))
    assert resizes_in_place(grown, started(), LAUNCHED)


# -- orders ---------------------------------------------------------------------------------------------------


def ask(nodes: str, kind: str = "shrink", path: str = "resize", per_node: int = 2) -> ResizeRequest:
    order = {"id": 4, "path": path, "kind": kind, "nodes": nodes.split(), "gpus_per_node": per_node}
    return ResizeRequest.parse(order | {"step": "draining"})


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (ask("n1"), None),
        (ask("n1 n2 n3", "grow"), None),
        (ask("n1", per_node=1), "expected 2 ranks on each node"),
        (ask("n2"), "n1, is to stay"),
        (ask("n1 n2"), "expected some of the nodes"),
        (ask("n1 n3"), "expected some of the nodes"),
        (ask("n1 n3", "grow"), "n2 and more"),
    ],
)
def test_an_order_has_to_make_sense(order: ResizeRequest, why: str | None) -> None:
    world = World(0, 4, 2, torch.device("cpu"), None, places=("n1", "n1", "n2", "n2"))
    found = objection(order, world, in_place=True, resting=False)
    assert (found is None) if why is None else (why in str(found))


def test_an_order_beyond_the_job_s_ability_is_refused() -> None:
    world = World(0, 4, 2, torch.device("cpu"), None, places=("n1", "n1", "n2", "n2"))
    assert "in place" in str(objection(ask("n1"), world, in_place=False, resting=False))
    assert "over" in str(objection(ask("n1"), world, in_place=True, resting=True))


@pytest.mark.parametrize("change", [{"path": "requeue"}, {"path": "teleport"}, {"nodes": None}, {"id": "x"}])
def test_garbled_orders_are_refused(change: dict[str, Any]) -> None:
    order = {"id": 4, "path": "resize", "kind": "shrink", "nodes": ["n1"], "gpus_per_node": 2}
    with pytest.raises(PolluxAgentError):
        ResizeRequest.parse(order | change)


def test_no_rank_leaves_in_an_evaluation_nor_after_the_last_step() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = attach(model, optimizer, adaptive=False)
    loader = job.loader(TensorDataset(torch.randn(8, 2)), 4)
    resizer = job.coordinator.resizer
    resizer.phase, resizer.request = ResizePhase.READY, ask("n1")
    job.poll()
    assert resizer.phase is ResizePhase.READY, "it comes again after a step"
    assert resizer.refused is None
    for _ in job.epochs(1, statistical=True):
        resizer.phase, resizer.request = ResizePhase.IDLE, None
        for (x,) in loader:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        resizer.phase, resizer.request = ResizePhase.READY, ask("n1")
    assert resizer.refused == {"id": 4, "why": "the training is over"}
    job.close()


def test_an_order_is_passed_on_once_and_so_is_its_end() -> None:
    heard: list[Any] = []
    publisher = Publisher(GatewayAccess((), "", 1, 0), dict, heard.append, heard.append)
    order = {"id": 4, "path": "resize"}
    for instructions in ({"drain": None, "resize": order}, {"resize": order}, {"drain": None}, {}):
        publisher.take_orders(instructions)
    assert heard == [order, None]


def test_an_order_to_drain_that_polluxd_takes_back_ends_the_wait() -> None:
    heard: list[int] = []
    publisher = Publisher(GatewayAccess((), "", 1, 0), dict, heard.append, lambda _terms: None)
    for instructions in ({"drain": 4}, {"drain": 4}, {"drain": None}, {"drain": None}, {"drain": 5}):
        publisher.take_orders(instructions)
    assert heard == [4, 0, 5]
    drains = Drains(SchedulerLine(None), wait=3600.0)
    drains.order(4)
    waits = threading.Thread(target=drains.wait_for_end, daemon=True)
    waits.start()
    assert drains.wanted() == 4
    drains.order(0)
    waits.join(60.0)
    assert not waits.is_alive(), "the training goes on at once"
    drains.order(5)
    assert drains.wanted() == 5


# -- recruitment ----------------------------------------------------------------------------------------------


def test_the_companion_s_environment_is_the_user_s_own() -> None:
    kept = {"PATH": "/bin", "HOME": "/home/me", "DATA": "x", "SLURM_CONF": "/etc/slurm.conf", "RANKS": "3"}
    kept |= {"POLLUX_MODE": "enforce", "POLLUX_CHECKPOINT_DIR": "/c", "OMP_NUM_THREADS": "1"}
    dropped = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"]
    dropped += ["SLURM_JOB_ID", "SLURM_NTASKS_PER_NODE", "SBATCH_PARTITION", "POLLUX_GATEWAY", "POLLUX_TOKEN"]
    dropped += ["PMIX_RANK"]
    dropped += ["POLLUX_LAUNCHER_FD", "POLLUX_RESIZED", "GROUP_RANK", "TORCHELASTIC_RUN_ID"]
    assert clean(kept | dict.fromkeys(dropped, "1")) == kept


@pytest.mark.parametrize("chosen_by_launcher", [True, False])
def test_a_companion_talks_over_the_interfaces_that_the_user_names(chosen_by_launcher: bool) -> None:
    named = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}
    mark = {CHOSEN_INTERFACE: "yes"} if chosen_by_launcher else {}
    assert clean(named | mark) == ({"NCCL_SOCKET_IFNAME": "ib0"} if chosen_by_launcher else named)


SHOWN = (
    "JobId=9 JobName=x TimeLimit=9-00:00:00 UserId=nobody(65534) GroupId=nogroup(65534) MCS_label=N/A Priority=1 "
    "Nice=5 Account=open QOS=normal WCKey=wk JobState=RUNNING Reason=None RunTime=1-00:10:30 TimeLimit=1-00:40:00 "
    "TimeMin=N/A EndTime=2026-11-28T22:13:30 Partition=ht ReqNodeList=n3 ExcNodeList=(null) NodeList=n[3-4] "
    "NumNodes=2 NumCPUs=12 NumTasks=2 CPUs/Task=3 ReqB:S:C:T=0:0:*:1 TRES=cpu=12,mem=400M MinCPUsNode=3 "
    "MinMemoryNode=300M MinTmpDiskNode=0 Features=a100&ib DelayBoot=00:00:00 Reservation=course OverSubscribe=NO "
    "Licenses=matlab:1 Command=/home/a b/c.sh WorkDir=/ AdminComment=pollux:v1 min-gpus=1 mem-asked=yes submitted=1 "
    "Comment=hello big world StdErr=/o/e StdIn=/dev/null StdOut=/o/o Power= MemPerTres=gpu:200 TresPerNode=gres:gpu:1"
)


def test_a_companion_repeats_all_that_slurm_and_filters_count() -> None:
    given = {name: value for name, value in parent_options(SHOWN, {}).items() if value}
    assert given == {
        "time": "30",
        "wckey": "wk",
        "nice": "5",
        "reservation": "course",
        "constraint": "a100&ib",
        "exclusive": "exclusive",
        "mem": "300M",
        "cpus-per-task": "3",
        "threads-per-core": "1",
        "comment": "hello big world",
        "output": "/o/o",
    }


@pytest.mark.parametrize(
    ("field", "changed", "option", "value"),
    [
        ("TimeLimit=1-00:40:00", "TimeLimit=UNLIMITED", "time", "UNLIMITED"),
        ("RunTime=1-00:10:30", "RunTime=1-00:39:54", "time", "1"),
        ("RunTime=1-00:10:30", "RunTime=23:10:30", "time", "90"),
        ("WCKey=wk", "WCKey=*wk", "wckey", ""),
        ("MinMemoryNode=300M", "MinMemoryCPU=50M", "mem-per-cpu", "50M"),
        ("MinMemoryNode=300M", "MinMemoryNode=0", "mem", "0"),
        ("OverSubscribe=NO", "OverSubscribe=OK", "exclusive", ""),
        ("Comment=hello", "Comment=pollux: hello", "comment", ""),
    ],
)
def test_one_option_of_a_companion(field: str, changed: str, option: str, value: str) -> None:
    assert field in SHOWN
    assert parent_options(SHOWN.replace(field, changed), {}).get(option, "") == value


def test_a_companion_of_a_job_that_asked_for_memory_per_gpu_does_so() -> None:
    by_gpu = SHOWN.replace("MinMemoryNode=300M", "MinMemoryNode=0").replace("=gpu:200", "=gres:gpu:100")
    assert parent_options(by_gpu, {})["mem-per-gpu"] == "100"


def commands(folder: Path, **scripts: str) -> None:
    for name, script in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)


def test_the_companion_is_submitted_like_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "JobId=9 JobName=a StdErr=/o/e StdIn=/dev/null StdOut=/o/my 100% run.out Power= TresPerNode=gres/gpu:2"
    sbatch = f'cat > {tmp_path}/script; for a; do echo "$a"; done > {tmp_path}/args; echo "12;c1"'
    commands(tmp_path, scontrol=f"echo '{shown}'", sbatch=sbatch)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "2"}
    environment |= {"SLURM_JOB_ACCOUNT": "a", "SLURM_JOB_QOS": "q", "SLURM_JOB_CPUS_PER_NODE": "8(x2),6"}
    assert submit(Path("/c/companion-3.json"), Wanted(3, 2, 4, "0af"), environment) == "12"
    options = set((tmp_path / "args").read_text().splitlines())
    assert {
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gres=gpu:4",
        "--cpus-per-task=6",
        "--no-requeue",
    } <= options
    assert {"--account=a", "--qos=q", "--output=/o/my 100%% run.out", "--open-mode=append"} <= options
    assert not [option for option in options if option.startswith("--partition")]
    lines = (tmp_path / "script").read_text().splitlines()
    assert lines[1] == "#POLLUX companion-of=9 attempt=2 move=3 nonce=0af"
    assert lines[2] == f"exec {sys.executable} -m pollux.launcher.launch run --companion /c/companion-3.json"


def test_a_companion_of_a_job_in_a_container_starts_by_the_python_of_the_batch_script(tmp_path: Path) -> None:
    commands(tmp_path, sbatch=f'cat > {tmp_path}/script; env > {tmp_path}/env; echo "12"')
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "POLLUX_CONTAINER": "apptainer exec a.sif"}
    submit(Path("/c/f"), Wanted(3, 2, 4, "0af"), environment | {"POLLUX_BATCH_PYTHON": "/opt/py thon"})
    assert "exec '/opt/py thon' -m pollux.launcher" in (tmp_path / "script").read_text()
    assert "POLLUX_CONTAINER=apptainer exec a.sif" in (tmp_path / "env").read_text()


def test_a_site_that_forbids_it_is_a_typed_error(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "SLURM_JOB_ID": ""}
    with pytest.raises(RecruitmentFailed, match="cannot be submitted"):
        submit(tmp_path / "f", Wanted(3, 1, 1, "0af"), environment)
    commands(tmp_path, sbatch="echo 'sbatch: error: not from\n a compute node' >&2; exit 1")
    with pytest.raises(
        RecruitmentFailed, match="refused the companion job: sbatch: error: not from a compute node"
    ):
        submit(tmp_path / "f", Wanted(3, 1, 1, "0af"), environment)


def test_the_way_in_is_read_from_a_file_that_is_the_user_s_alone(tmp_path: Path) -> None:
    told = {
        "per_node": 2,
        "first": 4,
        "size": 8,
        "nodes": 4,
        "move": 3,
        "adaptive": False,
        "grows": True,
        "call": None,
    }
    told |= {"address": "127.0.0.1", "port": 1, "secret": "s", "cwd": "/", "argv": ["train.py"]}
    path = tmp_path / "companion-3.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(told))
    environment = {
        "POLLUX_COMPANION": str(path),
        "GROUP_RANK": "1",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    joiner = Joiner.from_environment(environment)
    assert joiner is not None
    assert joiner.index == 3
    assert environment["POLLUX_ADAPTIVE"] == "no"
    assert Joiner.from_environment({}) is None
    with pytest.raises(LaunchError, match="2 ranks on each node"):
        Joiner.from_environment(environment | {"LOCAL_WORLD_SIZE": "1"})
    path.chmod(0o644)
    with pytest.raises(LaunchError, match="0600"):
        Joiner.from_environment(environment)
    path.chmod(0o600)
    for garbled in ("{", "{}", "[]", json.dumps(told | {"port": None}), json.dumps(told | {"first": "x"})):
        path.write_text(garbled)
        with pytest.raises(LaunchError):
            Joiner.from_environment(environment)
    path.unlink()
    with pytest.raises(SystemExit) as end:
        Joiner.from_environment(environment)  # the move was given up: no fault, and no traceback in the log
    assert end.value.code == LEFT_STATUS


def test_a_script_that_was_edited_is_not_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("epochs = 3")
    monkeypatch.setattr("sys.argv", [str(script), "--lr", "1"])
    before = code_version()
    assert code_version() == before
    script.write_text("epochs = 4")
    assert code_version()["the agent"] == before["the agent"]
    assert code_version()["the script"] != before["the script"]
    script.unlink()
    assert code_version()["the script"]


# -- handing over ---------------------------------------------------------------------------------------------


def whole() -> dict[str, Any]:
    """Every type of value that a state may hold."""
    generator = torch.Generator().manual_seed(5)
    large = torch.randn(300, 7, generator=generator)
    norm = nn.BatchNorm1d(3)
    return {
        "large": large,
        "again": large,
        "turned": large.t(),
        "module": norm.state_dict(),
        "kinds": [torch.tensor(3), torch.zeros(0, 2), torch.tensor([True, False]), torch.ones(3).bfloat16()],
        "noise": NoiseScale(1.0, 2.0),
        "plain": (1, "two", None, {3: [4.0]}),
        "ordered": OrderedDict(a=torch.arange(5)),
    }


def give(piece: int) -> Any:
    handover.PIECE = piece
    world = join(torch.device("cpu"))
    return handover.hand_over(whole() if world.rank == 0 else None, world, range(world.size - 2, world.size))


@pytest.mark.parametrize("piece", [7, 1000, 1 << 24])
def test_a_state_arrives_as_it_is(ranks: Any, piece: int) -> None:
    first, second, joiner, last = ranks(4, give, piece)
    assert first is None
    assert second is None
    assert torch.equal(last["large"], joiner["large"])
    expected = whole()
    assert joiner.keys() == expected.keys()
    for name in ("large", "again", "turned"):
        assert torch.equal(joiner[name], expected[name])
    for a, b in zip(joiner["kinds"], expected["kinds"], strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b)
    assert joiner["noise"] == expected["noise"]
    assert type(joiner["noise"]) is NoiseScale
    assert joiner["plain"] == expected["plain"]
    assert joiner["module"]._metadata == expected["module"]._metadata
    nn.BatchNorm1d(3).load_state_dict(joiner["module"])
    assert torch.equal(joiner["ordered"]["a"], torch.arange(5))


# -- process groups -------------------------------------------------------------------------------------------


def test_nccls_communicators_are_aborted_before_groups_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(rendezvous, "abort_nccl", lambda: done.append("abort"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: done.append("destroy"))
    rendezvous.leave_groups()
    assert done == ["abort", "destroy"]


def test_a_leaving_rank_aborts_its_communicators_when_the_others_have_ended_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(groups_module, "abort_nccl", lambda: done.append("abort"))
    groups = groups_module.Groups()
    groups.rendezvous = SimpleNamespace(count=lambda key, more=0: done.append(f"{key} {more}") or 1)  # type: ignore[assignment]
    with pytest.raises(SystemExit):
        groups.leave(SimpleNamespace(name="move", number=1, stay=(0,)), 1)  # type: ignore[arg-type]
    assert done == ["move/free 0", "abort", "move/left 1"]
