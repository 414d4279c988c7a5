"""Node lists of every shape, and the records of each Slurm version, as they were printed."""

from __future__ import annotations

import pytest

from polluxd.errors import SlurmGarbled
from polluxd.model import JobState
from polluxd.slurm.records import index_count, node_names, parse_jobs, parse_nodes

# One and the same job (sbatch --gres=gpu:2 -N2 --ntasks-per-node=1 -c2), but for the hour.
JOBS = {
    "22.05.8": (
        "JobId=1 JobName=j.sh UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901759 Nice=0 "
        "Account=(null) QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 "
        "BatchFlag=1 Reboot=0 ExitCode=0:0 DerivedExitCode=0:0 RunTime=00:00:02 TimeLimit=UNLIMITED "
        "TimeMin=N/A SubmitTime=1795295463 EligibleTime=1795295463 AccrueTime=1795295463 "
        "StartTime=1795295466 EndTime=Unknown Deadline=N/A SuspendTime=None SecsPreSuspend=0 "
        "LastSchedEval=1795295466 Scheduler=Main Partition=main AllocNode:Sid=localhost:19744 "
        "ReqNodeList=(null) ExcNodeList=(null) NodeList=n[1-2] BatchHost=n1 NumNodes=2 NumCPUs=4 NumTasks=2 "
        "CPUs/Task=2 ReqB:S:C:T=0:0:*:* TRES=cpu=4,node=2,billing=4 Socks/Node=* NtasksPerN:B:S:C=1:0:*:* "
        "CoreSpec=* JOB_GRES=gpu:4   Nodes=n[1-2] CPU_IDs=6-7 Mem=0 GRES=gpu:2(IDX:0-1) MinCPUsNode=2 "
        "MinMemoryNode=0 MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 OverSubscribe=OK Contiguous=0 "
        "Licenses=(null) Network=(null) Command=/home/a/j.sh WorkDir=/home/a StdErr=/dev/null "
        "StdIn=/dev/null StdOut=/dev/null Power= TresPerNode=gres:gpu:2 \n"
    ),
    "24.11.5": (
        "JobId=1 JobName=j.sh UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1 Nice=0 Account=(null) "
        "QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
        "ExitCode=0:0 DerivedExitCode=0:0 RunTime=00:00:00 TimeLimit=UNLIMITED TimeMin=N/A "
        "SubmitTime=1795295463 EligibleTime=1795295463 AccrueTime=1795295463 StartTime=1795295473 "
        "EndTime=Unknown Deadline=N/A SuspendTime=None SecsPreSuspend=0 LastSchedEval=1795295473 "
        "Scheduler=Main Partition=main AllocNode:Sid=localhost:0 ReqNodeList=(null) ExcNodeList=(null) "
        "NodeList=n[1-2] BatchHost=n1 NumNodes=2 NumCPUs=4 NumTasks=2 CPUs/Task=2 ReqB:S:C:T=0:0:*:* "
        "ReqTRES=cpu=4,mem=8000M,node=2,billing=4 AllocTRES=cpu=4,node=2,billing=4 Socks/Node=* "
        "NtasksPerN:B:S:C=1:0:*:* CoreSpec=* JOB_GRES=gpu:4   Nodes=n[1-2] CPU_IDs=6-7 Mem=0 "
        "GRES=gpu:2(IDX:0-1) MinCPUsNode=2 MinMemoryNode=0 MinTmpDiskNode=0 Features=(null) "
        "DelayBoot=00:00:00 OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null) "
        "Command=/home/a/j.sh WorkDir=/home/a StdErr=/dev/null StdIn=/dev/null StdOut=/dev/null "
        "TresPerNode=gres/gpu:2 TresPerTask=cpu=2 \n"
    ),
    "26.05.5": (
        "JobId=1 JobName=j.sh SLUID=s409M7ZZ5YB900 UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1 "
        "Nice=0 Account=(null) QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 "
        "Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 DerivedExitCode=0:0 RunTime=00:00:01 "
        "TimeLimit=UNLIMITED TimeMin=N/A SubmitTime=1795295463 EligibleTime=1795295463 AccrueTime=1795295463 "
        "StartTime=1795295479 EndTime=Unknown Deadline=N/A SuspendTime=None SecsPreSuspend=0 "
        "LastSchedEval=1795295479 Scheduler=Main Partition=main AllocNode:Sid=localhost:0 ReqNodeList=(null) "
        "ExcNodeList=(null) NodeList=n[1-2] BatchHost=n1 NumNodes=2 NumCPUs=4 NumTasks=2 CPUs/Task=2 "
        "ReqB:S:C:T=0:0:*:* ReqTRES=cpu=4,mem=8000M,node=2,billing=4 AllocTRES=cpu=4,node=2,billing=4 "
        "Socks/Node=* NtasksPerN:B:S:C=1:0:*:* CoreSpec=* JOB_GRES=gpu:4 Nodes=n[1-2] CPU_IDs=6-7 Mem=0 "
        "GRES=gpu:2(IDX:0-1) MinCPUsNode=2 MinMemoryNode=0 MinTmpDiskNode=0 Features=(null) "
        "DelayBoot=00:00:00 OverSubscribe=NO Exclusive=NO Contiguous=0 Licenses=(null) LicensesAlloc=(null) "
        "Network=(null) Command=/home/a/j.sh SubmitLine=sbatch --parsable --output=/dev/null --gres=gpu:2 "
        "-N2 --ntasks-per-node=1 -c2 /home/a/j.sh WorkDir=/home/a StdErr= StdIn=/dev/null StdOut=/dev/null "
        "TresPerNode=gres/gpu:2 TresPerTask=cpu=2\n"
    ),
}
NODE_26_05 = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=2 CPUEfctv=8 CPUTot=8 CPULoad=5.47 AvailableFeatures=(null) "
    "ActiveFeatures=(null) Gres=gpu:a100:4 GresDrain=N/A GresUsed=gpu:a100:2 NodeAddr=127.0.0.1 "
    "NodeHostName=vm Port=22350 Version=26.05.5 OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=4000 AllocMem=0 "
    "FreeMem=19351 Sockets=8 Boards=1 State=MIXED+PLANNED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A "
    "Partitions=main,pollux  BootTime=1795270340 SlurmdStartTime=1795271829 LastBusyTime=1795271829 "
    "ResumeAfterTime=None SuspendTime=INFINITE CfgTRES=cpu=8,mem=4000M,billing=8 AllocTRES=cpu=2 CurrentWatts=0\n"
)


