"""PyslurmClient with a stand-in for pyslurm in a real worker process: what it reads and orders, and everything that
pyslurm and libslurm can do to a process. The real pyslurm is in tests/integration/test_pyslurm.py."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from polluxd.config import parse_config
from polluxd.daemon import Daemon
from polluxd.errors import ConfigError, SlurmRefused, SlurmUnavailable
from polluxd.model import JobState
from polluxd.slurm import pyslurm_client, pyslurm_process
from polluxd.slurm.protocol import Geometry
from polluxd.slurm.pyslurm_client import PyslurmClient, open_client
from polluxd.slurm.pyslurm_process import PyslurmProcess, WorkerFailed, WorkerHung
from polluxd.slurm.scontrol import ScontrolClient

COMMENT = "pollux:v1 min-gpus=1"
SCONTROL_JOBS = "".join(
    f"JobId={i} JobName={name} UserId=alice(1000) GroupId=users(100) Priority=1 Account=(null) QOS=(null) "
    "JobState=RUNNING Reason=None Dependency=(null) Restarts=0 TimeLimit=UNLIMITED SubmitTime=1 EligibleTime=1 "
    "StartTime=1 EndTime=Unknown Partition=main ReqNodeList=(null) NodeList=n1 BatchHost=n1 NumNodes=1 NumCPUs=1 "
    f"CPUs/Task=1 Command=x WorkDir=y AdminComment={comment}  StdErr=z\n"
    for i, name, comment in [(7, "by-scontrol", COMMENT), (9, "by-scontrol", "none")]
)
SCONTROL = """#!/bin/sh
echo "$*" >>{folder}/commands
for last; do :; done
test ! -e {folder}/answers/$last || cat {folder}/answers/$last
"""
PYSLURM = """
import ctypes, json, os, resource, sys, time
FOLDER = {folder!r}
def say(*words):
    with open(FOLDER + "/pyslurm", "a") as log:
        print(json.dumps(words), file=log)
def misbehave(at):
    how = json.load(open(FOLDER + "/faults")).get(at)
    if how == "hang":
        ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock held, as pyslurm's calls are
    elif how == "exit":
        os.write(2, b"slurmctld: fatal: no configuration\\n")
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
say("import", os.environ.get("PYSLURM_DISABLE_AUTO_INIT"))
os.write(1, b"{{}} libslurm: a word on standard output\\n")
misbehave("import")
__version__ = json.load(open(FOLDER + "/faults")).get("version", "22.05.2")
def slurm_init(configuration):
    say("init", configuration)
    misbehave("init")
class Thing:
    def __init__(self, **values): self.__dict__.update(values)
    def __getattr__(self, name):
        if name.startswith("of_"): raise AttributeError(name)
        return None
class Job(Thing):
    def __init__(self, job_id=None, **values):
        super().__init__(id=job_id, **values)
    def get_resource_layout_per_node(self): return self.layout
    def send_signal(self, signal, steps):
        say("signal", self.id, signal, steps)
        misbehave("signal")
    def requeue(self):
        say("requeue", self.id)
        misbehave("requeue")
    @property
    def name(self):
        return b"\\xffx".decode() if self.id == 9 else "by-pyslurm"
class Jobs:
    @staticmethod
    def load():
        os.write(1, b"libslurm: another\\n")
        misbehave("jobs")
        kept = dict(user_name="alice", user_id=1000, partition="main", state="RUNNING", requeue_count=0, cpus=2,
                    allocated_nodes="n1", priority=1, num_nodes=1, submit_time=1, gres_per_node={{"gres/gpu": 2}},
                    layout={{"n1": {{"cpu_ids": "0", "gres": {{"gpu": {{"count": 2, "indexes": "0-1"}}}}}}}})
        kept.update(json.load(open(FOLDER + "/faults")).get("values", {{}}))
        return {{7: Job(7, admin_comment={comment!r}, **kept), 9: Job(9, **kept)}}
