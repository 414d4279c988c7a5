"""PyslurmClient with a stand-in for pyslurm in a real worker process, and what the worker writes.

tests/integration/test_pyslurm.py uses the real pyslurm.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polluxd.daemon import Daemon
from polluxd.errors import ConfigError, SlurmRefused, SlurmUnavailable
from polluxd.model import JobState, Node
from polluxd.slurm import pyslurm_client
from polluxd.slurm.node_records import attribute, parse_nodes
from polluxd.slurm.protocol import Geometry, SlurmJob
from polluxd.slurm.pyslurm_client import PyslurmClient, open_client
from polluxd.slurm.pyslurm_worker import write_jobs, write_nodes
from polluxd.slurm.queue import Queue, jobs_query, parse_jobs
from polluxd.slurm.scontrol import ScontrolClient
from tests import build
from tests.unit.slurm.stand_in_commands import Commands, job

PYSLURM = """
import ctypes, json, os, resource
FOLDER = {folder!r}
def misbehave(at):
    with open(FOLDER + "/pyslurm", "a") as log:
        print(at, file=log)
    how = json.load(open(FOLDER + "/faults")).get(at)
    if how == "hang":
        ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock held, as pyslurm's calls are
    elif how == "exit":
        os._exit(1)
    elif how == "crash":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), 11)
    elif how == "no such attribute":
        object().of_another_version
    elif how == "import error":
        raise ImportError("libslurmfull.so: undefined symbol: slurm_x")
    elif how:
        raise RPCError(how)
class RPCError(Exception): pass
os.write(1, b"{{}} libslurm: a word on standard output\\n")
misbehave("import")
class Thing:
    def __init__(self, **values): self.__dict__.update(values)
    def __getattr__(self, name): return None
class Job(Thing):
    def get_resource_layout_per_node(self): return self.layout
    @property
    def name(self):
        return b"\\xffx".decode() if self.id == 9 else "by-pyslurm"
class Jobs:
    @staticmethod
    def load():
        misbehave("jobs")
        kept = dict(user_name="alice", user_id=1000, partition="main", state="RUNNING", requeue_count=0, cpus=2,
                    allocated_nodes="n1", priority=1, num_nodes=1, submit_time=1, gres_per_node={{"gres/gpu": 2}},
                    layout={{"n1": {{"cpu_ids": "0", "gres": {{"gpu": {{"count": 2, "indexes": "0-1"}}}}}}}})
        return {{7: Job(id=7, admin_comment={comment!r}, **kept), 9: Job(id=9, **kept)}}
class Nodes:
    @staticmethod
    def load():
        return {{"n1": Thing(name="n1", state="MIXED", configured_gres={{"gpu:a100": 4}}, effective_cpus=8,
                            partitions=["main"], allocated_cpus=4)}}
