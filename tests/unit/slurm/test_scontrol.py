"""The command lines of ScontrolClient, against stand-in commands: arguments, environment, and how failures are told."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polluxd.errors import SlurmGarbled, SlurmRefused, SlurmUnavailable
from polluxd.slurm.protocol import Geometry
from polluxd.slurm.scontrol import TOPOLOGY_S, ScontrolClient

OURS = (
    "JobId={id} JobName=train UserId=alice(1000) GroupId=users(100) MCS_label=N/A Priority=1 Nice=0 Account=(null) "
    "QOS=(null) JobState={state} Reason=None Dependency=(null) Requeue=1 Restarts=0 TimeLimit=UNLIMITED "
    "SubmitTime=1 EligibleTime={eligible} StartTime=1 EndTime=Unknown Partition=main ReqNodeList=(null) NodeList= "
    "NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 Command=x WorkDir=y AdminComment=pollux:v1 min-gpus=1  StdErr=z\n"
)
NODE = "NodeName=n1 CPUTot=8 Gres=gpu:4 State=IDLE Partitions=main\n"

STAND_IN = """#!{python} -S
import json, os, sys, time
folder = {folder!r}
with open(folder + "/calls", "a") as calls:
    print(json.dumps([sys.argv[1:], dict(os.environ)]), file=calls)
shown = "show" in sys.argv and sys.argv[-1] in ("job", "node", "topology", "config")
name = "show-" + sys.argv[-1] if shown else "other"
answer = json.load(open(folder + "/answers")).get(name) or dict()
time.sleep(answer.get("sleep", 0))
sys.stdout.write(answer.get("out", ""))
sys.stderr.write(answer.get("err", ""))
sys.exit(answer.get("rc", 0))
"""


class Commands:
    """Stand-ins for scontrol and scancel, first in PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("scontrol", "scancel"):
            script = folder / name
            script.write_text(STAND_IN.format(python=sys.executable, folder=str(folder)))
            script.chmod(0o755)
        self.answer()

    def answer(self, **answers: object) -> None:
        jobs = {
            "out": OURS.format(id=7, state="PENDING", eligible=5)
            + OURS.format(id=8, state="RUNNING", eligible=5)
        }
        full = {"show-job": jobs, "show-node": {"out": NODE}} | {
            k.replace("_", "-"): v for k, v in answers.items()
        }
        (self.folder / "answers").write_text(json.dumps(full))

    @property
    def calls(self) -> list[tuple[list[str], dict[str, str]]]:
        return [tuple(json.loads(line)) for line in (self.folder / "calls").read_text().splitlines()]

    @property
    def last(self) -> list[str]:
        return self.calls[-1][0]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Commands(tmp_path)


def client(timeout: float = 10.0) -> ScontrolClient:
    return ScontrolClient(conf="/etc/other/slurm.conf", timeout=timeout, clock=lambda: 1000.0)


def test_one_poll_is_a_few_calls_whatever_the_number_of_jobs(commands: Commands) -> None:
    many = "".join(OURS.format(id=i, state="PENDING", eligible=5) for i in range(1, 300))
    commands.answer(show_job={"out": many})
    now = 1000.0
    slurm = ScontrolClient(clock=lambda: now)
    state = slurm.observe()
    assert (len(state.jobs), len(state.nodes), state.taken_at) == (299, 1, 1000.0)
    poll = [["show", "job"], ["show", "node"]]
    assert [call[-2:] for call, _ in commands.calls] == [*poll, ["show", "topology"]]
    slurm.observe()
    assert [call[-2:] for call, _ in commands.calls[3:]] == poll, "racks hardly ever change"
    now += TOPOLOGY_S
    slurm.observe()
    assert [call[-2:] for call, _ in commands.calls[5:]] == [*poll, ["show", "topology"]]


