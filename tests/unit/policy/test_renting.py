"""Rented nodes: the set in use is the best of all sets, as an independent count of time and money finds it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from pollux.goodput import Goodput
from polluxd.model import KEPT_BACK, JobSpec, Spent
from polluxd.policy import decide, decision
from polluxd.policy.cloud.powered_down import rented
from polluxd.policy.cloud.prices import hourly
from polluxd.policy.cloud.renting import NEVER_S
from tests.build import job, node, report, running, snapshot

PRICES = {"big": 2.0, "small": 0.6}


def cloud(name: str, kind: str = "big", **more):
    return node(name, 4 if kind == "big" else 2, features=frozenset({kind}), **{"power": "off", **more})


def trains(number: int, on=("n1",), gpus: int = 4, work: float = 5e5, **more):
    return running(number, on, gpus, **{"report": report(target=work, progress=0.0), **more})


def waits(number: int, spec: JobSpec | None = None, work: float = 1e5):
    return job(number, spec, report=report(target=work, progress=0.0), submitted_at=float(number))


def seen(nodes, jobs, **settings):
    chosen = {
        "objective": "completion-time",
        "cloud_prices": PRICES,
        "cloud_hour_value": 5.0,
        "hysteresis": 0.0,
        "cloud_return_s": 0.0,
    }
    return snapshot(nodes, jobs, **{**chosen, **settings})


def money(snap, names: frozenset[str]) -> float:
    """What jobs' time is worth and nodes cost on a set of rented nodes, counted by hand."""
    nodes = {n.name: n for n in snap.nodes}
    closed = {n.name for n in snap.nodes if n.features and n.name not in names}
    plan = decision.decide(
        replace(snap, nodes=tuple(replace(n, schedulable=n.name not in closed) for n in snap.nodes))
    )
    jobs = {j.job_id: j for j in snap.jobs}
    ends, line, busy = {}, [], []
    for a in plan.allocations:
        j, place = jobs[a.job_id], a.placement
        examples = j.report.target * j.report.limits.initial
        function = Goodput(j.report.params, j.report.noise, j.report.limits, j.spec.adaptive)
        if not place:
            size = a.explanation.next_gpus if a.explanation else 10**6
            rate = function.optimize(1, size).goodput if size <= 4 else function.optimize(2, size).goodput
            line.append((j.submitted_at, a.job_id, size, examples / float(rate) if a.explanation else 1200.0))
            continue
        seconds = examples / float(function.optimize(len(place.nodes), place.gpus).goodput)
        boots = any(nodes[n].power == "off" for n in place.nodes)
        seconds += snap.settings.cloud_boot_s if boots else 0.0
        seconds += j.move_cost if j.placement and place != j.placement else 0.0
        ends[a.job_id] = seconds
        busy.append((seconds, place.gpus))
    now, free = 0.0, sum(n.gpus for n in snap.nodes if n.name not in closed) - sum(g for _, g in busy)
    for _, number, size, seconds in sorted(line):
        while free < size and busy and size < 10**6:
            busy.sort(reverse=True)
            now, freed = busy.pop()
            free += freed
        if free < size:
            ends[number] = NEVER_S + seconds
        else:
            free -= size
            ends[number] = now + seconds
            busy.append((ends[number], size))
    paid = 0.0
    for name in names:
        held = [ends[a.job_id] for a in plan.allocations if name in a.placement.nodes]
        held = [seconds + snap.settings.cloud_return_s for seconds in held]
        paid += PRICES[next(iter(nodes[name].features))] * max(held, default=0.0) / 3600
    return snap.settings.cloud_hour_value * sum(ends.values()) / 3600 + paid


def some_cluster(seed: int, kinds: tuple[str, ...]):
    draw = random.Random(seed)
    nodes = [node("n1")]
    for kind in kinds:
        nodes += [cloud(f"{kind}{i}", kind) for i in range(draw.randint(1, 3))]
    jobs = [trains(1, work=10 ** draw.uniform(4, 6), move_cost=draw.uniform(5, 60))]
    for number in range(2, 2 + draw.randint(0, 3)):
        spec = JobSpec(min_gpus=draw.choice([1, 2, 4]))
        jobs.append(waits(number, spec, work=10 ** draw.uniform(3, 6)))
    return seen(
        nodes,
        jobs,
        cloud_hour_value=draw.choice([0.3, 1.0, 3.0, 10.0]),
        cloud_return_s=draw.choice([0.0, 600.0]),
    )


