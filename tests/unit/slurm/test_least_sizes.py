"""The least sizes that Slurm starts become the jobs' own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.model import JobSpec, JobState, Node
from polluxd.slurm.demands import Demands
from polluxd.slurm.gpu_defaults import with_default_cpus
from polluxd.slurm.least_sizes import with_least_sizes
from polluxd.slurm.limits import GroupLimits, JobLimits, Limits, Qos
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.rules import Partition
from tests.build import slurm_job

NODES = (*(Node(f"small{n}", 2, "t4") for n in (1, 2)), Node("large", 8, "a100"), Node("cpu", 0))
SMALL, ALL = frozenset({"small1", "small2", "cpu"}), frozenset(node.name for node in NODES)
JOB = slurm_job(1, JobState.PENDING, user="ada", reason="BeginTime", spec=JobSpec(cpus_per_gpu=2))


def least(job: SlurmJob, minimum: dict[str, int], *partitions: Partition) -> int:
    qos = Qos("big", GroupLimits(), JobLimits(least=minimum))
    known = {one.name: one for one in partitions}
    (shown,) = with_least_sizes([job], NODES, known, Limits(qos={"big": qos}))
    assert shown.spec is not None
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
    assert least(replace(JOB, qos="big"), minimum, Partition("main", "UP", ALL)) == gpus
    assert least(JOB, minimum, Partition("main", "UP", ALL, qos="big")) == gpus
    assert least(JOB, minimum, Partition("main", "UP", ALL)) == 1


def test_a_type_counts_where_all_gpus_have_it() -> None:
    assert least(replace(JOB, qos="big"), {"gres/gpu:t4": 4}, Partition("main", "UP", SMALL)) == 4


def test_jobs_that_ask_for_no_cpus_have_the_sites_default() -> None:
    def cpus(job: SlurmJob, partition: int | None, configuration: str = "") -> int:
        known = {"main": Partition("main", "UP", ALL, cpus_per_gpu=partition)}
        (shown,) = with_default_cpus([job], known, configuration)
        assert shown.spec is not None
        return shown.spec.cpus_per_gpu

    everywhere = "ClusterName = x\nJobDefaults             = DefCpuPerGPU=6,DefMemPerGPU=900\nX = y\n"
    assert [cpus(JOB, own) for own in (None, 1, 8)] == [2, 2, 8]
    assert [cpus(JOB, own, everywhere) for own in (None, 1, 8)] == [6, 2, 8]
    assert cpus(JOB, 8, "JobDefaults             = (null)\n") == 8
    assert cpus(replace(JOB, demands=Demands(cpus_asked=True)), 8, everywhere) == 2


def test_fewest_nodes_of_a_partition() -> None:
    wide = Partition("wide", "UP", SMALL, min_nodes=2)
    assert least(replace(JOB, partition="wide"), {}, wide) == 3
    narrow = Partition("main", "UP", SMALL)
    assert least(replace(JOB, partition="wide,main"), {}, wide, narrow) == 1, (
        "Slurm starts it in the other one"
    )


def test_jobs_that_cannot_have_it_stay_as_they_are() -> None:
    main = Partition("main", "UP", ALL)
    few = replace(JOB, qos="big", spec=JobSpec(max_gpus=2))
    assert least(few, {"gres/gpu": 4}, main) == 1, "Slurm refuses, and `explain` says so"
    holds = replace(JOB, qos="big", state=JobState.RUNNING, gpus_per_node_held={"large": 2})
    assert least(holds, {"gres/gpu": 4}, main) == 1, "the limit came after its start"
    assert least(replace(holds, gpus_per_node_held={"large": 6}), {"gres/gpu": 4}, main) == 4
    plain = replace(JOB, qos="big", spec=None)
    assert with_least_sizes([plain], NODES, {"main": main}, Limits()) == (plain,)