def test_nodes_have_the_rack_of_the_topology_and_no_garbage_ends_a_poll(
    commands: Commands, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    slurm = ScontrolClient(clock=lambda: now)
    commands.answer(show_topology={"out": "SwitchName=s7 Level=0 LinkSpeed=1 Nodes=n[1-2]\n"})
    assert [(n.name, n.rack) for n in slurm.observe().nodes] == [("n1", "s7")]
    for answer in ({"out": "what is this\n"}, {"err": "Invalid user", "rc": 1}):
        commands.answer(show_topology=answer)
        now += TOPOLOGY_S
        assert [(n.name, n.rack) for n in slurm.observe().nodes] == [("n1", "s7")]
        assert "racks are as they were known before" in caplog.text
        caplog.clear()
    commands.answer()
    now += TOPOLOGY_S
    assert [(n.name, n.rack) for n in slurm.observe().nodes] == [("n1", "")], "the topology is gone"


def test_the_environment_is_this_clusters_and_nobody_elses(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "elsewhere")
    monkeypatch.setenv("SCANCEL_STATE", "PENDING")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    monkeypatch.setenv("TZ", "America/New_York")
    client().observe()
    environment = commands.calls[0][1]
    assert environment["SLURM_CONF"] == "/etc/other/slurm.conf"
    assert (environment["TZ"], environment["SLURM_TIME_FORMAT"]) == ("UTC0", "%s")
    assert not {"SLURM_CLUSTERS", "SCANCEL_STATE"} & set(environment)


def test_the_recipe(commands: Commands) -> None:
    client().configure(7, Geometry(("n1", "n2"), 4, 8, 3000), start=True)
    assert commands.last == [
        "update",
        "JobId=7",
        "NumNodes=2-2",
        "NumTasks=2",
        "NumCPUs=16",
        "CPUsPerTask=8",
        "MinCPUsNode=8",
        "TasksPerNode=1",
        "TresPerJob=",
        "TresPerTask=",
        "TresPerNode=gres:gpu:4",
        "ReqNodeList=n1,n2",
        "MinMemoryNode=3000",
        "StartTime=now",
    ]
    client().configure(7, Geometry(("n1",), 1, 1), start=False)
    assert not [word for word in commands.last if word.startswith(("StartTime", "MinMemory"))]


def test_the_other_calls(commands: Commands) -> None:
    slurm = client()
    slurm.signal(8)
    assert commands.last == ["--signal=USR1", "8"]
    slurm.requeue(8)
    assert commands.last == ["requeue", "incomplete", "8"]
    slurm.renew([7, 8], 1_700_000_000.7)
    assert commands.last == ["update", "JobId=7,8", "StartTime=2023-11-14T22:13:20"]
    before = len(commands.calls)
    slurm.renew([], 1.0)
    assert slurm.jobs([]) == {}
    assert len(commands.calls) == before


RUNNING = (
    OURS.format(id=8, state="RUNNING", eligible=5)
    .replace("NodeList= NumNodes=1", "NodeList=n[1-3] BatchHost=n1 NumNodes=3")
    .replace("CPUs/Task=1", "CPUs/Task=1 JOB_GRES=gpu:12 Nodes=n[1-3] CPU_IDs=0-3 Mem=0 GRES=gpu:4(IDX:0-3)")
)
COMPANION = OURS.format(id=9, state="PENDING", eligible=5).replace(
    "pollux:v1 min-gpus=1", "pollux:v1 companion-of=8 attempt=0 move=3 cpus-per-gpu=1 submitted=5"
)


def test_a_running_job_is_left_some_of_its_nodes(commands: Commands) -> None:
    commands.answer(show_job={"out": RUNNING}, other={"out": RUNNING})  # of this job alone too
    slurm = client()
    slurm.shrink(8, ("n1", "n3"))
    assert commands.last == ["update", "JobId=8", "NodeList=n1,n3"]
    before = len(commands.calls)
    slurm.shrink(8, ("n3", "n1", "n2"))
    assert [call for call, _ in commands.calls[before:] if "show" not in call] == [], "it holds these"
    for nodes in (("n2", "n3"), ("n1", "n4")):
        with pytest.raises(SlurmRefused, match="is no part of that to shrink to"):
            slurm.shrink(8, nodes)
    assert all("show" in call for call, _ in commands.calls[before:])


def test_only_companions_are_ended_and_those_that_are_gone_are_no_trouble(commands: Commands) -> None:
    both = {"out": COMPANION + RUNNING}
    commands.answer(show_job=both)
    slurm = client()
    slurm.cancel([9])
    assert commands.last == ["9"]
    slurm.cancel([])
    for others in ([8], [9, 8], [7]):
        with pytest.raises(SlurmRefused, match="are no companions"):
            slurm.cancel(others)
    assert commands.last != ["8"]
    no = {"rc": 1, "err": "scancel: error: Kill job error on job id 9: Access/permission denied"}
    commands.answer(show_job=both, other=no)
    with pytest.raises(SlurmRefused, match="denied"):
        slurm.cancel([9])
    ended = COMPANION.replace("JobState=PENDING", "JobState=CANCELLED")
    commands.answer(show_job={"out": ended}, other=no)
    slurm.cancel([9])


def test_whether_jobs_can_shrink_is_asked_for_now_and_then(commands: Commands) -> None:
    now = 1000.0
    slurm = ScontrolClient(clock=lambda: now)
    commands.answer(show_config={"out": "AccountingStorageType   = accounting_storage/slurmdbd\n"})
    assert slurm.can_shrink()
    assert slurm.can_shrink()
    assert [call for call, _ in commands.calls] == [["show", "config"]]
    now += TOPOLOGY_S
    commands.answer(show_config={"rc": 1, "err": "Socket timed out"})
    assert slurm.can_shrink(), "as it was known before"
    now += TOPOLOGY_S
    commands.answer(show_config={"out": "AccountingStorageType   = accounting_storage/none\n"})
    assert not slurm.can_shrink()


def test_what_disappears_from_an_answer_is_asked_for_once_more(commands: Commands) -> None:
    slurm = client()
    assert len(slurm.observe().jobs) == 2
    # Cut off between two records: nothing in the text tells.
    commands.answer(show_job={"out": OURS.format(id=7, state="PENDING", eligible=5)})
    before = len(commands.calls)
    assert len(slurm.observe().jobs) == 1
    assert sum(call[-1] == "job" for call, _ in commands.calls[before:]) == 2
    before = len(commands.calls)
    assert len(slurm.observe().jobs) == 1
    assert sum(call[-1] == "job" for call, _ in commands.calls[before:]) == 1, "it is believed now"
    commands.answer(show_node={"out": NODE.replace("n1", "n2")})
    before = len(commands.calls)
    slurm.observe()
    assert sum(call[-1] == "node" for call, _ in commands.calls[before:]) == 2


def test_a_job_that_did_not_opt_in_is_never_written_to(commands: Commands) -> None:
    foreign = OURS.format(id=9, state="RUNNING", eligible=5).replace("pollux:v1", "other")
    commands.answer(show_job={"out": foreign})
    writes: list[Callable[[ScontrolClient], None]] = [
        lambda c: c.requeue(9),
        lambda c: c.signal(9),
        lambda c: c.configure(9, Geometry(("n1",), 1, 1), start=True),
        lambda c: c.renew([9], 1e9),
    ]
    for write in writes:
        with pytest.raises(SlurmRefused, match=r"jobs \[9\] did not opt in"):
            write(client())
    assert all("show" in call for call, _ in commands.calls)


def test_opting_out_is_noticed(commands: Commands) -> None:
    slurm = client()
    slurm.requeue(8)
    commands.answer(
        show_job={"out": OURS.format(id=8, state="RUNNING", eligible=5).replace("pollux:v1", "none")}
    )
    slurm.observe()
    with pytest.raises(SlurmRefused):
        slurm.requeue(8)


@pytest.mark.parametrize(
    "complaint",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "slurm_update error: Socket timed out on send/recv operation",
        "scontrol: error: Munge encode failed: Failed to access socket",
        "slurm_load_jobs error: Zero Bytes were transmitted or received",
        "scontrol: fatal: Could not establish a configuration source",
        "slurm_update error: Protocol authentication error",
        "scontrol: error: slurm_msg_sendto: address:port=127.0.0.1:6817 msg_type=2003: Unexpected missing socket error",
    ],
)
def test_no_answer_is_unavailable(commands: Commands, complaint: str) -> None:
    commands.answer(show_job={"rc": 1, "err": complaint})
    with pytest.raises(SlurmUnavailable, match="does not answer"):
        client().observe()