@pytest.mark.parametrize("seed", range(25))
def test_of_all_numbers_of_one_kind_the_cheapest_in_time_and_money_is_used(seed) -> None:
    snap = some_cluster(seed, ("big",))
    names = sorted(n.name for n in snap.nodes if n.features)
    counted = [money(snap, frozenset(names[:k])) for k in range(len(names) + 1)]
    found = rented(snap)
    assert -found.net == pytest.approx(min(counted))
    assert money(snap, found.nodes) == pytest.approx(min(counted))


def test_of_all_numbers_of_two_kinds_the_cheapest_is_used_or_one_close_to_it() -> None:
    over = []
    for seed in range(15):
        snap = some_cluster(seed, ("big", "small"))
        names = {k: sorted(n.name for n in snap.nodes if k in n.features) for k in PRICES}
        sets = itertools.product(*(range(len(own) + 1) for own in names.values()))
        best = min(
            money(snap, frozenset(n for own, k in zip(names.values(), counts, strict=True) for n in own[:k]))
            for counts in sets
        )
        over.append(-rented(snap).net / best - 1)
    assert min(over) > -1e-9
    assert max(over) < 0.02


OWN, OFF = node("n1"), [cloud("c1"), cloud("c2")]


def places(snap):
    return {a.job_id: a.placement.nodes for a in decide(snap).allocations if a.placement}


def test_a_job_grows_onto_rented_nodes_where_its_time_is_worth_the_price() -> None:
    grows = [trains(1)]
    assert places(seen([OWN, *OFF], grows, cloud_hour_value=0.5)) == {1: ("n1",)}
    plan = decide(seen([OWN, *OFF], grows))
    assert plan.of(1).placement.nodes == ("c1", "c2", "n1")
    assert "Slurm boots c1 and 1 more, 4.00 an hour, for it: it ends " in plan.of(1).reason
    assert hourly(seen([OWN, *OFF], grows), plan) == 4.0


def test_a_long_boot_outweighs_the_gain_of_a_short_job() -> None:
    short = [trains(1, work=1e4)]
    quick, slow = ([replace(n, boot_s=s) for n in OFF] for s in (1.0, 900.0))
    assert len(places(seen([OWN, *quick], short))[1]) > 1
    assert places(seen([OWN, *slow], short)) == {1: ("n1",)}
    assert len(places(seen([OWN, *OFF], short, cloud_boot_s=1.0))[1]) > 1


def test_a_node_is_vacated_where_it_is_not_worth_its_price_any_more_and_kept_a_little_longer() -> None:
    on = [replace(n, power="on") for n in OFF]
    job_on_two = [trains(1, ("n1", "c1"), keeps=("n1", "c1"), resize_cost=2.0)]
    assert places(seen([OWN, *on], job_on_two, cloud_hour_value=5.0))[1] != ("n1",)
    gone = decide(seen([OWN, *on], job_on_two, cloud_hour_value=0.2))
    assert gone.of(1).placement.nodes == ("n1",)
    assert KEPT_BACK in gone.of(1).reason
    # Between the price without and with a boot, a node that is off stays off, and one that is on stays in use.
    between = [
        value / 100
        for value in range(20, 500, 2)
        if places(seen([OWN, *on], job_on_two, cloud_hour_value=value / 100))[1] != ("n1",)
        and places(seen([OWN, *OFF], [trains(1)], cloud_hour_value=value / 100))[1] == ("n1",)
    ]
    assert between


def test_a_waiting_job_does_not_start_on_a_rented_node_that_costs_more_than_its_wait() -> None:
    full = [
        trains(1, work=2e3, spec=JobSpec(max_gpus=4, preemptible=False)),
        waits(2, JobSpec(min_gpus=4), work=2e3),
    ]
    plan = decide(seen([OWN, *OFF], full, cloud_hour_value=1.0))
    assert not plan.of(2).placement
    assert plan.of(2).reason.endswith(f"{KEPT_BACK}any further one is not worth the price now")
    long = [trains(1, work=1e7, spec=JobSpec(max_gpus=4, preemptible=False)), full[1]]
    assert places(seen([OWN, *OFF], long, cloud_hour_value=1.0))[2] == ("c1",)


