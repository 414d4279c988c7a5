"""The records of pyslurm's worker mean the same as scontrol's.

The reader refuses a form that it does not know.
"""

from __future__ import annotations

from typing import Any

import pytest

from polluxd.errors import SlurmGarbled
from polluxd.model import JobSpec, JobState
from polluxd.slurm.protocol import Companion, SlurmJob
from polluxd.slurm.pyslurm_records import read_cluster, read_jobs
from tests.unit.slurm.pyslurm_records import JOB, NODE


def one(**other: Any) -> SlurmJob:
    (job,) = read_jobs([JOB | other])
    return job


def test_a_deadline_and_a_hold_of_a_running_job() -> None:
    assert (one().deadline, one().held_by_user) == (None, False)
    held = one(deadline=1795460526, on_hold=True)
    assert (held.deadline, held.held_by_user) == (1795460526, True)


def test_a_running_job() -> None:
    job = one()
    assert (job.job_id, job.name, job.user, job.account, job.qos) == (7, "train", "alice", "vision", "")
    assert (job.state, job.reason, job.restart_count, job.batch_host) == (JobState.RUNNING, "None", 1, "n3")
    assert job.nodes == ("n3", "n4")
    assert job.gpus_per_node_held == {"n3": 4, "n4": 4}
    assert job.cpus_per_node_held == {"n3": 4, "n4": 1}  # two threads a core, as scontrol counts them
    assert job.requested_gpus_per_node == 4
    assert (job.submit_time, job.end_time, job.time_limit_s) == (1795271000, None, 3600)
    assert job.spec == JobSpec(min_gpus=1, max_gpus=8)


def test_a_waiting_job() -> None:
    waiting = {"state": "PENDING", "nodes": None, "held": {}, "limit": None, "reason": "a b  c"}
    job = one(**waiting)
    assert (job.nodes, job.start_time, job.time_limit_s, job.reason) == ((), None, None, "a_b_c")
    assert (job.held_by_user, job.dependent) == (False, False)
    assert one(**waiting, on_hold=True).held_by_user
    assert one(**waiting, dependent=True).dependent
    assert not one(state="COMPLETED", on_hold=True).held_by_user


def test_what_slurm_plans_and_counts() -> None:
    plan = {"state": "PENDING", "nodes": None, "held": {}, "planned_nodes": "n[2-3]"}
    job = one(**plan, licenses=["matlab:2", "ansys"])
    assert (job.priority, job.planned_nodes, job.licenses) == (
        4294901757,
        ("n2", "n3"),
        {"matlab": 2, "ansys": 1},
    )
    assert job.tres == {"cpu": 6, "node": 2, "billing": 6, "gres/gpu": 8}
    assert one(planned_nodes="n[2-3]").planned_nodes == ()  # it runs
    assert one(tres={}).tres == {"gres/gpu": 8, "cpu": 5, "node": 2}
    assert one(gpus_otherwise=True).requested_gpus_per_node is None
    assert one(gres_per_node=[]).requested_gpus_per_node == 0


def test_tasks_of_an_array() -> None:
    waiting = {"state": "PENDING", "nodes": None, "held": {}, "array": 7, "array_task": None}
    together = one(**waiting, array_waiting="2,5-7,10-20:5")
    assert (together.array, together.tasks) == ((7, 2), (2, 5, 6, 7, 10, 15, 20))
    assert (one(**waiting, array_waiting="3").array, one(**waiting, array_waiting="3").tasks) == ((7, 3), ())
    assert one(array=7, array_task=4).array == (7, 4)
    assert one(array=7).array == (7, 0)  # pyslurm takes task 0 for none
    assert one().array is None
    for text in ("1-", "x", "1,,2", "64,...", "0-4000001", "0-4000000,4000002", "9" * 5000):
        with pytest.raises(SlurmGarbled, match="task"):
            one(**waiting, array_waiting=text)


def test_a_completing_job_holds_its_gpus_until_its_nodes_are_rid_of_it() -> None:
    leaving = JOB | {"state": "COMPLETING", "nodes": "n3", "held": {}, "admin_comment": None}
    assert one(**leaving).gpus_per_node_held == {"n3": 4}
    # Asked for by --gpus: how many are where is not known any more; the node's own are the bound.
    jobs, (node,) = read_cluster(
        {"jobs": [leaving | {"gres_per_node": [], "gpus_otherwise": True}], "nodes": [NODE]}
    )
    assert (jobs[0].gpus_per_node_held, node.foreign_gpus, node.capacity) == ({"n3": 4}, 4, 0)