def test_no_is_refused_with_slurms_words(commands: Commands) -> None:
    commands.answer(other={"rc": 1, "err": "Invalid node name specified for job 7"})
    with pytest.raises(SlurmRefused, match="Invalid node name specified"):
        client().configure(7, Geometry(("n9",), 1, 1), start=True)


def test_a_hanging_command_is_given_up(commands: Commands) -> None:
    commands.answer(show_job={"sleep": 30})
    with pytest.raises(SlurmUnavailable, match=r"no answer within 0\.3 s"):
        client(timeout=0.3).observe()


def test_a_missing_command_is_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmUnavailable, match="installed"):
        client().observe()


def test_garbled_output_is_garbled(commands: Commands) -> None:
    for out in ("", "no such thing\n", NODE[:-1]):
        commands.answer(show_node={"out": out})
        with pytest.raises(SlurmGarbled):
            client().observe()
    commands.answer(show_job={"out": OURS.format(id=7, state="PENDING", eligible=5)[:120]})
    with pytest.raises(SlurmGarbled):
        client().observe()


def test_a_job_that_slurm_has_forgotten_is_left_out(commands: Commands) -> None:
    commands.answer(other={"rc": 1, "err": "slurm_load_jobs error: Invalid job id specified"})
    assert client().jobs([12345]) == {}
    assert set(client().jobs([7, 12345])) == {7}


def test_renewing_passes_over_jobs_that_started_or_ended(commands: Commands) -> None:
    refusal = {"rc": 1, "err": "Job is no longer pending execution for job 8\n"}
    renewed = OURS.format(id=7, state="PENDING", eligible=100) + OURS.format(
        id=8, state="RUNNING", eligible=5
    )
    commands.answer(other=refusal, show_job={"out": renewed})
    client().renew([7, 8], 100.7)
    commands.answer(other=refusal)  # job 7 waits and has kept its old lease
    with pytest.raises(SlurmRefused, match="no longer pending"):
        client().renew([7, 8], 100.7)


def test_geometry_checks_itself() -> None:
    for nodes, gpus, cpus in (((), 1, 1), (("n1", "n1"), 1, 1), (("n1",), 0, 1), (("n1",), 1, 0)):
        with pytest.raises(ValueError, match="a geometry"):
            Geometry(nodes, gpus, cpus)
