"""From sbatch to moved training and back, and what goes wrong on the way."""

from __future__ import annotations

import random
import signal
import time

import pytest

from polluxd.model import JobState

from .conftest import Loop, polluxd

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_a_training_grows_as_soon_as_it_is_measured_and_ends_as_a_plain_one_would(loop: Loop) -> None:
    loop.daemon.stop()
    loop.daemon = polluxd(loop.cluster, loop.folder, interval=3600.0)
    loop.daemon.start()
    ends = loop.folder / "ends"
    plain = loop.sbatch("plain", f"until [ -e {ends} ]; do sleep 0.2; done", directive=None)
    loop.until(lambda: loop.job(plain).state is JobState.RUNNING, why="the plain job's start")
    # Nothing comes or goes until the training has grown: only its measurements bring a decision.
    words = "--alpha 0.002 --beta 0.0012 --sync 0.005 0.01"
    job_id = loop.train("grows", 20, words, directive="#POLLUX min-gpus=1 prior=no")
    loop.until(lambda: loop.completed_moves(job_id) >= 1, why="growth between two regular decisions")
    assert loop.store.moves(job_id)[1].reason.startswith("grows from 1 to 2 GPUs")
    ends.touch()
    explained = loop.daemon.command("polluxctl", "explain", str(job_id))
    assert explained.returncode == 0, explained.stderr
    assert str(job_id) in explained.stdout
    assert loop.trained(job_id, "grows", 20).restart_count >= 1
    result = loop.result("grows")
    assert result["accuracy"] > 0.93
    assert result["gpus"] > 1
    loop.completed(plain)
    loop.left_alone(plain)
    costs = loop.store.move_costs(job_id)
    assert costs
    assert sum(costs[0]["steps"].values()) == pytest.approx(costs[0]["total_s"], abs=0.01)


def test_a_training_that_was_never_measured_starts_on_the_gpus_of_a_node(loop: Loop) -> None:
    def set_start_gpus(count: str) -> None:
        told = loop.daemon.command("polluxctl", "settings", "set", "--start-gpus", count)
        assert told.returncode == 0, told.stderr

    set_start_gpus("4")
    try:
        broad = loop.train("broad", 6, directive="#POLLUX min-gpus=1 prior=no")
        fixed = loop.train("fixed", 3, directive="#POLLUX adaptive=no")
        for job_id, name, epochs in ((broad, "broad", 6), (fixed, "fixed", 3)):
            loop.trained(job_id, name, epochs)
    finally:
        set_start_gpus("1")
    first = {j: loop.store.moves(j)[0] for j in (broad, fixed)}
    assert [first[j].path for j in (broad, fixed)] == ["start", "start"]
    assert (len(first[broad].target.nodes), first[broad].target.gpus) == (1, 4)
    assert first[fixed].target.gpus == 1
    assert loop.result("broad")["accuracy"] > 0.9


def test_kill_9_of_polluxd_again_and_again_loses_no_job(loop: Loop) -> None:
    jobs = {name: loop.train(name, 14) for name in ("one", "two")}
    chance = random.Random(7)
    kills = 0
    deadline = time.monotonic() + 400
    while not all(loop.job(j).state.finished for j in jobs.values()):
        assert time.monotonic() < deadline
        time.sleep(chance.uniform(1.0, 8.0))
        loop.daemon.stop(signal.SIGKILL)
        kills += 1
        loop.daemon.start()
    assert kills >= 3
    for name, job_id in jobs.items():
        loop.trained(job_id, name, 14)


def test_the_database_and_slurmctld_go_away_in_mid_run(loop: Loop) -> None:
    job_id = loop.train("weathers", 14)
    loop.until(lambda: loop.store.reports().get(job_id), why="a report")
    loop.cluster.stop_postgres()
    loop.until(
        lambda: (
            "does not answer" in loop.daemon.log.read_text()
            or "StoreUnavailable" in loop.daemon.log.read_text()
        ),
        60,
        why="polluxd saying that the database is away",
    )
    # A move that had begun goes on for as long as the leader's lease of 5 s.
    time.sleep(5)
    loop.until(lambda: loop.job(job_id).state is not JobState.COMPLETING, why="the end of a requeue")
    before = loop.job(job_id)
    time.sleep(3)
    assert loop.daemon.running
    now = loop.job(job_id)
    assert not now.state.finished or now.state is JobState.COMPLETED
    assert now.restart_count == before.restart_count, "moved without the database"
    loop.cluster.start_postgres()
    loop.until(lambda: "recovered" in loop.daemon.log.read_text(), 80, why="polluxd's recovery")
    loop.cluster.stop_slurmctld()
    loop.until(
        lambda: "SlurmUnavailable" in loop.daemon.log.read_text(), 80, why="polluxd saying that Slurm is away"
    )
    assert loop.daemon.running
    loop.cluster.start_slurmctld()
    loop.completed(job_id)
    assert loop.result("weathers")["accuracy"] > 0.9


def test_polluxd_starts_before_its_database(loop: Loop) -> None:
    loop.daemon.stop()
    loop.cluster.stop_postgres()
    try:
        before = len(loop.daemon.log.read_text())
        loop.daemon.start()
        loop.until(
            lambda: "StoreUnavailable" in loop.daemon.log.read_text()[before:],
            60,
            why="a clear line in the log",
        )
        assert loop.daemon.running
        answer = loop.daemon.command("polluxctl", "jobs")
        assert answer.returncode != 0
        assert "Traceback" not in answer.stderr
        assert answer.stderr.strip()
    finally:
        loop.cluster.start_postgres()
    job_id = loop.train("late", 3)
    loop.completed(job_id)


def test_a_script_that_never_attaches_is_started_and_left_in_peace(loop: Loop) -> None:
    loop.daemon.stop()
    loop.daemon = polluxd(loop.cluster, loop.folder, training_timeout=4.0)
    loop.daemon.start()
    ends = loop.folder / "ends"
    waits = f"import os, time\nwhile not os.path.exists('{ends}'): time.sleep(0.2)"
    job_id = loop.sbatch("silent", f'pollux run -m timeit -n 1 -r 1 "{waits}"')
    loop.until(lambda: loop.job(job_id).state is JobState.RUNNING, 80, why="its start")
    loop.until(lambda: "pollux.attach()" in loop.store.moves(job_id)[0].detail, 60, why="the move's end")
    loop.explained(job_id, "has not reported a training step")
    ends.touch()
    assert loop.completed(job_id, 100).restart_count == 0