@pytest.mark.parametrize("version", JOBS)
def test_each_versions_record_says_the_same(version: str) -> None:
    (job,) = parse_jobs(JOBS[version])
    assert (job.name, job.user, job.state, job.batch_host) == ("j.sh", "root", JobState.RUNNING, "n1")
    assert job.gpus_per_node_held == job.cpus_per_node_held == {"n1": 2, "n2": 2}
    assert (job.requested_nodes, job.requested_gpus_per_node, job.requested_cpus) == (2, 2, 4)
    assert (job.cpus_per_task, job.mem_per_node_mb, job.time_limit_s) == (2, None, None)
    assert (job.command, job.submit_time, job.eligible_time) == ("/home/a/j.sh", 1795295463, 1795295463)


@pytest.mark.parametrize("version", JOBS)
@pytest.mark.parametrize("share", [0.05, 0.2, 0.4, 0.6, 0.8])
def test_each_versions_record_cut_off_anywhere_is_garbled(version: str, share: float) -> None:
    text = JOBS[version]
    with pytest.raises(SlurmGarbled):
        parse_jobs(JOBS[version].replace("JobId=1", "JobId=2") + text[: int(share * len(text))])


def test_a_node_of_26_05() -> None:
    (node,) = parse_nodes(NODE_26_05)
    assert (node.gpus, node.gpu_type, node.cpus, node.schedulable) == (4, "a100", 8, True)
    assert node.partitions == {"main", "pollux"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[1-2]-ib", ("n1-ib", "n2-ib")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("n[1,01]", ("n01", "n1")),
        ("gpu-a.example.org,gpu_b,7", ("7", "gpu-a.example.org", "gpu_b")),
        ("[1-2]", ("1", "2")),
        ("n[1-3,5-6]x,n4", ("n1x", "n2x", "n3x", "n4", "n5x", "n6x")),
        ("@all,n$(id)", ("@all", "n$(id)")),
        ("None", ()),
    ],
)
def test_node_lists_with_ranges_and_odd_names(text: str, names: tuple[str, ...]) -> None:
    assert sorted(node_names(text)) == sorted(names)


def test_a_large_cluster_is_no_oddity() -> None:
    assert len(node_names(",".join(f"rack{i}-n[0001-5000]" for i in range(13)))) == 65_000


@pytest.mark.parametrize(
    "text",
    [
        "n[1-2",
        "n1]",
        "n[3-1]",
        "n[1-a]",
        "n[]",
        "n1,,n2",
        ",",
        "n[1-2][3-4]",
        "n[1-3]!n2",  # to the library: without n2
        "n1&n2",  # none at all
        "n1^n2",
        "n[1-9/2]",  # every other one
        "n1 n2",
        "n1\nn2",
        "n[1-10000000000]",  # would fill the memory
        "r[1-60000]n[1-60000]",
        "n[1-" + "9" * 5000 + "]",
    ],
)
def test_what_is_no_node_list_is_garbled(text: str) -> None:
    with pytest.raises(SlurmGarbled, match="expected a node list"):
        node_names(text)


def test_indices() -> None:
    assert [index_count(text) for text in ("", "0", "0-3,7", "0-127")] == [0, 1, 5, 128]
    for text in ("3-0", "a", "0-3,", "0-99999999999"):
        with pytest.raises(SlurmGarbled, match="expected indices"):
            index_count(text)
