"""Fairness per user or account: equal shares, whatever the number of jobs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polluxd.config.settings import PolicySettings
from polluxd.model import JobSpec
from polluxd.policy import decide, owners
from polluxd.policy.domains import split
from polluxd.policy.owners import divided, ranked, with_shares, within_owner
from tests.build import job, nodes, report, snapshot
from tests.unit.policy.programs import by_prices

FIVE_AND_THREE = [job(n, report=report(), user="mallory" if n <= 5 else "ann") for n in range(1, 9)]


def held(plan, jobs, key="user"):
    found = {}
    for each in jobs:
        owner = getattr(each, key)
        found[owner] = found.get(owner, 0) + plan.of(each.job_id).placement.gpus
    return found


@pytest.mark.parametrize("objective", ["fair-share", "completion-time"])
@pytest.mark.parametrize("power", [-1.0, float("-inf")])
def test_five_jobs_of_one_user_get_half_against_three_of_another(objective, power):
    given = {"objective": objective, "power": power}
    before = held(decide(snapshot(nodes(4), FIVE_AND_THREE, **given)), FIVE_AND_THREE)
    assert before == {"mallory": 10, "ann": 6}
    after = decide(snapshot(nodes(4), FIVE_AND_THREE, fairness_per="user", **given))
    assert held(after, FIVE_AND_THREE) == {"mallory": 8, "ann": 8}


def test_per_account_users_of_one_account_share_its_half():
    jobs = [replace(j, account="lab" if j.user == "ann" else "big") for j in FIVE_AND_THREE]
    jobs += [job(9, report=report(), user="bob", account="lab")]
    plan = decide(snapshot(nodes(4), jobs, fairness_per="account"))
    assert held(plan, jobs, "account") == {"big": 8, "lab": 8}


def test_a_share_without_use_is_lent_to_others():
    jobs = [
        replace(j, spec=JobSpec(max_gpus=1)) if j.user == "ann" else j
        for j in FIVE_AND_THREE
    ]  # fmt: skip
    plan = decide(snapshot(nodes(4), jobs, fairness_per="user"))
    assert held(plan, jobs) == {"mallory": 13, "ann": 3}


@pytest.mark.parametrize("objective", ["fair-share", "completion-time"])
@pytest.mark.parametrize("exact", [True, False])
def test_a_job_that_no_share_can_start_keeps_nobody_from_gpus(objective, exact, monkeypatch):
    """Half of the GPUs are ann's share, and her one job asks for all of them."""
    if not exact:
        by_prices(monkeypatch)
    jobs = [job(n, report=report(), user="mallory") for n in range(1, 9)]
    jobs.append(job(9, report=report(), user="ann", spec=JobSpec(min_gpus=16)))
    plan = decide(snapshot(nodes(4), jobs, fairness_per="user", objective=objective))
    assert held(plan, jobs) == {"mallory": 16, "ann": 0}


def test_shares_follow_users_weights_and_leave_guarantees_and_ceilings_alone():
    given = {"fairness_per": "user", "objective": "completion-time"}
    plan = decide(snapshot(nodes(4), FIVE_AND_THREE, user_weights={"ann": 3.0}, **given))
    assert held(plan, FIVE_AND_THREE) == {"mallory": 4, "ann": 12}
    plan = decide(snapshot(nodes(4), FIVE_AND_THREE, user_guarantees={"mallory": 10}, **given))
    assert held(plan, FIVE_AND_THREE) == {"mallory": 10, "ann": 6}
    plan = decide(snapshot(nodes(4), FIVE_AND_THREE, user_ceilings={"ann": 5}, **given))
    assert held(plan, FIVE_AND_THREE) == {"mallory": 11, "ann": 5}


def test_more_users_than_gpus_fall_back_to_divided_weights():
    jobs = [job(n, report=report(), user="mallory" if n <= 6 else f"u{n}") for n in range(1, 11)]
    plan = decide(snapshot(nodes(1), jobs, fairness_per="user", objective="completion-time"))
    assert [n for n in range(1, 11) if plan.of(n).placement] == [7, 8, 9, 10]


def test_a_weight_is_divided_over_running_and_waiting_jobs_of_every_partition():
    jobs = [replace(FIVE_AND_THREE[0], partition="side"), *FIVE_AND_THREE[1:]]
    snap = divided(snapshot(nodes(1), jobs, fairness_per="user", user_weights={"ann": 6.0}))
    assert owners.weights(snap.jobs, snap.settings) == pytest.approx([0.2] * 5 + [2.0] * 3)
    same = snapshot(nodes(1), jobs)
    assert divided(same) is same


def test_a_wait_moves_weight_within_one_user_s_jobs_only():
    weight, factor = np.full(8, 0.25), np.array([4.0, 4.0, 4.0, 4.0, 4.0, 1.0, 0.25, 1.0])
    found = within_owner(weight, factor, FIVE_AND_THREE, "user")
    assert found[:5] == pytest.approx(weight[:5])
    assert found[5:].sum() == pytest.approx(0.75)
    assert found[5] == pytest.approx(4 * found[6])
    assert within_owner(weight, factor, FIVE_AND_THREE, "job") == pytest.approx(weight * factor)


def test_a_user_gains_nothing_by_more_jobs():
    settings = PolicySettings(fairness_per="user", objective="completion-time")
    for count in (1, 4, 20):
        jobs = [job(n, report=report(), user="mallory") for n in range(count)]
        jobs = [*jobs, job(99, report=report(), user="ann")]
        plan = decide(replace(snapshot(nodes(4), jobs), settings=settings))
        assert held(plan, jobs) == {"mallory": 8, "ann": 8}, count


