"""Which steps count as measurements, for how long and on which GPUs."""

from __future__ import annotations

import pytest

from pollux.tuning import pass_timer
from pollux.tuning.measurements import Configuration
from pollux.tuning.pass_timer import WARM_PASSES, HostClock, PassTimer
from pollux.tuning.profile import EXPIRY, MOST_CONFIGURATIONS, StepProfile

ONE = Configuration(1, 1, 32)
FOUR = Configuration(1, 4, 32)


class Device(HostClock):
    """A device stream that is `lag` seconds behind the host.

    A mark has passed only `lag` seconds after it was made.
    """

    def __init__(self, lag: float = 0.0) -> None:
        self.now, self.lag = 0.0, lag

    def mark(self) -> float:
        return self.now

    def passed(self, mark: float) -> bool:
        return self.now >= mark + self.lag


def run(
    timer: PassTimer,
    clock: Device,
    body: float,
    *,
    wait: float = 0.0,
    sync: float = 0.0,
    key: Configuration = ONE,
) -> None:
    """Run one pass: wait for data, work, wait for other ranks."""
    timer.fetch()
    clock.now += wait
    timer.begin(key)
    clock.now += body
    if sync:
        timer.ready()
        clock.now += sync
        timer.passed()
    timer.end(synchronised=True, counts=True)


def test_warm_up_passes_and_pauses_are_no_measurements() -> None:
    clock, profile = Device(), StepProfile()
    timer = PassTimer(profile, clock, file_every=0.0, sparse=1)
    for _ in range(WARM_PASSES):
        run(timer, clock, 5.0)
    assert profile.medians(ONE)[1] is None
    for _ in range(5):
        run(timer, clock, 1.0)
    timer.pause()
    clock.now += 500.0  # an evaluation
    run(timer, clock, 1.0)
    assert profile.medians(ONE)[1] == pytest.approx(1.0)
    assert profile.rows().weights.tolist() == [6.0]
    timer.cool()
    run(timer, clock, 9.0)
    assert profile.rows().weights.tolist() == [6.0]


def test_the_wait_for_other_ranks_is_not_this_ranks_own_time() -> None:
    clock, profile = Device(), StepProfile()
    timer = PassTimer(profile, clock, file_every=0.0, sparse=1)
    for _ in range(WARM_PASSES + 3):
        run(timer, clock, 1.0, sync=0.5, key=FOUR)
    assert profile.medians(FOUR) == (pytest.approx(1.0), pytest.approx(1.5))


def test_passes_are_filed_together_and_none_is_lost() -> None:
    clock, profile = Device(), StepProfile()
    timer = PassTimer(profile, clock, file_every=1e9, sparse=1)
    for _ in range(WARM_PASSES + 40):
        run(timer, clock, 1.0)
    (filed,) = profile.rows().weights.tolist()
    assert 0 < filed < 40
    timer.pause()
    assert profile.rows().weights.tolist() == [40.0]


def test_a_data_stall_is_told_and_left_out_and_a_slow_loader_is_part_of_the_cost() -> None:
    clock, profile = Device(), StepProfile()
    timer = PassTimer(profile, clock, file_every=0.0, sparse=1)
    assert timer.data_wait is None
    for _ in range(WARM_PASSES + 20):
        run(timer, clock, 1.0, wait=0.01)
    quiet = timer.data_wait
    for _ in range(3):
        run(timer, clock, 1.0, wait=30.0)
        run(timer, clock, 1.0, wait=0.01)
    assert profile.rows().weights.tolist() == [23.0]
    assert profile.medians(ONE)[1] == pytest.approx(1.01)
    stalled = timer.data_wait
    assert quiet is not None
    assert stalled is not None
    assert quiet < 0.02
    assert 0.5 < stalled <= 1.0

    slow = PassTimer(profile := StepProfile(), clock, file_every=0.0, sparse=1)
    for _ in range(WARM_PASSES + 40):
        run(slow, clock, 1.0, wait=1.0)
    assert profile.medians(ONE)[1] == pytest.approx(2.0)
    assert slow.data_wait == pytest.approx(0.5, abs=0.02)


def test_marks_that_a_device_has_not_reached_are_read_later_and_never_waited_for() -> None:
    clock, profile = Device(lag=3.5), StepProfile()
    timer = PassTimer(profile, clock, file_every=0.0, sparse=1)
    for _ in range(WARM_PASSES + 3):
        run(timer, clock, 1.0)
    assert profile.rows().weights.size == 0
    for _ in range(4):
        run(timer, clock, 1.0)
    assert profile.rows().weights.tolist() == [3.0]
    clock.lag = 1e9  # a device that hangs: what waits for it is bounded
    for _ in range(1000):
        run(timer, clock, 1.0)
    assert len(timer.pending) <= pass_timer.MOST_PENDING


def test_what_was_not_measured_again_for_a_day_is_forgotten_but_not_that_it_was_explored() -> None:
    now = [1.0]
    profile = StepProfile(clock=lambda: now[0])
    profile.add(Configuration(2, 8, 32), final=[1.0])
    now[0] = EXPIRY - 1
    profile.add(ONE, final=[1.0])
    assert profile.rows().gpus.tolist() == [8.0, 1.0]
    now[0] = EXPIRY + 2
    profile.add(FOUR, final=[1.0])
    assert profile.rows().gpus.tolist() == [1.0, 4.0]
    assert (profile.explored, profile.measured()) == ((8, 2), (4, 1))
    saved = profile.state_dict()
    now[0] = 3 * EXPIRY
    again = StepProfile(clock=lambda: now[0])
    again.load_state_dict(saved)
    assert again.rows().gpus.size == 0
    assert again.explored == (8, 2)


def test_configurations_are_bounded_in_number_the_newest_stay() -> None:
    now = [0.0]
    profile = StepProfile(clock=lambda: now[0])
    for m in range(1, MOST_CONFIGURATIONS + 50):
        now[0] += 1.0
        profile.add(Configuration(1, 1, m), final=[1.0])
    kept = profile.rows().local_batch
    assert (kept.size, kept.min(), kept.max()) == (MOST_CONFIGURATIONS, 50, MOST_CONFIGURATIONS + 49)


def test_times_belong_to_a_gpu_type_and_are_there_again_when_the_job_comes_back() -> None:
    first = StepProfile("a100")
    for m in (16, 32):
        first.add(Configuration(1, 4, m), final=[0.1])
    second = StepProfile("v100")
    second.load_state_dict(first.state_dict())
    assert second.of_other_type
    assert (second.rows().gpus.size, second.measured(), second.explored) == (0, (0, 0), (4, 1))
    assert second.fit() is None
    second.add(FOUR, final=[0.5])
    assert not second.of_other_type
    third = StepProfile("a100")
    third.load_state_dict(second.state_dict())
    assert (third.medians(FOUR)[1], third.rows().local_batch.tolist()) == (0.1, [16.0, 32.0])
    fourth = StepProfile("v100")
    fourth.load_state_dict(third.state_dict())
    assert fourth.medians(FOUR)[1] == 0.5


def test_a_profile_saved_by_an_earlier_version_is_read() -> None:
    profile = StepProfile("a100")
    profile.load_state_dict({"rows": [[[1, 2, 16], [0.1], [0.2]]]})
    assert profile.medians(Configuration(1, 2, 16))[1] == 0.2
    assert profile.explored == (2, 1)
