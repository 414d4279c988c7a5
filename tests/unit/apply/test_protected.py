"""How much of a job's GPUs its own user protects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from polluxd.apply.paths import Intent, RestartBudget
from polluxd.apply.protected import Protection, stay
from polluxd.apply.startable import Eligibility
from polluxd.config.settings import MoveSettings
from polluxd.model import JobSpec, JobState, Node, Placement, Report, Step
from polluxd.slurm.protocol import ClusterState, SlurmJob
from polluxd.slurm.rules import Partition, Rules
from polluxd.store import CycleRecords
from tests.build import move
from tests.unit.apply.four_nodes import MAIN, NODES, NOW, job
from tests.unit.apply.resized_job import says

STEPPED = says(first_step_at=1.0)


def free(_user: str) -> str:
    return ""


NOWHERE = {1: Eligibility(frozenset(), "a rule")}


def running(job_id: int, *nodes: str, uid: int = 1, **more: object) -> SlurmJob:
    return job(job_id, gpus_per_node_held=dict.fromkeys(nodes, 4), nodes=nodes, uid=uid, **more)


def waiting(job_id: int, uid: int = 2, **more: object) -> SlurmJob:
    return job(job_id, JobState.PENDING, uid=uid, **more)


def observed(
    *jobs: SlurmJob,
    report: Report | None = STEPPED,
    eligibility: dict[int, Eligibility] | None = None,
    spent: Callable[[str], str] = free,
    undrained: Callable[[int], int] = lambda _job_id: 0,
    nodes: tuple[Node, ...] = NODES,
    partitions: dict[str, Partition] = MAIN,
) -> Protection:
    found = Protection(MoveSettings())
    reports = {} if report is None else {one.job_id: report for one in jobs}
    state = ClusterState(NOW, nodes, jobs, {}, Rules(partitions))
    found.observe(state, CycleRecords(reports=reports), eligibility or {}, spent, undrained)
    return found


def beyond(*jobs: SlurmJob, **more: Any) -> dict[int, int]:
    return observed(*jobs, **more).beyond


ALL = running(1, "n1", "n2", "n3", "n4")
SILENT = replace(STEPPED, attempt=1)


@pytest.mark.parametrize(
    ("grown", "more"),
    [
        (replace(ALL, held_by_user=True), {}),
        (replace(ALL, spec=JobSpec(preemptible=False)), {}),
        (replace(ALL, start_time=NOW, time_limit_s=100.0), {}),
        (ALL, {"report": None}),
        (ALL, {"report": SILENT}),
        (ALL, {"report": says()}),
        (ALL, {"report": replace(STEPPED, immovable="the disk is full")}),
        (ALL, {"report": replace(STEPPED, at=NOW, next_save_s=1800.0)}),
        (ALL, {"undrained": lambda _job_id: 1}),
        (ALL, {"undrained": lambda _job_id: 1, "report": replace(STEPPED, checkpointed=True)}),
        (ALL, {"spent": lambda user: f"the restarts of {user} are used up"}),
        (ALL, {"eligibility": NOWHERE}),
    ],
)
def test_what_a_user_can_cause_protects_the_equal_share_alone(
    grown: SlurmJob, more: dict[str, object]
) -> None:
    assert beyond(grown, waiting(2), **more) == {1: 8}
    assert beyond(grown, waiting(2, uid=1), **more) == {}, "nobody else is there"


@pytest.mark.parametrize(
    "other",
    [
        waiting(2, held_by_user=True),
        waiting(2, partition="elsewhere"),
        running(2, "n4", uid=2, spec=JobSpec(max_gpus=4)),
        running(2, "n3", "n4", uid=2),
    ],
)
def test_nothing_is_given_back_where_nobody_lacks_it(other: SlurmJob) -> None:
    held = replace(ALL, held_by_user=True)
    elsewhere = replace(MAIN["main"], name="elsewhere", nodes=frozenset({"n9"}))
    assert beyond(held, other, partitions={**MAIN, "elsewhere": elsewhere}) == {}


@pytest.mark.parametrize("nodes", [("n1",), ("n1", "n2", "n3")])
def test_a_drain_until_a_trainers_own_checkpoint_protects_the_equal_share_alone(
    nodes: tuple[str, ...],
) -> None:
    """Of what it holds and what is set aside for it, however soon it says to save."""
    saver = replace(STEPPED, at=NOW, next_save_s=5.0)
    drain = move("requeue", Placement(("n1", "n2"), 4), Placement(nodes, 4), Step.DRAINING, job_id=1)
    found = Protection(MoveSettings())
    state = ClusterState(NOW, NODES, (running(1, "n1", "n2"), waiting(2)), {}, Rules(MAIN))
    found.observe(state, CycleRecords(reports={1: saver}, moves=(drain,)), {}, free)
    assert bool(found.beyond) is (len(nodes) > 2), "8 of 16 GPUs are its share"


def test_jobs_of_one_user_share_what_protection_leaves() -> None:
    small, large = running(1, "n1", held_by_user=True), running(3, "n2", "n3", held_by_user=True)
    assert beyond(small, large, waiting(2)) == {3: 4}


def test_a_trainer_that_may_work_on_no_fewer_gpus_keeps_them_in_its_users_share() -> None:
    young = replace(STEPPED, first_step_at=NOW)

    def least(*jobs: SlurmJob) -> dict[int, int]:
        return observed(*jobs, waiting(9), report=young).least

    own, grown = (running(1, *nodes, spec=JobSpec(own_size=8)) for nodes in (("n1",), ("n1", "n2", "n3")))
    assert least(own) == {1: 4}, "what it has works, whatever was asked"
    assert least(grown) == {1: 8}, "all that the share has room for"
    assert least(replace(grown, spec=JobSpec(own_size=12))) == {}, "what is owed is tried"
    assert least(own, running(2, "n2", "n3", held_by_user=True)) == {}, "a job on hold has the share first"


def test_a_job_that_could_start_nowhere_lacks_nothing() -> None:
    held = replace(ALL, held_by_user=True)
    assert beyond(held, waiting(2), eligibility={2: Eligibility(frozenset(), "a rule")}) == {}


def test_the_share_is_one_of_the_type_of_nodes_where_others_may_start() -> None:
    held = running(1, "n1", "n2", held_by_user=True)
    some = {2: Eligibility(frozenset({"n1"}), "--nodelist")}
    typed = *(replace(node, gpu_type="a100") for node in NODES[:2]), *NODES[2:]
    assert beyond(held, waiting(2)) == {}, "8 of 16"
    assert beyond(held, waiting(2), eligibility=some) == {}, "whoever names a node asks for all like it"
    assert beyond(held, waiting(2), eligibility=some, nodes=typed) == {1: 4}
    many = [waiting(n, uid=n) for n in range(2, 20)]
    assert beyond(held, *many, eligibility=some, nodes=typed) == {1: 1}, "a GPU each"


def test_an_attempt_that_was_seen_to_train_stays_so_whatever_is_reported_later() -> None:
    found = Protection(MoveSettings())
    state = ClusterState(NOW, NODES, (ALL, waiting(2)), {}, Rules(MAIN))
    found.observe(state, CycleRecords(reports={1: STEPPED}), {}, free)
    assert found.stepped == {1: 0}
    found.observe(state, CycleRecords(reports={1: SILENT}), {}, free)
    assert (found.stepped, found.beyond) == ({1: 0}, {})


def test_an_attempts_start_took_as_long_as_was_first_heard() -> None:
    """What it says later would make its moves look too dear to take its GPUs."""
    found = Protection(MoveSettings())
    for at, claimed in ((NOW, NOW - 40.0), (NOW + 3600.0, NOW + 3600.0)):
        state = ClusterState(at, NODES, (replace(ALL, start_time=NOW - 60.0),), {}, Rules(MAIN))
        found.observe(
            state,
            CycleRecords(reports={1: replace(STEPPED, first_step_at=claimed, next_save_s=0.0)}),
            {},
            free,
        )
        assert found.start_s == {1: 20.0}


def test_no_number_of_restarts_keeps_what_is_owed() -> None:
    budget = RestartBudget(MoveSettings(user_restarts_per_hour=1), {"alice": 1})
    back = Intent(1, 0, "requeue", Placement(("n1", "n2"), 4), Placement(("n1",), 4), "", "alice")
    assert budget.charge(back)
    assert not budget.charge(replace(back, owed=True))


def test_the_report_of_a_step_is_enough_to_move_a_job() -> None:
    assert stay(ALL, replace(STEPPED, attempt=ALL.restart_count), "", NOW, {}, {}) is None
    assert stay(ALL, SILENT, "", NOW, {}, {}) is not None
