"""Ceilings and guarantees: exact against brute force, kept in every plan."""

from __future__ import annotations

import numpy as np
import pytest

from polluxd.config.settings import PolicySettings
from polluxd.model import GpuLimit, JobSpec
from polluxd.policy import counts, decide, price
from polluxd.policy.owners import Group, groups, nested
from tests.build import job, nodes, report, running, snapshot
from tests.unit.policy.count_instances import best_limited, flat, limited


@pytest.mark.parametrize("floors", [False, True])
def test_counts_under_nested_limits_equal_brute_force(floors):
    for seed in range(400):
        table, capacity, inside = limited(seed, floors=floors)
        gpus, value, start = flat(table)
        chosen, total = counts.solve(gpus, value, start, capacity, inside)
        assert total == pytest.approx(best_limited(table, capacity, inside)), seed
        assert value[chosen].sum() == pytest.approx(total)
        assert gpus[chosen].sum() <= capacity
        for g in inside:
            assert gpus[chosen][list(g.members)].sum() <= g.ceiling


@pytest.mark.parametrize("floors", [False, True])
def test_price_keeps_limits_and_its_bound_holds(floors):
    losses = []
    for seed in range(400):
        table, capacity, inside = limited(seed, floors=floors)
        gpus, value, start = flat(table)
        found = price.solve(gpus, value, start, capacity, inside)
        best = best_limited(table, capacity, inside)
        assert found.bound >= best - 1e-9 * abs(best)
        assert gpus[found.chosen].sum() <= capacity
        for g in inside:
            assert gpus[found.chosen][list(g.members)].sum() <= g.ceiling
        losses.append(best - found.total)
    if not floors:
        assert np.mean(np.array(losses) <= 1e-9) > 0.95


def test_groups_come_from_settings_and_guarantees_are_cut_to_what_exists():
    jobs = [job(1, user="ada", account="lab"), job(2, user="bob", account="lab"), job(3, account="big")]
    found = groups(
        jobs,
        PolicySettings(
            user_ceilings={"bob": 2, "eve": 1},
            account_guarantees={"big": 6, "lab": 6},
            account_ceilings={"lab": 5},
        ),
        8,
    )
    assert found == (
        Group("user bob", (1,), 0, 2),
        Group("account big", (2,), 6, 1 << 40),
        Group("account lab", (0, 1), 2, 5),
    )
    assert nested(found)
    assert not nested([Group("a", (0, 1), 0, 1), Group("b", (1, 2), 0, 1)])


def test_plan_keeps_an_accounts_ceiling_and_says_so():
    jobs = [job(n, report=report(), account="lab") for n in (1, 2)] + [job(3, report=report(), account="big")]
    plan = decide(snapshot(nodes(4), jobs, account_ceilings={"lab": 3}))
    assert sum(plan.of(n).placement.gpus for n in (1, 2)) == 3
    assert plan.of(3).placement.gpus == 12
    assert "account lab" in plan.of(1).reason
    assert plan.of(1).explanation.limit == "ceiling"


@pytest.mark.parametrize(
    ("held", "words"), [(0, "infeasible: "), (4, "parked, gives up 4 GPUs; infeasible: ")]
)
def test_a_job_whose_least_is_above_a_ceiling_is_infeasible_and_told_which(held, words):
    spec = JobSpec(min_gpus=4)
    own = running(1, ["n000"], held, spec, report=report()) if held else job(1, spec, report=report())
    snap = snapshot(nodes(4), [own, job(2, report=report(), account="big")], account_ceilings={"lab": 2})
    plan = decide(snap)
    assert (
        plan.of(1).reason == f"{words}the job needs at least 4 GPUs, and the ceiling of account lab is 2 GPUs"
    )
    assert plan.of(1).explanation.limit == "ceiling"
    assert plan.of(2).placement.gpus >= 12
    nobody = decide(snapshot(nodes(1), [job(1, report=report())], user_ceilings={"ada": 0}))
    assert (
        nobody.of(1).reason
        == "infeasible: the job needs at least 1 GPU, and the ceiling of user ada is 0 GPUs"
    )


def test_plan_keeps_a_guarantee_against_weights():
    jobs = [job(n, report=report(), account="big", weight=50.0) for n in (1, 2, 3)]
    jobs += [job(4, report=report(), account="lab")]
    poor = decide(snapshot(nodes(4), jobs)).of(4).placement.gpus
    assert decide(snapshot(nodes(4), jobs, account_guarantees={"lab": 8})).of(4).placement.gpus == 8 > poor


def test_a_guarantee_without_use_is_lent_to_others():
    jobs = [
        job(1, JobSpec(max_gpus=1), report=report(), account="lab"),
        job(2, report=report(), account="big"),
    ]
    plan = decide(snapshot(nodes(2), jobs, account_guarantees={"lab": 6}))
    assert plan.of(1).placement.gpus == 1
    assert plan.of(2).placement.gpus == 4


def test_users_in_several_accounts_are_held_to_their_ceiling_too():
    jobs = [
        job(n, report=report(), user=u, account=a)
        for n, (u, a) in enumerate([("ada", "lab"), ("ada", "big"), ("bob", "lab"), ("bob", "big")], 1)
    ]
    limits = {"user_ceilings": {"ada": 3}, "account_ceilings": {"lab": 5, "big": 5}}
    plan = decide(snapshot(nodes(4), jobs, **limits))
    held = {n: plan.of(n).placement.gpus for n in range(1, 5)}
    assert held[1] + held[2] <= 3
    assert held[1] + held[3] <= 5
    assert held[2] + held[4] <= 5
    assert all(held.values())


def test_pinned_jobs_count_towards_the_ceiling_and_running_ones_shrink_to_it():
    jobs = [running(1, ["n000"], 4, report=report(), pinned=True), running(2, ["n001"], 4, report=report())]
    plan = decide(snapshot(nodes(4), jobs, account_ceilings={"lab": 6}))
    assert plan.of(1).placement.gpus == 4
    assert plan.of(2).placement.gpus == 2


def test_slurm_s_limits_guarantee_nothing_and_limits_that_bind_nobody_are_left_out():
    limits = (
        GpuLimit("gres/gpu=6 of account lab", (2, 1, 99), 6),
        GpuLimit("gres/gpu=1 of account lab", (1,), -2),
        GpuLimit("as large as the cluster", (1,), 8),
        GpuLimit("of jobs that are gone", (99,), 2),
    )
    assert groups([job(1), job(2)], PolicySettings(), 8, limits) == (
        Group("gres/gpu=6 of account lab", (0, 1), 0, 6),
        Group("gres/gpu=1 of account lab", (0,), 0, 0),
    )


def test_a_ceiling_with_room_for_the_next_gpu_is_not_named():
    jobs = [job(1, report=report(), user="ada", account="lab")]
    plan = decide(snapshot(nodes(4), jobs, user_ceilings={"ada": 2}, account_ceilings={"lab": 3}))
    assert "the ceiling of user ada is reached" in plan.of(1).reason


def test_ceilings_with_room_for_everybody_cost_nothing():
    """Three jobs want four GPUs each; both of their groups may hold more."""
    gpus, value = np.tile([0, 2, 4], 3), np.tile([-8.0, -2.0, -1.0], 3)
    roomy = [Group("user ada", (0, 1), 0, 9), Group("account lab", (0, 1, 2), 0, 13)]
    found = price.solve(gpus, value, np.array([0, 3, 6, 9]), 16, roomy)
    assert (found.total, found.bound, found.price) == (-3.0, -3.0, 0.0)
    assert found.proven
