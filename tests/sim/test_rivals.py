"""Each rival does what its paper says it does.

The traces are small enough to know the right result beforehand.
"""

from __future__ import annotations

import numpy as np
import pytest

from polluxd.sim.cluster import NodeGroup, Scenario
from polluxd.sim.engine import Policy, View, simulate
from polluxd.sim.policies import POLICIES
from polluxd.sim.policies.baseline_packing import compact, emptiest_first, seated
from polluxd.sim.policies.gavel import share, shares
from polluxd.sim.policies.shockwave import planned
from polluxd.sim.policies.sia import Option, program
from polluxd.sim.workload import Submission

TWO = Scenario(nodes=2)


def job(name, time, gpus, work=1.0, app="vision-small", batch=None):
    return Submission(name, time, app, gpus, batch or 128 * gpus, work)


def run(name, jobs, apps, scenario=TWO):
    found = simulate(jobs, apps, POLICIES[name](scenario), scenario)
    return {j.submission.name: j for j in found.jobs}


def test_fifo_waits_behind_the_first_and_backfill_passes_it(apps):
    trace = [job("wide", 0, 6), job("wider", 60, 8), job("small", 120, 1, 0.05)]
    fifo, backfill = run("fifo", trace, apps), run("backfill", trace, apps)
    assert fifo["small"].started_at >= fifo["wider"].started_at
    assert backfill["small"].started_at < backfill["wider"].started_at
    assert backfill["wider"].started_at == fifo["wider"].started_at, "who waits first is not delayed"


def test_fairshare_prefers_who_used_least(apps):
    trace = [job("first", 0, 8), job("again", 60, 8), job("other", 120, 8, 0.2, app="speech", batch=160)]
    found = run("fairshare", trace, apps)
    assert found["other"].started_at < found["again"].started_at


def test_tiresias_preempts_who_was_served_most(apps):
    hog = job("hog", 0, 8, 40.0)
    found = run("tiresias", [hog, job("late", 3 * 3600.0, 8)], apps)
    assert found["hog"].restarts == 1
    assert found["late"].ended_at < found["hog"].ended_at


def test_optimus_gives_more_to_who_has_more_left(apps):
    trace = [job("long", 0, 1, 5.0, batch=1024), job("short", 0, 1, 0.5, batch=1024)]
    policy = POLICIES["optimus"](TWO)
    seen = {}

    class Watched(Policy):
        def decide(self, view: View):
            found = policy.decide(view)
            if len(view.jobs) == 2 and not seen:
                seen.update({n: sum(g for _, g in seats) for n, seats in found.items()})
            return found

    simulate(trace, apps, Watched(), TWO)
    assert seen[0] > seen[1] >= 1


def test_gandiva_takes_turns(apps):
    found = run("gandiva", [job("a", 0, 8), job("b", 0, 8)], apps)
    assert min(found["a"].restarts, found["b"].restarts) >= 1
    assert abs(found["a"].ended_at - found["b"].ended_at) < 0.6 * found["a"].ended_at


def test_gandiva_grows_into_idle_gpus(apps):
    asked, grown = run("fifo", [job("a", 0, 2)], apps), run("gandiva", [job("a", 0, 2)], apps)
    assert grown["a"].ended_at < asked["a"].ended_at


def test_slaq_prefers_the_young(apps):
    old, young = job("old", 0, 1, 20.0, batch=1024), job("young", 3600, 1, batch=1024)
    found = run("slaq", [old, young], apps)
    assert found["young"].ended_at < found["old"].ended_at


def test_gavel_shares_time_alike(apps):
    assert share([8, 8], 8) == 0.5
    assert share([2, 2], 8) == 1.0
    found = run("gavel", [job("a", 0, 8), job("b", 0, 8), job("c", 0, 8)], apps)
    ends = sorted(j.ended_at for j in found.values())
    assert ends[0] > 0.6 * ends[-1], "nobody is served to the end first"


def test_gavel_gives_each_job_the_type_that_serves_it_most():
    # The first job gains five times on the fast type, the second nothing.
    found = shares([4, 4], np.array([[1.0, 5.0], [1.0, 1.0]]), [4, 4])
    assert found == pytest.approx(np.array([[0.0, 1.0], [1.0, 0.0]]), abs=1e-6)
    alike = shares([8, 8], np.array([[1.0, 2.0], [1.0, 2.0]]), [8, 8])
    assert alike.sum(axis=1) == pytest.approx([1.0, 1.0])
    assert alike @ [1.0, 2.0] == pytest.approx([1.5, 1.5])


def test_gavel_leaves_out_the_type_that_a_job_does_not_fit():
    found = shares([8, 2], np.array([[1.0, 9.0], [1.0, 9.0]]), [8, 4])
    assert found[0, 1] == 0
    assert found[0, 0] > 0


