"""Completion time as the objective: the market clears, plans follow."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from polluxd.config.settings import PolicySettings
from polluxd.policy import decide, market, objective
from polluxd.policy.domains import split
from polluxd.policy.option_table import build
from polluxd.policy.owners import Group
from tests.build import job, node, nodes, report, running, snapshot
from tests.unit.policy.every_plan import compared, outside_the_gap, racked, small, two_types
from tests.unit.policy.invariants import check
from tests.unit.policy.scenarios import random_snapshot

COMPLETION = {"objective": objective.COMPLETION_TIME}


def offers(seed, jobs=12, types=1, capacity=16, groups=()):
    """Random options: goodput rises with GPUs, by less and less for most jobs."""
    rng = np.random.default_rng(seed)
    gpus, goodput, kind, start = [], [], [], [0]
    for _ in range(jobs):
        gpus.append(0), goodput.append(0.0), kind.append(-1)
        exponent = rng.uniform(0.2, 0.95)
        speed = rng.uniform(0.5, 20, types)
        for count in (1, *sorted(rng.choice(np.arange(2, 9), rng.integers(0, 6), replace=False))):
            for k in range(types):
                gpus.append(int(count)), kind.append(k)
                goodput.append(float(speed[k] * count**exponent * rng.uniform(0.9, 1.1)))
        start.append(len(gpus))
    per_type = np.array([capacity] * types)
    arrays = (np.array(gpus), np.array(goodput), np.array(kind), np.array(start))
    return market.MarketOptions(*arrays, per_type, groups)


def weights_and_work(seed, jobs=12):
    rng = np.random.default_rng(seed + 1)
    return rng.uniform(0.5, 2, jobs), rng.lognormal(8, 1.5, jobs), np.zeros(jobs)


def demand(offered, worth, price):
    """GPUs that each job buys at a price, given what its work is worth."""
    bought = []
    for j, (a, b) in enumerate(pairwise(offered.start.tolist())):
        net = worth[j] * offered.goodput[a:b] - price * offered.gpus[a:b]
        bought.append(int(offered.gpus[a:b][np.argmax(net)]))
    return np.array(bought)


@pytest.mark.parametrize("seed", range(20))
def test_demand_at_the_price_is_within_capacity_and_above_it_just_below(seed):
    offered = offers(seed)
    found = market.clear(offered, *weights_and_work(seed), 1.5)
    price = float(found.price[0])
    assert price > 0
    assert demand(offered, found.worth, price * (1 + 1e-6)).sum() <= 16
    assert demand(offered, found.worth, price * (1 - 1e-6)).sum() > 16


@pytest.mark.parametrize("seed", range(10))
def test_work_is_worth_the_least_that_finishing_it_costs(seed):
    offered = offers(seed)
    weight, work, done = weights_and_work(seed)
    found = market.clear(offered, weight, work, done, 0.0)
    finish = np.argsort(found.seconds)
    left = {int(j): float(weight[finish[i:]].sum() / weight.sum()) for i, j in enumerate(finish)}
    for j, (a, b) in enumerate(pairwise(offered.start.tolist())):
        gpus, goodput = offered.gpus[a + 1 : b], offered.goodput[a + 1 : b]
        cost = (weight[j] + found.price[0] * np.sqrt(left[j]) * gpus) / goodput
        assert found.worth[j] == pytest.approx(cost.min())


@pytest.mark.parametrize("types", [2, 3])
def test_each_gpu_type_has_a_price_at_which_demand_is_near_its_capacity(types):
    offered = offers(3, jobs=200, types=types, capacity=150)
    weight, work, done = weights_and_work(3, 200)
    found = market.clear(offered, weight, work, done, 1.5)
    wanted = np.zeros(types)
    for j, (a, b) in enumerate(pairwise(offered.start.tolist())):
        paid = np.where(offered.kind[a:b] >= 0, found.price[offered.kind[a:b]], 0) * offered.gpus[a:b]
        best = a + int(np.argmax(found.worth[j] * offered.goodput[a:b] - paid))
        wanted[offered.kind[best]] += offered.gpus[best]
    assert wanted == pytest.approx(offered.capacity, rel=0.1)


@pytest.mark.parametrize("types", [1, 2])
def test_a_job_that_cannot_begin_with_one_gpu_is_not_priced_out(types):
    """It is alike to the elastic jobs, except that it runs on 4 GPUs or not at all."""
    counts = [(0, 1, 2, 3, 4)] * 30 + [(0, 4)]
    gpus, goodput, kind, start = [], [], [], [0]
    for each in counts:
        for count in each:
            for k in range(types if count else 1):
                gpus.append(count), goodput.append(count**0.8), kind.append(k if count else -1)
        start.append(len(gpus))
    capacity = np.array([16 // types] * types)
    arrays = (np.array(gpus), np.array(goodput), np.array(kind), np.array(start))
    offered = market.MarketOptions(*arrays, capacity)
    own = slice(offered.start[30], offered.start[31])
    work = np.array([5000.0] * 30 + [5e6])  # it ends last, when GPUs are cheap
    wide = offered._replace(gpus=np.where(np.arange(len(gpus)) < own.start, offered.gpus, 2 * offered.gpus))
    most = []
    for each in (offered, wide):
        found = market.clear(each, np.ones(31), work, np.zeros(31), 0.0)
        most.append((found.worth[30] * each.goodput[own] - found.price.max() * each.gpus[own]).max())
    # Half of the cluster is more than a quarter: the price counts for the rest of it.
    assert most[0] > 0 >= most[1]


@pytest.mark.parametrize("types", [1, 2])
def test_jobs_of_replicas_that_fill_the_cluster_do_not_price_out_all_others(types):
    counts = [(0, 1, 2, 4)] * 20 + [(0, 8, 16)] * 9
    gpus, goodput, kind, start = [], [], [], [0]
    for each in counts:
        for count in each:
            for k in range(types if count else 1):
                gpus.append(count), goodput.append(count**0.7), kind.append(k if count else -1)
        start.append(len(gpus))
    arrays = (np.array(gpus), np.array(goodput), np.array(kind), np.array(start))
    offered = market.MarketOptions(*arrays, np.array([64 // types] * types))
    work = np.array([*np.linspace(1000.0, 20_000.0, 20), *[20_000.0] * 9])
    found = market.clear(offered, np.ones(29), work, np.zeros(29), 2.0)
    assert demand(offered, found.worth, found.price.max())[:20].sum() > 8, "of 64 GPUs"


def test_no_price_where_there_are_gpus_for_everybody():
    found = market.clear(offers(1, capacity=1000), *weights_and_work(1), 1.5)
    assert found.price.tolist() == [0.0]


def test_more_jobs_than_gpus_and_unknown_lengths_still_have_a_finite_price():
    offered = offers(2, jobs=50, capacity=4)
    found = market.clear(offered, np.ones(50), np.full(50, np.nan), np.zeros(50), 0.0)
    assert 0 < found.price[0] < np.inf
    assert np.all(np.isfinite(found.worth))
    assert np.all(found.seconds == found.seconds[0])


def test_a_job_of_unknown_length_is_expected_to_take_as_long_again_and_no_less_than_is_usual():
    work = np.array([100.0, np.nan, np.nan])
    offered = offers(5, jobs=3, capacity=60)
    found = market.clear(offered, np.ones(3), work, np.array([0.0, 0.0, 1e6]), 0.0)
    assert found.seconds[1] == found.seconds[0]
    assert found.seconds[2] > 10 * found.seconds[0]
    unknown = market.clear(offered, np.ones(3), np.full(3, np.nan), np.zeros(3), 0.0)
    assert unknown.seconds.tolist() == [market.UNKNOWN] * 3
    limit = np.array([60.0, np.inf, 1e6])
    limited = market.clear(offered, np.ones(3), np.full(3, np.nan), np.zeros(3), 0.0, limit)
    assert limited.seconds.tolist() == [60.0, market.UNKNOWN, market.UNKNOWN]


def test_a_job_of_unknown_length_is_taken_to_end_within_its_time_limit():
    gpus = []
    for limit in (None, 120.0):
        jobs = [job(1, report=report()), job(2, report=report()), job(3, report=report(), time_limit=limit)]
        plan = decide(snapshot(nodes(1), jobs, waiting_power=0.0, **COMPLETION))
        gpus.append(plan.of(3).placement.gpus)
    assert gpus[0] < gpus[1]


def test_jobs_under_a_full_ceiling_compete_at_a_price_of_their_own():
    free = market.clear(offers(4, capacity=60), *weights_and_work(4), 0.0)
    held = market.clear(
        offers(4, capacity=60, groups=(Group("user eve", (0, 1, 2), 0, 2),)), *weights_and_work(4), 0.0
    )
    assert np.all(held.worth[:3] >= free.worth[:3])
    assert np.any(held.worth[:3] > free.worth[:3])
    assert np.all(held.worth[3:] <= free.worth[3:] * (1 + 1e-9))


def by_completion(make, **settings):
    def made(seed):
        snap = make(seed)
        return replace(snap, settings=replace(snap.settings, **COMPLETION, **settings))

    return made


@pytest.mark.parametrize("make", [small, two_types, racked])
def test_plan_lies_within_its_gap_of_the_best_there_is(make):
    found = compared(by_completion(make), range(120))
    assert len(found) >= 10
    assert not outside_the_gap(found)
    short = [c.seed for c in found if c.shortfall > 1e-6]
    assert len(short) <= 0.05 * len(found), short


@pytest.mark.parametrize(
    ("moves", "age", "grows"), [(0, 20_000.0, True), (100, 20_000.0, False), (0, 60.0, False)]
)
def test_a_dear_move_pays_for_a_job_that_stays_where_it_is_for_long(moves, age, grows):
    slow = report("stubborn", progress=0.0, target=1e6)
    told = running(1, ["n000"], 1, report=slow, age=age, moves=moves, move_cost=400.0)
    gained = decide(snapshot(nodes(1), [replace(told, move_cost=0.0)], **COMPLETION)).of(1).goodput
    kept = decide(snapshot(nodes(1), [replace(told, move_cost=1e6)], **COMPLETION)).of(1).goodput
    assert 1.1 < gained / kept < 1.5
    assert decide(snapshot(nodes(1), [told], **COMPLETION)).of(1).changed == grows


@pytest.mark.parametrize("seed", range(60))
def test_plans_keep_every_rule_and_say_the_same_in_any_order(seed):
    snap = random_snapshot(seed)
    snap = replace(snap, settings=replace(snap.settings, **COMPLETION))
    plan = decide(snap)
    check(snap, plan)
    turned = replace(snap, jobs=tuple(reversed(snap.jobs)), nodes=tuple(reversed(snap.nodes)))
    assert decide(turned) == plan


def declared(number, seconds, **more):
    """A job that has about so many seconds left on one GPU."""
    left = report(progress=0.0, target=seconds * 10.0)
    return job(number, report=left, **more)


def test_of_like_jobs_the_shorter_one_is_served_first():
    jobs = [declared(1, 50_000), declared(2, 500), declared(3, 5_000)]
    plan = decide(snapshot(nodes(1), jobs, kappa=0.0, **COMPLETION))
    given = [plan.of(n).placement.gpus for n in (1, 2, 3)]
    assert given[1] >= given[2] >= given[0]
    assert given[1] > given[0]


def test_weights_and_the_tail_shift_what_a_job_is_given():
    def given(number, **settings):
        jobs = [declared(1, 40_000), declared(2, 20_000), declared(3, 10_000, user="eve")]
        return decide(snapshot(nodes(4), jobs, **COMPLETION, **settings)).of(number).placement.gpus

    assert given(3, user_weights={"eve": 20.0}) > given(3)
    assert given(1, kappa=50.0) > given(1, kappa=0.0)


def test_the_last_job_counts_beside_many_jobs_too():
    def extra(jobs, weight=1.0):
        """Seconds that the long job's time counts beyond its weight. GPUs are for nothing here."""
        offered = offers(3, jobs=jobs, capacity=10_000)
        work = np.full(jobs, 1e3)
        work[0] = 1e5
        found = [
            market.clear(offered, np.full(jobs, weight), work, np.zeros(jobs), kappa) for kappa in (2.0, 0.0)
        ]
        assert found[0].price == 0.0
        return found[0].worth[0] / found[1].worth[0] - 1.0

    assert extra(100) > 0.5 * extra(10) > 0.5
    assert extra(100, weight=0.02) < 10 * extra(100), "100 jobs with the weight of two count as two"


