"""Reading scontrol: records as Slurm 22.05.8 printed them, a later version's forms, and what users put into them."""

from __future__ import annotations

import pytest

from polluxd.errors import SlurmGarbled
from polluxd.model import JobSpec, JobState, Node
from polluxd.slurm.records import Gpus, node_names, parse_gpus, parse_jobs, parse_nodes

RUNNING = (
    "JobId=7 JobName=train UserId=alice(1000) GroupId=users(100) MCS_label=N/A Priority=4294901759 Nice=0 "
    "Account=vision QOS=normal JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=1 BatchFlag=1 "
    "Reboot=0 ExitCode=0:0 DerivedExitCode=0:0 RunTime=00:00:01 TimeLimit=1-02:03:04 TimeMin=N/A SubmitTime=1795271832 "
    "EligibleTime=1795271833 AccrueTime=1795271953 StartTime=1795271833 EndTime=1826807833 Deadline=N/A "
    "SuspendTime=None SecsPreSuspend=0 LastSchedEval=1795271833 Scheduler=Backfill Partition=main "
    "AllocNode:Sid=localhost:3315 ReqNodeList=n3,n4 ExcNodeList=(null) NodeList=n[3-4] BatchHost=n3 NumNodes=2 "
    "NumCPUs=4 NumTasks=2 CPUs/Task=2 ReqB:S:C:T=0:0:*:* TRES=cpu=4,node=2,billing=1 Socks/Node=* "
    "NtasksPerN:B:S:C=1:0:*:* CoreSpec=* JOB_GRES=gpu:8   Nodes=n[3-4] CPU_IDs=6-7 Mem=0 GRES=gpu:4(IDX:0-3) "
    "MinCPUsNode=1 MinMemoryNode=300M MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 OverSubscribe=OK "
    "Contiguous=0 Licenses=(null) Network=(null) Command=/home/alice/j.sh WorkDir=/home/alice "
    "AdminComment=pollux:v1 min-gpus=1 max-gpus=8 cpus-per-gpu=2 submitted=1795271000  Comment=c "
    "StdErr=/home/alice/o StdIn=/dev/null StdOut=/home/alice/o Power= TresPerJob= "
    "TresPerNode=gres:gpu:4 TresPerTask= \n"
)
PENDING = (
    RUNNING.replace("JobState=RUNNING Reason=None", "JobState=PENDING Reason=BeginTime")
    .replace("NodeList=n[3-4] BatchHost=n3 NumNodes=2 NumCPUs=4", "NodeList= NumNodes=1-2 NumCPUs=2-4")
    .replace("JOB_GRES=gpu:8   Nodes=n[3-4] CPU_IDs=6-7 Mem=0 GRES=gpu:4(IDX:0-3) ", "")
    .replace("StartTime=1795271833 EndTime=1826807833", "StartTime=1795271953 EndTime=Unknown")
)
NODE = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=8 CPUTot=8 CPULoad=0.18 AvailableFeatures=(null) "
    "ActiveFeatures=(null) Gres=gpu:4 GresDrain=N/A GresUsed=gpu:0 NodeAddr=127.0.0.1 NodeHostName=vm Port=15221 "
    "Version=22.05.8 OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=4000 AllocMem=0 FreeMem=23183 Sockets=8 "
    "Boards=1 State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=main,debug  "
    "BootTime=1795270341 SlurmdStartTime=1795271829 CfgTRES=cpu=8,mem=4000M,billing=8 AllocTRES= CapWatts=n/a\n"
)


def one(text: str):  # type: ignore[no-untyped-def]
    (job,) = parse_jobs(text)
    return job


def test_a_running_job() -> None:
    job = one(RUNNING)
    assert (job.job_id, job.name, job.user, job.uid, job.account) == (7, "train", "alice", 1000, "vision")
    assert (job.state, job.restart_count, job.reason) == (JobState.RUNNING, 1, "None")
    assert job.nodes == ("n3", "n4")
    assert job.gpus_per_node_held == {"n3": 4, "n4": 4}
    assert job.cpus_per_node_held == {"n3": 2, "n4": 2}
    assert (job.requested_nodes, job.requested_gpus_per_node, job.requested_cpus, job.cpus_per_task) == (
        2,
        4,
        4,
        2,
    )
    assert job.mem_per_node_mb == 300
    assert job.time_limit_s == 86400 + 2 * 3600 + 3 * 60 + 4
    assert job.submit_time == 1795271000  # not Slurm's own, which a requeue resets
    assert (job.start_time, job.end_time) == (1795271833, None)
    assert job.spec == JobSpec(min_gpus=1, max_gpus=8, cpus_per_gpu=2)
    assert job.required_nodes == ("n3", "n4")
    assert job.command == "/home/alice/j.sh"


def test_a_pending_job() -> None:
    job = one(PENDING)
    assert job.state is JobState.PENDING
    assert (job.nodes, dict(job.gpus_per_node_held)) == ((), {})
    assert (job.start_time, job.eligible_time) == (None, 1795271833)
    assert job.requested_nodes == 1
    assert not job.held_by_user
    assert one(PENDING.replace("Priority=4294901759", "Priority=0")).held_by_user
    assert one(PENDING.replace("Dependency=(null)", "Dependency=afterok:3(unfulfilled)")).dependent