class Nodes:
    @staticmethod
    def load():
        misbehave("nodes")
        return {{"n1": Thing(name="n1", state="MIXED", configured_gres={{"gpu:a100": 4}}, effective_cpus=8,
                            partitions=["main"], threads_per_core=2)}}
"""


class StandIn:
    """A module `pyslurm` for workers, and a `scontrol`, with faults to choose."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self.conf.touch()
        names = {"folder": str(folder), "comment": COMMENT}
        for name in ("scontrol", "scancel"):
            (folder / name).write_text(SCONTROL.format(**names))
            (folder / name).chmod(0o755)
        (folder / "answers").mkdir()
        (folder / "answers" / "--version").write_text("slurm-wlm 22.05.8\n")
        (folder / "answers" / "job").write_text(SCONTROL_JOBS)
        (folder / "answers" / "node").write_text(
            "NodeName=n1 CPUTot=8 Gres=gpu:4 State=IDLE Partitions=main\n"
        )
        (folder / "lib" / "pyslurm").mkdir(parents=True)
        (folder / "lib" / "pyslurm" / "__init__.py").write_text(PYSLURM.format(**names))
        self.fault()

    def fault(self, **how: object) -> None:
        (self.folder / "faults").write_text(json.dumps(how))

    def client(self, timeout: float = 60.0, choice: pyslurm_client.Choice = "auto") -> PyslurmClient:
        return PyslurmClient(conf=self.conf, timeout=timeout, choice=choice)

    @property
    def commands(self) -> list[list[str]]:
        """Those run since the last look."""
        return [line.split() for line in self._taken("commands")]

    @property
    def heard(self) -> list[list[object]]:
        """What pyslurm was told since the last look."""
        return [json.loads(line) for line in self._taken("pyslurm")]

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
    monkeypatch.setattr(pyslurm_process, "_GRACE_S", 60.0)  # however slow the machine
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
    assert stand_in.heard == [["import", "1"], ["init", str(stand_in.conf)]]
    ours, foreign = state.jobs
    assert (ours.job_id, ours.name, ours.state) == (7, "by-pyslurm", JobState.RUNNING)
    assert (ours.gpus_per_node_held, ours.cpus_per_node_held) == ({"n1": 2}, {"n1": 2})
    assert ours.spec is not None
    assert (foreign.name, foreign.spec) == ("\ufffdx", None)
    (node,) = state.nodes
    assert (node.gpus, node.gpu_type, node.foreign_gpus, node.cpus, node.schedulable) == (
        4,
        "a100",
        2,
        8,
        True,
    )
    assert [call[-1] for call in stand_in.commands] == ["--version", "topology"]
    assert set(slurm.jobs([7])) == {7}
    assert set(slurm.jobs([7, 9])) == {7, 9}
    assert slurm.jobs([8]) == {}
    assert (stand_in.commands, stand_in.heard) == ([], [])
    assert said(caplog) == [("INFO", "Slurm is read through pyslurm 22.05.2")]


def test_signals_and_second_runs_go_to_the_worker_and_the_rest_to_scontrol(stand_in: StandIn) -> None:
    slurm = stand_in.client()
    slurm.observe()
    assert stand_in.heard, stand_in.commands
    slurm.signal(7)
    slurm.run_again(7)
    assert stand_in.heard == [["signal", 7, "SIGUSR1", "children"], ["requeue", 7]]
    assert [call for call in stand_in.commands if "update" in call or "requeue" in call] == []
    slurm.requeue(7)
    slurm.configure(7, Geometry(("n1",), 1, 1), start=True)
    assert [call[0] for call in stand_in.commands] == ["requeue", "update"]
    assert stand_in.heard == []
    for order in (slurm.signal, slurm.run_again):
        with pytest.raises(SlurmRefused, match=r"jobs \[9\] did not opt in"):
            order(9)
    assert (stand_in.heard, stand_in.commands) == ([], [])


