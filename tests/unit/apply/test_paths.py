"""Which way a job takes, and what its next move is expected to cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pollux.goodput import BatchLimits
from polluxd.apply.actions import NOT_BOOTED, PAUSED
from polluxd.apply.paths import MoveRules, choose, failed_paths, intents, keeps, likely
from polluxd.model import NO_PLACEMENT, JobSpec, JobState, Move, Placement, Report, Step
from polluxd.slurm.protocol import SlurmJob
from tests import build
from tests.build import slurm_job

ALL = MoveRules(frozenset({"resize", "requeue"}), can_shrink=True)


def on(*names: str, gpus: int = 4) -> Placement:
    return Placement(names, gpus)


def job(*own: str, lent: tuple[tuple[str, ...], ...] = (), gpus: int = 4, host: str = "") -> SlurmJob:
    base = slurm_job()
    companions = tuple(
        replace(base, job_id=100 + i, gpus_per_node_held=dict.fromkeys(names, gpus))
        for i, names in enumerate(lent)
    )
    names = [*own, *(name for group in lent for name in group)]
    return replace(
        base,
        spec=JobSpec(),
        gpus_per_node_held=dict.fromkeys(names, gpus),
        batch_host=host or own[0],
        companions=companions,
    )


def says(able: str, attempt: int = 0) -> Report:
    return Report(attempt=attempt, at=0.0, limits=BatchLimits(32, 1024, 8, 128), resize=able)


def test_companions_leave_in_place_even_where_slurm_cannot_shrink_a_job() -> None:
    lent = job("n1", "n2", lent=(("n3",),))
    fixed = MoveRules(ALL.paths, can_shrink=False)
    assert choose(on("n1", "n2", "n3"), on("n1", "n2"), lent, says("in-place"), fixed)[0] == "resize"
    assert choose(on("n1", "n2", "n3"), on("n1"), lent, says("in-place"), fixed)[0] == "requeue"


@pytest.mark.parametrize(
    ("able", "target", "path"),
    [
        ("in-place", on("n1", "n2", "n3"), "resize"),
        ("in-place", on("n1"), "resize"),
        ("requeue", on("n1"), "requeue"),
        ("in-place", on("n2"), "requeue"),  # its batch script would go
        ("in-place", on("n1", "n3"), "requeue"),  # one out, another in
        ("in-place", on("n1", "n2", gpus=2), "requeue"),
        ("in-place", on("n2", "n1"), "requeue"),  # the same nodes: neither a grow nor a shrink
        ("in-place", NO_PLACEMENT, "park"),
    ],
)
def test_the_fastest_path_that_job_and_target_allow(able: str, target: Placement, path: str) -> None:
    assert choose(on("n1", "n2"), target, job("n1", "n2"), says(able), ALL)[0] == path


def test_the_target_begins_with_the_batch_host_and_keeps_those_that_stay_together() -> None:
    shown = job("n5", "n2", host="n5")
    path, target = choose(on("n2", "n5"), on("n1", "n2", "n5"), shown, says("in-place"), ALL)
    assert (path, target.nodes) == ("resize", ("n5", "n2", "n1"))
    path, target = choose(on("n2", "n5"), on("n1", "n2"), shown, says("in-place"), ALL)
    assert (path, target.nodes) == ("requeue", ("n1", "n2"))


def test_without_slurmdbd_only_companions_are_given_back() -> None:
    means = replace(ALL, can_shrink=False)
    both, source = job("n1", "n2", lent=(("n3", "n4"), ("n5",))), on("n1", "n2", "n3", "n4", "n5")
    for target, path in (
        (on("n1", "n2", "n5"), "resize"),
        (on("n1", "n2", "n3", "n4"), "resize"),
        (on("n1", "n3", "n4", "n5"), "requeue"),
    ):
        assert choose(source, target, both, says("in-place"), means)[0] == path
    assert choose(source, on("n1", "n3", "n4", "n5"), both, says("in-place"), ALL)[0] == "resize"


def test_a_companion_is_kept_or_given_up_whole() -> None:
    lent, source = job("n1", lent=(("n2", "n3"),)), on("n1", "n2", "n3")
    assert choose(source, on("n1", "n2"), lent, says("in-place"), ALL)[0] == "requeue"


def test_a_shrink_leaves_the_batch_host_first_and_gives_the_newest_companion_up_first() -> None:
    held = job("n1", "n5", lent=(("n4",), ("n2", "n3")), host="n5")
    assert keeps(held, says("in-place"), ALL) == ("n5", "n1", "n4", "n2", "n3")
    for count in (1, 2, 3):
        left = keeps(held, says("in-place"), ALL)[:count]
        assert choose(on(*held.gpus_per_node_held), on(*left), held, says("in-place"), ALL)[0] == "resize"
    assert keeps(held, says("requeue"), ALL) == keeps(held, None, ALL) == ()
    assert keeps(job("n1"), says("in-place"), ALL) == ()


def test_a_path_that_failed_in_this_attempt_gives_way_to_the_queue() -> None:
    source, shown = on("n1", "n2"), job("n1", "n2")
    failed = replace(ALL, failed={7: frozenset({("resize", False)})})
    assert choose(source, on("n1"), shown, says("in-place"), failed)[0] == "requeue"
    assert choose(source, on("n1", "n2", "n3"), shown, says("in-place"), failed)[0] == "resize"
    grown = replace(ALL, failed={7: frozenset({("resize", True)})})
    assert choose(source, on("n1"), shown, says("in-place"), grown)[0] == "resize"
    assert choose(source, on("n1", "n2", "n3"), shown, says("in-place"), grown)[0] == "requeue"
    other = replace(ALL, failed={8: frozenset({("resize", False)})})
    assert choose(source, on("n1"), shown, says("in-place"), other)[0] == "resize"
    unwanted = replace(ALL, paths=frozenset({"requeue"}))
    assert choose(source, on("n1"), shown, says("in-place"), unwanted)[0] == "requeue"


def test_nothing_is_believed_of_another_attempt_or_of_what_slurm_shows_otherwise() -> None:
    source, shown = on("n1", "n2"), job("n1", "n2")
    assert choose(source, on("n1"), shown, says("in-place", attempt=1), ALL)[0] == "requeue"
    assert choose(source, on("n1"), shown, None, ALL)[0] == "requeue"
    assert choose(on("n1", "n3"), on("n1"), shown, says("in-place"), ALL)[0] == "requeue"
    assert choose(source, on("n1"), replace(shown, batch_host=""), says("in-place"), ALL)[0] == "requeue"
    asleep = replace(shown, state=JobState.SUSPENDED)
    assert choose(source, on("n1"), asleep, says("in-place"), ALL)[0] == "requeue"


def test_what_speaks_against_a_path_and_what_does_not() -> None:
    move = Move(1, 7, 0, "resize", on("n1"), on("n1", "n2"), "", Step.FAILED, {Step.PLANNED: 1.0})
    assert failed_paths([move]) == {7: {("resize", True)}}
    back = replace(move, source=move.target, target=move.source)
    assert failed_paths([move, back]) == {7: {("resize", True), ("resize", False)}}
    assert failed_paths([replace(move, cancelled_by="ann")]) == {}
    assert failed_paths([replace(move, detail=PAUSED)]) == {}
    assert failed_paths([replace(move, detail=f"its companion is gone; {NOT_BOOTED}n2")]) == {}
    for forged in (
        PAUSED,
        f"{NOT_BOOTED}n2",
    ):  # it would be asked in place again and again, and never requeued
        assert failed_paths([replace(move, detail=f"the job's agent could not: {forged}")])
    assert failed_paths([replace(move, step=Step.TRAINING)]) == {}


def test_the_next_move_is_expected_in_place_of_jobs_on_whole_nodes_alone() -> None:
    shown = job("n1", "n2")
    assert likely(shown, says("in-place"), ALL, whole_nodes=True) == "resize"
    assert likely(shown, says("in-place"), ALL, whole_nodes=False) == "requeue"
    assert likely(shown, says("in-place"), MoveRules(), whole_nodes=True) == "requeue"
    failed = replace(ALL, failed={7: frozenset({("resize", True)})})
    assert likely(shown, says("in-place"), failed, whole_nodes=True) == "requeue"


def test_intents_give_back_before_they_take() -> None:
    one, two = Placement(("n1",), 2), on("n1", "n2")
    jobs = {1: NO_PLACEMENT, 2: two, 3: one, 4: one, 5: one}
    wanted = {1: one, 2: one, 3: NO_PLACEMENT, 4: two, 5: one}
    ours = [build.job(number, placement=at, pinned=number == 4) for number, at in jobs.items()]
    shown = [slurm_job(number, at=at) for number, at in jobs.items()]
    found = intents(build.plan(ours, wanted), ours, shown, {}, ALL)
    assert [(i.job_id, i.path) for i in found] == [(2, "requeue"), (3, "park"), (1, "start")]