def test_groups_of_nodes_and_typed_gpus_of_later_versions() -> None:
    text = RUNNING.replace(
        "Nodes=n[3-4] CPU_IDs=6-7 Mem=0 GRES=gpu:4(IDX:0-3) ",
        "Nodes=n3 CPU_IDs=0-3,6 Mem=100 GRES=gpu:a100:3(IDX:0,2-3) "
        "  Nodes=n[4-5] CPU_IDs=0 Mem=100 GRES=gpu:a100:1(IDX:1),nic:1(IDX:0) ",
    ).replace("TresPerNode=gres:gpu:4", "TresPerNode=gres/gpu:a100:3")
    job = one(text)
    assert job.gpus_per_node_held == {"n3": 3, "n4": 1, "n5": 1}
    assert job.cpus_per_node_held == {"n3": 5, "n4": 1, "n5": 1}
    assert job.requested_gpus_per_node == 3


def test_a_completing_job_holds_its_gpus_until_its_nodes_are_rid_of_it() -> None:
    leaving = (
        RUNNING.replace("JobState=RUNNING", "JobState=COMPLETING")
        .replace("NodeList=n[3-4] BatchHost", "NodeList=n4 BatchHost")
        .replace("GRES=gpu:4(IDX:0-3) ", "GRES= ")
    )
    assert one(leaving).gpus_per_node_held == {"n4": 4}
    # Asked for by --gpus: which of them are where is not known any more; the total is the bound.
    assert one(leaving.replace("TresPerNode=gres:gpu:4 ", "")).gpus_per_node_held == {"n4": 8}


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("CONFIGURING", JobState.RUNNING),
        ("TIMEOUT", JobState.FAILED),
        ("NODE_FAIL", JobState.FAILED),
        ("CANCELLED", JobState.CANCELLED),
        ("SUSPENDED", JobState.SUSPENDED),
        ("SPECIAL_EXIT", JobState.PENDING),
        ("A_STATE_OF_TOMORROW", JobState.COMPLETING),
    ],
)
def test_states(word: str, state: JobState) -> None:
    job = one(RUNNING.replace("JobState=RUNNING", f"JobState={word}"))
    assert (job.state, job.raw_state) == (state, word)


@pytest.mark.parametrize("comment", ["pollux:v9 min-gpus=1", "pollux:v1 min-gpus=none", "hello", "(null)"])
def test_a_comment_that_makes_no_sense_is_no_opt_in(comment: str) -> None:
    text = RUNNING.replace("pollux:v1 min-gpus=1 max-gpus=8 cpus-per-gpu=2 submitted=1795271000", comment)
    job = one(text)
    assert job.spec is None
    assert job.submit_time == 1795271832


def test_no_jobs() -> None:
    assert parse_jobs("No jobs in the system\n") == ()
    assert parse_jobs("") == ()


def test_array_and_heterogeneous_jobs() -> None:
    array = RUNNING.replace("JobId=7 ", "JobId=7 ArrayJobId=6 ArrayTaskId=1 ")
    het = RUNNING.replace("JobId=7 ", "JobId=8 HetJobId=8 HetJobOffset=0 HetJobIdSet=8-9 ")
    assert [(job.job_id, job.name) for job in parse_jobs(array + het)] == [(7, "train"), (8, "train")]


@pytest.mark.parametrize(
    "cut",
    [
        RUNNING[:-1],
        RUNNING[:400] + "\n",
        RUNNING.replace("Restarts=1 ", ""),
        RUNNING.replace("Restarts=1", "Restarts=one"),
        RUNNING.replace("StartTime=1795271833", "StartTime=2026-11-21T14:37:13"),
        RUNNING.replace("TimeLimit=1-02:03:04", "TimeLimit=soon"),
        RUNNING.replace("GRES=gpu:4(IDX:0-3)", "GRES=gpu:-4"),
        RUNNING.replace("Nodes=n[3-4] CPU", "Nodes=n[3- CPU"),
        RUNNING.replace("CPU_IDs=6-7", "CPU_IDs=6-"),
        RUNNING.replace("MinMemoryNode=300M", "MinMemoryNode=300X"),
        "slurm_load_jobs error: something\n" + RUNNING,
        "{}\n",
    ],
)
def test_truncated_or_unknown_output_is_garbled(cut: str) -> None:
    with pytest.raises(SlurmGarbled):
        parse_jobs(cut)


def test_a_name_with_blanks_equals_signs_and_line_breaks_describes_only_itself() -> None:
    other = RUNNING.replace("JobId=7", "JobId=9")
    for name in (
        "a b",
        "x=y AdminComment=pollux:v1",
        "x\nJobId=9 JobName=forged",
        "x\n\nJobId=9",
        "UserId=root(0)",
    ):
        text = RUNNING.replace("JobName=train", f"JobName={name}") + other
        jobs = {job.job_id: job for job in parse_jobs(text)}
        assert set(jobs) == {7, 9}
        assert jobs[9].name == "train"
        assert jobs[7].gpus_per_node_held == {"n3": 4, "n4": 4}


