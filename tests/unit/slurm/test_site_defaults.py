"""What a site's partitions, QOSes and slurm.conf make of jobs: least sizes, CPUs, memory, whole nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.model import JobSpec, JobState, Node
from polluxd.slurm.demands import Demands
from polluxd.slurm.limits import GroupLimits, JobLimits, Limits, Qos
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.rules import Partition
from polluxd.slurm.site_defaults import (
    alone_on_nodes,
    default_memory,
    kept_off_s,
    shares_memory,
    with_default_cpus,
    with_least_sizes,
)
from tests.build import slurm_job
from tests.unit.slurm.squeue_stand_in import PENDING, queue

KINDS = (*(Node(f"small{n}", 2, "t4") for n in (1, 2)), Node("large", 8, "a100"), Node("cpu", 0))
T4, EVERY = frozenset({"small1", "small2", "cpu"}), frozenset(node.name for node in KINDS)
WAITING = slurm_job(1, JobState.PENDING, user="ada", reason="BeginTime", spec=JobSpec(cpus_per_gpu=2))


def least(job: SlurmJob, minimum: dict[str, int], *partitions: Partition) -> int:
    qos = Qos("big", GroupLimits(), JobLimits(least=minimum))
    known = {one.name: one for one in partitions}
    (shown,) = with_least_sizes([job], KINDS, known, Limits(qos={"big": qos}))
    return shown.spec.min_gpus


@pytest.mark.parametrize(
    ("minimum", "gpus"),
    [
        ({}, 1),
        ({"gres/gpu": 4}, 4),
        ({"cpu": 7}, 4),
        ({"node": 2}, 9),
        ({"gres/gpu:t4": 4}, 1),
        ({"billing": 9}, 1),
    ],
)
def test_what_a_qos_demands_at_least(minimum: dict[str, int], gpus: int) -> None:
    assert least(replace(WAITING, qos="big"), minimum, Partition("main", "UP", EVERY)) == gpus
    assert least(WAITING, minimum, Partition("main", "UP", EVERY, qos="big")) == gpus
    assert least(WAITING, minimum, Partition("main", "UP", EVERY)) == 1


def test_a_type_counts_where_all_gpus_have_it() -> None:
    assert least(replace(WAITING, qos="big"), {"gres/gpu:t4": 4}, Partition("main", "UP", T4)) == 4


def test_jobs_that_ask_for_no_cpus_have_the_sites_default() -> None:
    def cpus(job: SlurmJob, partition: int | None, configuration: str = "") -> int:
        known = {"main": Partition("main", "UP", EVERY, cpus_per_gpu=partition)}
        (shown,) = with_default_cpus([job], known, configuration)
        return shown.spec.cpus_per_gpu

    everywhere = "ClusterName = x\nJobDefaults             = DefCpuPerGPU=6,DefMemPerGPU=900\nX = y\n"
    assert [cpus(WAITING, own) for own in (None, 1, 8)] == [2, 2, 8]
    assert [cpus(WAITING, own, everywhere) for own in (None, 1, 8)] == [6, 2, 8]
    assert cpus(WAITING, 8, "JobDefaults             = (null)\n") == 8
    assert cpus(replace(WAITING, demands=Demands(cpus_asked=True)), 8, everywhere) == 2


def test_fewest_nodes_of_a_partition() -> None:
    wide = Partition("wide", "UP", T4, min_nodes=2)
    assert least(replace(WAITING, partition="wide"), {}, wide) == 3
    narrow = Partition("main", "UP", T4)
    assert least(replace(WAITING, partition="wide,main"), {}, wide, narrow) == 1, (
        "Slurm starts it in the other one"
    )


def test_jobs_that_cannot_have_it_stay_as_they_are() -> None:
    main = Partition("main", "UP", EVERY)
    few = replace(WAITING, qos="big", spec=JobSpec(max_gpus=2))
    assert least(few, {"gres/gpu": 4}, main) == 1, "Slurm refuses, and `explain` says so"
    holds = replace(WAITING, qos="big", state=JobState.RUNNING, gpus_per_node_held={"large": 2})
    assert least(holds, {"gres/gpu": 4}, main) == 1, "the limit came after its start"
    assert least(replace(holds, gpus_per_node_held={"large": 6}), {"gres/gpu": 4}, main) == 4
    plain = replace(WAITING, qos="big", spec=None)
    assert with_least_sizes([plain], KINDS, {"main": main}, Limits()) == (plain,)


NODES = (Node("n1", 4, memory_mb=16001), Node("n2", 4, memory_mb=16001), Node("login", 0, memory_mb=4000))


def pending(memory: str, **words: str) -> SlurmJob:
    asks = {"tres-per-node": "gres:gpu:3", "NumNodes": "1-1", "tres-alloc": f"cpu=1,mem={memory},node=1"}
    return queue(PENDING | {"admin_comment": "pollux:v1"} | asks | words).jobs[0]


@pytest.mark.parametrize(
    ("line", "shared"),
    [
        ("SelectTypeParameters    = CR_CORE_MEMORY", True),
        ("SelectTypeParameters    = CR_CPU_MEMORY,CR_PACK_NODES", True),
        ("SelectTypeParameters    = CR_CORE", False),
        ("SelectType              = select/cons_tres", False),
    ],
)
def test_memory_is_shared_out_where_slurm_says_so(line: str, shared: bool) -> None:
    assert shares_memory(f"ClusterName = c\n{line}\nDefMemPerNode = UNLIMITED\n") is shared


def alone(job: SlurmJob, **partitions: Partition) -> SlurmJob:
    return alone_on_nodes([job], NODES, partitions)[0]


def test_a_job_that_asks_for_no_memory_gets_all_and_so_whole_nodes() -> None:
    job = alone(pending("16001M"))
    assert (job.spec.gpu_counts, job.mem_per_gpu_mb) == ("whole-nodes", 4000)
    running = alone(pending("16001M", State="RUNNING", NodeList="n2"))
    assert running.spec.gpu_counts == "whole-nodes"


def test_a_small_one_counts_with_all_memory() -> None:
    job = alone(pending("16001M", admin_comment="pollux:v1 max-gpus=2"))
    assert job.spec == JobSpec(max_gpus=2)
    assert job.mem_per_gpu_mb == 8000


@pytest.mark.parametrize("memory", ["12000M", "4000M", "16005M"])
def test_other_jobs_share_memory(memory: str) -> None:
    before = pending(memory)
    assert alone(before) == before


def test_a_job_that_asks_for_as_much_by_itself_shares_its_node() -> None:
    before = pending("16001M", admin_comment="pollux:v1 mem-per-gpu=5333")
    assert alone(before) == before


def test_a_partition_can_give_its_nodes_to_one_job_at_a_time() -> None:
    job = pending("3000M", State="RUNNING", NodeList="n2", Partition="whole")
    found = alone(job, whole=Partition("whole", "UP", frozenset({"n2"}), exclusive=True))
    assert (found.spec.gpu_counts, found.gpus_per_node_held) == ("whole-nodes", {"n2": 4})
    assert found.demands == Demands(exclusive=True)
    assert alone(job, whole=Partition("whole", "UP", frozenset({"n2"}))) == job


@pytest.mark.parametrize("memory", ["16001M", "700M"])  # of a partition with DefMemPerNode=700
def test_a_waiting_job_that_asks_for_no_memory_has_the_sites_default(memory: str) -> None:
    (job,) = alone_on_nodes([pending(memory)], NODES, {}, {"main": 2000})
    assert job == replace(pending(memory), mem_per_gpu_mb=2000)
    requeued = pending(memory, RestartCnt="3", Reason="BeginTime")
    assert alone_on_nodes([requeued], NODES, {}, {"main": 2000})[0].mem_per_gpu_mb == 2000
    asks = pending(memory, admin_comment="pollux:v1 mem-asked=yes")
    assert alone_on_nodes([asks], NODES, {}, {"main": 2000}) == (alone(asks),)
    assert alone_on_nodes([asks], NODES, {}, {"main": 0}) == (alone(asks),)


def test_of_a_running_job_slurm_shows_what_it_holds() -> None:
    running = pending("4500M", State="RUNNING", NodeList="n2")
    assert alone_on_nodes([running], NODES, {}, {"main": 2000}) == (running,)


def test_the_default_of_a_partition_comes_before_that_of_slurm_conf() -> None:
    everywhere = "ClusterName = x\nJobDefaults             = DefCpuPerGPU=6,DefMemPerGPU=900\nX = y\n"
    partitions = {
        "main": Partition("main", "UP", frozenset()),
        "big": Partition("big", "UP", frozenset(), memory_per_gpu_mb=3000),
    }
    assert default_memory(partitions, everywhere) == {"main": 900, "big": 3000}
    assert default_memory(partitions, "") == {"main": 0, "big": 3000}


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        (
            "SLURM_VERSION = 22.05.8\nProlog = (null)\nPrologFlags = (null)\nJobContainerType = job_container/none",
            0,
        ),
        ("SLURM_VERSION = 22.05.8\nPrologFlags = Alloc", 121),
        ("SLURM_VERSION = 22.05.8\nProlog = /etc/prolog.sh\nPrologFlags = (null)", 121),
        ("SLURM_VERSION = 23.02.1\nJobContainerType = job_container/tmpfs\nAuthInfo = cred_expire=30", 31),
        ("SLURM_VERSION = 22.05.8\nPrologSlurmctld = /etc/begin.sh\nAuthInfo = (null)", 0),
        ("SLURM_VERSION = 24.11.5\nPrologFlags = Alloc\nProlog[0] = /etc/prolog.sh", 0),
        ("", 0),
    ],
)
def test_how_long_an_attempt_bars_its_nodes(lines: str, seconds: float) -> None:
    assert kept_off_s(lines) == seconds