def test_slurms_no_is_refused_and_the_worker_lives_on(stand_in: StandIn) -> None:
    slurm = stand_in.client()
    slurm.observe()
    stand_in.fault(requeue="Job/step already completing or completed")
    with pytest.raises(SlurmRefused, match="already completing"):
        slurm.run_again(7)
    stand_in.fault()
    assert reader(slurm) == "by-pyslurm"
    assert [words[0] for words in stand_in.heard] == ["import", "init", "requeue"]


def test_an_order_starts_no_worker(stand_in: StandIn) -> None:
    slurm = stand_in.client()
    slurm._ours.add(7)
    slurm.signal(7)
    assert (stand_in.heard, stand_in.commands) == ([], [["--signal=USR1", "7"]])


def test_a_worker_ends_with_its_client_and_after_its_time(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = stand_in.client()
    slurm.observe()
    assert slurm._worker is not None
    first = slurm._worker._process.pid
    monkeypatch.setattr(pyslurm_client, "LIFETIME_S", 0.0)
    slurm.observe()
    assert slurm._worker._process.pid != first
    second = slurm._worker._process.pid
    del slurm
    gc.collect()
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# --- which, and why -----------------------------------------------------------------------------


def test_the_configuration_decides_and_the_log_says_so(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(stand_in.folder / "lib")
    assert type(open_client("scontrol", conf=stand_in.conf, timeout=60)) is ScontrolClient
    assert said(caplog) == [("INFO", "Slurm is read through scontrol: slurm.client says so")]
    for choice in ("auto", "pyslurm"):
        made = open_client(choice, conf=stand_in.conf, timeout=60)  # type: ignore[arg-type]
        assert isinstance(made, PyslurmClient)
        assert reader(made) == "by-pyslurm"
    monkeypatch.setattr(pyslurm_client, "find_spec", lambda name: None)
    caplog.clear()
    for choice in ("auto", "pyslurm"):
        assert type(open_client(choice, conf=stand_in.conf, timeout=60)) is ScontrolClient  # type: ignore[arg-type]
    why = "Slurm is read through scontrol: pyslurm is not installed"
    assert said(caplog) == [("INFO", why), ("WARNING", why)]
    assert "pyslurm" not in sys.modules


@pytest.mark.parametrize("choice", ["scontrol", "pyslurm"])
def test_the_daemon_asks_for_the_client_of_its_configuration(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, choice: str
) -> None:
    monkeypatch.setattr(pyslurm_client, "find_spec", lambda name: None)
    document = {
        "slurm": {"cluster": "c", "client": choice},
        "database": {"url": "postgresql://pollux_daemon@127.0.0.1:1/pollux"},
    }
    Daemon(lambda: parse_config(document, "test"))._store.close()
    (found,) = said(caplog)
    assert found == {
        "scontrol": ("INFO", "Slurm is read through scontrol: slurm.client says so"),
        "pyslurm": ("WARNING", "Slurm is read through scontrol: pyslurm is not installed"),
    }.get(choice)
    document["slurm"]["client"] = "squeue"
    with pytest.raises(
        ConfigError, match=r"slurm.client: should be 'auto', 'scontrol' or 'pyslurm'; got 'squeue'"
    ):
        parse_config(document, "test")


@pytest.mark.parametrize("version", ["25.11.2", "22.11.0", "none"])
def test_a_pyslurm_of_another_version_is_never_initialised(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    stand_in.fault(version=version)
    slurm = stand_in.client(choice="pyslurm")
    assert [reader(slurm) for _ in range(3)] == ["by-scontrol"] * 3
    assert [words[0] for words in stand_in.heard] == ["import"]
    why = f"pyslurm {version} is not for this Slurm, 'slurm-wlm 22.05.8'"
    assert said(caplog) == [("WARNING", f"Slurm is read through scontrol: {why}")]


@pytest.mark.parametrize(
    ("at", "how", "why"),
    [
        ("import", "exit", "slurmctld: fatal: no configuration"),
        ("import", "crash", "the process ended (exit status -11)"),
        ("import", "import error", "pyslurm is not usable: ImportError: libslurmfull.so: undefined symbol"),
        ("init", "exit", "slurmctld: fatal: no configuration"),
        ("jobs", "exit", "slurmctld: fatal: no configuration"),
        ("jobs", "crash", "the process ended (exit status -11)"),
        ("nodes", "crash", "the process ended (exit status -11)"),
        ("jobs", "no such attribute", "jobs: AttributeError: 'object' object has no attribute"),
        ("jobs", "Access/permission denied", "pyslurm jobs: Access/permission denied"),
        ("values", {"cpus": "8"}, "pyslurm's worker: jobs.0.cpus: Input should be a valid integer"),
        ("values", {"state": None}, "pyslurm's worker: jobs.0.state: Input should be a valid string"),
        ("values", {"allocated_nodes": "n[1-"}, "expected a node list, got 'n[1-'"),
        ("values", {"required_nodes": "n[1-99999999999]"}, "expected a node list of at most"),
        (
            "values",
            {"layout": {"n1": {"cpu_ids": "0-", "gres": {}}}},
            "expected indices such as 0-3,7, got '0-'",
        ),
        ("values", {"gres_per_node": {"gpu:a:b": 2}}, "expected GPUs as gpu[:type][:count]"),
    ],
)
def test_whatever_a_worker_dies_of_or_garbles_scontrol_reads_at_once(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture, at: str, how: object, why: str
) -> None:
    stand_in.fault(**{at: how})
    slurm = stand_in.client()
    assert reader(slurm) == "by-scontrol"
    ((level, message),) = said(caplog)
    assert level == "INFO"  # it never served, and nobody asked for it by name
    assert message.startswith("Slurm is read through scontrol: ")
    assert why in message
    # For a while no worker is tried; nothing is said again.
    stand_in.fault()
    before = stand_in.heard
    assert reader(slurm) == "by-scontrol"
    assert (before[0], stand_in.heard, said(caplog)) == (["import", "1"], [], [])
    # Then one is.
    slurm._paused_until = 0.0
    assert reader(slurm) == "by-pyslurm"
    assert said(caplog) == [("INFO", "Slurm is read through pyslurm 22.05.2")]
    # A failure in service is a warning.
    stand_in.fault(jobs="exit")
    assert reader(slurm) == "by-scontrol"
    assert [level for level, _ in said(caplog)] == ["WARNING"]


def test_without_slurm_conf_pyslurm_is_not_even_imported(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.conf.unlink()
    assert reader(stand_in.client()) == "by-scontrol"
    assert stand_in.heard == []
    assert f"no slurm.conf can be read at {stand_in.conf}" in caplog.text


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
    assert len(stand_in.heard) == 2
    stand_in.fault(jobs="no such attribute")
    assert tries() == 0  # the worker that is there
    now += 5
    assert tries() == 2


# --- hanging ------------------------------------------------------------------------------------


def test_a_reading_that_hangs_is_no_answer_and_the_next_goes_by_scontrol(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    slurm = stand_in.client()
    slurm.observe()
    assert slurm._worker is not None
    pid = slurm._worker._process.pid
    slurm._timeout = 0.3
    stand_in.fault(jobs="hang")
    said(caplog)
    with pytest.raises(SlurmUnavailable, match=r"observe .*: no answer within 0\.3 s"):
        slurm.observe()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    slurm._timeout = 60.0
    assert reader(slurm) == "by-scontrol"
    assert said(caplog) == [("WARNING", "Slurm is read through scontrol: observe: no answer within 0.3 s")]


def test_an_import_that_hangs_is_killed(stand_in: StandIn) -> None:
    stand_in.fault(**{"import": "hang"})
    with pytest.raises(WorkerHung, match=r"no answer within 0\.5 s"):
        PyslurmProcess({**os.environ, "SLURM_CONF": str(stand_in.conf)}, start_s=0.5)


@pytest.mark.parametrize(
    ("how", "why"), [("hang", "no answer within"), ("exit", "the process ended"), ("crash", "ended")]
)
def test_an_order_left_unanswered_may_have_been_applied_and_is_not_repeated(
    stand_in: StandIn, how: str, why: str
) -> None:
    slurm = stand_in.client()
    slurm.observe()
    assert stand_in.commands
    assert stand_in.heard
    slurm._timeout = 60.0 if how != "hang" else 0.5
    stand_in.fault(signal=how)
    with pytest.raises(SlurmUnavailable, match=rf"{why}.*; it may have been applied all the same"):
        slurm.signal(7)
    # A worker that is killed may not have come that far.
    assert all(words == ["signal", 7, "SIGUSR1", "children"] for words in stand_in.heard)
    assert stand_in.commands == []
    slurm._timeout = 60.0
    slurm.signal(7)
    assert (stand_in.heard, stand_in.commands) == ([], [["--signal=USR1", "7"]])


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
    slurm._paused_until = 0.0
    assert reader(slurm) == "by-pyslurm"
    assert [words[0] for words in stand_in.heard] == ["import", "init"] * 2


# --- a worker that is no worker -----------------------------------------------------------------

HELLO = 'import os, sys, time; print(\'{"pyslurm": "22.05.2"}\', flush=True); line = sys.stdin.readline()\n'


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (
            "print('hello', flush=True); import time; time.sleep(100)",
            "expected one JSON object a line, got b'hello'",
        ),
        ("print('[1]')", "expected one JSON object a line"),
        ("print('[' * 100000)", "expected one JSON object a line"),
        ("print('{\"version\": 1}')", "it began with"),
        ("", "the process ended (exit status 0): without a word"),
        ("import sys; sys.exit('a' * 1000)", "the process ended (exit status 1): aaa"),
        (HELLO, "the process ended (exit status 0)"),
        (HELLO + "print('{\"id\": 1, \"done\": [1, 2', end='')", "the process ended (exit status 0)"),
        (HELLO + 'print(\'{"id": 1, "done": [1, 2\')', "expected one JSON object a line"),
        (HELLO + 'print(\'{"id": 2, "done": 1}\')', "expected the answer to request 1"),
        (HELLO + "print('{\"id\": 1}')", "expected the answer to request 1"),
        (HELLO + 'print(\'{"id": 1, "don": 1}\')', "jobs: None"),
        (HELLO + "print('x' * 5000)", "an answer of more than 4096 bytes"),
        (HELLO + "os.close(1); os.close(2); time.sleep(100)", "its pipe closed"),
    ],
)
def test_garbage_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    (tmp_path / "worker.py").write_text(program)
    monkeypatch.setattr(pyslurm_process, "_WORKER", tmp_path / "worker.py")
    monkeypatch.setattr(pyslurm_process, "_LONGEST_ANSWER", 4096 if "5000" in program else 1 << 28)
    monkeypatch.setattr(pyslurm_process, "_GRACE_S", 0.5 if "close" in program else 60.0)
    before = children()
    with pytest.raises(WorkerFailed) as caught:
        PyslurmProcess(os.environ, start_s=60).ask("jobs", 60)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 500
    wait_for(lambda: children() <= before)


def children() -> set[int]:
    """Pids of our children that live."""
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return {pid for pid in pids if alive(pid) and stat(pid)[1:2] == [str(os.getpid())]}


def alive(pid: int) -> bool:
    return stat(pid)[:1] not in ([], ["Z"])


def stat(pid: int) -> list[str]:
    """From the state on, proc(5); nothing for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def test_a_worker_outlives_no_polluxd(stand_in: StandIn) -> None:
    code = (
        "import os, sys\n"
        "from polluxd.slurm.pyslurm_process import PyslurmProcess\n"
        f"worker = PyslurmProcess({{**os.environ, 'SLURM_CONF': {str(stand_in.conf)!r}}}, start_s=60)\n"
        "print(worker._process.pid, flush=True)\n"
        "os._exit(0)\n"  # as if killed: nothing is tidied up
    )
    path = os.pathsep.join([os.environ["PYTHONPATH"], *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=True
    )
    pid = int(done.stdout)
    wait_for(lambda: not alive(pid))


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