def test_sia_s_program_keeps_each_type_within_its_gpus():
    options = [
        [Option("a", 0, -1.1), Option("a", 4, -0.1), Option("b", 4, -0.5)],
        [Option("a", 0, -1.1), Option("a", 4, -0.2), Option("b", 4, -0.9)],
    ]
    chosen = program(options, {"a": 4, "b": 4})
    assert [(o.kind, o.gpus) for o in chosen] == [("b", 4), ("a", 4)]


def test_antman_lets_the_overflow_borrow_idle_cycles(apps):
    trace = [job("a", 0, 8, 4.0), job("b", 0, 8, 0.3)]
    found, alone = run("antman", trace, apps), run("antman", trace[:1], apps)
    assert found["b"].started_at == found["a"].started_at
    assert found["a"].ended_at == alone["a"].ended_at, "the guaranteed job is not slowed"


def test_themis_serves_the_worst_treated(apps):
    trace = [job("a", 0, 8, 4.0), job("b", 60, 8)]
    found = run("themis", trace, apps)
    assert found["a"].restarts >= 1
    assert found["b"].ended_at < found["a"].ended_at


def test_shockwave_plans_more_rounds_for_the_worst_treated_and_for_the_longest():
    gpus, whole = np.array([4, 4]), np.array([7200.0, 7200.0])
    unfair = planned(np.array([1.0, 2.0]), gpus, whole, whole, 4)
    assert unfair.tolist() == [0, 20], "twice the slowdown weighs 2 to the 12th"
    # Both stand in the same segment of the logarithm, where a round is worth as much: the longest decides.
    equal = np.array([1.0, 1.0])
    assert planned(equal, gpus, 10 * whole, np.array([36000.0, 39000.0]), 4).tolist() == [0, 20]
    assert (planned(equal, gpus, whole, whole, 8) == 20).all(), "all fit"


def test_shockwave_serves_who_was_treated_worst(apps):
    found = run("shockwave", [job("a", 0, 8, 4.0), job("b", 60, 8)], apps)
    assert found["a"].restarts >= 1
    assert found["b"].ended_at < found["a"].ended_at


def test_lucid_starts_the_least_work_first_and_stops_nobody(apps):
    trace = [job("running", 0, 8, 2.0), job("large", 60, 8, 3.0), job("small", 120, 8, 0.5)]
    found = run("lucid", trace, apps)
    assert found["small"].started_at < found["large"].started_at
    assert all(each.restarts == 0 for each in found.values())


def test_lucid_waits_for_whole_nodes_and_passes_who_does_not_fit(apps):
    trace = [job("a", 0, 3, 2.0), job("b", 0, 3, 2.0), job("spread", 200, 2, 0.5), job("fits", 300, 1, 1.0)]
    found = run("lucid", trace, apps)
    assert found["spread"].started_at >= min(found["a"].ended_at, found["b"].ended_at)
    assert found["fits"].started_at < found["spread"].started_at
    mixed = Scenario(groups=(NodeGroup("t4", 8, 4), NodeGroup("v100", 1, 8)))
    assert run("lucid", [job("wide", 0, 16, 0.1)], apps, mixed)["wide"].ended_at


def test_sia_scales_a_lone_job_out_step_by_step(apps):
    trace = [job("a", 0, 1, batch=2048)]
    found, fixed = run("sia", trace, apps), run("fifo", trace, apps)
    assert found["a"].ended_at < 0.5 * fixed["a"].ended_at
    assert found["a"].restarts >= 2


def test_sia_gives_no_more_gpus_than_the_users_batch_size_keeps_busy(apps):
    """On one type; 128 examples are eight GPUs' least batches."""
    most, scenario = {}, Scenario(nodes=8)
    for batch in (128, 4096):
        found = simulate([job("a", 0, 1, batch=batch)], apps, POLICIES["sia"](scenario), scenario)
        most[batch] = max(moment.gpus for moment in found.moments)
    assert most[128] <= 8 < most[4096]


def test_seats_go_to_the_emptiest_node_and_stay():
    free = [2, 4, 4]
    assert emptiest_first(free, 5) == ((1, 4), (2, 1))
    assert free == [2, 0, 3]
    assert emptiest_first([1, 1], 3) == ()
    assert seated({7: 2, 8: 4}, {7: ((0, 2),)}, (4, 4)) == {7: ((0, 2),), 8: ((1, 4),)}


def test_compact_placement_keeps_whole_nodes_whole():
    held = {1: ((0, 1),), 2: ((1, 1),)}
    found = compact({1: 1, 2: 1, 3: 4}, held, (4, 4))
    assert found[3] in (((0, 4),), ((1, 4),)), "the small ones make room"
    assert len(found) == 3
    assert compact({1: 8}, {}, (4, 4, 4))[1] == ((0, 4), (1, 4))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_rival_says_where_it_comes_from(name):
    module = __import__(type(POLICIES[name](TWO)).__module__, fromlist=["_"])
    assert module.__doc__
    assert len(module.__doc__) > 200