def test_a_job_about_to_end_is_not_moved_and_none_is_shrunk_for_it():
    ending = report(progress=9_990.0, target=10_000.0)
    busy = report(progress=0.0, target=1e6)
    jobs = [
        running(1, ["n000"], 2, report=ending, move_cost=30.0),
        running(2, ["n001"], 4, report=busy, move_cost=30.0),
    ]
    plan = decide(snapshot(nodes(2), jobs, **COMPLETION))
    assert not plan.of(1).changed
    assert not plan.of(2).changed


def test_a_job_is_shrunk_for_another_that_goes_on_but_not_for_one_that_ends_before_that_pays():
    def given_to_the_other(left):
        near = running(1, ["n000"], 1, report=report(progress=1e4 - left, target=1e4), move_cost=30.0)
        other = running(2, ["n000"], 3, report=report(progress=0.0, target=1e6), move_cost=30.0)
        return decide(snapshot(nodes(1), [near, other], kappa=0.0, **COMPLETION)).of(2).placement.gpus

    assert given_to_the_other(left=5_000.0) < 3
    assert given_to_the_other(left=10.0) == 3


def test_the_default_settings_name_a_known_objective():
    assert PolicySettings().objective in objective.OBJECTIVES


def test_a_node_out_of_service_adds_nothing_to_what_the_market_sells():
    jobs = [declared(n, 1_000 * n) for n in range(1, 6)]
    one = decide(snapshot([node("n000"), node("n001", schedulable=False)], jobs, **COMPLETION))
    other = decide(snapshot([node("n000")], jobs, **COMPLETION))
    assert [a.placement for a in one.allocations] == [a.placement for a in other.allocations]


