"""Stand-ins for pyslurm, in a real worker process, and for scontrol.

A test sees the answers and the log of a client that uses them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from polluxd.slurm import pyslurm_client
from polluxd.slurm.pyslurm_client import PyslurmClient
from polluxd.slurm.scontrol import ScontrolClient
from tests.unit.slurm.squeue_stand_in import RUNNING

COMMENT = "pollux:v1 min-gpus=1"
SCONTROL = """#!{python} -S
import json, os, sys
words, form = sys.argv[1:], os.environ.get("SQUEUE_FORMAT2", "")
with open({folder!r} + "/commands", "a") as commands:
    print(*words, file=commands)
if form:
    fields = [word.replace(":1<", ":<").split(":", 1) for word in form.split(",")]
    for job in json.load(open({folder!r} + "/jobs")):
        print("".join(job[name] + suffix for name, suffix in fields))
elif os.path.exists({folder!r} + "/answers/" + words[-1]):
    print(open({folder!r} + "/answers/" + words[-1]).read(), end="")
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
        names = {"folder": str(folder), "comment": COMMENT, "python": sys.executable}
        for name in ("squeue", "scontrol", "scancel"):
            (folder / name).write_text(SCONTROL.format(**names))
            (folder / name).chmod(0o755)
        (folder / "answers").mkdir()
        (folder / "answers" / "--version").write_text("slurm-wlm 22.05.8\n")
        on_one = {"NodeList": "n1", "BatchHost": "n1", "NumNodes": "1", "Name": "by-scontrol"}
        jobs = [
            RUNNING | on_one | {"JobID": "7", "admin_comment": COMMENT},
            RUNNING | on_one | {"JobID": "9"},
        ]
        jobs[1]["admin_comment"] = "none"
        (folder / "jobs").write_text(json.dumps(jobs))
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


def reader(slurm: ScontrolClient) -> str:
    """Who has read Slurm's jobs."""
    return slurm.jobs([7, 8])[7].name


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    found = [(r.levelname, r.message) for r in caplog.records if r.name == pyslurm_client.__name__]
    caplog.clear()
    return found
