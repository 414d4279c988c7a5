"""Rented nodes: the set in use is the best of all sets, as an independent count of time and money finds it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from pollux.goodput import Goodput
from polluxd.apply.plain_jobs import unplaced
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


def test_a_node_with_a_plain_job_or_a_job_that_stays_is_not_given_back() -> None:
    on = [cloud("c1", power="on", foreign_gpus=1), cloud("c2", power="on"), cloud("c3", power="on")]
    stays = running(1, ["c2"], 4, report=report(), pinned=True, pin_reason="a rule")
    found = rented(seen([OWN, *on], [stays], cloud_hour_value=0.0))
    assert found.nodes == {"c1", "c2"}
    assert found.plan.of(1).placement.nodes == ("c2",)


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
    jobs = [makes_room, replace(gains, account="rich", partition="own")]
    plan = decide(seen([own, rented_one], jobs, cloud_hour_value=20.0))
    assert "Slurm boots c1, 2.00 an hour, for job 2: it ends 78 min sooner" in plan.of(1).reason


def test_a_node_of_many_is_found_by_doublings() -> None:
    many = seen([OWN, *(cloud(f"c{i:02d}") for i in range(40))], [trains(1)])
    found = rented(many)
    assert len(found.nodes) > 1
    assert found.tried < 60


@pytest.mark.parametrize("partitions", [frozenset[str](), frozenset({"gpu"})])
def test_the_budget_of_an_account_keeps_its_jobs_off_rented_nodes_and_no_others(partitions) -> None:
    """A node that names no partition is open to all."""
    own = replace(OWN, partitions=partitions)
    on = [replace(n, power="on", partitions=partitions) for n in OFF]
    jobs = [
        trains(1, ("c1",), account="poor", partition=",".join(partitions)),
        trains(2, ("c2",), account="rich", partition=",".join(partitions)),
    ]
    budgets = {"cloud_month_budgets": {"poor": 1.0, "rich": 50.0}}
    spent = Spent({"poor": 0.9, "rich": 0.9})
    snap = seen([own, *on], jobs, cloud_return_s=300.0, **budgets)
    found = places(replace(snap, spent=spent))
    assert found[1] == ("n1",)
    assert set(found[2]) & {"c1", "c2"}


def test_without_prices_nothing_changes() -> None:
    snap = seen([OWN, *OFF], [trains(1), waits(2)], cloud_prices={})
    assert decide(snap) == decide(replace(snap, settings=replace(snap.settings, cloud_hour_value=99.0)))


def test_whoever_is_barred_from_rented_nodes_gains_no_own_ones() -> None:
    """Others would be moved to rented nodes, and pay for both."""
    own = [node("o1"), node("o2")]
    on = [cloud(name, power="on") for name in ("c1", "c2")]
    bob = trains(1, ("o1", "o2"), 4, account="rich", user="bob", spec=JobSpec(max_gpus=8))
    alice = replace(waits(2, JobSpec(), work=5e5), account="poor", user="alice")
    snap = seen([*own, *on], [bob, alice], cloud_month_budgets={"poor": 1.0, "rich": 50.0})
    found = decide(replace(snap, spent=Spent({"poor": 1.0})))
    assert found.of(1).placement.nodes == ("o1", "o2"), found.of(1).reason
    assert not found.of(2).placement or set(found.of(2).placement.nodes) <= {"o1", "o2"}


@pytest.mark.parametrize("name", ["lab", "*"])
@pytest.mark.parametrize(("spent", "nodes"), [(0.0, 3), (8.99, 3), (9.01, 2), (9.49, 2), (9.51, 1)])
def test_an_account_without_a_rented_node_rents_what_its_budget_can_boot_and_give_back(
    spent, nodes, name
) -> None:
    """A boot of 300 s, as long again, and a return of 300 s cost 0.5 on a node of 2 an hour."""
    grows = [trains(1, account="lab")]
    snap = seen([OWN, *OFF], grows, cloud_return_s=300.0, cloud_month_budgets={name: 10.0})
    assert len(places(replace(snap, spent=Spent({"lab": spent})))[1]) == nodes


def test_where_all_budgets_are_used_up_the_plan_is_that_of_the_own_nodes_and_slurm_starts_nothing() -> None:
    jobs = [trains(1, account="lab", work=1e7), waits(2, JobSpec(min_gpus=4))]
    jobs[1] = replace(jobs[1], account="lab")
    snap = seen([OWN, *OFF], jobs, cloud_month_budgets={"lab": 1.0})
    plan, own = decide(replace(snap, spent=Spent({"lab": 1.0}))), decide(seen([OWN], jobs))
    assert [a.placement for a in plan.allocations] == [a.placement for a in own.allocations]
    without = next(a for a in plan.allocations if not a.placement)
    assert without.reason.endswith(f"{KEPT_BACK}its account's budget for rented nodes is used up")
    assert not unplaced(snap, plan), "Slurm would boot a node for it"