def test_an_account_of_value_rents_and_another_does_not() -> None:
    values = {"cloud_hour_value": 0.0, "cloud_account_hour_values": {"lab": 9.0}}
    assert len(places(seen([OWN, *OFF], [trains(1)], **values))[1]) > 1
    assert places(seen([OWN, *OFF], [trains(1, account="other")], **values)) == {1: ("n1",)}


def test_most_least_and_hours_bound_the_set() -> None:
    grows, nodes = [trains(1)], [OWN, *OFF, cloud("c3")]
    assert rented(seen(nodes, grows, cloud_most=1)).nodes == {"c1"}
    assert not rented(seen(nodes, grows, cloud_most=0)).nodes
    assert rented(seen(nodes, grows, cloud_hour_value=0.0, cloud_least=2)).nodes == {"c1", "c2"}
    noon, night = ({"taken_at": hour * 3600.0} for hour in (12, 3))
    by_day = seen(nodes, grows, cloud_hours="8-18")
    assert rented(replace(by_day, **noon)).nodes
    assert not rented(replace(by_day, **night)).nodes
    on = replace(by_day, nodes=(OWN, replace(OFF[0], power="on")), jobs=(trains(1, ("n1", "c1")),), **night)
    assert "c1 is outside the hours 8-18 (UTC)" in decide(on).of(1).reason


def test_a_node_with_a_plain_job_or_a_job_that_stays_is_not_given_back() -> None:
    on = [cloud("c1", power="on", foreign_gpus=1), cloud("c2", power="on"), cloud("c3", power="on")]
    stays = running(1, ["c2"], 4, report=report(), pinned=True, pin_reason="a rule")
    found = rented(seen([OWN, *on], [stays], cloud_hour_value=0.0))
    assert found.nodes == {"c1", "c2"}
    assert found.plan.of(1).placement.nodes == ("c2",)


def test_no_job_that_cannot_move_or_has_a_fixed_size_is_put_on_a_spot_node() -> None:
    for spec in (JobSpec(4, 4), JobSpec(4, preemptible=False)):
        alone = [waits(1, spec, work=1e7)]
        free = seen(OFF, alone, cloud_hour_value=50.0)
        assert places(free)[1]
        assert not places(replace(free, settings=replace(free.settings, cloud_interruptions={"big": 2.0})))
    moves = seen(OFF, [waits(1, work=1e7)], cloud_hour_value=50.0, cloud_interruptions={"big": 2.0})
    assert places(moves)[1]


def test_interruptions_are_a_part_of_the_price() -> None:
    often = seen([OWN, *OFF], [trains(1)], cloud_hour_value=3.0, cloud_interruptions={"big": 400.0})
    assert places(replace(often, settings=replace(often.settings, cloud_interruptions={})))[1] != ("n1",)
    assert places(often) == {1: ("n1",)}


@pytest.mark.parametrize("resize", ["in-place", "requeue"])
def test_a_job_that_can_grow_in_place_does_not_stop_for_a_boot(resize: str) -> None:
    able = report(target=5e5, progress=0.0, resize=resize)
    plan = decide(seen([OWN, *OFF], [trains(1, gpus=1, report=able)]))
    assert ("c1" in plan.of(1).placement.nodes) is (resize == "requeue")
    assert plan.of(1).placement.gpus_per_node == 4
    grown = decide(seen([OWN, *OFF], [trains(1, report=able, resize_cost=2.0)]))
    assert {"n1", "c1"} <= set(grown.of(1).placement.nodes)


