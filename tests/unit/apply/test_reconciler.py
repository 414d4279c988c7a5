"""Carrying moves out: a refusal for one job concerns that job alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pollux.goodput import BatchLimits
from polluxd.apply.capacity import BACK
from polluxd.apply.headroom import Headroom
from polluxd.apply.refused.refusals import TRIED_AGAIN_S
from polluxd.errors import SlurmRefused
from polluxd.model import NO_PLACEMENT, JobSpec, JobState, Node, Placement, Report, Step
from polluxd.slurm.limits import GroupLimits, JobLimits, Limits, Qos
from polluxd.slurm.protocol import Geometry
from tests import build
from tests.troubled_slurm import TroubledSlurm
from tests.unit.apply.site import Site, on

TWO_NODES = (Node("n1", 4, cpus=8), Node("n2", 4, cpus=8))
SMALL, LARGE = on("n1", 1), on("n1", 2)


def test_a_refused_requeue_fails_its_move_and_the_others_go_on() -> None:
    site = Site(TWO_NODES)
    jobs = [site.running(on(name, 1)) for name in ("n1", "n2")]
    for job_id in jobs:
        site.at_step(job_id, Step.CHECKPOINTED)
    site.slurm.fail("requeue", SlurmRefused("Requested operation is presently disabled"))
    site.turn(5.0)
    assert site.steps == [Step.FAILED, Step.CHECKPOINTED]
    assert [site.slurm.truth(job_id).restart_count for job_id in jobs] == [0, 1]


def noted_renewals(site: Site) -> list[tuple[list[int], float]]:
    """The jobs and the end of each call that follows."""
    calls: list[tuple[list[int], float]] = []
    renew = site.slurm.renew
    site.slurm.renew = lambda job_ids, until: (calls.append((list(job_ids), until)), renew(job_ids, until))[1]
    return calls


def test_a_refused_renewal_stops_no_move_and_is_not_repeated_at_once() -> None:
    site = Site()
    site.at_step(site.running(SMALL), Step.PLANNED)
    site.slurm.submit(JobSpec())
    calls = noted_renewals(site)
    site.slurm.fail("renew", SlurmRefused("Access denied"), times=2)
    site.turn(99.0)
    assert site.steps == [Step.DRAINING]
    site.turn(2.0)  # a third of the lease of 300 s has passed
    assert len(calls) == 1
    site.turn()
    assert len(calls) == 2


def test_leases_of_many_jobs_are_renewed_in_bounded_calls() -> None:
    site = Site()
    waiting = {site.slurm.submit(JobSpec(), lease=300) for _ in range(600)}
    calls = noted_renewals(site)
    for turns in (1, 2, 3, 3):
        site.turn()
        assert len(calls) == turns, "moves do not wait for the renewal of all"
    assert [len(job_ids) for job_ids, _ in calls] == [250, 250, 100]
    assert {job_id for job_ids, _ in calls for job_id in job_ids} == waiting
    urgent = Site()
    for _ in range(600):
        urgent.slurm.submit(JobSpec(), lease=60)
    calls = noted_renewals(urgent)
    urgent.turn()
    assert [len(job_ids) for job_ids, _ in calls] == [250, 250, 100], "they are about to end"


def test_many_waiting_jobs_have_longer_leases_and_few_renewals() -> None:
    site = Site()
    for _ in range(3000):
        site.slurm.submit(JobSpec(), lease=60)
    calls, now = noted_renewals(site), site.slurm.clock()
    site.turn(199.0)
    assert {until for _, until in calls} == {now + 600}
    site.turn(2.0)
    assert len(calls) == 12
    site.turn()
    assert len(calls) == 13, "15 renewals a second"


def test_a_pause_costs_no_job_a_cooldown_and_a_move_taken_back_one() -> None:
    site = Site(cooldown_s=60.0)
    first, second = site.running(SMALL), site.running(SMALL)
    site.at_step(first, Step.PLANNED)
    site.turn(paused=True)
    assert (site.steps, site.acting.past.cooldown(first)) == ([Step.FAILED], 0.0)
    site.at_step(second, Step.PLANNED, cancelled_by="ann@host")
    site.turn()
    assert (site.steps[1:], site.acting.past.cooldown(second)) == ([Step.FAILED], 60.0)


def test_a_job_that_started_within_seconds_rests_for_seconds() -> None:
    site = Site(cooldown_s=60.0)
    started = site.running(SMALL)
    site.at_step(started, Step.STARTED, "start", 1)
    site.slurm.advance(3.0)
    now = site.slurm.clock()
    site.reports = {started: Report(0, now, BatchLimits(32, 1024, 8, 128), first_step_at=now)}
    site.turn()
    assert site.acting.past.cooldown(started) == 4.0, "as long as the start took"


def test_a_wait_counts_from_its_own_step_though_the_clock_was_set_back_before() -> None:
    """A new polluxd ignores an old acknowledgement: the job trained on."""
    site = Site()
    job_id, now = site.running(SMALL), site.slurm.clock()
    times = {Step.PLANNED: now + 7200.0, Step.CHECKPOINTED: now - 150.0}
    site.at_step(job_id, Step.CHECKPOINTED, times=times)
    site.turn()
    assert (site.steps, site.slurm.truth(job_id).restart_count) == ([Step.FAILED], 0)


def test_the_restart_budget_holds_running_jobs_back_and_starts_others() -> None:
    site = Site(restarts_per_hour=2)
    restarts = [(job_id, "requeue", SMALL, LARGE) for job_id in (1, 2, 3)]
    assert site.begin(*restarts, (4, "start", NO_PLACEMENT, SMALL)) == [1, 2, 4]
    assert site.begin(restarts[2]) == [], "two are planned already, though none was ordered out yet"
    for number in (1, 2):
        site.reach(number, Step.DRAINING, Step.FAILED)
    assert site.spent("ann") == "the cluster's 2 restarts an hour are used up"
    site.slurm.advance(10.0)
    assert site.begin(restarts[2]) == []
    before = {Step.DRAINING: site.hour_ago - 100.0}
    site.rows.moves = [replace(move, times=before) for move in site.rows.moves]
    assert site.spent("ann") == ""


def test_one_user_s_restarts_leave_the_cluster_s_budget_to_others() -> None:
    site = Site(restarts_per_hour=10, user_restarts_per_hour=2)
    first = [site.slurm.submit(JobSpec(), user="mallory") for _ in range(4)]
    site.store.sync_jobs(site.slurm.observe().jobs)
    wished = [(job_id, "requeue", SMALL, LARGE) for job_id in first]
    assert site.begin(*wished, user="mallory") == first[:2]
    assert site.begin((99, "requeue", SMALL, LARGE), user="ann") == [99]
    assert site.spent("mallory") == "the 2 restarts an hour of user mallory are used up"
    assert site.spent("ann") == ""
    assert site.begin(wished[2], user="mallory") == []


@pytest.mark.parametrize(("continues", "limit"), [(False, 3000.0), (True, 3600.0)])
def test_a_requeued_job_keeps_what_was_left_of_its_time_limit(continues: bool, limit: float) -> None:
    site = Site()
    job_id = site.running(SMALL, JobSpec(continues=continues), time_limit_s=3600.0)
    site.slurm.advance(599.0)
    site.begin((job_id, "requeue", SMALL, LARGE))
    for _ in range(12):
        site.turn()
        site.rows.acknowledge(1, site.slurm.clock())
        site.slurm.advance(0.5)
    now = site.slurm.truth(job_id)
    assert (now.restart_count, now.gpus_per_node_held, now.time_limit_s) == (1, {"n1": 2}, limit)


@pytest.mark.parametrize("between", [7.0, 25.0, 40.0])
def test_moves_do_not_lengthen_a_time_limit(between: float) -> None:
    """Over all attempts a job runs at most one minute beyond its limit."""
    limit, site = 600.0, Site()
    job_id = site.running(SMALL, time_limit_s=limit)
    ran, moved, begun = 1.0, 0, site.slurm.clock()
    while not site.slurm.truth(job_id).state.finished:
        now = site.slurm.truth(job_id)
        if now.state is JobState.RUNNING and now.start_time is not None:
            ran += 0.5
            if site.slurm.clock() - now.start_time > between and not site.store.open_moves():
                size = now.gpus_per_node_held["n1"]
                site.begin((job_id, "requeue", on("n1", size), on("n1", 3 - size)), attempt=now.restart_count)
                moved += 1
        site.turn()
        for move in site.store.open_moves():
            site.rows.acknowledge(move.id, site.slurm.clock())
            if move.step is Step.STARTED:
                site.reach(move.id, Step.TRAINING)
        site.slurm.advance(0.5)
        assert site.slurm.clock() < begun + 3 * limit, "it neither runs nor ends"
        assert ran <= limit + 61.0, f"it runs on after {ran} s and {moved} moves"
    assert moved > 5
    assert ran >= limit - 2.0 * moved - 1.0, "a requeue may cost a second or two"


def test_what_is_remembered_of_jobs_that_are_gone_is_forgotten() -> None:
    site = Site(cooldown_s=60.0)
    site.at_step(99, Step.PLANNED)
    site.turn()  # no such job: the move fails
    assert site.acting.past.cooldown(99) > 0.0
    site.turn()
    assert site.acting.past.cooldown(99) == 0.0


def test_a_job_that_slurm_ends_in_the_second_of_its_start_is_queued_again_once() -> None:
    site = Site(slurm=TroubledSlurm([Node("n1", 4, cpus=8)], exit_s=0.05, start_s=0.0))
    job_id = site.running(SMALL)
    site.begin((job_id, "requeue", SMALL, LARGE))
    site.reach(1, Step.DRAINING, Step.CHECKPOINTED)
    site.slurm.requeue(job_id)
    site.slurm.advance(0.1)
    site.reach(1, Step.REQUEUED)
    # What polluxd itself does not do: start it in the second in which it left.
    site.slurm.configure(job_id, Geometry(("n1",), 2, 2), start=True)
    site.reach(1, Step.CONFIGURED)
    site.slurm.advance(0.1)
    assert site.slurm.truth(job_id).raw_state == "FAILED"
    site.turn()
    now = site.slurm.truth(job_id)
    assert (now.raw_state, now.restart_count, site.steps) == ("PENDING", 2, [Step.FAILED])
    site.turn()
    site.begin((job_id, "start", NO_PLACEMENT, LARGE), attempt=2)
    site.slurm.advance(1.0)
    site.turn(1.0)
    assert site.slurm.truth(job_id).gpus_per_node_held == {"n1": 2}


@pytest.mark.parametrize("step", [Step.REQUEUED, Step.CONFIGURED, Step.STARTED])
def test_an_attempt_that_fails_before_its_agent_reported_is_run_once_more(step: Step) -> None:
    site = Site(slurm=TroubledSlurm([Node("n1", 4, cpus=8)], start_s=0.0))
    job_id = site.running(SMALL)
    site.reports[job_id] = build.report(first_step_at=1.0)
    site.begin((job_id, "requeue", SMALL, LARGE))
    site.reach(1, Step.DRAINING, Step.CHECKPOINTED)
    site.slurm.requeue(job_id)
    site.slurm.advance(2.0)
    site.slurm.configure(job_id, Geometry(("n1",), 2, 2), start=True)
    site.slurm.advance(1.0)
    site.reach(1, *{Step.REQUEUED: 0, Step.CONFIGURED: 0, Step.STARTED: 0})
    site.rows.moves[0] = replace(site.rows.moves[0], step=step)
    site.slurm.advance(3.0)
    site.slurm.finish(job_id, JobState.FAILED)
    site.slurm.advance(1.0)
    site.turn()
    assert site.slurm.truth(job_id).state is JobState.PENDING
    site.turn()
    # polluxd starts it again; a script that fails at once then has failed.
    site.begin((job_id, "start", NO_PLACEMENT, LARGE), attempt=2)
    site.turn(3.0)
    site.turn(1.0)
    assert site.slurm.truth(job_id).state is JobState.RUNNING
    site.slurm.finish(job_id, JobState.FAILED)
    site.slurm.advance(1.0)
    site.turn()
    assert site.slurm.truth(job_id).state is JobState.FAILED


def test_a_parked_job_whose_start_fails_at_once_is_run_once_more() -> None:
    site = Site(slurm=TroubledSlurm([Node("n1", 4, cpus=8)], start_s=0.0))
    job_id = site.running(SMALL)
    site.reports[job_id] = build.report(first_step_at=1.0)
    site.slurm.requeue(job_id)
    site.slurm.advance(2.0)
    site.turn()
    site.begin((job_id, "start", NO_PLACEMENT, LARGE), attempt=1)
    site.turn(2.0)
    site.slurm.finish(job_id, JobState.FAILED)
    site.slurm.advance(1.0)
    site.turn()
    assert site.slurm.truth(job_id).state is JobState.PENDING


def test_a_job_stays_off_the_nodes_of_its_last_attempt_while_slurm_protects_them() -> None:
    site = Site(slurm=TroubledSlurm(TWO_NODES, start_s=0.0, kept_off_s=121.0))
    there, other = site.running(SMALL), site.running(SMALL)
    site.begin((there, "requeue", SMALL, LARGE), (other, "requeue", SMALL, on("n2", 1)))
    for number in (1, 2):
        site.reach(number, Step.DRAINING, Step.CHECKPOINTED)
    began = site.slurm.clock()
    while Step.STARTED not in site.rows.moves[0].times and site.slurm.clock() < began + 200.0:
        site.turn(1.0)
    assert site.slurm.truth(there).gpus_per_node_held == {"n1": 2}
    assert site.slurm.clock() - began >= 121.0
    assert site.rows.moves[1].times[Step.STARTED] - began < 20.0, "other nodes are free to it"


def test_a_waiting_job_is_not_planned_where_it_has_just_been() -> None:
    site = Site(slurm=TroubledSlurm(TWO_NODES, start_s=0.0, kept_off_s=121.0))
    job_id = site.running(SMALL)
    site.turn()
    site.slurm.requeue_by_hand(job_id)
    site.slurm.advance(2.0)
    site.turn()
    for acting, nodes_allowed in ((site.acting, {"n2"}), (Site(slurm=site.slurm).acting, set())):
        state = site.slurm.observe()
        acting.former.observe(state)
        assert acting.former.eligibility(state)[job_id].nodes == nodes_allowed
        site.slurm.advance(30.0)
    site.slurm.advance(121.0)
    assert not site.acting.former.eligibility(site.slurm.observe())


def test_an_update_that_slurm_applied_and_then_refused_counts_as_done() -> None:
    site = Site()
    job_id = site.slurm.submit(JobSpec())
    site.at_step(job_id, Step.REQUEUED)
    seen = site.acting.gather(site.slurm.observe())
    site.slurm.configure(
        job_id, Geometry(("n1",), 2, 2), start=True
    )  # an update that timed out goes through now
    site.slurm.advance(5.0)
    site.slurm.fail("configure", SlurmRefused("Job is no longer pending execution"))
    site.acting.tick(seen, site.store.records())
    assert site.steps == [Step.CONFIGURED]


def test_a_refused_size_fails_the_move_and_stays_barred() -> None:
    site = Site()
    job_id = site.slurm.submit(JobSpec(), lease=1e6)
    site.at_step(job_id, Step.PLANNED, "start")
    site.slurm.fail("configure", SlurmRefused("Requested node configuration is not available"))
    site.slurm.advance(1.0)
    site.turn()
    assert site.steps == [Step.FAILED]
    site.turn()
    most, rule = site.acting.refusals.bars(site.slurm.observe()).most[job_id]
    assert (most, "configuration is not available" in rule) == (1, True)
    site.slurm.advance(TRIED_AGAIN_S)
    assert site.acting.refusals.bars(site.slurm.observe()).most[job_id][0] == 8, "it has no training"


def refused_growth(site: Site, target: Placement = LARGE, **fault: SlurmRefused) -> int:
    """A job that polluxd requeues from one GPU of n1 for two, which Slurm refuses."""
    job_id = site.running(SMALL)
    site.begin((job_id, "requeue", SMALL, target))
    site.reach(1, Step.DRAINING, Step.CHECKPOINTED)
    for call, error in fault.items():
        site.slurm.fail(call, error)
    return job_id


def goes_back(site: Site, job_id: int) -> None:
    """The job starts again on its one GPU of n1 within 10 s."""
    began = site.slurm.clock()
    while site.slurm.truth(job_id).restart_count == 0 or not site.slurm.truth(job_id).nodes:
        site.turn(0.5)
        assert site.slurm.clock() - began < 10.0
    assert site.slurm.truth(job_id).gpus_per_node_held == {"n1": 1}


def test_a_training_that_scontrol_refuses_goes_back_to_its_former_size_at_once() -> None:
    site = Site()
    job_id = refused_growth(site, configure=SlurmRefused("Requested node configuration is not available"))
    goes_back(site, job_id)
    assert site.rows.moves[1].reason.startswith(BACK)
    site.turn(1.0)
    bars = site.acting.refusals.bars(site.slurm.observe())
    assert bars.most[job_id][0] == 1, "a start at another size does not end the refusal"


def test_a_training_whose_nodes_refuse_it_goes_back_although_nobody_took_the_gpus() -> None:
    site = Site([Node("n1", 4, cpus=8, memory_mb=1000)])
    job_id = site.running(SMALL, spec=JobSpec(mem_per_gpu_mb=600))
    site.begin((job_id, "requeue", SMALL, LARGE))
    site.reach(1, Step.DRAINING, Step.CHECKPOINTED)
    goes_back(site, job_id)
    site.turn()
    most, rule = site.acting.refusals.bars(site.slurm.observe()).most[job_id]
    assert (most, "BadConstraints" in rule) == (1, True)
    assert f"jobs {job_id} (n1:2: BadConstraints)" in site.acting.refusals.note()
    site.slurm.finish(job_id)
    site.turn(1.0)
    site.turn()
    assert not site.acting.refusals.note()


def test_no_training_goes_back_to_gpus_that_another_move_was_promised() -> None:
    site = Site(TWO_NODES)
    job_id, other = site.running(on("n1", 4)), site.running(on("n2", 2))
    site.begin((job_id, "requeue", on("n1", 4), on("n2", 1)), (other, "requeue", on("n2", 2), on("n1", 4)))
    for number in (1, 2):
        site.reach(number, Step.DRAINING, Step.CHECKPOINTED)
    site.turn(2.0)
    site.reach(2, Step.REQUEUED)
    site.slurm.fail("configure", SlurmRefused("no"))
    site.turn(0.5)
    site.turn(0.5)
    assert len([m for m in site.rows.moves if m.reason.startswith(BACK)]) <= 1
    for _ in range(20):
        site.turn(0.5)
    held = [site.slurm.truth(job_id).gpus_per_node_held, site.slurm.truth(other).gpus_per_node_held]
    assert sum(each.get("n1", 0) for each in held) <= 4


def test_the_former_place_of_a_refused_training_waits_for_it_as_long_as_slurm_protects_it() -> None:
    site = Site(slurm=TroubledSlurm(TWO_NODES, start_s=0.0, kept_off_s=121.0))
    job_id = refused_growth(site, on("n2", 2), configure=SlurmRefused("no"))
    other = site.slurm.submit(JobSpec(cpus_per_gpu=2), lease=1e6)
    while len(site.rows.moves) == 1:
        site.turn(0.5)
    site.begin((other, "start", NO_PLACEMENT, on("n1", 4)))
    for _ in range(130):
        site.turn(1.0)
    assert (site.steps[1], site.slurm.truth(job_id).gpus_per_node_held) == (Step.STARTED, {"n1": 1})
    assert "a training went back there" in site.rows.moves[2].detail


def test_a_site_whose_hook_refuses_updates_is_asked_before_the_order_to_drain() -> None:
    site = Site(TWO_NODES)
    job_id = site.running(SMALL)
    site.slurm.fail("probe", SlurmRefused("Unspecified error"), times=9)
    for _ in range(2):
        site.begin((job_id, "requeue", SMALL, LARGE))
        site.turn(1.0)
        site.turn(1.0)
    assert site.steps[0] is Step.FAILED
    assert not any(Step.DRAINING in move.times for move in site.rows.moves)
    assert "Unspecified error" in site.acting.eligibility(site.slurm.observe(), Headroom())[job_id].rule
    site.slurm.mend()
    other = site.running(on("n2", 1))
    site.begin((other, "requeue", on("n2", 1), on("n2", 2)))
    for _ in range(3):
        site.turn(1.0)
    assert site.slurm.calls.count(("probe", other)) == 1, "once"


def test_a_training_that_may_not_start_again_once_it_has_drained_is_not_requeued() -> None:
    site = Site(TWO_NODES)
    job_id = refused_growth(site, probe=SlurmRefused("Invalid qos specification"))
    for _ in range(3):
        site.turn(1.0)
    assert (site.steps, site.slurm.truth(job_id).restart_count) == ([Step.FAILED], 0)


def test_a_job_into_which_not_even_its_own_size_may_be_written_is_left_to_slurm() -> None:
    """Slurm starts it as it was submitted. It then stays where it is: it has no way back."""
    site = Site(TWO_NODES)
    job_id = site.slurm.submit(JobSpec(own_size=3), gpus_per_node=3)
    site.slurm.refuses_update = lambda _job, size: "" if size.gpus_per_node < 3 else "no more than 2"
    site.begin((job_id, "start", NO_PLACEMENT, on("n1", 3)))
    for _ in range(4):
        site.turn(1.0)
    assert site.steps == [Step.FAILED]
    job = site.slurm.truth(job_id)
    assert (job.state, sum(job.gpus_per_node_held.values())) == (JobState.RUNNING, 3), "its lease has ended"
    assert site.slurm.calls.count(("renew", job_id)) == 3, "at first, after the refusal, and to end it"
    assert not site.acting.eligibility(site.slurm.observe(), Headroom())[job_id].nodes


def test_a_move_whose_size_was_barred_since_its_plan_is_taken_back() -> None:
    site = Site()
    first, second = site.running(SMALL), site.running(SMALL)
    site.begin((first, "requeue", SMALL, LARGE), (second, "requeue", SMALL, LARGE))
    site.turn(1.0)
    assert site.steps == [Step.DRAINING, Step.DRAINING]
    site.acting.refusals.learn(site.rows.moves[0], site.slurm.truth(first), "QOSMaxGRESPerJob")
    site.turn(1.0)
    assert site.steps[1] is Step.FAILED
    assert "QOSMaxGRESPerJob" in site.rows.moves[1].detail
    assert site.slurm.truth(second).restart_count == 0


def test_a_limit_that_slurm_shows_once_a_move_is_planned_forbids_it_before_the_order_to_drain() -> None:
    site = Site()
    job_id = site.running(SMALL)
    site.begin((job_id, "requeue", SMALL, LARGE))
    assert site.slurm.limits_asked == 1
    limit = Qos("normal", GroupLimits(), JobLimits({"gres/gpu": SMALL.gpus}))
    site.slurm.limits = Limits(qos={"normal": limit})
    site.turn(1.0)
    assert site.steps == [Step.FAILED]
    assert "MaxTRESPerJob" in site.rows.moves[0].detail
    assert Step.DRAINING not in site.rows.moves[0].times


def test_a_plain_job_that_came_since_the_plan_does_not_get_the_place_of_a_training() -> None:
    site = Site((Node("n1", 4, cpus=8),))
    job_id = site.running(SMALL)
    site.slurm.submit(gpus_per_node=2)
    site.turn(1.0)  # it starts
    site.begin((job_id, "requeue", SMALL, LARGE))
    site.turn(1.0)
    assert site.steps == [Step.DRAINING]
    waits = site.slurm.submit(gpus_per_node=2)
    site.reach(1, Step.CHECKPOINTED)
    site.turn(1.0)
    assert site.slurm.truth(waits).reason == "Resources"
    assert (site.steps, site.slurm.truth(job_id).restart_count) == ([Step.FAILED], 0)
    assert f"job {waits} (Resources)" in site.rows.moves[0].detail


def test_a_job_whose_requeue_slurm_refuses_is_not_asked_for_another_move() -> None:
    site = Site(TWO_NODES)
    job_id = refused_growth(site, requeue=SlurmRefused("Requested operation is presently disabled"))
    site.turn(1.0)
    site.turn()
    eligible = site.acting.eligibility(site.slurm.observe(), Headroom())[job_id]
    assert (eligible.nodes, "presently disabled" in eligible.rule) == (frozenset(), True)


def test_a_waiting_job_whose_start_failed_may_start_elsewhere_at_once() -> None:
    site = Site(cooldown_s=60.0)
    job_id = site.slurm.submit(JobSpec(), lease=1e6)
    site.at_step(job_id, Step.CONFIGURED, "start", 3)
    site.turn(31.0)
    site.turn()
    assert site.steps == [Step.FAILED]
    site.turn()
    assert not site.acting.occupied(job_id)
    assert site.acting.past.cooldown(job_id) == 0.0


def test_a_first_start_that_no_node_could_hold_is_tried_with_fewer_gpus() -> None:
    site = Site([Node("n1", 4, cpus=8, memory_mb=1000)])
    slurm, refusals = site.slurm, site.acting.refusals
    job_id = slurm.submit(JobSpec(mem_per_gpu_mb=400))
    site.at_step(job_id, Step.PLANNED, "start", 3)
    site.turn()
    site.turn(5.0)
    assert site.steps == [Step.CONFIGURED]
    site.turn()
    assert site.steps == [Step.FAILED]
    assert slurm.calls[-2:] == [("renew", job_id), ("release", job_id)], (
        "kept back, then with a priority again"
    )
    site.turn()
    most, rule = refusals.bars(slurm.observe()).most[job_id]
    assert (most, "BadConstraints" in rule) == (1, True), "its user's size"


def test_a_waiting_job_gets_the_size_back_that_its_user_wrote() -> None:
    site = Site(TWO_NODES)
    slurm = site.slurm
    fresh = slurm.submit(JobSpec(), lease=1e6)
    job_id = slurm.submit(JobSpec(cpus_per_gpu=2), nodes=1, gpus_per_node=1, lease=1e6)
    site.at_step(job_id, Step.PLANNED, "start", 3)
    site.turn()
    assert slurm.truth(job_id).requested_gpus_per_node == 3
    site.reach(1, Step.STARTED, Step.TRAINING)
    slurm.advance(5.0)
    assert slurm.truth(job_id).nodes == ("n1",)
    slurm.set_schedulable("n1", False)
    slurm.requeue_by_hand(job_id)
    slurm.advance(5.0)
    site.turn()
    site.turn()
    assert slurm.calls.count(("configure", job_id)) == 2, "once for each time that it waits again"
    assert ("configure", fresh) not in slurm.calls
    assert slurm.truth(job_id).requested_gpus_per_node == 1
    slurm.advance(400.0)  # nobody renews its lease: polluxd is gone
    assert slurm.truth(job_id).nodes == ("n2",)
