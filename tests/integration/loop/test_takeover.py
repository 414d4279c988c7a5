"""Two polluxd, one leader; and what becomes of the jobs when there is none. With real processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from polluxd.model import JobState, Step

from .conftest import Daemon, Loop

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.fixture
def second(loop: Loop, tmp_path: Path) -> Iterator[Daemon]:
    """A polluxd beside the one that leads."""
    folder = tmp_path / "second"
    folder.mkdir()
    made = Daemon(loop.cluster, folder)
    loop.until(lambda: "leading cluster" in loop.daemon.log.read_text(), why="the first to lead")
    made.start()
    loop.until(lambda: "another polluxd leads" in made.log.read_text(), why="the standby's word")
    yield made
    made.end()


def epoch(loop: Loop) -> int:
    leader = loop.store.leader()
    return leader.epoch if leader is not None and leader.leased else 0


def epochs_of_cycles(loop: Loop) -> list[int]:
    """Who recorded each cycle, oldest first."""
    return [row.cycle.epoch or 0 for row in reversed(loop.store.cycles(1000))]


def test_the_standby_leads_after_kill_9_and_the_training_goes_on(loop: Loop, second: Daemon) -> None:
    job_id = loop.train("inherited", 20)
    loop.until(lambda: loop.store.reports().get(job_id), why="a report")
    before = epoch(loop)
    loop.daemon.end(signal.SIGKILL)
    died_at = max(row.cycle.started_at for row in loop.store.cycles(1))
    loop.until(lambda: epoch(loop) > before, why="the standby leads")
    loop.until(lambda: epochs_of_cycles(loop)[-1] > before, why="a decision of the new leader")
    first = min(row.cycle.started_at for row in loop.store.cycles(1000) if (row.cycle.epoch or 0) > before)
    print(f"from the last decision of the old leader to the first of the new: {first - died_at:.1f} s")
    loop.until(lambda: loop.job(job_id).state.finished, why="the training's end")
    assert loop.job(job_id).state is JobState.COMPLETED
    assert loop.result("inherited")["epochs"] == pytest.approx(20, abs=0.01)
    requeued = [m for m in loop.store.reallocations(job_id) if Step.REQUEUED in m.times]
    assert loop.job(job_id).restart_count == len(requeued)


def test_a_leader_that_stood_still_past_its_lease_acts_no_more(loop: Loop, second: Daemon) -> None:
    job_id = loop.train("overtaken", 20)
    loop.until(lambda: loop.store.reports().get(job_id), why="a report")
    before = epoch(loop)
    loop.daemon.send(signal.SIGSTOP)
    try:
        loop.until(lambda: epochs_of_cycles(loop)[-1] > before, why="a decision of the new leader")
        said = len(loop.daemon.log.read_text())
    finally:
        loop.daemon.send(signal.SIGCONT)
    loop.until(
        lambda: "another polluxd leads" in loop.daemon.log.read_text()[said:],
        why="the former leader's word that it leads no more",
    )
    loop.until(lambda: loop.job(job_id).state.finished, why="the training's end")
    assert loop.job(job_id).state is JobState.COMPLETED
    by = epochs_of_cycles(loop)
    assert by == sorted(by), f"a former leader recorded a cycle: {by}"
    woken = loop.daemon.log.read_text()[said:]
    assert " reached " not in woken, woken
    assert "leading cluster" not in woken, woken


def test_without_any_polluxd_parked_and_waiting_jobs_start_by_themselves(loop: Loop) -> None:
    loop.daemon.end()
    text = loop.daemon.config.read_text()
    assert "\nlease_s = 60\n" in text
    loop.daemon.config.write_text(text.replace("\nlease_s = 60\n", "\nlease_s = 15\n"))
    first, last = loop.cluster.node_names[0], loop.cluster.node_names[-1]
    drain = ("scontrol", "update", "State=DRAIN", "Reason=test")
    loop.cluster.command(*drain, f"NodeName={last}")
    try:
        loop.daemon.start()
        parked = loop.train("parked", 16)
        loop.until(lambda: loop.store.reports().get(parked), why="a report")
        loop.cluster.command(*drain, f"NodeName={first}")
        loop.park(parked)
        loop.until(
            lambda: any(m.step is Step.PARKED for m in loop.store.reallocations(parked)), why="the park's end"
        )
        waiting = loop.train("waiting", 2)
        loop.until(lambda: waiting in loop.store.job_times(), why="polluxd to see the second job")
        assert [loop.job(j).state for j in (parked, waiting)] == [JobState.PENDING] * 2
        loop.daemon.end(signal.SIGKILL)
    finally:
        for name in (first, last):
            loop.cluster.command("scontrol", "update", "State=RESUME", f"NodeName={name}")
    for name, job_id, epochs in (("parked", parked, 16), ("waiting", waiting, 2)):
        loop.until(lambda j=job_id: loop.job(j).state.finished, why=f"{name} to run without polluxd")  # type: ignore[misc]
        assert loop.job(job_id).state is JobState.COMPLETED
        assert loop.result(name)["epochs"] == pytest.approx(epochs, abs=0.01)
    assert loop.job(parked).restart_count == 1
