"""What Slurm refused stays barred until its cause has changed, and bars it for those who share the cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from polluxd.apply.actions import WAITED
from polluxd.apply.refused.refusals import AS_OTHERS_S, STUCK, TRIED_AGAIN_S, Refusals
from polluxd.apply.refused.refused_nodes import MOST_OF_USER
from polluxd.cli.status import health
from polluxd.config.settings import CycleSettings, MoveSettings
from polluxd.model import NO_PLACEMENT, JobSpec, JobState, Node, Placement, Step
from polluxd.slurm.limits import Association, GroupLimits, JobLimits, Limits, Qos
from polluxd.slurm.protocol import ClusterState, SlurmJob
from polluxd.slurm.rules import Partition, Rules
from tests.build import move as build_move
from tests.unit.apply.four_nodes import ALL, NODES, NOW, job

MINUTE = 60.0
LIMITS = Limits(
    {("vision", None, ""): Association("vision", None, "", "", GroupLimits(), JobLimits())},
    {"normal": Qos("normal", GroupLimits({"gres/gpu": 8}), JobLimits())},
)


class Learned:
    """Refusals, and the cluster in which they are met."""

    def __init__(self, *jobs: SlurmJob, nodes: tuple[Node, ...] = NODES) -> None:
        self.ticks = 0.0
        self.state = ClusterState(
            NOW, nodes, jobs, rules=Rules({"main": Partition("main", "UP", ALL)}), limits=LIMITS
        )
        self.refusals = Refusals(lambda: NOW, lambda: self.ticks)
        self.refusals.observe(self.state)

    def refuse(self, job: SlurmJob, reason: str, to: int, *, held: int = 0, on: str = "n2") -> None:
        source = Placement(("n1",), held) if held else NO_PLACEMENT
        move = build_move("requeue", source, Placement((on,), to), Step.CONFIGURED, job_id=job.job_id)
        self.refusals.learn(move, job, reason)

    def most(self, **changes: object) -> dict[int, int]:
        """The most GPUs by job, and 0 for those that may start nowhere, after a change of the cluster."""
        self.state = replace(self.state, **changes)
        self.refusals.observe(self.state)
        bars = self.refusals.bars(self.state)
        nowhere = {job_id: 0 for job_id, eligible in bars.eligibility.items() if not eligible.nodes}
        return {job_id: most for job_id, (most, _) in bars.most.items()} | nowhere


def running(number: int, gpus: int, **more: object) -> SlurmJob:
    return job(number, **{"gpus_per_node_held": {"n1": gpus}, "qos": "normal", **more})


def waiting(number: int, asked: int = 1, **more: object) -> SlurmJob:
    known = job(number, JobState.PENDING, **{"qos": "normal", **more})
    return replace(known, demands=replace(known.demands, asked=(1, asked)))


def test_a_limit_of_one_job_bars_its_training_for_good_and_the_size_for_others() -> None:
    stopped, colleague, elsewhere = running(1, 4), running(2, 2, user="bea"), running(3, 2, qos="high")
    waits, large = waiting(4, user="cem"), waiting(5, user="cem", spec=JobSpec(min_gpus=8))
    known = Learned(stopped, colleague, elsewhere, waits, large)
    known.refuse(stopped, "QOSMaxGRESPerJob", 8, held=4)
    bars = {1: 4, 2: 4, 4: 7, 5: 0}
    assert known.most() == bars, "no training is stopped where one was; a start may try what is below"
    known.ticks += 30.0
    known.refusals.works(build_move("start", target=Placement(("n1",), 4), job_id=1), stopped)
    assert known.most() == bars, "a start at another size does not end the refusal"
    known.refusals.works(build_move("start", target=Placement(("n1",), 6), job_id=2), colleague)
    assert known.most()[1] == 6, "what works for one works for all"
    assert not known.refusals.note().startswith(STUCK), "it keeps no job of another size out"
    assert "1 (QOSMaxGRESPerJob)" in known.refusals.note()
    raised = Qos("normal", GroupLimits({"gres/gpu": 8}), JobLimits({"gres/gpu": 16}))
    assert known.most(limits=replace(LIMITS, qos={"normal": raised})) == {}, "the limit has changed"


def test_a_limit_of_minutes_counts_time_limits() -> None:
    hour, short = running(1, 4, limit=61 * MINUTE), running(2, 4, limit=11 * MINUTE, user="bea")
    known = Learned(hour, short)
    known.refuse(hour, "QOSMaxGRESMinutesPerJob", 8, held=4)
    most = known.most()
    assert most[1] == 4
    assert most[2] >= 16, "10 minutes on 16 GPUs are less than was refused"


def test_a_limit_of_a_group_ends_when_others_use_less() -> None:
    stopped, other, waits = running(1, 2), running(2, 4, user="bea"), waiting(3, user="cem")
    known = Learned(stopped, other, waits)
    known.refuse(stopped, "QOSGrpGRES", 4, held=2)
    assert known.most()[1] == 2
    assert known.most(jobs=(stopped, replace(other, gpus_per_node_held={"n1": 1}), waits))[1] == 5, (
        "6 in all have worked"
    )
    ended = replace(other, state=JobState.COMPLETED, gpus_per_node_held={})
    assert known.most(jobs=(stopped, ended, waits))[1] == 6


def test_a_move_under_way_counts_at_what_it_comes_to() -> None:
    """It has stopped its training: nobody else may start with what the limit leaves to it."""
    moved, waits = running(1, 2), waiting(2, asked=2)
    known = Learned(moved, waits)
    known.refuse(moved, "QOSMaxGRESPerUser", 4, held=2)
    assert known.most() == {1: 2, 2: 1}, "4 in all were refused"
    ends = replace(moved, state=JobState.COMPLETING)
    assert known.most(jobs=(ends, waits)) == {1: 2, 2: 3}, "Slurm counts no job that is completing"
    move = build_move("requeue", Placement(("n1",), 2), Placement(("n1",), 3), Step.DRAINING, job_id=1)
    known.refusals.begins(move)
    bars = known.refusals.bars(known.state, {2})
    assert not bars.eligibility[2].nodes, (
        "with the 3 of the move, no GPU is left below those that were refused"
    )
    assert not bars.most.keys() & {1}, "of others, nothing was asked"
    known.refusals.observe(known.state, [replace(move, step=Step.PLANNED)])
    assert known.refusals.bars(known.state).most[2][0] == 3, "what is planned may still be withdrawn"


@pytest.mark.parametrize("reason", ["InvalidQOS", "InvalidAccount", "QOSNotAllowed"])
def test_a_right_that_was_taken_away_stops_one_training_and_no_other(reason: str) -> None:
    stopped, hers, waits = running(1, 2), running(2, 1), waiting(3)
    bea, elsewhere = running(4, 1, user="bea"), running(5, 1, account="physics")
    known = Learned(stopped, hers, waits, bea, elsewhere)
    known.refuse(stopped, reason, 4, held=2)
    assert known.most() == {1: 0, 2: 0, 3: 0}, "no job of hers would start again, at whatever size"
    known.ticks += TRIED_AGAIN_S
    assert known.most() == {1: 0, 2: 0}, "what waits is tried again"
    known.refusals.works(build_move("start", target=Placement(("n1",), 1), job_id=3), waits)
    assert known.most() == {}, "she has the right again"


def test_one_user_s_refusal_closes_no_account_to_others() -> None:
    alice, hers, bea = waiting(1), waiting(2, account="vision"), waiting(3, user="bea")
    known = Learned(alice, hers, bea)
    known.refuse(alice, "AssocGrpGRES", 1)
    assert known.most() == {1: 0, 2: 0}
    known.refuse(bea, "AssocGrpGRES", 1)
    assert known.most() == {1: 0, 2: 0, 3: 0}
    note = known.refusals.note()
    assert note.startswith(f"{STUCK}2027-01-15 08:00:00 UTC: Slurm refuses to start jobs of account vision")
    assert known.refusals.groups == ["account"]
    status = {"leader": "host", "leading": True, "decided_at": NOW, "paused": False, "note": note}
    verdict = health(status, (), CycleSettings(), MoveSettings(), NOW + 1)
    assert (verdict.exit_status, verdict.stuck_since) == (2, NOW)


def test_a_job_that_is_tried_again_is_tried_at_its_least_size() -> None:
    trains, waits, exact = running(1, 1), waiting(2, 4), waiting(3, 4, spec=JobSpec(min_gpus=3))
    known = Learned(trains, waits, exact)
    known.refuse(trains, "QOSMaxGRESPerUser", 2, held=1)
    assert known.most() == {1: 1, 2: 0, 3: 0}
    known.ticks += TRIED_AGAIN_S
    assert known.most() == {1: 1, 2: 1, 3: 3}, "4 GPUs may be refused still where 1 is not"
    known.refuse(waits, "QOSMaxGRESPerUser", 1)
    assert known.most() == {1: 1, 2: 0, 3: 0}, "and not before a minute has passed"
    known.ticks += TRIED_AGAIN_S
    others = running(4, 0, user="bea", gpus_per_node_held={"n1": 3, "n2": 4, "n3": 4, "n4": 3})
    assert known.most(jobs=(trains, waits, exact, others)) == {1: 1, 2: 1, 3: 0}, "nobody gives way for a try"
    known.ticks += AS_OTHERS_S
    assert known.most() == {1: 1}, "or it might never be tried"


def test_what_works_shows_an_older_refusal_to_be_out_of_date_and_no_newer_one() -> None:
    waits, trains = waiting(1), running(2, 2, user="bea")
    known = Learned(waits, trains)
    known.refuse(waits, "QOSMaxGRESPerJob", 1)
    assert known.most() == {1: 0, 2: 0}
    known.refuse(trains, "QOSMaxGRESPerJob", 4, held=2)
    known.refusals.works(build_move("start", target=Placement(("n1",), 2), job_id=1), waits)
    assert known.most() == {1: 3, 2: 2}, "2 GPUs work, 4 were refused after that"
    known.refusals.works(build_move("start", target=Placement(("n1",), 4), job_id=1), waits)
    assert known.most() == {}


def test_what_started_after_a_training_had_left_was_never_beside_it() -> None:
    stopped = running(1, 2)
    later = running(2, 1, start_time=NOW - 1.0)
    known = Learned(stopped, later)
    times = {Step.CHECKPOINTED: NOW - 5.0, Step.CONFIGURED: NOW - 3.0}
    source, target = Placement(("n1",), 2), Placement(("n2",), 3)
    move = build_move("requeue", source, target, Step.CONFIGURED, job_id=1, times=times)
    known.refusals.learn(move, stopped, "QOSMaxGRESPerUser")
    assert known.most(jobs=(stopped,))[1] == 2, "2 GPUs are known to work, and not the 3 of both"


def test_a_training_that_a_limit_would_not_start_again_is_moved_nowhere() -> None:
    large, small, waits = running(1, 3), running(2, 1), waiting(3)
    known = Learned(large, small, waits)
    known.refuse(waits, "QOSMaxGRESPerJob", 2)
    assert known.most() == {1: 0, 2: 1, 3: 1}, "the limit was lowered under its feet"


def test_a_limit_that_a_large_job_meets_leaves_small_ones_in() -> None:
    greedy, small = waiting(1, 8, spec=JobSpec(min_gpus=8)), waiting(2, 1)
    known = Learned(greedy, small)
    known.refuse(greedy, "AssocGrpGRESRunMinutes", 8)
    assert known.most() == {1: 0, 2: 1}, "no more than its user wrote"


def test_a_first_start_that_is_refused_falls_to_the_size_of_its_user() -> None:
    known = Learned(wide := waiting(1, 2))
    known.refuse(wide, "QOSMaxGRESPerJob", 8)
    assert known.most() == {1: 2}, "no try in between"


@pytest.mark.parametrize(
    ("reason", "barred"),
    [
        ("QOSMaxJobsPerUserLimit", {1, 2}),
        ("AssocMaxJobsLimit", {1, 2}),
        ("PartitionTimeLimit", {1, 2, 3}),
        ("PartitionConfig", {1, 2, 3}),
        ("QOSGrpJobsLimit", {1, 2, 3}),
        ("Licenses", {1, 2, 3}),
        ("JobArrayTaskLimit", {1, 2}),
    ],
)
def test_limits_that_count_jobs_keep_others_of_the_group_waiting(reason: str, barred: set[int]) -> None:
    flex: Mapping[str, object] = {"licenses": {"matlab@flex": 1}}
    first, second = (waiting(n, array=(1, n), **flex) for n in (1, 2))
    known = Learned(first, second, waiting(3, user="bea", **flex))
    known.refuse(first, reason, 1)
    assert set(known.most()) == barred
    known.ticks += TRIED_AGAIN_S
    assert known.most() == {}, "no training can be stopped: on free GPUs it is tried again"


def test_nodes_that_refuse_a_size_bar_it_until_they_change() -> None:
    nodes = (replace(NODES[0], foreign_cpus=4, foreign_gpus=1), *NODES[1:])
    stopped, alike = running(1, 2), waiting(2, 2)
    known = Learned(stopped, alike, nodes=nodes)
    known.refuse(stopped, "Resources", 3, held=2, on="n1")
    assert known.most() == {1: 2, 2: 2}
    assert known.most(nodes=(replace(nodes[0], foreign_cpus=5), *NODES[1:])) == {1: 2, 2: 2}
    assert known.most(nodes=(replace(nodes[0], foreign_cpus=2), *NODES[1:])) == {1: 2}, (
        "others use less: a job that waits may try it, and the training is stopped for no guess"
    )
    waits = replace(stopped, state=JobState.PENDING, gpus_per_node_held={})
    assert known.most(jobs=(waits, alike)) == {}, "no training is left to stop"
    known.most(jobs=(stopped, alike))
    known.refuse(stopped, "Resources", 3, held=2, on="n1")
    known.refusals.works(build_move("start", target=Placement(("n1",), 2), job_id=2), alike)
    assert known.most() == {1: 2, 2: 2}
    known.refusals.works(build_move("start", target=Placement(("n1",), 3), job_id=2), alike)
    assert known.most() == {}, "another one has started there"
    known.refuse(stopped, "Resources", 3, held=2, on="n1")
    assert known.most(nodes=(replace(NODES[0], cpus=64), *NODES[1:])) == {}, "the node has changed"


def test_a_start_for_which_slurm_told_no_reason_is_tried_again_after_an_hour() -> None:
    waited, known = running(1, 1), Learned(running(1, 1))
    known.refuse(waited, f"{WAITED}30 s (Priority)", 4, held=1)
    known.ticks += 3590.0
    assert known.most() == {1: 1}
    known.ticks += 20.0
    assert known.most() == {}


def test_a_size_that_did_not_start_on_its_node_leaves_a_training_where_it_is() -> None:
    alone = {"main": Partition("main", "UP", frozenset({"n1"}))}
    stopped, alike, other = running(1, 4), waiting(2), waiting(3, spec=JobSpec(cpus_per_gpu=2))
    # What a user asks for, polluxd knows in part: a refusal of one says nothing of another's job.
    known = Learned(stopped, alike, other, waiting(4, user="bea"))
    known.most(rules=Rules(alone))
    known.refuse(stopped, "Resources", 3, held=4, on="n1")
    assert known.most() == {1: 0, 2: 1}, (
        "and a job that asks for the same per GPU is tried at its user's size"
    )
    assert 1 not in known.refusals.bars(known.state).most, "it gives up nothing of what it has"


def test_a_script_that_fails_on_a_second_node_gets_no_second_node() -> None:
    stays = running(1, 2)
    known = Learned(stays)
    growth = build_move("resize", Placement(("n1",), 2), Placement(("n1", "n2"), 2), job_id=1)
    known.refusals.cannot_span(growth, "a joiner's script has ended before its training: no data")
    bars = known.refusals.bars(known.state)
    assert (bars.nodes, bars.most[1][0]) == ({1: 1}, 4)
    assert "no data" in bars.most[1][1]
    assert known.most(jobs=(replace(stays, state=JobState.FAILED),)) == {}


def test_a_limit_on_nodes_is_none_on_gpus() -> None:
    wide, other = running(1, 2), running(2, 2, user="bea")
    known = Learned(wide, other)
    target = Placement(("n1", "n2"), 2)
    known.refusals.learn(
        build_move("requeue", Placement(("n1",), 2), target, Step.CONFIGURED, job_id=1),
        wide,
        "PartitionNodeLimit",
    )
    assert known.refusals.bars(known.state).nodes == {1: 1, 2: 1}
    known.refusals.works(build_move("start", target=Placement(("n2",), 8), job_id=2), other)
    assert known.refusals.bars(known.state).nodes == {1: 1, 2: 1}, (
        "8 GPUs of one node say nothing of two nodes"
    )


def test_what_worked_before_a_refusal_does_not_outlast_it() -> None:
    stopped, lucky = running(1, 1), running(2, 3, user="bea")
    known = Learned(stopped, lucky)
    known.refuse(lucky, "QOSMaxGRESPerJob", 8, held=3)
    known.refuse(stopped, "QOSMaxGRESPerJob", 4, held=1)
    assert known.most()[1] == 1, "3 worked, but the limit may have been lowered since"


def test_a_refusal_stays_whether_the_job_was_read_with_the_site_s_defaults_or_without() -> None:
    shown = waiting(1, 4, mem_per_gpu_mb=400)
    known = Learned(shown)
    known.refuse(replace(shown, mem_per_gpu_mb=0), "scontrol update: Unspecified error", 4)
    assert known.refusals.count == 1
    known.most()
    assert known.refusals.count == 1, "nothing has changed"


def test_an_update_that_a_hook_refuses_stays_refused_while_nodes_come_and_go() -> None:
    stopped = running(1, 2)
    known = Learned(stopped)
    move = build_move("requeue", Placement(("n1",), 2), Placement(("n2",), 4), Step.REQUEUED, job_id=1)
    known.refusals.learn(move, stopped, "scontrol update: no more than 2 GPUs")
    away = (NODES[0], replace(NODES[1], schedulable=False), *NODES[2:])
    assert known.most(nodes=away) == {1: 2}
    assert known.most(nodes=NODES) == {1: 2}
    assert known.most(nodes=(NODES[0], replace(NODES[1], gpus=8), *NODES[2:])) == {}, "it is another node now"


def test_a_new_polluxd_reads_what_a_former_one_was_refused() -> None:
    stopped = running(1, 2)
    move = build_move("requeue", Placement(("n1",), 2), Placement(("n2",), 4), job_id=1)
    failed = replace(
        move,
        step=Step.FAILED,
        times={Step.CONFIGURED: NOW - 9.0, Step.FAILED: NOW - 5.0},
        detail="Slurm refuses to start it there: QOSMaxGRESPerJob",
    )
    again = replace(move, id=2)
    fresh = Learned(stopped)
    # Its agent may say anything: it would bar all other jobs of its QOS.
    forged = replace(
        failed, detail="the job's agent could not: Slurm refuses to start it there: QOSGrpJobsLimit"
    )
    assert not fresh.refusals.recall(again, stopped, [forged, again])
    assert "QOSMaxGRESPerJob" in fresh.refusals.recall(again, stopped, [failed, again])
    raised = Qos("normal", GroupLimits({"gres/gpu": 8}), JobLimits({"gres/gpu": 16}))
    assert fresh.most(limits=replace(LIMITS, qos={"normal": raised})) == {}
    assert not fresh.refusals.recall(again, stopped, [failed, again]), (
        "each is read once: its cause has changed"
    )


def test_a_job_that_is_completing_has_left_its_limit() -> None:
    stopped, leaves = running(1, 2), running(2, 1, state=JobState.COMPLETING)
    known = Learned(stopped, leaves)
    known.refuse(stopped, "QOSMaxGRESPerUser", 4, held=2)
    ended = replace(leaves, state=JobState.COMPLETED, gpus_per_node_held={})
    assert known.most(jobs=(stopped, ended)) == {1: 2}, "4 were refused, and not 5"
    known.refusals.works(build_move("start", target=Placement(("n1",), 3), job_id=1), stopped)
    assert known.most() == {1: 3}


def test_a_user_whose_jobs_are_refused_without_end_costs_a_bounded_memory() -> None:
    mine = [waiting(n, user="mal", array=(n, 0)) for n in range(1, 201)]
    hers = waiting(900, user="bea", array=(900, 0))
    known = Learned(*mine, hers)
    known.refuse(hers, "Resources", 4)
    known.refuse(hers, "JobArrayTaskLimit", 4)
    for each in mine:
        known.refuse(each, "Resources", 4)
        known.refuse(each, "JobArrayTaskLimit", 4)
    assert known.refusals.count > 400
    bars = known.most()
    assert known.refusals.count <= 2 * MOST_OF_USER + 2
    assert 900 in bars, "another user's stay"
    assert 200 in bars, "the newest stay"
