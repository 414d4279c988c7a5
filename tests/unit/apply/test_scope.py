"""Pollux jobs outside of section [scope] are plain ones to polluxd."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.apply.scope import LostMarks, Scope
from polluxd.config.settings import ScopeSettings
from polluxd.model import JobState, Node, Placement
from polluxd.slurm.fake import FakeSlurm
from polluxd.slurm.protocol import ClusterState, Companion
from tests.build import slurm_job

NOW = 1_800_000_000.0


class Calls:
    """Takes the renewals."""

    def __init__(self) -> None:
        self.renewed: list[tuple[list[int], float]] = []

    def renew(self, job_ids: list[int], until: float) -> None:
        self.renewed.append((list(job_ids), until))


def scope(**named: tuple[str, ...]) -> tuple[Scope, Calls]:
    calls = Calls()
    return Scope(ScopeSettings(**named), calls, lambda: 1), calls


@pytest.mark.parametrize(
    ("named", "inside"),
    [
        ({}, True),
        ({"partitions": ("main", "test")}, True),
        ({"partitions": ("test",)}, False),
        ({"accounts": ("lab",)}, True),
        ({"accounts": ("other",)}, False),
        ({"users": ("ann",), "partitions": ("test",)}, True),
        ({"users": ("bea",)}, False),
    ],
)
def test_any_list_that_names_the_job_covers_it(named: dict[str, tuple[str, ...]], inside: bool) -> None:
    assert (scope(**named)[0].why_outside(slurm_job()) == "") is inside


def test_the_reason_names_the_settings() -> None:
    one = scope(partitions=("test",), users=("bea", "cyd"))[0]
    said = one.why_outside(slurm_job(partition="main,test", account="lab", user="ann"))
    assert said == (
        "it is outside of the scope in polluxd.toml: scope.partitions does not name main and scope.users does not name "
        "ann. Slurm runs it as a plain job"
    )


def test_a_job_of_several_partitions_is_covered_where_all_of_them_are() -> None:
    one = scope(partitions=("main",))[0]
    assert one.why_outside(slurm_job(partition="main,test"))
    assert not scope(partitions=("main", "test"))[0].why_outside(slurm_job(partition="main,test"))


def test_a_job_with_a_deadline_is_left_to_slurm_while_it_waits() -> None:
    one, calls = scope()
    waits = slurm_job(1, JobState.PENDING, deadline=NOW + 900, eligible_time=NOW + 300)
    state, outside = one.divide(ClusterState(NOW, (), (waits,)))
    assert [job.spec for job in state.jobs] == [None], "its lease is not renewed"
    assert "deadline" in outside[0].left_alone
    one.release(outside, NOW)
    assert calls.renewed == [([1], NOW)]
    assert not one.why_outside(slurm_job(2, deadline=NOW + 900)), "one that runs is not moved"
    companion = replace(waits, companion=Companion(7, 0, 3, "00"))
    assert not one.why_outside(companion), "polluxd ends one that nobody asked for"


def test_a_mark_that_is_lost_is_the_reason_that_the_store_gets() -> None:
    marks, marked = LostMarks(), slurm_job(1)
    marks.observe([marked])
    marks.observe([replace(marked, spec=None, admin_comment="")])
    (lost,) = marks.lost
    assert (lost.spec, lost.left_alone[:34]) == (marked.spec, "its AdminComment has lost Pollux' ")


def test_jobs_outside_are_plain_ones_and_hold_their_nodes_as_such() -> None:
    node = Node("n1", 4, foreign_gpus=1, foreign_cpus=2, foreign_memory_mb=100)
    held = {"cpus_per_node_held": {"n1": 6}, "mem_per_gpu_mb": 50}
    mine = slurm_job(1, at=Placement(("n1",), 1), account="lab")
    other = slurm_job(2, at=Placement(("n1",), 2), account="other", **held)
    state, outside = scope(accounts=("lab",))[0].divide(ClusterState(NOW, (node,), (mine, other)))
    assert [job.spec is None for job in state.jobs] == [False, True]
    (after,) = state.nodes
    assert (after.foreign_gpus, after.foreign_cpus, after.foreign_memory_mb) == (3, 8, 200)
    (known,) = outside
    assert replace(known, left_alone="") == other, "the store still knows it"
    assert known.left_alone
    everything = ClusterState(NOW, (node,), (mine, other))
    assert scope()[0].divide(everything)[0] is everything


def test_a_lease_that_the_hook_gave_outside_ends_once() -> None:
    one, calls = scope(users=("bea",))
    waits = slurm_job(1, JobState.PENDING, eligible_time=NOW + 300)
    later = slurm_job(2, JobState.PENDING, eligible_time=NOW + 900, begin_time=NOW + 600)
    held = slurm_job(3, JobState.PENDING, eligible_time=NOW + 300, held_by_user=True)
    runs = slurm_job(4)
    one.release([waits, later, held, runs], NOW)
    one.release([waits, later, held, runs], NOW)
    assert calls.renewed == [([1], NOW)]
    one.release([], NOW)
    one.release([waits], NOW)
    assert len(calls.renewed) == 2, "it waits again"


def test_slurm_starts_a_job_whose_lease_has_ended() -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8)])
    job = slurm.submit(slurm_job().spec, lease=1e6)
    Scope(ScopeSettings(users=("bea",)), slurm, lambda: 1).release([slurm.truth(job)], slurm.clock())
    slurm.advance(5.0)
    assert slurm.truth(job).state is JobState.RUNNING
