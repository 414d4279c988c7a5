"""One real case per path and fault: polluxd is killed during a move.

Another fault happens at the same time, and the next polluxd finishes the move. `make soak` runs these tests.
tests/unit/apply/test_matrix.py has the whole matrix, on a cluster in memory.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from contrib.devcluster import Polluxd
from polluxd.model import Step
from tests.unit.apply.faults import FAULTS

from .conftest import Loop, polluxd
from .elastic import Elastic

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not os.environ.get("POLLUX_SOAK"), reason="minutes of it: POLLUX_SOAK=1, or make soak"
    ),
]

LATE = """\
#!/bin/sh
# scontrol whose writing calls are carried out and then answered too late, the first {times} times.
case "$1" in
requeue|update)
    {scontrol} "$@" > /dev/null 2>&1
    echo x >> {folder}/late
    [ "$(wc -l < {folder}/late)" -le {times} ] && sleep 6
    exit 0
    ;;
esac
exec {scontrol} "$@"
"""


@contextmanager
def trouble(fault: str, loop: Loop, folder: Path) -> Iterator[Polluxd]:
    """Take polluxd away, cause a fault, and have a polluxd back at the end.

    For the fault "second leader", another polluxd takes its place.
    """
    daemon, cluster = loop.daemon, loop.cluster
    if fault == "second leader":
        daemon.send(signal.SIGSTOP)
        (folder / "second").mkdir()
        second = polluxd(cluster, folder / "second")
        second.start()
        loop.until(lambda: "leading cluster" in second.log.read_text(), why="the second to lead")
        daemon.send(signal.SIGCONT)
        try:
            yield second
        finally:
            second.stop()
        return
    daemon.stop(signal.SIGKILL)
    if fault == "database down":
        cluster.stop_postgres(immediate=True)
    elif fault == "scontrol times out":
        cluster.signal_slurmctld(signal.SIGSTOP)
    elif fault == "slurmctld restarts":
        cluster.restart_slurmctld()
    elif fault == "applied but timed out":
        late = folder / "scontrol"
        late.write_text(LATE.format(times=2, scontrol=shutil.which("scontrol"), folder=folder))
        late.chmod(0o755)
        daemon.env["PATH"] = f"{folder}:{daemon.env['PATH']}"
    daemon.start()
    if fault in ("database down", "scontrol times out"):
        time.sleep(7.0)
        cluster.signal_slurmctld(signal.SIGCONT)
        if fault == "database down":
            cluster.start_postgres()
    yield daemon


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("path", ["start", "requeue", "park"])
def test_a_move_outlives_polluxd_and(path: str, fault: str, loop: Loop, tmp_path: Path) -> None:
    plain = loop.sbatch("plain", "sleep 30", directive=None)
    first, last = loop.cluster.node_names[0], loop.cluster.node_names[-1]

    def nodes(state: str, *names: str) -> None:
        for name in names:
            reason = ["Reason=test"] if state == "DRAIN" else []
            loop.cluster.command("scontrol", "update", f"NodeName={name}", f"State={state}", *reason)

    def under_way() -> bool:
        moves = loop.store.moves(job_id)
        return any(m.path == path and (path == "start" or Step.DRAINING in m.times) for m in moves)

    drained = False
    try:
        job_id = loop.train("outlives", 14)
        if path == "park":
            loop.until(lambda: loop.store.reports().get(job_id), why="a report")
            drained = True
            nodes("DRAIN", first, last)
            loop.park(job_id)
        loop.until(under_way, why=f"a move of path {path}")
        with trouble(fault, loop, tmp_path):
            if path == "park":
                loop.until(lambda: parked(loop, job_id), why="the job to be parked, or left running")
                nodes("RESUME", first, last)
                drained = False
            loop.trained(job_id, "outlives", 14)
    finally:
        if drained:
            nodes("RESUME", first, last)
    loop.left_alone(plain)


def parked(loop: Loop, job_id: int) -> bool:
    """The move is over, whichever way."""
    moves = [m for m in loop.store.moves(job_id) if m.path == "park"]
    return bool(moves) and moves[-1].step.terminal


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("path", ["resize shrink", "resize grow"])
def test_a_move_within_the_allocation_outlives_polluxd_and(
    path: str, fault: str, elastic_loop: Loop, tmp_path: Path
) -> None:
    loop = elastic_loop
    plain = loop.sbatch("plain", "sleep 30", directive=None)
    job = Elastic(loop, "outlives", "#POLLUX min-gpus=2 max-gpus=2")
    job.begin()
    first, second = job.nodes
    loop.until(lambda: loop.job(plain).nodes, why="the plain job's start")
    third = min({*loop.cluster.node_names} - {first, second, *loop.job(plain).nodes})
    if path == "resize shrink":
        job.go("resize", first, second, third)
    targets = {"resize grow": (first, second, third)}
    number = job.order(path.split(maxsplit=1)[0], targets.get(path, (first,)))
    loop.until(lambda: job.move(number).step is not Step.PLANNED, why="the move's begin")
    with trouble(fault, loop, tmp_path):
        job.moved(number)
        lived = job.end()
        job.alone("the job has ended")
    assert lived.repeated == 0
    assert job.slurm.restart_count == loop.requeues(job.job_id)
    loop.left_alone(plain)


def test_the_late_scontrol_is_carried_out_and_late(loop: Loop, tmp_path: Path) -> None:
    """The stand-in does what the case needs of it."""
    script = tmp_path / "scontrol"
    script.write_text(LATE.format(times=0, scontrol=shutil.which("scontrol"), folder=tmp_path))
    script.chmod(0o755)
    done = subprocess.run(
        [str(script), "update", f"NodeName={loop.cluster.node_names[0]}", "Comment=seen"],
        env=loop.cluster.client_environment,
        check=False,
    )
    assert done.returncode == 0
    assert "Comment=seen" in loop.cluster.command("scontrol", "show", "node", loop.cluster.node_names[0])
