"""The fake and the real Slurm behave alike in the same scenarios.

The scenarios run through each client of the real Slurm.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from math import floor
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster, SiteLines
from contrib.devcluster.power_saving import PowerSaving
from contrib.devcluster.processes import program
from polluxd.errors import SlurmRefused
from polluxd.model import JobSpec, JobState, Node
from polluxd.slurm.fake import fake_power as power_saving
from polluxd.slurm.protocol import Companion, Geometry, SlurmClient, SlurmJob
from polluxd.slurm.pyslurm_client import PyslurmClient
from tests.integration.slurm_jobs import SlurmJobs
from tests.troubled_slurm import TroubledSlurm


class FakeWorld:
    """A Slurm in memory, and the hands of a user and of time."""

    def __init__(self, *, slurmdbd: bool = False) -> None:
        self.slurm = TroubledSlurm([Node(f"n{i}", gpus=4, cpus=8) for i in range(1, 5)], slurmdbd=slurmdbd)
        self.client: SlurmClient = self.slurm

    def now(self) -> float:
        return self.slurm.clock()

    def sleep(self, seconds: float) -> None:
        self.slurm.advance(seconds)

    def submit(
        self, *, ours: bool = True, gpus: int = 1, begin_in: float = 0, after: int | None = None
    ) -> int:
        begin = self.now() + begin_in if begin_in else None
        spec = JobSpec(max_gpus=16) if ours else None
        return self.slurm.submit(spec, gpus_per_node=gpus, lease=60, begin=begin, depends_on=after)

    def lend(self, claim: Companion, *, nodes: int, gpus: int) -> int:
        return self.slurm.submit(JobSpec(), nodes=nodes, gpus_per_node=gpus, lease=60, companion=claim)

    def finish(self, job_id: int) -> None:
        self.slurm.finish(job_id)

    def fail(self, job_id: int) -> None:
        self.slurm.finish(job_id, JobState.FAILED)

    def hold(self, job_id: int) -> None:
        self.slurm.hold(job_id)


class RealWorld:
    """A real Slurm with jobs that end when a test creates a file.

    A job completes when its file `stop.<id>` appears, and fails when `fail.<id>` appears.
    """

    def __init__(self, jobs: SlurmJobs) -> None:
        self.jobs, self.client = jobs, jobs.client

    def now(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def submit(
        self, *, ours: bool = True, gpus: int = 1, begin_in: float = 0, after: int | None = None
    ) -> int:
        directive = "#POLLUX max-gpus=16\n" if ours else ""
        wait = f"while [ ! -e {self.jobs.folder}/stop.$SLURM_JOB_ID ]; do\n"
        wait += f"[ -e {self.jobs.folder}/fail.$SLURM_JOB_ID ] && exit 1\nsleep 0.1; done\n"
        options = [f"--gres=gpu:{gpus}"]
        if begin_in:
            options.append(f"--begin=now+{begin_in:.0f}")
        if after is not None:
            options.append(f"--dependency=afterany:{after}")
        return self.jobs.submit(f"#!/bin/sh\n{directive}{wait}", *options)

    def lend(self, claim: Companion, *, nodes: int, gpus: int) -> int:
        script = (
            f"#!/bin/sh\n#POLLUX companion-of={claim.parent} attempt={claim.attempt} "
            f"move={claim.move} nonce={claim.nonce}\nsleep 600\n"
        )
        options = [f"--nodes={nodes}", "--ntasks-per-node=1", f"--gres=gpu:{gpus}", "--no-requeue"]
        return self.jobs.submit(script, *options)

    def finish(self, job_id: int) -> None:
        (self.jobs.folder / f"stop.{job_id}").touch()

    def fail(self, job_id: int) -> None:
        (self.jobs.folder / f"fail.{job_id}").touch()

    def hold(self, job_id: int) -> None:
        self.jobs.cluster.command("scontrol", "hold", str(job_id))


World = FakeWorld | RealWorld
CLIENTS = ["scontrol", "pyslurm"] if find_spec("pyslurm") else ["scontrol"]


@pytest.fixture(params=["fake", *(pytest.param(name, marks=pytest.mark.slurm) for name in CLIENTS)])
def world(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[World]:
    if request.param == "fake":
        yield FakeWorld()
        return
    jobs: SlurmJobs = request.getfixturevalue("jobs")
    if request.param == "pyslurm":
        caplog.set_level(logging.INFO, "polluxd.slurm.pyslurm_client")
        # However slow the machine, pyslurm is what is tested here.
        jobs.client = PyslurmClient(conf=jobs.cluster.slurm_conf, timeout=60)
    yield RealWorld(jobs)
    if request.param == "pyslurm":
        said = [record.message for record in caplog.get_records("call")]
        assert {words.rpartition(" ")[0] for words in said} <= {"Slurm is read through pyslurm"}


@pytest.fixture(scope="module")
def accounted(scratch: Path) -> Iterator[DevCluster]:
    """A cluster with slurmdbd."""
    with DevCluster(scratch / "accounted", postgres=False, lease_s=60, accounting=True) as cluster:
        yield cluster


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.slurm)])
def shrinking(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "fake":
        yield FakeWorld(slurmdbd=True)
        return
    jobs = SlurmJobs(request.getfixturevalue("accounted"), tmp_path)
    yield RealWorld(jobs)
    jobs.end()


def wait_for(world: World, true: Callable[[], bool], timeout_s: float = 240.0) -> None:
    deadline = world.now() + timeout_s
    while not true():
        assert world.now() < deadline, "it did not come about in time"
        world.sleep(0.05)


def job(world: World, job_id: int) -> SlurmJob:
    return world.client.jobs([job_id])[job_id]


def wait_state(world: World, job_id: int, state: JobState) -> SlurmJob:
    wait_for(world, lambda: job(world, job_id).state is state)
    return job(world, job_id)


def place(world: World, job_id: int, nodes: tuple[str, ...], gpus: int) -> SlurmJob:
    world.client.configure(job_id, Geometry(nodes, gpus, gpus), start=True)
    return wait_state(world, job_id, JobState.RUNNING)


def requeue(world: World, job_id: int) -> None:
    world.client.requeue(job_id)
    wait_state(world, job_id, JobState.PENDING)
    second = floor(world.now())
    wait_for(world, lambda: floor(world.now()) > second)


def test_an_opted_in_job_waits_and_a_foreign_one_runs(world: World) -> None:
    before = floor(world.now())
    ours = world.submit()
    after = world.now()
    foreign = world.submit(ours=False, gpus=2)
    shown = wait_state(world, foreign, JobState.RUNNING)
    assert sum(shown.gpus_per_node_held.values()) == 2
    assert shown.spec is None
    waiting = job(world, ours)
    assert waiting.state is JobState.PENDING
    assert waiting.spec is not None
    assert waiting.spec.max_gpus == 16
    assert before + 60 <= (waiting.eligible_time or 0.0) <= after + 60
    state = world.client.observe()
    assert {node.name: node.foreign_gpus for node in state.nodes} == {
        name: shown.gpus_per_node_held.get(name, 0) for name in ("n1", "n2", "n3", "n4")
    }
    assert {ours, foreign} <= {j.job_id for j in state.jobs}


def test_requeue_grows_and_shrinks_to_exact_nodes(world: World) -> None:
    ours = world.submit(gpus=4)
    submitted = job(world, ours).submit_time
    for attempt, (nodes, gpus) in enumerate(
        [(("n2",), 1), (("n3", "n4"), 4), (("n2",), 2), (("n1", "n2", "n4"), 3), (("n4",), 1)]
    ):
        if attempt:
            requeue(world, ours)
            assert not job(world, ours).gpus_per_node_held
        running = place(world, ours, nodes, gpus)
        assert running.gpus_per_node_held == dict.fromkeys(nodes, gpus)
        assert running.cpus_per_node_held == dict.fromkeys(nodes, gpus)
        assert running.restart_count == attempt
        assert running.submit_time == submitted


def test_a_requeued_job_waits_for_its_fail_safe(world: World) -> None:
    ours = world.submit()
    place(world, ours, ("n1",), 1)
    requeue(world, ours)
    waiting = job(world, ours)
    assert waiting.eligible_time is not None
    assert waiting.eligible_time - world.now() > 60
    assert waiting.reason == "BeginTime"


def test_a_time_limit_is_set_in_whole_minutes(world: World) -> None:
    first = world.submit()
    world.client.configure(first, Geometry(("n1",), 1, 1), start=True, time_limit_s=3601.0)
    assert wait_state(world, first, JobState.RUNNING).time_limit_s == 3660.0
    requeue(world, first)
    assert job(world, first).time_limit_s == 3660.0
    world.client.limit_time(first, 90.0)
    assert job(world, first).time_limit_s == 120.0


def test_a_probe_is_an_update_that_changes_nothing(world: World) -> None:
    for limit in (None, 3600.0):
        first = world.submit()
        world.client.configure(first, Geometry(("n1",), 1, 1), start=True, time_limit_s=limit)
        before = wait_state(world, first, JobState.RUNNING)
        world.client.probe(first)
        assert job(world, first) == before


def test_a_failed_job_runs_again(world: World) -> None:
    first = world.submit()
    place(world, first, ("n1",), 1)
    with pytest.raises(SlurmRefused):
        world.client.run_again(world.submit(begin_in=600))
    world.fail(first)
    wait_state(world, first, JobState.FAILED)
    world.client.requeue(first)  # requeue proper leaves an ended job alone
    assert job(world, first).state is JobState.FAILED
    world.client.run_again(first)
    assert wait_state(world, first, JobState.PENDING).restart_count == 1


def test_requeue_of_a_waiting_or_ended_job_does_nothing(world: World) -> None:
    ours = world.submit()
    world.client.requeue(ours)
    assert job(world, ours).restart_count == 0
    place(world, ours, ("n1",), 1)
    world.finish(ours)
    wait_state(world, ours, JobState.COMPLETED)
    world.client.requeue(ours)
    world.sleep(1.0)
    ended = job(world, ours)
    assert ended.state is JobState.COMPLETED
    assert ended.restart_count == 0
    assert ended.end_time is not None


def test_foreign_and_unknown_jobs_are_not_touched(world: World) -> None:
    foreign = world.submit(ours=False)
    wait_state(world, foreign, JobState.RUNNING)
    with pytest.raises(SlurmRefused, match="did not opt in"):
        world.client.requeue(foreign)
    with pytest.raises(SlurmRefused, match="did not opt in"):
        world.client.configure(foreign, Geometry(("n1",), 1, 1), start=True)
    with pytest.raises(SlurmRefused, match="did not opt in"):
        world.client.renew([foreign], world.now() + 100)
    with pytest.raises(SlurmRefused, match="did not opt in"):
        world.client.requeue(999_999)
    assert world.client.jobs([999_999]) == {}
    assert job(world, foreign).state is JobState.RUNNING


def test_configuring_a_running_job_is_refused(world: World) -> None:
    ours = world.submit()
    place(world, ours, ("n1",), 1)
    with pytest.raises(SlurmRefused):
        world.client.configure(ours, Geometry(("n1", "n2"), 1, 1), start=True)
    assert job(world, ours).gpus_per_node_held == {"n1": 1}


def test_unknown_node_is_refused(world: World) -> None:
    ours = world.submit()
    with pytest.raises(SlurmRefused):
        world.client.configure(ours, Geometry(("nowhere",), 1, 1), start=True)
    assert job(world, ours).state is JobState.PENDING


def test_leases_are_renewed_in_one_call_past_jobs_that_started(world: World) -> None:
    first, second, third = world.submit(), world.submit(), world.submit()
    place(world, second, ("n1",), 1)
    until = world.now() + 500
    world.client.renew([first, second, third], until)
    for waiting in (first, third):
        assert job(world, waiting).eligible_time == pytest.approx(until, abs=1.5)
    assert job(world, second).state is JobState.RUNNING


def test_a_taken_node_keeps_the_job_waiting(world: World) -> None:
    ours = world.submit()
    other = world.submit()
    place(world, other, ("n1",), 3)
    world.client.configure(ours, Geometry(("n1",), 2, 2), start=True)
    # Once the scheduler has looked at it.
    wait_for(world, lambda: job(world, ours).reason in ("Resources", "ReqNodeNotAvail", "Priority"))
    assert job(world, ours).state is JobState.PENDING
    world.finish(other)
    assert wait_state(world, ours, JobState.RUNNING).gpus_per_node_held == {"n1": 2}


def test_hold_dependency_and_begin_are_shown(world: World) -> None:
    running = world.submit(ours=False)
    held, dependent = world.submit(), world.submit(after=running)
    before = floor(world.now())
    later = world.submit(begin_in=400)
    after = world.now()
    world.hold(held)
    assert job(world, held).held_by_user
    assert job(world, dependent).dependent
    assert before + 400 <= (job(world, later).begin_time or 0.0) <= after + 400
    assert before + 460 <= (job(world, later).eligible_time or 0.0) <= after + 460
    plain = job(world, running)
    assert (plain.held_by_user, plain.dependent, plain.begin_time) == (False, False, None)


def test_a_completing_job_still_holds_its_gpus_or_is_gone(world: World) -> None:
    ours = world.submit()
    place(world, ours, ("n2",), 2)
    world.client.requeue(ours)
    seen: set[JobState] = set()
    while (shown := job(world, ours)).state is not JobState.PENDING:
        seen.add(shown.state)
        assert shown.gpus_per_node_held == {"n2": 2}
        world.sleep(0.02)
    assert seen <= {JobState.RUNNING, JobState.COMPLETING}


def test_a_companion_waits_says_whose_it_is_and_is_ended(world: World) -> None:
    parent = world.submit(gpus=4)
    place(world, parent, ("n2",), 4)
    claim = Companion(parent, 0, 12, "0123456789abcdef" * 2)
    lent, waiting = world.lend(claim, nodes=2, gpus=4), world.lend(claim, nodes=1, gpus=4)
    shown = job(world, lent)
    assert (shown.state, shown.companion) == (JobState.PENDING, claim)
    assert (shown.uid, shown.account) == (job(world, parent).uid, job(world, parent).account)
    assert job(world, parent).companion is None
    running = place(world, lent, ("n1", "n3"), 4)
    assert running.gpus_per_node_held == {"n1": 4, "n3": 4}
    with pytest.raises(SlurmRefused, match="no companions"):
        world.client.cancel([parent])
    with pytest.raises(SlurmRefused, match="no companions"):
        world.client.cancel([999_999])
    world.client.cancel([lent, waiting])
    for ended in (lent, waiting):
        assert wait_state(world, ended, JobState.CANCELLED).restart_count == 0
    world.client.cancel([lent, waiting])  # over already: no trouble
    assert job(world, parent).state is JobState.RUNNING


def test_a_companion_is_not_started_again(world: World) -> None:
    parent = world.submit()
    place(world, parent, ("n1",), 1)
    lent = world.lend(Companion(parent, 0, 12, "f" * 32), nodes=1, gpus=1)
    place(world, lent, ("n2",), 1)
    with contextlib.suppress(SlurmRefused):  # as Slurm says of a job with --no-requeue
        world.client.requeue(lent)
    world.sleep(1.0)
    assert (job(world, lent).state, job(world, lent).restart_count) == (JobState.RUNNING, 0)


def test_without_slurmdbd_no_running_job_shrinks(world: World) -> None:
    assert not world.client.can_shrink()


def test_a_running_job_gives_nodes_back(shrinking: World) -> None:
    world = shrinking
    assert world.client.can_shrink()
    ours = world.submit(gpus=4)
    place(world, ours, ("n2", "n3", "n4"), 4)
    assert job(world, ours).batch_host == "n2"
    for nodes, why in (
        (("n3", "n4"), "its batch host"),
        (("n1", "n2"), "not its own"),
        (("n2", "n9"), "unknown"),
    ):
        with pytest.raises(SlurmRefused):
            world.client.shrink(ours, nodes)
        assert len(job(world, ours).nodes) == 3, why
    world.client.shrink(ours, ("n2", "n4"))
    wait_for(world, lambda: job(world, ours).gpus_per_node_held == {"n2": 4, "n4": 4})
    other = world.submit(gpus=4)
    assert place(world, other, ("n3",), 4).gpus_per_node_held == {"n3": 4}, "it is free at once"
    world.client.shrink(ours, ("n2", "n4"))  # is so already
    world.client.shrink(ours, ("n2",))
    wait_for(world, lambda: job(world, ours).gpus_per_node_held == {"n2": 4})
    shown = job(world, ours)
    assert (shown.state, shown.restart_count, shown.nodes) == (JobState.RUNNING, 0, ("n2",))
    world.finish(other)
    wait_state(world, other, JobState.COMPLETED)
    requeue(world, ours)
    assert place(world, ours, ("n3", "n4"), 2).gpus_per_node_held == {"n3": 2, "n4": 2}
    with pytest.raises(SlurmRefused):
        world.client.shrink(world.submit(begin_in=600), ("n1",))


BOOT_S, IDLE_S = 3.0, 8
"""Seconds of a boot, and of a node without a job until it is off."""


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.slurm)])
def sleeping(request: pytest.FixtureRequest, scratch: Path, tmp_path: Path) -> Iterator[World]:
    """A cluster of one node that is on and one that is off."""
    if request.param == "fake":
        world = FakeWorld()
        nodes = [Node("n1", gpus=4, cpus=8), Node("n2", gpus=4, cpus=8, power="off")]
        world.slurm = TroubledSlurm(nodes, saving=power_saving.PowerSaving(BOOT_S, IDLE_S))
        world.client = world.slurm
        yield world
        return
    power = PowerSaving(scratch / "power", boot_s=BOOT_S, fails_every=0, idle_s=IDLE_S)
    site = SiteLines(lines=power.lines, cloud=["n2"])
    cluster = DevCluster(scratch / "sleeping", nodes=2, postgres=False, lease_s=60, site=site)
    power.programs(cluster.slurm_conf, program("slurmd"))
    with cluster:
        jobs = SlurmJobs(cluster, tmp_path)
        real = RealWorld(jobs)
        wait_for(real, lambda: power_of(real) == ["on", "off"])
        yield real
        jobs.end()


def power_of(world: World) -> list[str]:
    return [node.power for node in sorted(world.client.observe().nodes, key=lambda node: node.name)]


def test_a_node_that_is_off_boots_for_a_job_which_runs_from_then_on(sleeping: World) -> None:
    begun = sleeping.now()
    wide = sleeping.submit()
    sleeping.client.configure(wide, Geometry(("n1", "n2"), 4, 4), start=True)
    shown = wait_state(sleeping, wide, JobState.RUNNING)
    assert (shown.raw_state, shown.nodes) == ("CONFIGURING", ("n1", "n2"))
    wait_for(sleeping, lambda: power_of(sleeping) == ["on", "booting"])
    assert job(sleeping, wide).raw_state == "CONFIGURING"
    wait_for(sleeping, lambda: job(sleeping, wide).raw_state == "RUNNING")
    started = job(sleeping, wide).start_time
    assert started is not None
    assert started >= begun + BOOT_S - 1.0, "the time of the boot is not the job's"
    assert power_of(sleeping) == ["on", "on"]
    sleeping.finish(wide)
    wait_for(sleeping, lambda: job(sleeping, wide).state.finished)
    wait_for(sleeping, lambda: power_of(sleeping) == ["on", "off"])