@pytest.mark.parametrize(
    ("resize", "more", "first"),
    [
        ("in-place", {}, ("n1", "c1")),
        ("requeue", {}, ("c1",)),
        ("in-place", {"contiguous": True}, ("c1",)),
        ("in-place", {"spec": JobSpec(gpu_counts="4,8")}, ("c1",)),
    ],
)
def test_a_job_without_room_to_grow_trains_on_while_its_next_node_boots(resize, more, first) -> None:
    able = report(target=5e5, progress=0.0, resize=resize, explored=2)
    others = trains(2, gpus=3, pinned=True)
    plan = decide(seen([OWN, OFF[0]], [trains(1, gpus=1, report=able, **more), others]))
    assert plan.of(1).placement.nodes == first
    assert plan.of(1).placement.gpus_per_node == (1 if len(first) == 2 else 4)
    assert "Slurm boots c1" in plan.of(1).reason
    assert ("trains while" in plan.of(1).reason) is (len(first) == 2)
    if len(first) == 2:
        up = decide(seen([OWN, replace(OFF[0], power="on")], [trains(1, first, 1, report=able), others]))
        assert up.of(1).placement.nodes == ("c1",)
        assert up.of(1).placement.gpus == 4


@pytest.mark.parametrize(
    ("spec", "settings", "first"),
    [
        (JobSpec(), {}, ("n1", "c1")),
        (JobSpec(max_gpus=5), {}, ("c1",)),
        (JobSpec(adaptive=False), {}, ("c1",)),
        (JobSpec(), {"account_ceilings": {"lab": 5}}, ("c1",)),
    ],
)
def test_a_job_keeps_its_gpus_during_a_boot_also_where_it_goes_to_fewer(spec, settings, first) -> None:
    able = report(target=5e5, progress=0.0, resize="in-place", explored=3)
    others = trains(2, gpus=1, pinned=True)
    jobs = [trains(1, gpus=3, report=able, spec=spec, account="lab"), others]
    plan = decide(seen([OWN, OFF[0]], jobs, cloud_hour_value=200.0, **settings))
    assert plan.of(1).placement.nodes == first


def test_nobody_waits_for_the_boot_of_another_job() -> None:
    able = report(target=1e5, progress=0.0, resize="in-place", explored=4)
    own = replace(OWN, partitions=frozenset({"own", "any"}))
    off = replace(OFF[0], partitions=frozenset({"any"}))
    goes = trains(1, report=able, account="poor", partition="any")
    starts = replace(waits(2, JobSpec(min_gpus=4), work=1e6), account="rich", partition="own")
    plan = decide(seen([own, off], [goes, starts], cloud_account_hour_values={"poor": 0.5, "rich": 20.0}))
    assert (plan.of(1).placement.nodes, plan.of(2).placement.nodes) == (("c1",), ("n1",))


def test_a_node_stays_until_the_interval_ends_that_is_paid_for() -> None:
    def used(minute: float, interval: float = 3600.0) -> bool:
        on = replace(OFF[0], power="on", booted_at=1e9 - 60.0 * minute)
        job = trains(1, ("n1", "c1"), keeps=("n1", "c1"), resize_cost=2.0)
        prices = {"cloud_hour_value": 0.5, "cloud_paid_interval_s": interval, "cloud_return_s": 300.0}
        return "c1" in places(seen([OWN, on], [job], **prices))[1]

    assert [used(minute) for minute in (10.0, 50.0, 54.0, 70.0)] == [True, True, False, True]
    assert not used(10.0, interval=0.0)
    rents = {"cloud_hour_value": 5.0, "cloud_boot_s": 0.0}
    for interval, nodes in ((0.0, 3), (3600.0, 1)):
        short = seen([OWN, *OFF], [trains(1, work=5e4)], cloud_paid_interval_s=interval, **rents)
        assert len(places(short)[1]) == nodes


def test_the_reason_names_the_job_that_gains_and_the_plan_how_fast() -> None:
    assert decide(seen(OFF, [waits(1)], cloud_hour_value=50.0)).sooner == {1: 1.0}, "it would wait"
    alone = decide(seen([OWN], [trains(1)])).of(1).goodput
    grown = decide(seen([OWN, *OFF], [trains(1)]))
    assert grown.sooner[1] == pytest.approx(grown.of(1).goodput / alone - 1.0)
    assert decide(seen([OWN], [trains(1)])).sooner == {}
    own, rented_one = (
        replace(OWN, partitions=frozenset({"own", "any"})),
        replace(OFF[0], partitions=frozenset({"any"})),
    )
    makes_room = trains(1, account="poor", work=1e5, partition="any")
    gains = waits(2, JobSpec(min_gpus=4), work=1e6)
    values = {"poor": 0.5, "rich": 20.0}
    jobs = [makes_room, replace(gains, account="rich", partition="own")]
    plan = decide(seen([own, rented_one], jobs, cloud_account_hour_values=values))
    assert "Slurm boots c1, 2.00 an hour, for job 2: it ends 78 min sooner" in plan.of(1).reason


