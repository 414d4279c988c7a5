"""The command lines of ScontrolClient, against stand-in commands.

The tests check arguments, environment, and the errors that the client raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from polluxd.errors import SlurmGarbled, SlurmRefused, SlurmUnavailable
from polluxd.slurm.protocol import Geometry
from polluxd.slurm.rarely_asked import TOPOLOGY_S
from polluxd.slurm.scontrol import ScontrolClient
from tests.unit.slurm.stand_in_commands import NODE, Commands, job


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Commands(tmp_path)


def client(timeout: float = 10.0) -> ScontrolClient:
    return ScontrolClient(conf="/etc/other/slurm.conf", timeout=timeout, clock=lambda: 1000.0)


def test_one_poll_is_a_few_calls_whatever_the_number_of_jobs(commands: Commands) -> None:
    commands.answer([job(i) for i in range(1, 300)])
    now = 1000.0
    slurm = ScontrolClient(clock=lambda: now)
    state = slurm.observe()
    assert (len(state.jobs), len(state.nodes), state.taken_at) == (299, 1, 1000.0)
    assert {shown.name for shown in state.jobs} == {"train"}
    assert commands.since() == ["squeue", "node", "topology", "partition", "reservation", "config", "words"]
    slurm.observe()
    assert commands.since(7) == ["squeue", "node", "partition", "reservation", "words"], (
        "racks hardly ever change"
    )
    now += TOPOLOGY_S
    commands.answer([job(i) for i in range(1, 301)])
    slurm.observe()
    assert commands.since(12) == ["squeue", "node", "topology", "partition", "reservation", "config", "words"]


def test_only_words_of_pollux_jobs_are_asked_for(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain job's lists of nodes may have 16 KiB, and a user may have ten thousand such jobs."""
    monkeypatch.setattr("polluxd.slurm.scontrol._WORDS_AT_ONCE", 2)
    commands.answer([job(3), *(job(i, admin_comment="") for i in range(10, 20)), job(5), job(4)])
    client().observe()
    asked = [words[-1] for words, environment in commands.calls if "SQUEUE_FORMAT" in environment]
    assert asked == ["--jobs=3,3,4", "--jobs=5,5"]
    commands.answer([job(9, admin_comment="")])
    before = len(commands.calls)
    client().observe()
    assert "words" not in commands.since(before)


def test_the_words_that_separate_fields_are_secret_and_new_each_time(commands: Commands) -> None:
    slurm = client()
    slurm.observe()
    slurm.observe()
    formats = [environment.get("SQUEUE_FORMAT2", "") for _, environment in commands.calls]
    separators = {form.split(",")[0].split(":")[1] for form in formats if form}
    assert len(separators) == 2
    assert not any(word in " ".join(words) for word in separators for words, _ in commands.calls), (
        "others see words"
    )


def test_what_cannot_be_read_is_named_and_costs_nothing_else(commands: Commands) -> None:
    bad = job(9, "RUNNING", StartTime="soon", admin_comment="")
    commands.answer(
        [job(7), bad], show_node={"out": NODE + NODE.replace("n1", "n2").replace("CPUTot=8", "CPUTot=?")}
    )
    state = client().observe()
    assert [shown.job_id for shown in state.jobs] == [7]
    assert [(node.name, node.capacity) for node in state.nodes] == [("n1", 4), ("n2", 0)]
    assert set(state.unreadable) == {"job 9", "node n2"}


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


def test_no_more_memory_is_asked_for_than_a_node_has(commands: Commands) -> None:
    commands.answer([job(7)], show_node={"out": NODE[:-1] + " RealMemory=2500\n"})
    slurm = ScontrolClient()
    state = slurm.observe()
    assert state.nodes[0].memory_mb == 0, "jobs do not share out memory on this cluster"
    slurm.configure(7, Geometry(("n1", "n2"), 4, 8, 3000), start=True)
    assert "MinMemoryNode=2500" in commands.last


def test_the_other_calls(commands: Commands) -> None:
    slurm = client()
    slurm.requeue(8)
    assert commands.last == ["requeue", "incomplete", "8"]
    slurm.renew([7, 8], 1_700_000_000.7)
    assert commands.last == ["update", "JobId=7,8", "StartTime=2023-11-14T22:13:20"]
    before = len(commands.calls)
    slurm.renew([], 1.0)
    assert slurm.jobs([]) == {}
    assert len(commands.calls) == before


def test_a_probe_changes_nothing(commands: Commands) -> None:
    slurm = client()
    commands.answer([job(8, "RUNNING", TimeLimit="2:30:00"), job(9, "RUNNING", TimeLimit="UNLIMITED")])
    for job_id, same in ((8, "TimeLimit=150"), (9, "TimeLimit=UNLIMITED")):
        slurm.probe(job_id)
        assert ["update", f"JobId={job_id}", same] in [words[1:] for words, _ in commands.calls]