def test_a_plan_tells_the_price_of_each_gpu_type_and_none_under_fair_share():
    busy = [declared(n, 1_000 * n) for n in range(1, 9)]
    one = decide(snapshot(nodes(1), busy, **COMPLETION))
    told = [a.explanation.gpu_price for a in one.allocations]
    assert one.gpu_prices == {"": pytest.approx(max(told))}
    assert one.gpu_prices[""] > 0
    fast = report().params
    slow = fast._replace(alpha_grad=4 * fast.alpha_grad, beta_grad=4 * fast.beta_grad)
    apart = report(params_by_type={"a100": fast, "v100": slow})
    two = [node("n000", gpu_type="a100"), node("n001", gpu_type="v100")]
    jobs = [replace(j, report=replace(apart, target=1_000.0 * j.job_id)) for j in busy]
    priced = decide(snapshot(two, jobs, **COMPLETION)).gpu_prices
    assert priced["a100"] > priced["v100"] > 0
    assert decide(snapshot(nodes(1), [], **COMPLETION)).gpu_prices == {"": 0.0}
    assert decide(snapshot(nodes(1), busy, objective="fair-share")).gpu_prices == {}


def test_the_work_left_is_known_only_below_a_target():
    def left(**progress):
        return market.work(job(1, report=report(**progress)))

    assert left(progress=10.0, target=30.0) == (20.0 * 64, 10.0 * 64)
    for unknown in (left(progress=10.0), left(progress=30.0, target=30.0), market.work(job(1))):
        assert np.isnan(unknown[0])
    assert left(progress=10.0)[1] == 640.0