def trials(count, *, ranks=None, measured=True, **more):
    """A search of mallory's."""
    found = []
    for n in range(count):
        rank = None if ranks is None else ranks[n % len(ranks)]
        known = report(search_rank=rank) if measured else None
        found.append(job(100 + n, JobSpec(search="lr"), report=known, user="mallory", **more))
    return found


@pytest.mark.parametrize("objective", ["fair-share", "completion-time"])
@pytest.mark.parametrize("others", [1, 3, 7, 20])
def test_a_search_gets_no_more_than_one_job_s_weight(objective, others):
    ann = [job(n, report=report(), user="ann") for n in range(others)]
    share = max(16 // (others + 1), 1)
    if others == 1:
        plain = [replace(each, spec=JobSpec()) for each in trials(64)]
        without = held(decide(snapshot(nodes(4), ann + plain, objective=objective)), plain)
        assert without["mallory"] > share, "what 64 jobs of their own would get"
    for count in (1, 2, 4, 16, 64):
        for measured, ranks in ((True, None), (False, None), (True, [1.0]), (True, [0.0, 0.5, 1.0])):
            jobs = ann + trials(count, ranks=ranks, measured=measured)
            got = held(decide(snapshot(nodes(4), jobs, objective=objective)), jobs)["mallory"]
            assert (0 if others > 16 else 1) <= got <= share, (count, measured, ranks)


@pytest.mark.parametrize("per", ["job", "user"])
def test_a_claimed_rank_changes_nobody_else_s_weight(per):
    ann = [job(n, report=report(), user="ann") for n in range(3)]
    found = []
    for ranks in (None, [0.1], [1.0], [0.0, 1.0], [0.3, 0.9, 0.2]):
        (domain,) = split(divided(snapshot(nodes(4), ann + trials(12, ranks=ranks), fairness_per=per)))
        settings = PolicySettings(fairness_per=per)
        weight = owners.weights(ranked(domain, settings).jobs, settings)
        found.append((weight[:3].tolist(), pytest.approx(float(weight[3:].sum()))))
    assert all(each == found[0] for each in found)
    assert found[0][1] == (1.0 if per == "job" else 3.0 * found[0][0][0])


def trial_weights(snap):
    """The weights by which the trials compete, by job id."""
    (domain,) = split(divided(snap))
    return {each.job_id: each.weight for each in ranked(domain, snap.settings).jobs if each.spec.search}


def test_the_weight_of_a_search_goes_to_its_best_trials_and_grows_with_their_end():
    ann = [job(n, report=report(), user="ann") for n in range(3)]
    found = trial_weights(snapshot(nodes(8), ann + trials(12, ranks=[0.1, 0.5, 1.0])))
    best = [number for number, weight in found.items() if weight > 0.1]
    assert best == [102, 105, 108, 111], "a share of 8 GPUs has room for 4 trials of 2"
    assert sum(found.values()) == pytest.approx(1.0)
    uneven = trial_weights(snapshot(nodes(8), ann + trials(3, ranks=[1.0, 0.5, 0.1])))
    assert [weight > 0.1 for weight in uneven.values()] == [True, True, False], "no 2 GPUs for a part of 0.5"
    few = trial_weights(snapshot(nodes(8), ann + trials(2, ranks=[0.5, 1.0])))
    assert list(few.values()) == pytest.approx([1 / 3, 2 / 3])
    assert trial_weights(snapshot(nodes(8), ann + trials(1))) == {100: 1.0}


def test_the_share_of_a_search_is_one_of_the_nodes_that_it_may_use():
    small = replace(nodes(1)[0], name="s1", partitions=frozenset({"small"}))
    large = [replace(each, partitions=frozenset({"main"})) for each in nodes(16)]
    ann = [job(1, report=report(), user="ann", partition="small"), job(2, report=report(), user="ann")]
    jobs = ann + trials(16, partition="small")
    plan = decide(snapshot([small, *large], jobs, objective="completion-time"))
    assert held(plan, jobs)["mallory"] in (1, 2), (
        "of a share of 2; nothing, where the share is one of 68 GPUs"
    )


def test_a_search_does_not_wait_while_one_of_its_trials_runs():
    jobs = [*trials(3), job(9, user="ann")]
    found = within_owner(np.ones(4), np.array([100.0, 1.0, 50.0, 100.0]), jobs, "job")
    assert found.tolist() == [1.0, 1.0, 1.0, 100.0]
    waits = within_owner(np.ones(4), np.array([100.0, 80.0, 90.0, 1.0]), jobs, "job")
    assert waits.tolist() == [80.0, 80.0, 80.0, 1.0]


def test_a_search_counts_as_one_of_its_user_s_jobs():
    jobs = [*trials(8), job(1, report=report(), user="mallory"), job(2, report=report(), user="ann")]
    snap = divided(snapshot(nodes(4), jobs, fairness_per="user"))
    weight = owners.weights(snap.jobs, snap.settings)
    assert weight[:8].sum() == pytest.approx(0.5)
    assert weight[8:].tolist() == pytest.approx([0.5, 1.0])


def test_each_user_is_guaranteed_the_share_of_its_weight():
    snap = divided(snapshot(nodes(4), FIVE_AND_THREE, fairness_per="user", user_weights={"ann": 3.0}))
    assert with_shares(snap.jobs, snap.settings, 16).user_guarantees == {"mallory": 4, "ann": 12}