def test_a_whole_forged_record_is_noticed() -> None:
    forged = RUNNING.replace("JobName=train", "JobName=x")[:-1] + "\n" + "JobId=9 JobName=y"
    text = RUNNING.replace("JobId=7 JobName=train", f"{forged}") + RUNNING.replace("JobId=7", "JobId=9")
    with pytest.raises(SlurmGarbled, match="line break in a job's name"):
        parse_jobs(text)


def test_nodes_with_foreign_use() -> None:
    foreign = RUNNING.replace("AdminComment=pollux:v1", "AdminComment=none").replace("n[3-4]", "n[1-2]")
    ours = RUNNING.replace("JobId=7", "JobId=8").replace("n[3-4]", "n1")
    (node,) = parse_nodes(NODE, parse_jobs(foreign + ours))
    assert node == Node(
        "n1",
        4,
        foreign_gpus=4,
        partitions=frozenset({"main", "debug"}),
        cpus=8,
        foreign_cpus=2,
        schedulable=True,
    )


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("IDLE", True),
        ("MIXED", True),
        ("ALLOCATED", True),
        ("MIXED+PLANNED", True),
        ("IDLE+COMPLETING", True),
        ("IDLE+CLOUD", True),
        ("IDLE+DRAIN", False),
        ("MIXED+DRAIN", False),
        ("DOWN", False),
        ("DOWN*", False),
        ("IDLE*", False),
        ("IDLE+MAINTENANCE", False),
        ("IDLE+REBOOT_REQUESTED", False),
        ("IDLE+POWERED_DOWN", False),
        ("IDLE+RESERVED", False),
        ("UNKNOWN", False),
        ("FUTURE", False),
        ("DOWN+INVALID_REG", False),
    ],
)
def test_node_states(state: str, usable: bool) -> None:
    (node,) = parse_nodes(NODE.replace("State=IDLE", f"State={state}"))
    assert node.schedulable is usable
    assert node.capacity == (4 if usable else 0)


def test_a_node_without_gpus_and_garbled_nodes() -> None:
    (node,) = parse_nodes(NODE.replace("Gres=gpu:4", "Gres=(null)"))
    assert node.gpus == 0
    for cut in (
        NODE[:200] + "\n",
        NODE.replace("CPUTot=8", "CPUTot=?"),
        NODE.replace("State=IDLE", "Sate=IDLE"),
    ):
        with pytest.raises(SlurmGarbled):
            parse_nodes(cut)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:4", Gpus(4)),
        ("gpu", Gpus(1)),
        ("gres:gpu:2", Gpus(2)),
        ("gres/gpu:2", Gpus(2)),
        ("gres/gpu=2", Gpus(2)),
        ("gres:gpu:a100:2", Gpus(2, "a100")),
        ("gres/gpu:a100-sxm.80:2", Gpus(2, "a100-sxm.80")),
        ("gpu:a100:4(S:0-1)", Gpus(4, "a100")),
        ("gpu:a100:2(IDX:0-1),gpu:v100:1(IDX:2)", Gpus(3)),
        ("nic:2", Gpus(0)),
        ("gpumem:2", Gpus(0)),
        ("(null)", Gpus(0)),
        ("", Gpus(0)),
    ],
)
def test_gres(text: str, gpus: Gpus) -> None:
    assert parse_gpus(text) == gpus


def test_node_lists() -> None:
    assert node_names("n[1-3,7],gpu-a") == ("gpu-a", "n1", "n2", "n3", "n7")
    assert node_names("rack[01-02]-n1") == ("rack01-n1", "rack02-n1")
    assert node_names("(null)") == ()
    assert node_names("@all") == ("@all",)


@pytest.mark.parametrize(
    "forged",
    [
        "Nodes=n[1-4] CPU_IDs=0-7 Mem=0 GRES=gpu:4",  # would take the whole cluster
        "Nodes=n[ CPU_IDs=z Mem=0 GRES=gpu:?",  # these would make every job's reading fail
        "TresPerNode=gpu:a:b:c",
        "MinMemoryNode=lots JOB_GRES=gpu:a:b:c",
    ],
)
@pytest.mark.parametrize("state", ["PENDING", "COMPLETING"])
def test_a_users_words_take_no_gpus_and_stop_no_reading(forged: str, state: str) -> None:
    text = (
        PENDING.replace("JobState=PENDING", f"JobState={state}")
        .replace("MinMemoryNode=300M ", "MinMemoryCPU=300M ")
        .replace("TresPerNode=gres:gpu:4 ", "TresPerJob=gres:gpu:4 ")
        .replace("Comment=c ", f"Comment=c {forged} ")
    )
    job = one(text)
    assert (dict(job.gpus_per_node_held), job.mem_per_node_mb) == ({}, None)