def test_no_chance_tells_apart_two_jobs_that_could_each_use_the_faster_type():
    """One of the two types is four times as fast, and neither job's by chance."""
    gpus, goodput = np.tile([0, 8, 8], 2), np.tile([0.0, 10.0, 40.0], 2)
    kind, start = np.tile([-1, 0, 1], 2), np.array([0, 3, 6])
    offered = market.MarketOptions(gpus, goodput, kind, start, np.array([8, 8]))
    found = market.clear(offered, np.ones(2), np.array([4_000.0, 4_040.0]), np.zeros(2), 1.5)
    assert found.seconds[1] == pytest.approx(1.01 * found.seconds[0], rel=1e-3)
    assert 100.0 < found.seconds[0] < 400.0


def test_gpus_that_add_next_to_nothing_are_left_idle():
    alone = job(1, report=report(), started=True)
    gpus = {}
    for least in (0.0, 0.2, 0.5, 0.9):
        snap = snapshot(nodes(8), [alone], least_gain=least, **COMPLETION)
        gpus[least] = decide(snap).of(1).placement.gpus
        (domain,) = split(snap)
        table = build(domain, snap.settings)
        goodput = dict(zip(table.gpus.tolist(), table.goodput.tolist(), strict=True))
        best = max(goodput[k] / k for k in goodput if k)
        smaller = max(k for k in goodput if k < gpus[least])
        added = (goodput[gpus[least]] - goodput[smaller]) / (gpus[least] - smaller)
        assert added >= least * best
    assert gpus[0.0] == 32
    assert list(gpus.values()) == sorted(gpus.values(), reverse=True)
    assert 1 <= gpus[0.9] < gpus[0.5] < 32


@pytest.mark.parametrize("held", [1, 2])
def test_a_job_that_is_parked_loses_as_much_as_by_a_move_from_what_it_holds(held):
    """Its next start has to be paid for: with nothing where moves are free."""
    for cost in (0.0, 300.0):
        jobs = [
            running(1, ["n000"], held, report=report(), age=600.0, move_cost=cost),
            job(2, report=report()),
        ]
        (domain,) = split(snapshot(nodes(1), jobs, hysteresis=0.0, **COMPLETION))
        table = build(domain, PolicySettings(hysteresis=0.0, **COMPLETION))
        own = np.array(table.options(0))
        factor = table.factor[own][-1]
        assert (factor == 1.0) == (cost == 0.0)
        stays = table.stay[own][table.kept[own]].item()
        expected = table.stay[own] * factor
        expected[table.gpus[own] == 0] -= stays * (1.0 - factor)
        assert table.move[own] == pytest.approx(expected, abs=1e-8)
        assert table.stay[own][0] == pytest.approx(0.0, abs=1e-8)