def test_a_probe_asks_whether_the_user_still_has_the_qos(commands: Commands) -> None:
    enforced = {"out": "AccountingStorageEnforce = associations,limits,qos\nClusterName = dev\n"}
    slurm, shown = client(), job(8, "RUNNING", QOS="urgent", UserName="ann", Account="lab")
    for names, refused in (("normal", True), ("normal\nhigh,urgent", False), ("", False)):
        commands.answer([shown], show_config=enforced, other={"out": names})
        said = pytest.raises(SlurmRefused, match="user ann has no QOS urgent in account lab any more")
        with said if refused else nullcontext():
            slurm.probe(8)


def test_a_completing_job_is_never_requeued(commands: Commands) -> None:
    slurm = client()
    commands.answer(other={"out": "JobId=8 JobName=x JobState=COMPLETING Reason=None\n"})
    for requeue in (slurm.requeue, slurm.run_again):
        with pytest.raises(SlurmRefused, match="job 8 is COMPLETING"):
            requeue(8)
    assert not [words for words, _ in commands.calls if "requeue" in words]


@pytest.mark.parametrize("field", ["WorkDir", "Command", "StdOut", "StdErr", "StdIn", "Comment"])
def test_a_path_that_says_so_makes_no_job_a_completing_one(commands: Commands, field: str) -> None:
    """Such a job would keep its GPUs for good."""
    slurm = client()
    record = f"JobId=8 JobName=x JobState=RUNNING Reason=None {field}=/tmp/x JobState=COMPLETING/y\n"
    commands.answer([job(8, "RUNNING")], other={"out": record})
    slurm.requeue(8)
    assert commands.last[:2] == ["requeue", "incomplete"]


WIDE = job(8, "RUNNING", NodeList="n[1-3]", BatchHost="n1", NumNodes="3")
COMPANION = job(9, admin_comment="pollux:v1 companion-of=8 attempt=0 move=3 cpus-per-gpu=1 submitted=5")


def test_a_running_job_is_left_some_of_its_nodes(commands: Commands) -> None:
    commands.answer([WIDE])
    slurm = client()
    slurm.shrink(8, ("n1", "n3"))
    assert commands.last == ["update", "JobId=8", "NodeList=n1,n3"]
    before = len(commands.calls)
    slurm.shrink(8, ("n3", "n1", "n2"))
    assert set(commands.since(before)) == {"squeue"}, "it holds these"
    for nodes in (("n2", "n3"), ("n1", "n4")):
        with pytest.raises(
            SlurmRefused,
            match=rf"cannot shrink job 8 to {','.join(nodes)}: it holds n1,n2,n3 and its batch script runs on n1",
        ):
            slurm.shrink(8, nodes)
    assert set(commands.since(before)) == {"squeue"}


def test_only_companions_are_ended_and_those_that_are_gone_are_no_trouble(commands: Commands) -> None:
    both = [COMPANION, WIDE]
    commands.answer(both)
    slurm = client()
    slurm.cancel([9])
    assert commands.last == ["9"]
    slurm.cancel([])
    for others in ([8], [9, 8], [7]):
        with pytest.raises(SlurmRefused, match="are no companions"):
            slurm.cancel(others)
    assert commands.last != ["8"]
    no = {"rc": 1, "err": "scancel: error: Kill job error on job id 9: Access/permission denied"}
    commands.answer(both, other=no)
    with pytest.raises(SlurmRefused, match="denied"):
        slurm.cancel([9])
    commands.answer([COMPANION | {"State": "CANCELLED"}], other=no)
    slurm.cancel([9])


def test_whether_jobs_can_shrink_is_asked_for_now_and_then(commands: Commands) -> None:
    now = 1000.0
    slurm = ScontrolClient(clock=lambda: now)
    commands.answer(show_config={"out": "AccountingStorageType   = accounting_storage/slurmdbd\n"})
    assert slurm.can_shrink()
    assert slurm.can_shrink()
    assert commands.since() == ["config"]
    now += TOPOLOGY_S
    commands.answer(show_config={"rc": 1, "err": "Socket timed out"})
    assert slurm.can_shrink(), "as it was known before"
    now += TOPOLOGY_S
    commands.answer(show_config={"out": "AccountingStorageType   = accounting_storage/none\n"})
    assert not slurm.can_shrink()


