"""How rarely to measure follows from what a measured step costs, by the clock."""

from __future__ import annotations

import pytest

from pollux.tuning.measurements import Configuration
from pollux.tuning.measuring_cost import LEAST_INTERVAL, MOST_INTERVAL, MeasuringCost
from pollux.tuning.pass_timer import PassTimer
from pollux.tuning.profile import StepProfile


def learned(measured: float, plain: float = 1.0, count: int = 40) -> MeasuringCost:
    cost = MeasuringCost()
    for step in range(count):
        cost.add(measured if step % 5 == 0 else plain, measured=step % 5 == 0)
    return cost


@pytest.mark.parametrize(
    ("measured", "share", "steps", "interval"),
    [
        (1.0, 0.005, 1, LEAST_INTERVAL),
        (1.05, 0.005, 1, LEAST_INTERVAL),
        (1.3, 0.005, 1, 60),
        (1.3, 0.005, 2, 120),
        (1.3, 0.01, 1, 30),
        (1.3, 0.0001, 1, MOST_INTERVAL),
        (0.7, 0.005, 1, LEAST_INTERVAL),
    ],
)
def test_the_interval_is_as_long_as_the_share_asks(
    measured: float, share: float, steps: int, interval: int
) -> None:
    cost = learned(measured)
    cost.share = share
    assert cost.interval(steps) == pytest.approx(interval, abs=1)


def test_what_is_not_known_yet_costs_nothing_and_pauses_of_the_machine_are_no_cost() -> None:
    assert learned(9.0, count=15).interval(1) == LEAST_INTERVAL, "three measured steps are too few"
    cost = learned(1.0)
    for _ in range(2):
        cost.add(50.0, measured=True)
    assert cost.interval(1) == LEAST_INTERVAL


def test_a_new_batch_size_keeps_what_was_learned_until_enough_of_it_is_timed() -> None:
    cost = learned(1.3)
    cost.cool()
    cost.add(7.0, measured=True)
    cost.add(3.0, measured=False)
    assert cost.interval(1) == pytest.approx(60, abs=1)


class Device:
    """A clock that counts its marks."""

    def __init__(self) -> None:
        self.now, self.marks = 0.0, 0

    def mark(self) -> float:
        self.marks += 1
        return self.now

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


def run(timer: PassTimer, clock: Device, steps: int, passes: int = 1, seconds: float = 1.0) -> list[int]:
    """Make steps, every tenth of them measured and half as long again; return the marks of each."""
    found = []
    for step in range(steps):
        before, measured = clock.marks, step % 10 == 5
        for one in range(passes):
            timer.fetch(begins=not one, measured=measured)
            clock.now += 0.5 * seconds
            if timer.timing:
                timer.begin(Configuration(1, 1, 8, 1))
            clock.now += 1.5 * seconds if measured else seconds
            if timer.timing:
                timer.end(synchronised=one == passes - 1, counts=True)
        found.append(clock.marks - before)
    return found


@pytest.mark.parametrize("passes", [1, 2])
def test_few_steps_are_marked_and_measured_ones_are_compared_with_them(passes: int) -> None:
    clock, profile = Device(), StepProfile()
    timer = PassTimer(profile, clock, file_every=0.0)  # type: ignore[arg-type]
    marks = run(timer, clock, 120, passes)
    later = marks[40:]
    assert min(marks[:16]) > 0, "the first steps of a configuration are all timed"
    plain = [count for step, count in enumerate(later, 40) if step % 10 != 5]
    assert sum(count > 0 for count in plain) <= len(plain) / 7
    assert min(count for step, count in enumerate(later, 40) if step % 10 == 5) > 0
    assert timer.cost.extra == pytest.approx(0.5, rel=1e-6)
    assert profile.rows().local_batch.tolist() == [8.0]


def test_short_steps_are_timed_more_rarely() -> None:
    counts = {}
    for seconds in (1.0, 0.003):
        clock, profile = Device(), StepProfile()
        timer = PassTimer(profile, clock, file_every=0.0)  # type: ignore[arg-type]
        marks = run(timer, clock, 1040, seconds=seconds)
        counts[seconds] = sum(count > 0 for step, count in enumerate(marks) if step >= 80 and step % 10 != 5)
        assert timer.cost.extra == pytest.approx(0.5, rel=1e-6)
    assert counts[0.003] <= counts[1.0] / 4
