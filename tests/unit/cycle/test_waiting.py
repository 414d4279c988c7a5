"""Time in which its user keeps a job back is not time that it waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.cycle.snapshot import WaitingTimes
from polluxd.model import JobState
from polluxd.store import JobTimes
from tests.build import slurm_job

PENDING = slurm_job(state=JobState.PENDING, submit_time=10.0)


@pytest.mark.parametrize("how", [{"held_by_user": True}, {"dependent": True}, {"begin_time": 501.0}])
def test_waiting_begins_when_the_user_lets_a_job_start(how: dict[str, object]) -> None:
    waiting, times = WaitingTimes(), {7: JobTimes(10.0)}
    kept_back = replace(PENDING, **how)
    assert waiting.corrected([kept_back], times, 400.0)[7].held_at == 400.0
    assert waiting.corrected([kept_back], times, 500.0)[7].held_at == 500.0
    for now in (600.0, 9000.0):
        assert waiting.corrected([PENDING], times, now)[7] == JobTimes(10.0, held_at=500.0)
    # It has run since, and its last GPUs count.
    assert waiting.corrected([PENDING], {7: JobTimes(10.0, held_at=800.0)}, 9000.0)[7].held_at == 800.0


def test_other_jobs_wait_from_their_submission_on() -> None:
    waiting = WaitingTimes()
    assert waiting.corrected([PENDING], {}, 400.0) == {}
    assert waiting.corrected([replace(PENDING, spec=None, held_by_user=True)], {}, 400.0) == {}


def test_a_job_that_is_gone_is_forgotten() -> None:
    waiting = WaitingTimes()
    waiting.corrected([replace(PENDING, held_by_user=True)], {}, 400.0)
    waiting.corrected([], {}, 500.0)
    assert waiting.corrected([PENDING], {7: JobTimes(10.0)}, 600.0)[7].held_at is None