def test_a_node_of_many_is_found_by_doublings() -> None:
    many = seen([OWN, *(cloud(f"c{i:02d}") for i in range(40))], [trains(1)])
    found = rented(many)
    assert len(found.nodes) > 1
    assert found.tried < 60


def spends(nodes, jobs, spent: Spent, **settings):
    """A boot of 300 s, as long again, and a return of 300 s cost 0.5 on a node of 2 an hour."""
    return replace(seen(nodes, jobs, **{"cloud_return_s": 300.0, **settings}), spent=spent)


@pytest.mark.parametrize("span", ["day", "month"])
def test_a_budget_allows_the_nodes_that_it_can_boot_use_and_give_back(span: str) -> None:
    grows, budget = [trains(1)], {f"cloud_{span}_budget": 10.0}
    for cost, nodes in ((0.0, 2), (8.9, 2), (9.1, 1), (9.51, 0)):
        assert len(rented(spends([OWN, *OFF], grows, Spent(**{span: cost}), **budget)).nodes) == nodes
    assert len(rented(spends([OWN, *OFF], grows, Spent(day=99.0, month=99.0))).nodes) == 2


def test_nodes_are_vacated_while_the_budget_still_pays_for_their_return() -> None:
    on = [replace(n, power="on") for n in OFF]
    held = [trains(1, ("n1", "c1", "c2"), keeps=("n1", "c1", "c2"), resize_cost=2.0)]
    for cost, left in ((9.6, 3), (9.7, 1)):
        plan = decide(spends([OWN, *on], held, Spent(day=cost), cloud_day_budget=10.0, cloud_least=2))
        assert len(plan.of(1).placement.nodes) == left
    assert "c1 and 1 more is beyond the budget now" in plan.of(1).reason


def test_the_budget_of_an_account_keeps_its_jobs_off_rented_nodes_and_no_others() -> None:
    on = [replace(n, power="on") for n in OFF]
    jobs = [trains(1, ("c1",), account="poor"), trains(2, ("c2",), account="rich")]
    budgets = {"cloud_account_day_budgets": {"poor": 1.0, "rich": 50.0}}
    spent = Spent(account_day={"poor": 0.9, "rich": 0.9})
    found = places(spends([OWN, *on], jobs, spent, **budgets))
    assert found[1] == ("n1",)
    assert set(found[2]) & {"c1", "c2"}


def test_without_prices_nothing_changes() -> None:
    snap = seen([OWN, *OFF], [trains(1), waits(2)], cloud_prices={})
    assert decide(snap) == decide(replace(snap, settings=replace(snap.settings, cloud_hour_value=99.0)))


@pytest.mark.parametrize("fixed", [False, True])
def test_whoever_is_barred_from_rented_nodes_gains_no_own_ones(fixed: bool) -> None:
    """Others would be moved to rented nodes, and pay for both."""
    own = [node("o1"), node("o2")]
    on = [cloud(name, power="on") for name in ("c1", "c2")]
    spec = JobSpec(min_gpus=8, max_gpus=8) if fixed else JobSpec()
    bob = trains(1, ("o1", "o2"), 4, account="rich", user="bob", spec=JobSpec(max_gpus=8))
    alice = replace(waits(2, spec, work=5e5), account="poor", user="alice")
    settings = {"cloud_account_day_budgets": {"poor": 1.0, "rich": 50.0}}
    if fixed:
        settings = {"cloud_interruptions": {"big": 1.0}}
    snap = seen([*own, *on], [bob, alice], **settings)
    spent = Spent(account_day={} if fixed else {"poor": 1.0})
    found = decide(replace(snap, spent=spent))
    assert found.of(1).placement.nodes == ("o1", "o2"), found.of(1).reason
    assert not found.of(2).placement or set(found.of(2).placement.nodes) <= {"o1", "o2"}