"""


class StandIn(Commands):
    """A module `pyslurm` for workers, and stand-ins for Slurm's commands, with faults to choose."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        on_one = {"NodeList": "n1", "BatchHost": "n1", "NumNodes": "1", "Name": "by-scontrol"}
        jobs = [job(7, "RUNNING", **on_one), job(9, "RUNNING", **on_one, admin_comment="none")]
        self.answer(jobs, other={"out": "slurm-wlm 22.05.8\n"})
        (folder / "lib" / "pyslurm").mkdir(parents=True)
        module = PYSLURM.format(folder=str(folder), comment="pollux:v1 min-gpus=1")
        (folder / "lib" / "pyslurm" / "__init__.py").write_text(module)
        self.fault()

    def fault(self, **how: object) -> None:
        (self.folder / "faults").write_text(json.dumps(how))

    def client(self, timeout: float = 60.0, choice: pyslurm_client.Choice = "auto") -> PyslurmClient:
        return PyslurmClient(timeout=timeout, choice=choice)

    @property
    def commands(self) -> list[list[str]]:
        """Those run since the last look."""
        return [json.loads(line)[0][1:] for line in self._taken("calls")]

    @property
    def heard(self) -> list[str]:
        """What pyslurm did since the last look."""
        return self._taken("pyslurm")

    def _taken(self, name: str) -> list[str]:
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> StandIn:
    made = StandIn(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/lib:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(pyslurm_client, "version", lambda name: "22.05.2")
    caplog.set_level(logging.INFO, "polluxd.slurm.pyslurm_client")
    return made


def reader(slurm: ScontrolClient) -> str:
    """Who has read Slurm's jobs."""
    return slurm.jobs([7, 8])[7].name


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    found = [(r.levelname, r.message) for r in caplog.records if r.name == pyslurm_client.__name__]
    caplog.clear()
    return found


# --- serving ------------------------------------------------------------------------------------


def test_it_reads_through_a_worker_and_never_imports_pyslurm_itself(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    flags = sys.getdlopenflags()
    slurm = stand_in.client()
    state = slurm.observe()
    assert ("pyslurm" in sys.modules, sys.getdlopenflags()) == (False, flags)
    ours, foreign = state.jobs
    assert (ours.job_id, ours.name, ours.state) == (7, "by-pyslurm", JobState.RUNNING)
    assert (ours.gpus_per_node_held, ours.cpus_per_node_held) == ({"n1": 2}, {"n1": 2})
    assert ours.spec is not None
    assert (foreign.name, foreign.spec) == ("\ufffdx", None)
    (node,) = state.nodes
    assert (node.gpus, node.gpu_type, node.foreign_gpus, node.cpus) == (4, "a100", 2, 8)
    assert (node.foreign_cpus, node.schedulable) == (2, True)
    asked = ["--version", "topology", "partition", "reservation", "config", "--jobs=7,7"]
    assert [call[-1] for call in stand_in.commands] == asked
    assert set(slurm.jobs([7])) == {7}
    assert set(slurm.jobs([7, 9])) == {7, 9}
    assert slurm.jobs([8]) == {}
    assert (stand_in.commands, stand_in.heard) == ([], ["import", *["jobs"] * 4])
    assert said(caplog) == [("INFO", "Slurm is read through pyslurm 22.05.2")]


def test_changes_go_through_scontrol_and_start_no_worker(stand_in: StandIn) -> None:
    slurm = stand_in.client()
    slurm.observe()
    assert (stand_in.heard != [], stand_in.commands != []) == (True, True)
    slurm.run_again(7)
    slurm.requeue(7)
    slurm.configure(7, Geometry(("n1",), 1, 1), start=True)
    changes = [call[0] for call in stand_in.commands if "show" not in call]
    assert (changes, stand_in.heard) == (["requeue", "requeue", "update"], [])
    with pytest.raises(SlurmRefused, match=r"jobs \[9\] did not opt in"):
        slurm.run_again(9)
    assert stand_in.commands == []


def alive(pid: int) -> bool:
    """Tell whether a process runs, proc(5); one that has ended and is not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_the_end_of(pid: int) -> None:
    deadline = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_ends_with_its_client_and_after_its_time(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = stand_in.client()
    slurm.observe()
    first = slurm.worker.process.pid
    monkeypatch.setattr(pyslurm_client, "LIFETIME_S", 0.0)
    slurm.observe()
    assert not alive(first)
    second = slurm.worker.process.pid
    del slurm
    gc.collect()
    wait_for_the_end_of(second)


def test_a_worker_outlives_no_polluxd(stand_in: StandIn) -> None:
    code = (
        "import os\n"
        "from polluxd.slurm.pyslurm_client import Worker\n"
        "worker = Worker(os.environ)\n"
        "worker.ask(['JobID:;', None, False], 60)\n"
        "print(worker.process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = os.pathsep.join([os.environ["PYTHONPATH"], *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=False
    )
    wait_for_the_end_of(int(done.stdout))
    assert done.returncode == -signal.SIGKILL


# --- which, and why -----------------------------------------------------------------------------


def not_installed(name: str) -> str:
    raise PackageNotFoundError(name)


def test_the_configuration_decides_and_the_log_says_so(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert type(open_client("scontrol", conf=None, timeout=60)) is ScontrolClient
    assert said(caplog) == [("INFO", "Slurm is read through scontrol: slurm.client says so")]
    for choice in ("auto", "pyslurm"):
        made = open_client(choice, conf=None, timeout=60)
        assert isinstance(made, PyslurmClient)
        assert reader(made) == "by-pyslurm"
    monkeypatch.setattr(pyslurm_client, "version", not_installed)
    caplog.clear()
    for choice in ("auto", "pyslurm"):
        assert type(open_client(choice, conf=None, timeout=60)) is ScontrolClient
    why = "Slurm is read through scontrol: pyslurm is not installed"
    assert said(caplog) == [("INFO", why), ("WARNING", why)]


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ("scontrol", ("INFO", "Slurm is read through scontrol: slurm.client says so")),
        ("pyslurm", ("WARNING", "Slurm is read through scontrol: pyslurm is not installed")),
    ],
)
def test_the_daemon_asks_for_the_client_of_its_configuration(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, choice: str, found: tuple[str, str]
) -> None:
    caplog.set_level(logging.INFO, "polluxd.slurm.pyslurm_client")
    monkeypatch.setattr(pyslurm_client, "version", not_installed)
    Daemon(lambda: build.config(slurm={"client": choice})).store.close()
    assert said(caplog) == [found]
    expected = r"slurm.client: expected \"auto\", \"scontrol\" or \"pyslurm\"; got 'squeue'"
    with pytest.raises(ConfigError, match=expected):
        build.config(slurm={"client": "squeue"})


@pytest.mark.parametrize("version", ["25.11.2", "22.11.0", "none"])
def test_a_pyslurm_of_another_version_is_never_imported(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setattr(pyslurm_client, "version", lambda name: version)
    slurm = stand_in.client(choice="pyslurm")
    assert [reader(slurm) for _ in range(3)] == ["by-scontrol"] * 3
    assert stand_in.heard == []
    why = f"pyslurm {version} is not for this Slurm, 'slurm-wlm 22.05.8'"
    assert said(caplog) == [("WARNING", f"Slurm is read through scontrol: {why}")]


@pytest.mark.parametrize(
    ("at", "how", "why"),
    [
        ("import", "exit", "pyslurm's process ended without an answer"),
        ("import", "import error", "pyslurm is not usable: ImportError: libslurmfull.so: undefined symbol"),
        ("jobs", "crash", "pyslurm's process ended without an answer"),
        (
            "jobs",
            "no such attribute",
            "pyslurm is not usable: AttributeError: 'object' object has no attribute",
        ),
        ("jobs", "Access/permission denied", "pyslurm: Access/permission denied"),
    ],
)
def test_whatever_a_worker_dies_of_commands_read_at_once(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture, at: str, how: str, why: str
) -> None:
    stand_in.fault(**{at: how})
    slurm = stand_in.client()
    assert reader(slurm) == "by-scontrol"
    ((level, message),) = said(caplog)
    assert level == "INFO"  # it never served, and nobody asked for it by name
    assert message.startswith(f"Slurm is read through scontrol: {why}")
    # For a while no worker is tried; nothing is said again.
    stand_in.fault()
    before = stand_in.heard
    assert reader(slurm) == "by-scontrol"
    assert (before[0], stand_in.heard, said(caplog)) == ("import", [], [])
    # Then one is.
    slurm.paused_until = 0.0
    assert reader(slurm) == "by-pyslurm"
    assert said(caplog) == [("INFO", "Slurm is read through pyslurm 22.05.2")]
    # A failure in service is a warning.
    stand_in.fault(jobs="exit")
    assert reader(slurm) == "by-scontrol"
    assert [level for level, _ in said(caplog)] == ["WARNING"]


def test_pauses_grow_to_a_bound_and_are_forgotten_in_service(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(pyslurm_client.time, "monotonic", lambda: now)

    def tries() -> int:
        slurm.jobs([7, 8])
        return len(stand_in.heard)

    stand_in.fault(**{"import": "import error"})
    slurm = stand_in.client()
    assert tries() == 1
    for pause in (5, 10, 20, 40, 80, 160, 300, 300):
        now += pause - 1
        assert tries() == 0
        now += 1
        assert tries() == 1
    stand_in.fault()
    now += 300
    assert reader(slurm) == "by-pyslurm"
    assert stand_in.heard == ["import", "jobs"]
    stand_in.fault(jobs="no such attribute")
    assert tries() == 1  # the worker that is there
    now += 5
    assert tries() == 2


def test_a_reading_that_hangs_is_no_answer_and_the_next_goes_by_scontrol(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    slurm = stand_in.client()
    slurm.observe()
    pid = slurm.worker.process.pid
    slurm.timeout = 0.3
    stand_in.fault(jobs="hang")
    said(caplog)
    with pytest.raises(SlurmUnavailable, match=r"pyslurm: no answer within 0\.3 s"):
        slurm.observe()
    assert not alive(pid)
    slurm.timeout = 60.0
    assert reader(slurm) == "by-scontrol"
    assert said(caplog) == [("WARNING", "Slurm is read through scontrol: pyslurm: no answer within 0.3 s")]


@pytest.mark.parametrize(
    "complaint",
    ["Unable to contact slurm controller (connect failure)", "Socket timed out on send/recv operation"],
)
def test_no_answer_of_slurmctld_is_unavailable_and_slurm_conf_is_read_anew(
    stand_in: StandIn, complaint: str
) -> None:
    slurm = stand_in.client()
    slurm.observe()
    stand_in.fault(jobs=complaint)
    with pytest.raises(SlurmUnavailable, match="does not answer"):
        slurm.observe()
    stand_in.fault()
    assert reader(slurm) == "by-scontrol"
    slurm.paused_until = 0.0
    assert reader(slurm) == "by-pyslurm"
    assert stand_in.heard.count("import") == 2


# --- what the worker writes ---------------------------------------------------------------------


class Job(SimpleNamespace):
    """A job as pyslurm has it."""

    layout: dict[str, Any]

    def __getattr__(self, name: str) -> None:
        """Without a value, pyslurm's attributes are None."""

    def get_resource_layout_per_node(self) -> dict[str, Any]:
        return self.layout


def tres(**counts: int) -> SimpleNamespace:
    gres = {"gpu": SimpleNamespace(count=counts.pop("gpu"))} if "gpu" in counts else {}
    known = {name: SimpleNamespace(count=count) for name, count in counts.items()}
    return SimpleNamespace(gres=gres, license={}, **known)


def on_nodes(*gres: dict[str, int]) -> dict[str, Any]:
    return {f"n{number}": {"cpu_ids": "0-1", "gres": held} for number, held in enumerate(gres, 3)}


RUNS = {
    **{
        "id": 7,
        "name": "train",
        "user_name": "alice",
        "user_id": 1000,
        "account": "vision",
        "partition": "main",
    },
    **{"state": "RUNNING", "requeue_count": 1, "submit_time": 1795271832, "eligible_time": 1795271833},
    **{"start_time": 1795271833, "end_time": 1826807833, "time_limit": 60, "allocated_nodes": "n[3-4]"},
    **{"batch_host": "n3", "num_nodes": 2, "cpus": 6, "ntasks": 2, "priority": 4294901757},
    "gres_per_node": {"gres/gpu:a100": 4},
    "requested_tres": tres(cpu=6, node=2, billing=6, mem=8001, gpu=8),
    "layout": on_nodes({"gpu:a100": 4, "nic": 1}, {"gpu:a100": 4}),
    "admin_comment": "pollux:v1 min-gpus=1 max-gpus=8 submitted=1795271000",
}
WAITS = RUNS | {
    "state": "PENDING",
    "allocated_nodes": None,
    "layout": {},
    "start_time": None,
    "batch_host": None,
}


def read(*jobs: dict[str, Any]) -> Queue:
    query = jobs_query()
    return parse_jobs(write_jobs((Job(**job) for job in jobs), query.format), query)


def one(job: dict[str, Any] = RUNS, **other: Any) -> SlurmJob:
    queue = read(job | other)
    assert not queue.unreadable
    return queue.jobs[0]


def node(*jobs: dict[str, Any], **values: Any) -> Node:
    """Return how node n3 is read beside these jobs."""
    made = {
        "name": "n3",
        "state": "MIXED",
        "configured_gres": {"gpu:a100": 4},
        "total_cpus": 8,
        "partitions": ["main"],
    }
    text = write_nodes([Job(**made | values)], [Job(**job) for job in jobs])
    (found,) = attribute(read(*jobs), parse_nodes(text))[1]
    return found


def test_a_running_job() -> None:
    job = one()
    assert (job.job_id, job.name, job.user, job.account, job.qos) == (7, "train", "alice", "vision", "")
    assert (job.state, job.reason, job.restart_count, job.batch_host) == (JobState.RUNNING, "None", 1, "n3")
    assert (job.nodes, job.gpus_per_node_held) == (("n3", "n4"), {"n3": 4, "n4": 4})
    assert (job.cpus_per_node_held, job.requested_gpus_per_node) == ({"n3": 3, "n4": 3}, 4)
    assert (job.submit_time, job.start_time, job.end_time) == (1795271000, 1795271833, None)
    assert (job.time_limit_s, job.deadline, job.mem_per_gpu_mb) == (3600, None, 1000)
    assert job.tres == {"cpu": 6, "node": 2, "billing": 6, "gres/gpu": 8, "mem": 8001}
    assert job.spec is not None
    held = one(deadline=1795460526, priority=0, time_limit=None)
    assert (held.deadline, held.held_by_user, held.time_limit_s) == (1795460526, True, None)
    assert one(state="TIMEOUT").end_time == 1826807833


def test_a_waiting_job() -> None:
    job = one(WAITS, state_reason="a b  c", scheduled_nodes="n[2-3]", licenses=["matlab:2", "ansys"])
    assert (job.nodes, job.start_time, job.reason, job.dependent) == ((), None, "a_b_c", False)
    assert (job.planned_nodes, job.licenses) == (("n2", "n3"), {"matlab": 2, "ansys": 1})
    assert one(WAITS, dependencies={"all": []}).dependent


@pytest.mark.parametrize(
    ("waiting", "tasks"), [("2,5-7,10-20:5", (2, 5, 6, 7, 10, 15, 20)), ("3", ()), ("0-1", (0, 1))]
)
def test_tasks_of_an_array_that_wait(waiting: str, tasks: tuple[int, ...]) -> None:
    queue = read(WAITS | {"array_id": 7, "array_tasks_waiting": waiting})
    assert [(job.tasks, job.array) for job in queue.jobs] == [(tasks, (7, tasks[0] if tasks else 3))]


def test_a_task_of_an_array_that_runs() -> None:
    assert one(array_id=7, array_task_id=4).array == (7, 4)
    assert one(array_id=7).array == (7, 0)  # pyslurm takes task 0 for none
    assert one().array is None


def test_gpus_asked_for_in_another_way_than_per_node() -> None:
    on_one: dict[str, Any] = {"allocated_nodes": "n3", "num_nodes": 1, "gres_per_node": None}
    asked = one(**on_one, requested_tres=tres(node=1, gpu=3, mem=3000))
    assert (asked.requested_gpus_per_node, asked.gpus_per_node_held) == (None, {"n3": 3})
    assert asked.mem_per_gpu_mb == 1000
    # Slurm counts no GPUs: what the job holds tells.
    assert one(**on_one, requested_tres=None, layout=on_nodes({"gpu": 2})).gpus_per_node_held == {"n3": 2}
    assert one(**on_one, requested_tres=None, layout={}).gpus_per_node_held == {}
    assert read(RUNS | {"gres_per_node": None}).scattered == {7}


def test_nodes_and_what_others_hold_there() -> None:
    plain = RUNS | {
        "admin_comment": None,
        "allocated_nodes": "n3",
        "num_nodes": 1,
        "layout": on_nodes({"gpu:a100": 4}),
    }
    for jobs, foreign in ((plain, 4), (plain | {"state": "COMPLETED"}, 0), (RUNS, 0)):
        assert node(jobs).foreign_gpus == foreign
    size = {
        "real_memory": 4000,
        "memory_reserved_for_system": 500,
        "temporary_disk": 70,
        "active_features": ["ssd"],
    }
    use = {"allocated_cpus": 5, "allocated_memory": 700}
    found = node(plain, **size, **use)
    assert (found.memory_mb, found.tmp_mb, found.features) == (3500, 70, frozenset({"ssd"}))
    assert (found.foreign_cpus, found.foreign_memory_mb) == (5, 700)
    assert (node().gpus, node().gpu_type, node(configured_gres=None).gpus) == (4, "a100", 0)
    assert node(configured_gres={"gpu:a100": 4, "gpu:t4": 2}).gpu_type == "a100+t4"
    assert not node(state="MIXED+DRAIN").schedulable
    shared = node(plain | {"layout": on_nodes({"shard": 3})}, configured_gres={"gpu": 4, "shard": 8})
    assert shared.foreign_gpus == 3
