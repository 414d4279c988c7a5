"""Which batch size the agent chooses, and when it keeps one."""

from __future__ import annotations

import queue
import subprocess
import sys

import pytest

from pollux.errors import BatchError
from pollux.goodput import BatchChoice, BatchLimits, Goodput, NoiseScale, ThroughputParams
from pollux.tuning import batch_choice
from pollux.tuning.batch_choice import (
    GROWTH,
    HYSTERESIS,
    Advisor,
    batch_limits,
    choose,
    initial_choice,
    nearest_choice,
)
from pollux.tuning.measurements import Configuration
from pollux.tuning.profile import StepProfile

PARAMS = ThroughputParams(0.05, 0.001, 0.04, 0.0, 0.1, 0.0, 1.0)
LIMITS = BatchLimits(32, 1024, 4, 128)
NOISY = NoiseScale(sqr=1.0, var=20.0)
CALM = NoiseScale(sqr=20.0, var=1.0)


def refit_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch_choice, "FIRST_REFIT", 0.001)


def test_the_initial_choice_is_m0_rounded_up() -> None:
    assert initial_choice(LIMITS, 1, 1, adaptive=True) == BatchChoice(32, 0)
    assert initial_choice(LIMITS, 1, 4, adaptive=True) == BatchChoice(8, 0)
    assert initial_choice(BatchLimits(512, 512, 4, 128), 1, 1, adaptive=False) == BatchChoice(128, 3)
    assert initial_choice(BatchLimits(100, 100, 1, 100), 1, 3, adaptive=False) == BatchChoice(34, 0)


def test_more_gpus_than_the_limits_can_feed_still_train() -> None:
    assert initial_choice(BatchLimits(8, 8, 4, 8), 2, 16, adaptive=True) == BatchChoice(1, 0)


def test_the_least_share_of_many_gpus_lifts_the_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    assert initial_choice(BatchLimits(16, 512, 2, 64), 4, 16, adaptive=True) == BatchChoice(2, 0)
    assert not caplog.text


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
        profile.add(Configuration(1, 4, m), local=[0.05 + 0.001 * m] * 4, final=[0.09 + 0.001 * m] * 4)
    assert advisor.advise()
    assert advisor.params is not None
    assert advisor.params.alpha_grad == pytest.approx(0.05, rel=0.2)
    assert advisor.proposal is not None
    assert advisor.proposal.size(4) > 32


def test_the_scheduler_hears_at_once_of_a_fit_on_more_gpus_and_of_the_first_noise_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refit_at_once(monkeypatch)
    profile, heard = StepProfile(), queue.SimpleQueue[tuple[int, bool]]()
    noise: list[NoiseScale | None] = [None]

    def news() -> None:
        heard.put((profile.explored[0], noise[0] is not None))

    advisor = Advisor(
        profile, LIMITS, 1, 1, lambda: (noise[0], BatchChoice(32, 0)), adaptive=False, on_first=news
    )
    advisor.start()
    try:
        profile.add(Configuration(1, 1, 32), final=[0.1])
        assert heard.get(timeout=30) == (1, False)
        noise[0] = NOISY
        assert heard.get(timeout=30) == (1, True)
        profile.add(Configuration(1, 1, 16), final=[0.1])
        advisor.moved(1, 2)
        profile.add(Configuration(1, 2, 16), final=[0.1])
        assert heard.get(timeout=30) == (2, True)
        assert heard.empty(), "nothing else was news"
    finally:
        advisor.close()


def test_a_size_that_was_measured_during_a_fit_is_told_with_the_next_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile, heard = StepProfile(), list[tuple[int, int]]()
    advisor = Advisor(
        profile,
        LIMITS,
        1,
        2,
        lambda: (None, BatchChoice(16, 0)),
        adaptive=False,
        on_first=lambda: heard.append(advisor.explored),
    )
    profile.add(Configuration(1, 1, 32), final=[0.1])
    fit = profile.fit

    def measured_meanwhile() -> ThroughputParams | None:
        params = fit()
        profile.add(Configuration(1, 2, 16), final=[0.1])
        return params

    monkeypatch.setattr(profile, "fit", measured_meanwhile)
    for _ in range(2):
        assert advisor.advise()
        advisor.report_early()
        monkeypatch.undo()
    assert heard == [(1, 1), (2, 1)]


