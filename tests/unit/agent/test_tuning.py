"""Which batch size is chosen, and when it is left alone."""

from __future__ import annotations

import pytest

from pollux.goodput import BatchLimits, Goodput, NoiseScale, ThroughputParams
from pollux.profile import Configuration, StepProfile
from pollux.tuning import Advisor, BatchChoice, choose, initial_choice, nearest_choice

PARAMS = ThroughputParams(0.05, 0.001, 0.04, 0.0, 0.1, 0.0, 1.0)
LIMITS = BatchLimits(32, 1024, 4, 128)
NOISY = NoiseScale(sqr=1.0, var=20.0)
CALM = NoiseScale(sqr=20.0, var=1.0)


def test_the_initial_choice_is_m0_as_near_as_division_allows() -> None:
    assert initial_choice(LIMITS, 1, 1, adaptive=True) == BatchChoice(32, 0)
    assert initial_choice(LIMITS, 1, 4, adaptive=True) == BatchChoice(8, 0)
    assert initial_choice(BatchLimits(512, 512, 4, 128), 1, 1, adaptive=False) == BatchChoice(128, 3)
    assert initial_choice(BatchLimits(100, 100, 1, 100), 1, 3, adaptive=False) == BatchChoice(33, 0)


def test_more_gpus_than_the_limits_can_feed_still_train() -> None:
    assert initial_choice(BatchLimits(8, 8, 4, 8), 2, 16, adaptive=True) == BatchChoice(1, 0)


def test_after_a_restart_without_times_the_size_stays_about_what_it_was() -> None:
    assert nearest_choice(LIMITS, 1, 4, 256) == BatchChoice(64, 0)
    assert nearest_choice(LIMITS, 1, 2, 4096).size(2) == 1024


def test_growth_is_bounded_by_two() -> None:
    choice = choose(PARAMS, NOISY, LIMITS, 1, 4, BatchChoice(8, 0))
    assert choice is not None
    assert 32 < choice.size(4) <= 64
    on_arrival = choose(PARAMS, NOISY, LIMITS, 1, 8, None, current_size=128)
    assert on_arrival is not None
    assert on_arrival.size(8) <= 256


def test_small_gains_are_not_worth_a_change() -> None:
    # Little noise: a larger batch is hardly worth more, and M0 is right.
    assert choose(PARAMS, CALM, LIMITS, 1, 1, BatchChoice(32, 0)) is None
    goodput = Goodput(PARAMS, NOISY, LIMITS)
    best = goodput.optimize(1, 4)
    near = BatchChoice(int(best.local_batch) - 2, int(best.accumulation))
    assert float(goodput.evaluate(1, 4, near.local_batch, near.accumulation)) * 1.05 > float(best.goodput)
    assert choose(PARAMS, NOISY, LIMITS, 1, 4, near) is None


def test_a_batch_grown_too_large_shrinks_again() -> None:
    choice = choose(PARAMS, CALM, LIMITS, 1, 4, BatchChoice(128, 1))
    assert choice is not None
    assert choice.size(4) < 1024


def test_repeated_advice_settles() -> None:
    current = BatchChoice(8, 0)
    sizes = [current.size(4)]
    for _ in range(12):
        found = choose(PARAMS, NOISY, LIMITS, 1, 4, current)
        if found is None:
            break
        current = found
        sizes.append(current.size(4))
    else:
        pytest.fail(f"never settled: {sizes}")
    assert sizes == sorted(sizes)


def test_the_advisor_fits_what_was_measured_and_proposes() -> None:
    profile = StepProfile()
    advisor = Advisor(profile, LIMITS, 1, 4, lambda: (NOISY, BatchChoice(8, 0)), adaptive=True)
    assert not advisor.advise()
    for m in (8, 16):
        for _ in range(4):
            profile.add_local(Configuration(1, 4, m), 0.05 + 0.001 * m)
            profile.add_final(Configuration(1, 4, m), 0.09 + 0.001 * m)
    assert advisor.advise()
    assert advisor.params is not None
    assert advisor.params.alpha_grad == pytest.approx(0.05, rel=0.2)
    assert advisor.proposal is not None
    assert advisor.proposal.size(4) > 32


def test_a_job_that_is_not_adaptive_is_fitted_and_left_alone() -> None:
    profile = StepProfile()
    profile.add_final(Configuration(1, 1, 32), 0.1)
    advisor = Advisor(profile, LIMITS, 1, 1, lambda: (NOISY, BatchChoice(32, 0)), adaptive=False)
    assert advisor.advise()
    assert advisor.proposal is None


def test_a_straggler_does_not_move_the_profile_and_old_times_fade() -> None:
    profile = StepProfile()
    key = Configuration(1, 2, 8)
    for _ in range(9):
        profile.add_final(key, 0.1)
    profile.add_final(key, 9.0)
    assert profile.final_time(key) == pytest.approx(0.1)
    for _ in range(64):
        profile.add_final(key, 0.2)
    assert profile.final_time(key) == pytest.approx(0.2)
    assert (profile.explored_gpus, profile.explored_nodes) == (2, 1)
    again = StepProfile()
    again.load_state_dict(profile.state_dict())
    assert again.final_time(key) == pytest.approx(0.2)