def test_which_qos_preempts_is_asked_for_where_that_matters(commands: Commands) -> None:
    now = 1000.0
    slurm = ScontrolClient(clock=lambda: now)
    qos = "show-format=name,preempt"
    commands.answer(**{"show_config": {"out": "PreemptType   = preempt/qos\n"}, qos: {"out": "a|b\n"}})
    for _ in range(3):
        assert slurm.observe().rules.preempts == {"a": frozenset({"b"})}
    assert [call[0] for call, _ in commands.calls].count("sacctmgr") == 1
    now += TOPOLOGY_S
    commands.answer(**{"show_config": {"out": "PreemptType   = preempt/qos\n"}, qos: {"rc": 1, "err": "no"}})
    assert slurm.observe().rules.preempts == {"a": frozenset({"b"})}, "as it was known before"
    now += TOPOLOGY_S
    commands.answer(show_config={"out": "PreemptType   = preempt/none\n"})
    assert not slurm.observe().rules.preempts


def test_what_disappears_from_an_answer_is_asked_for_once_more(commands: Commands) -> None:
    slurm = client()
    assert len(slurm.observe().jobs) == 2
    # Cut off between two records: nothing in the text tells.
    commands.answer([job(7)])
    before = len(commands.calls)
    assert len(slurm.observe().jobs) == 1
    assert commands.since(before).count("squeue") == 2
    before = len(commands.calls)
    assert len(slurm.observe().jobs) == 1
    assert commands.since(before).count("squeue") == 1, "it is believed now"
    commands.answer([job(7)], show_node={"out": NODE.replace("n1", "n2")})
    before = len(commands.calls)
    slurm.observe()
    assert commands.since(before).count("node") == 2


def test_a_job_that_did_not_opt_in_is_never_written_to(commands: Commands) -> None:
    commands.answer([job(9, "RUNNING", admin_comment="other min-gpus=1")])
    writes: list[Callable[[ScontrolClient], None]] = [
        lambda c: c.requeue(9),
        lambda c: c.configure(9, Geometry(("n1",), 1, 1), start=True),
        lambda c: c.renew([9], 1e9),
    ]
    for write in writes:
        with pytest.raises(SlurmRefused, match=r"jobs \[9\] did not opt in"):
            write(client())
    assert set(commands.since()) == {"squeue"}


def test_opting_out_is_noticed(commands: Commands) -> None:
    slurm = client()
    slurm.requeue(8)
    commands.answer([job(8, "RUNNING", admin_comment="none")])
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
    commands.answer(squeue={"rc": 1, "err": complaint})
    with pytest.raises(SlurmUnavailable, match="does not answer"):
        client().observe()


def test_no_is_refused_with_slurms_words(commands: Commands) -> None:
    commands.answer(other={"rc": 1, "err": "Invalid node name specified for job 7"})
    with pytest.raises(SlurmRefused, match="Invalid node name specified"):
        client().configure(7, Geometry(("n9",), 1, 1), start=True)


def test_a_hanging_command_is_given_up(commands: Commands) -> None:
    commands.answer(squeue={"sleep": 30})
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
    commands.answer(squeue={"cut": 120})
    with pytest.raises(SlurmGarbled):
        client().observe()


def test_a_job_that_slurm_has_forgotten_is_left_out(commands: Commands) -> None:
    assert client().jobs([12345]) == {}
    assert set(client().jobs([7, 12345])) == {7}


def test_renewing_passes_over_jobs_that_started_or_ended(commands: Commands) -> None:
    refusal = {"rc": 1, "err": "Job is no longer pending execution for job 8\n"}
    commands.answer([job(7, eligible=100), job(8, "RUNNING")], other=refusal)
    client().renew([7, 8], 100.7)
    commands.answer(other=refusal)  # job 7 waits and has kept its old lease
    with pytest.raises(SlurmRefused, match="no longer pending"):
        client().renew([7, 8], 100.7)


def test_geometry_checks_itself() -> None:
    for nodes, gpus, cpus in (((), 1, 1), (("n1", "n1"), 1, 1), (("n1",), 0, 1), (("n1",), 1, 0)):
        with pytest.raises(ValueError, match="a geometry"):
            Geometry(nodes, gpus, cpus)


def test_a_job_that_did_not_change_is_the_same_object(commands: Commands) -> None:
    slurm = client()
    first = {j.job_id: j for j in slurm.observe().jobs}
    commands.answer([job(7), job(8, "RUNNING", RestartCnt="2")])
    second = {j.job_id: j for j in slurm.observe().jobs}
    assert second[7] is first[7]
    assert (first[8].restart_count, second[8].restart_count) == (1, 2)
    reused = "pollux:v1 min-gpus=1 submitted=1800000000"
    commands.answer([job(7, Name="other", admin_comment=reused), job(8, "RUNNING")])
    third = {j.job_id: j for j in slurm.observe().jobs}
    assert third[7].name == "other", "a new job of the same id"
    assert slurm.jobs([7])[7] == third[7]