def test_after_a_move_refits_come_as_often_as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    refit_at_once(monkeypatch)
    profile, fitted = StepProfile(), queue.SimpleQueue[int]()
    advisor = Advisor(profile, LIMITS, 1, 1, lambda: (None, BatchChoice(32, 0)), adaptive=False)
    monkeypatch.setattr(advisor, "advise", lambda: fitted.put(advisor._gpus))
    advisor._pause = 1e6
    advisor.start()
    try:
        advisor.moved(1, 2)
        assert fitted.get(timeout=30) == 2
    finally:
        advisor.close()


def test_a_job_that_is_not_adaptive_is_fitted_and_left_alone() -> None:
    profile = StepProfile()
    profile.add(Configuration(1, 1, 32), final=[0.1])
    advisor = Advisor(profile, LIMITS, 1, 1, lambda: (NOISY, BatchChoice(32, 0)), adaptive=False)
    assert advisor.advise()
    assert advisor.proposal is None


def test_a_straggler_does_not_move_the_profile_and_old_times_fade() -> None:
    profile = StepProfile()
    key = Configuration(1, 2, 8)
    profile.add(key, final=[*[0.1] * 9, 9.0])
    assert profile.medians(key)[1] == pytest.approx(0.1)
    profile.add(key, final=[0.2] * 64)
    assert profile.medians(key)[1] == pytest.approx(0.2)
    assert profile.explored == (2, 1)
    again = StepProfile()
    again.load_state_dict(profile.state_dict())
    assert again.medians(key)[1] == pytest.approx(0.2)


