"""Two real polluxd processes with one leader."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import Polluxd

from .conftest import Loop, polluxd

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.fixture
def pair(loop: Loop, tmp_path: Path) -> Iterator[tuple[Polluxd, Polluxd]]:
    """Two polluxd, both awake; which of them leads is chance."""
    folder = tmp_path / "second"
    folder.mkdir()
    second = polluxd(loop.cluster, folder)
    second.start()
    try:
        for daemon in (loop.daemon, second):
            loop.until(lambda d=daemon: _decided(d), why="both to lead or to stand by")  # type: ignore[misc]
        yield loop.daemon, second
    finally:
        second.stop()


def _decided(daemon: Polluxd) -> bool:
    log = daemon.log.read_text() if daemon.log.exists() else ""
    return "leading cluster" in log or "another polluxd leads" in log


def leads(loop: Loop, daemon: Polluxd) -> bool:
    leader = loop.store.leader()
    return leader is not None and leader.leased and leader.holder.endswith(f":{daemon.pid}")


def leader_and_other(loop: Loop, pair: tuple[Polluxd, Polluxd]) -> tuple[Polluxd, Polluxd]:
    loop.until(lambda: any(leads(loop, d) for d in pair), why="one of them to lead")
    first, second = pair
    return (first, second) if leads(loop, first) else (second, first)


def epochs_of_cycles(loop: Loop) -> list[int]:
    """Who recorded each cycle, oldest first."""
    return [row.cycle.epoch or 0 for row in reversed(loop.store.cycles(1000))]


def decided_since(loop: Loop, at: float) -> bool:
    """Whether who leads now has decided since the POSIX time `at`."""
    leader, newest = loop.store.leader(), loop.store.cycles(1)[0].cycle
    return leader is not None and newest.epoch == leader.epoch and newest.started_at > at


def test_the_standby_leads_after_kill_9_and_the_training_goes_on(
    loop: Loop, pair: tuple[Polluxd, Polluxd]
) -> None:
    job_id = loop.train("inherited", 12)
    loop.until(lambda: loop.store.reports().get(job_id), why="a report")
    leader, other = leader_and_other(loop, pair)
    leader.stop(signal.SIGKILL)
    at = time.time()
    loop.until(lambda: leads(loop, other) and decided_since(loop, at), why="a decision of the standby's")
    print(f"from kill -9 to the next polluxd's first decision: {time.time() - at:.1f} s")
    loop.trained(job_id, "inherited", 12, 400)


def test_a_leader_that_stood_still_past_its_lease_acts_no_more(
    loop: Loop, pair: tuple[Polluxd, Polluxd]
) -> None:
    job_id = loop.train("overtaken", 12)
    loop.until(lambda: loop.store.reports().get(job_id), why="a report")
    leader, other = leader_and_other(loop, pair)
    leader.send(signal.SIGSTOP)
    at = time.time()
    try:
        loop.until(lambda: leads(loop, other) and decided_since(loop, at), why="a decision of the other's")
        said = len(leader.log.read_text())
    finally:
        leader.send(signal.SIGCONT)
    loop.until(
        lambda: any(
            # The latter where the new leader was too slow to keep the lead.
            word in leader.log.read_text()[said:]
            for word in ("another polluxd leads", "not acting", "leading cluster")
        ),
        why="the former leader's word that it leads no more",
    )
    loop.trained(job_id, "overtaken", 12, 400)
    by = epochs_of_cycles(loop)
    assert by == sorted(by), f"a former leader recorded a cycle: {by}"