def test_memory_goes_with_gpus_and_counts_on_nodes() -> None:
    assert one(memory_mb=8001).mem_per_gpu_mb == 1000  # 8 GPUs on 2 nodes
    waiting = {"state": "PENDING", "nodes": None, "held": {}, "tres": {"node": 3}}
    assert one(**waiting, memory_mb=24_000).mem_per_gpu_mb == 2000
    assert one(gpus_otherwise=True, memory_mb=8000).mem_per_gpu_mb == 1000
    assert one(gres_per_node=[], memory_mb=8000).mem_per_gpu_mb == one().mem_per_gpu_mb == 0
    held = {"n3": {"cpu_ids": "0", "threads": 1, "gres": [], "memory_mb": 700}}
    plain = JOB | {"nodes": "n3", "held": held, "admin_comment": None}
    for job, foreign in ((plain, 700), (plain | {"state": "COMPLETED"}, 0), (JOB | {"held": held}, 0)):
        _, (node,) = read_cluster({"jobs": [job], "nodes": [NODE | {"memory_mb": 4000}]})
        assert (node.memory_mb, node.foreign_memory_mb) == (4000, foreign)


def test_a_job_that_has_ended_holds_nothing() -> None:
    """Slurm 26.05 still shows where it was."""
    ended = JOB | {"state": "COMPLETED", "nodes": "n3", "admin_comment": None}
    jobs, (node,) = read_cluster({"jobs": [ended], "nodes": [NODE]})
    assert (jobs[0].gpus_per_node_held, jobs[0].cpus_per_node_held) == ({}, {})
    assert (node.foreign_gpus, node.foreign_cpus) == (0, 0)


@pytest.mark.parametrize("comment", ["pollux:v9 min-gpus=1", "pollux:v1 min-gpus=none", "hello", "", None])
def test_a_comment_that_makes_no_sense_is_no_opt_in(comment: str | None) -> None:
    assert (one(admin_comment=comment).spec, one(admin_comment=comment).submit_time) == (None, 1795271832)


def test_a_companion_and_states_of_other_versions() -> None:
    companion = one(admin_comment="pollux:v1 companion-of=3 attempt=0 move=9").companion
    assert companion == Companion(parent=3, attempt=0, move=9)
    assert one(state="A_STATE_OF_TOMORROW").state is JobState.COMPLETING
    assert one(state="TIMEOUT").state is JobState.FAILED
    assert one(state="TIMEOUT").end_time == 1826807833
    for state, usable in (
        ("IDLE", True),
        ("MIXED+DRAIN", False),
        ("IDLE+NOT_RESPONDING", False),
        ("?", False),
    ):
        _, (node,) = read_cluster({"jobs": [], "nodes": [NODE | {"state": state}]})
        assert node.schedulable is usable


def test_a_node_without_gpus_or_with_two_types() -> None:
    nodes = [NODE | {"name": "a", "gres": []}, NODE | {"name": "b", "gres": ["gpu:a100:4", "gpu:t4:2"]}]
    _, (bare, mixed) = read_cluster({"jobs": [JOB | {"admin_comment": None}], "nodes": nodes})
    assert (bare.gpus, mixed.gpus, mixed.gpu_type, mixed.foreign_gpus) == (0, 6, "a100+t4", 0)


@pytest.mark.parametrize(
    "other",
    [
        {"nodes": "n[3-"},
        {"required_nodes": "r[1-60000]n[1-60000]"},
        {"held": {"n3": {"cpu_ids": "1-", "threads": 1, "gres": []}}},
        {"held": {"n3": {"cpu_ids": "1", "threads": 1, "gres": ["gpu:-1"]}}},
        {"gres_per_node": ["gpu:a:b:c"]},
        {"on_hold": 0},
        {"limit": "60"},
        {"id": 7.5},
        {"a_new_key": 1},
    ],
)
def test_another_form_is_garbled(other: dict[str, Any]) -> None:
    with pytest.raises(SlurmGarbled):
        one(**other)
    missing = dict(list(JOB.items())[:-1])
    for answer in (None, {}, "jobs", [None], [missing], [[JOB]]):
        with pytest.raises(SlurmGarbled, match="pyslurm's worker: "):
            read_jobs(answer)
    for answer in (None, [], {"jobs": []}, {"jobs": [], "nodes": [NODE | {"cpus": "8"}]}):
        with pytest.raises(SlurmGarbled, match="pyslurm's worker: "):
            read_cluster(answer)
