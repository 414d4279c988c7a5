"""Moves within the allocation, over a Slurm that may refuse or be mute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polluxd.apply.paths import Intent
from polluxd.apply.placed import ends_at
from polluxd.errors import SlurmRefused
from polluxd.model import JobSpec, JobState, Node, Placement, Step
from polluxd.slurm.protocol import Companion

from .resized_job import BOTH, NODES, ONE, says
from .site import Site


class Resized(Site):
    """One job that a resize brings from `source` to `target`."""

    def __init__(self, source: Placement = ONE, target: Placement = BOTH, **limits: Any) -> None:
        super().__init__(NODES, **{"cooldown_s": 60.0, **limits})
        self.job = self.running(source, JobSpec(cpus_per_gpu=3, mem_per_gpu_mb=100), time_limit_s=3600.0)
        self.reports = {self.job: says()}
        self.power: str | None = None
        """Of n2, in place of what Slurm shows."""
        observe = self.slurm.observe
        self.slurm.observe = lambda: replace(seen := observe(), nodes=tuple(map(self.shown, seen.nodes)))
        assert self.begin((self.job, "resize", source, target)) == [self.job]
        self.turn(4.0)

    def shown(self, node: Node) -> Node:
        return replace(node, power=self.power) if self.power and node.name == "n2" else node

    def report(self, **said: Any) -> None:
        self.reports = {self.job: says(**said)}

    def joining(self) -> int:
        """A companion that has started for the move, whose ranks have not joined."""
        lent = self.lend(self.job, 1)
        for _ in range(3):
            self.turn(4.0)
        assert self.steps == [Step.STARTED]
        return lent

    def joined(self) -> int:
        lent = self.joining()
        self.report(resized=1)
        self.turn(4.0)
        assert self.steps == [Step.TRAINING]
        return lent


def test_a_companion_gets_its_parents_share_and_no_more_time_than_it_has_left() -> None:
    site = Resized(restarts_per_hour=1)
    site.slurm.advance(600.0 - 4.0)
    lent = site.joined()
    shown = site.slurm.truth(lent)
    assert shown.gpus_per_node_held == {"n2": 4}
    assert (shown.cpus_per_node_held, site.slurm.raw(lent).mem_per_node_mb) == ({"n2": 12}, 400)
    assert shown.time_limit_s == 3000.0
    seen = site.acting.gather(site.slurm.observe())
    assert [j.gpus_per_node_held for j in seen.state.jobs] == [{"n1": 4, "n2": 4}]
    assert site.turn() == 0
    assert site.slurm.truth(lent).state is JobState.RUNNING
    assert site.store.records(restarts_since=0.0).restarts == {}, "nobody was restarted"
    assert site.acting.past.cooldown(site.job) == 0.0, "it may be resized again at once"


def test_a_companion_lasts_as_long_as_its_parent_whatever_its_own_limit_was() -> None:
    """A partition's DefaultTime is no limit of the parent, and an administrator may give the parent more time."""
    site = Resized()
    site.default_time_s = 180.0
    site.slurm.advance(600.0 - 4.0)
    lent = site.joined()
    assert site.slurm.truth(lent).time_limit_s == 3000.0
    site.slurm.limit_time(site.job, 7200.0)
    site.turn()
    ends = [ends_at(site.slurm.truth(number)) for number in (site.job, lent)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert 0.0 <= ends[1] - ends[0] < 60.0


def test_a_plan_made_before_a_move_ended_does_not_move_its_job_again() -> None:
    site = Resized()
    site.joined()
    assert not site.fresh(Intent(site.job, 0, "resize", ONE, BOTH, "")), (
        "this plan still saw the job on one node"
    )
    site.turn()
    assert site.fresh(Intent(site.job, 0, "resize", BOTH, ONE, ""))


def test_a_move_waits_while_a_node_of_it_boots_and_its_limits_begin_after_that() -> None:
    site = Resized(training_timeout_s=100.0)
    site.joining()
    site.power = "booting"
    for seconds in (100.0, 100.0, 100.0, 1.0):
        site.turn(seconds)
    site.power = None
    for _ in range(2):
        site.turn(60.0)
        assert site.steps == [Step.STARTED]
    site.turn()
    assert site.steps == [Step.FAILED]


def test_a_move_whose_node_did_not_boot_says_so() -> None:
    site = Resized()
    lent = site.joining()
    site.power = "booting"
    site.turn(4.0)
    site.slurm.cancel([lent])
    site.power = "off"
    site.turn()
    assert site.steps == [Step.FAILED]
    assert site.rows.moves[0].detail.endswith("; did not boot: n2")


def test_a_move_that_fails_ends_its_companion_at_once_and_not_the_job() -> None:
    for refused_by_slurm in (False, True):
        site = Resized()
        lent = site.lend(site.job, 1)
        if refused_by_slurm:
            site.slurm.fail("configure", SlurmRefused("Requested node configuration is not available"))
        else:
            site.report(refused=1)
        site.turn(4.0)
        assert site.steps == [Step.FAILED]
        assert site.slurm.truth(lent).raw_state == "CANCELLED"
        assert site.slurm.truth(site.job).gpus_per_node_held == {"n1": 4}
        assert site.acting.past.cooldown(site.job) > 50.0


def test_companions_of_nobody_are_ended_though_a_call_is_refused_first() -> None:
    site = Site(NODES)
    job_id = site.running(ONE)
    orphans = [site.lend(job_id, 77), site.slurm.submit(JobSpec(), companion=Companion(99, 0, 1))]
    site.slurm.fail("cancel", SlurmRefused("Access denied"))
    assert site.turn(1.0) == 2
    assert site.turn(5.0) == 2, "not asked again so soon"
    site.turn(4.0)
    assert [site.slurm.truth(j).raw_state for j in orphans] == ["CANCELLED", "CANCELLED"]
    assert site.turn() == 0
    forged = [site.lend(job_id, 77, uid=1001) for _ in range(600)]
    for left in (600, 350, 100, 0):
        assert site.turn(0.5) == left, "any number of them is ended in bounded calls"
    assert {site.slurm.truth(j).raw_state for j in forged} == {"CANCELLED"}


def test_nodes_that_a_job_left_in_a_move_that_was_given_up_are_taken_back() -> None:
    site = Resized(BOTH, ONE)
    site.turn(40.0)  # no word from the agent
    site.turn()
    assert site.steps == [Step.FAILED]
    assert site.slurm.truth(site.job).nodes == ("n1", "n2")
    site.report(resized=1)
    site.turn(4.0)
    assert (site.slurm.truth(site.job).nodes, site.steps) == (("n1",), [Step.FAILED])


def test_where_slurm_does_not_take_them_back_the_job_goes_through_the_queue() -> None:
    site = Resized(BOTH, ONE)
    site.rows.acknowledge(1, site.slurm.clock())
    site.report(resized=1, first_step_at=1.0, checkpointed=True)
    site.slurm.fail("shrink", SlurmRefused("Operation not permitted"), times=2)
    site.turn(4.0)
    assert site.steps == [Step.FAILED]
    site.turn(4.0)
    assert site.steps == [Step.FAILED, Step.PLANNED]
    requeue = site.rows.moves[1]
    assert (requeue.path, requeue.source, requeue.target) == ("requeue", BOTH, ONE)


def test_a_requeue_ends_the_companions_first() -> None:
    site = Resized()
    lent = site.joined()
    site.turn(4.0)
    assert site.begin((site.job, "requeue", BOTH, Placement(("n3",), 4)))
    site.turn(4.0)
    site.rows.acknowledge(2, site.slurm.clock())
    site.slurm.calls.clear()
    site.turn(4.0)
    calls = [call for call in site.slurm.calls if call[0] in ("cancel", "requeue")]
    assert calls == [("cancel", lent), ("requeue", site.job)]
    for _ in range(3):
        site.turn(4.0)
    assert site.slurm.truth(site.job).gpus_per_node_held == {"n3": 4}
    assert site.slurm.truth(lent).raw_state == "CANCELLED"