# -- the user's bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "most", "per_gpu", "message"),
    [
        (32, 16, None, "largest batch size \\(16\\) is below the initial one"),
        (32, 0, None, "from 1"),
        (32, 64, (8, 4), "from 8 to 4"),
        (32, 64, (0, 4), "from 1"),
        (32, 64, (65, 128), "at least 65 examples, more than the largest batch size \\(64\\)"),
        (0, None, None, "from 1"),
        (-3, None, None, "from 1"),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(
    batch_size: int, most: int | None, per_gpu: tuple[int, int] | None, message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        batch_limits(batch_size, most, per_gpu, adaptive=True)


@pytest.mark.parametrize(
    ("grow_after", "message"),
    [(-1, "0 or more, got -1"), (0.5, "got 0.5"), (2, "share is at least 48 examples")],
)
def test_a_batch_that_cannot_stay_at_first_is_refused(grow_after: float, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        batch_limits(32, 128, (48, 64), grow_after, adaptive=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("most", [64, 100, 127, 128, 1024])
def test_a_least_share_above_m0_can_always_be_run_on_one_gpu(most: int, adaptive: bool) -> None:
    limits = batch_limits(32, most, (64, 128), adaptive=adaptive)
    assert int(Goodput(PARAMS, NOISY, limits, adaptive).optimize(1, 1).batch_size) > 0
    first = initial_choice(limits, 1, 1, adaptive=adaptive)
    assert limits.local_min <= first.local_batch <= limits.local_max
    assert 32 <= first.size(1) <= most
    if not adaptive:
        assert first == BatchChoice(32, 0)


def test_the_growth_cap_never_forbids_the_least_size_of_a_placement() -> None:
    limits = batch_limits(32, 1024, (64, 128), adaptive=True)
    choice = choose(PARAMS, NOISY, limits, 1, 4, None, current_size=32)
    assert choice is not None
    assert choice.local_batch >= 64


def test_each_step_of_advice_keeps_hysteresis_and_growth() -> None:
    for noise in (NOISY, CALM, NoiseScale(1.0, 200.0), NoiseScale(1.0, 0.1)):
        for gpus in (1, 2, 4, 8):
            current = initial_choice(LIMITS, 1, gpus, adaptive=True)
            for _ in range(20):
                found = choose(PARAMS, noise, LIMITS, 1, gpus, current)
                if found is None:
                    break
                goodput = Goodput(PARAMS, noise, LIMITS)
                before, after = (
                    float(goodput.evaluate(1, gpus, c.local_batch, c.accumulation)) for c in (current, found)
                )
                assert after > before / HYSTERESIS
                if found.size(gpus) < GROWTH * current.size(gpus) - gpus * (found.accumulation + 1):
                    assert after > HYSTERESIS * before, "only the way to something better may cost anything"
                assert found.size(gpus) <= GROWTH * current.size(gpus)
                assert LIMITS.initial <= found.size(gpus) <= LIMITS.maximum
                assert LIMITS.local_min <= found.local_batch <= LIMITS.local_max
                current = found
            else:
                pytest.fail(f"never settled with {noise} on {gpus} GPUs")


def test_growth_goes_on_where_only_the_second_doubling_pays() -> None:
    """Two passes at twice M0 gain nothing; four times M0 gains much. One GPU accumulates above M0."""
    limits = BatchLimits(32, 1024, 4, 64)
    at_first = BatchChoice(32, 0)
    on_the_way = choose(PARAMS, NOISY, limits, 1, 1, at_first)
    assert on_the_way == BatchChoice(32, 1)
    goodput = Goodput(PARAMS, NOISY, limits)
    there = choose(PARAMS, NOISY, limits, 1, 1, on_the_way)
    assert there is not None
    assert there.size(1) <= 128
    gain = goodput.evaluate(1, 1, there.local_batch, there.accumulation) / goodput.evaluate(1, 1, 32, 0)
    assert float(gain) > HYSTERESIS
    assert choose(PARAMS, CALM, limits, 1, 1, at_first) is None


def test_one_gpu_needs_no_second_pass_where_a_measured_step_can_be_made_in_halves() -> None:
    limits = BatchLimits(32, 1024, 4, 128, halves=True)
    found = choose(PARAMS, NOISY, limits, 1, 1, BatchChoice(32, 0))
    assert found is not None
    assert found.accumulation == 0
    assert nearest_choice(limits, 1, 1, 100) == BatchChoice(100, 0)
    assert nearest_choice(limits, 1, 1, 200) == BatchChoice(100, 1), "more than the memory of one pass"
    whole, best = Goodput(PARAMS, NOISY, limits).optimize(1, 1), Goodput(PARAMS, NOISY, limits).best(1, 1)
    assert best[:2] == (int(whole.local_batch), int(whole.accumulation))


REFITTED = """
import sys, time, torch, pollux
from torch import nn
from pollux.tuning import batch_choice
batch_choice.FIRST_REFIT = 0.01
model = nn.Linear(6, 1)
job = pollux.attach(model, torch.optim.SGD(model.parameters(), 0.01))
data = torch.utils.data.TensorDataset(torch.randn(640, 6), torch.randn(640, 1))
loader = job.loader(data, batch_size=32, max_batch_size=128)
job.training.timer._file_every = 0.0
end = time.monotonic() + 90
for _ in job.epochs(100000):
    for x, y in loader:
        job.step(lambda: nn.functional.mse_loss(job.model(x), y))
    if job.params is not None or time.monotonic() > end:
        break
assert job.params is not None
print(*(name for name in sys.modules if name.partition(".")[0] == "scipy"))
"""


def test_a_rank_that_was_refitted_has_loaded_no_scipy() -> None:
    # Its import holds the interpreter for half a second: all ranks would wait in the second second of a training.
    argv = [sys.executable, "-c", REFITTED]
    shown = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
    assert (shown.returncode, shown.stdout.strip()) == (0, ""), shown.stderr
