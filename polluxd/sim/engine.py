"""The simulation loop: advance the jobs, decide, move; tick after tick.

The artifact's order of things at each tick: jobs train through the interval that ends, then the policy decides, then
placements change. A job that gets GPUs trains from that tick on, after its restart.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from polluxd.errors import ConfigError, PolluxError
from polluxd.sim.agent import Agent, Memory
from polluxd.sim.applications import Application, CalibratedApplication, ScaledApplication, on_type
from polluxd.sim.cluster import Scenario
from polluxd.sim.simulated_job import Seats, SimulatedJob, placement
from polluxd.sim.workload import Submission

SELDOM = 100_000
"""Objects between two looks for cycles that nothing refers to any more."""

Progress = Callable[[int, int], None]
"""Told how many jobs have ended, of how many."""


@dataclass(frozen=True, slots=True)
class View:
    """What a policy is shown at a decision."""

    now: float
    scenario: Scenario
    capacity: tuple[int, ...]
    """GPUs per node; 0 while it is down."""
    jobs: tuple[SimulatedJob, ...]
    """Submitted and not ended, in order of submission."""
    absent: frozenset[int] = frozenset()
    """Nodes that the policy does not rent at present; their capacity is 0."""


class Agents(Protocol):
    """What the agents of the jobs do under a policy."""

    chooses_batch: bool = False
    """They choose the batch size; otherwise the user's is held."""
    remembers: bool = False
    """They know what earlier runs of their application measured."""
    seconds_between_fits: float = 0.0
    """They renew their fit no more often."""


class Policy(Agents, Protocol):
    """A scheduling rule. A fresh one is made for each run; it may keep state."""

    reacts: bool = False
    """Decides on arrivals and departures too, not only every interval."""
    nodes: int | None = None
    """How many nodes it has rented at present; None: all that there are."""
    borrowers: Mapping[int, float] = MappingProxyType({})
    """By job number, the share of full speed of each job that runs in the idle cycles of others' GPUs."""

    def decide(self, view: View) -> Mapping[int, Seats]:
        """Seats of each job by its number; a job left out gets none."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The cluster just after a decision."""

    time: float
    jobs: int
    gpus: int
    """In use."""
    efficiency: float
    """Statistical, averaged over GPUs in use."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """A finished simulation."""

    jobs: tuple[SimulatedJob, ...]
    moments: tuple[Moment, ...]
    decision_seconds: tuple[float, ...]
    """Wall-clock; the one thing in a run that is not reproducible."""
    node_seconds: float = 0.0
    """Nodes rented, from the first arrival to the last end."""
    idle_seconds: float | None = None
    """For which polluxd's watch found GPUs idle beside a waiting job, and no rule that explains it; None: polluxd did
    not run."""


class BadDecision(ConfigError):
    """A policy gave GPUs that are not there."""


class Unfinished(PolluxError):
    """The policy never let some jobs end, or they were submitted over centuries."""

    def __init__(self, jobs: int) -> None:
        super().__init__(
            f"{jobs} jobs have not ended after 400 simulated days: does the policy let each job end, and "
            "is each time of submission in the trace right?"
        )


def simulate(
    submissions: Sequence[Submission],
    applications: Mapping[str, Application],
    policy: Policy,
    scenario: Scenario,
    progress: Progress | None = None,
) -> SimulationResult:
    """Run the trace to its end; deterministic except for decision times."""
    thresholds = gc.get_threshold()
    # A run makes many small objects and no cycles: looking for these takes a twentieth of it.
    gc.set_threshold(SELDOM, *thresholds[1:])
    try:
        jobs = trainings(submissions, applications, policy, scenario)
        return _Engine(jobs, policy, scenario).run(progress)
    finally:
        gc.set_threshold(*thresholds)


class _Engine:
    def __init__(self, jobs: tuple[SimulatedJob, ...], policy: Policy, scenario: Scenario) -> None:
        self._jobs, self._policy, self._scenario = jobs, policy, scenario
        self._restart = {job.app.name: scenario.restart_of(job.app.name) for job in jobs}
        self._now = 0.0
        self._decided_at = float("-inf")
        self._seen: list[int] = []
        self._moments: list[Moment] = []
        self._decision_seconds: list[float] = []
        horizon = jobs[-1].submission.time + 30 * 86400.0
        self._outages = scenario.outages(horizon)
        self._down: dict[int, float] = {}
        self._sizes = scenario.sizes
        self._borrowers: Mapping[int, float] = {}
        self._node_seconds = 0.0

    def run(self, progress: Progress | None) -> SimulationResult:
        waiting = list(self._jobs)
        active: list[SimulatedJob] = []
        scenario = self._scenario
        step = scenario.poll if self._policy.reacts else scenario.interval
        ended = 0
        while waiting or active:
            if not active and waiting[0].submission.time > self._now + step:
                # Nothing happens until the next arrival; the grid of ticks stays where it is.
                skipped = step * ((waiting[0].submission.time - self._now) // step)
                self._now += skipped
                if self._moments:
                    self._node_seconds += skipped * self._nodes(idle=True)
            self._advance(active, step)
            self._now += step
            if active or self._moments:
                self._node_seconds += step * self._nodes()
            self._fail(active)
            still = [job for job in active if job.ended_at is None]
            if len(still) < len(active):
                ended += len(active) - len(still)
                if progress is not None:
                    progress(ended, len(self._jobs))
            active = still
            while waiting and waiting[0].submission.time <= self._now:
                active.append(waiting.pop(0))
            if active and self._due(active):
                self._decide(active)
            if self._now > 400 * 86400.0:
                raise Unfinished(len(waiting) + len(active))
        return SimulationResult(
            self._jobs, tuple(self._moments), tuple(self._decision_seconds), self._node_seconds
        )

    def _nodes(self, idle: bool = False) -> int:
        """How many nodes are paid for; a policy that rents them keeps the least of them while there is no job."""
        cloud, rented = self._scenario.cloud, self._policy.nodes
        if cloud is None or rented is None:
            return self._scenario.nodes
        return cloud.least if idle else rented

    def _due(self, active: Sequence[SimulatedJob]) -> bool:
        since = self._now - self._decided_at
        if since >= self._scenario.interval:
            return True
        return since >= self._scenario.floor and self._present(active) != self._seen

    def _present(self, active: Sequence[SimulatedJob]) -> list[int]:
        """Jobs, and nodes that cannot be used: a change of either is news."""
        return [*[job.number for job in active], *sorted(-1 - node for node in self._down)]

    def _advance(self, active: Sequence[SimulatedJob], seconds: float) -> None:
        for job in active:
            job.advance(self._now, seconds, self._borrowers.get(job.number, 1.0))

    def _fail(self, active: Sequence[SimulatedJob]) -> None:
        """Take down nodes and their jobs; bring repaired nodes back."""
        self._down = {node: until for node, until in self._down.items() if until > self._now}
        while self._outages and self._outages[0][0] <= self._now:
            at, node = self._outages.pop(0)
            if node in self._down:
                continue
            self._down[node] = at + self._scenario.repair_seconds
            for job in active:
                if any(seat == node for seat, _ in job.seats):
                    job.fail(self._now, 0.5)

    def _view(self, active: Sequence[SimulatedJob]) -> View:
        capacity = tuple(0 if node in self._down else size for node, size in enumerate(self._sizes))
        return View(self._now, self._scenario, capacity, tuple(active))

    def _decide(self, active: Sequence[SimulatedJob]) -> None:
        view = self._view(active)
        if self._policy.chooses_batch:
            for job in active:
                # Fits are the agents' work: they are ready when the daemon looks.
                job.agent.params  # noqa: B018
        began = time.perf_counter()
        placed = self._policy.decide(view)
        self._check(placed, view)
        self._decision_seconds.append(time.perf_counter() - began)
        self._borrowers = dict(self._policy.borrowers)
        busy = sum(gpus for n, seats in placed.items() if n not in self._borrowers for _, gpus in seats)
        for job in active:
            seats = placed.get(job.number, ())
            if seats != job.seats:
                self._move(job, seats)
        self._decided_at = self._now
        self._seen = self._present(active)
        weight = sum(job.gpus * job.efficiency for job in active if job.number not in self._borrowers)
        self._moments.append(Moment(self._now, len(active), busy, weight / busy if busy else 0.0))

    def _check(self, placed: Mapping[int, Seats], view: View) -> None:
        """Raise BadDecision for GPUs that are not there, and for jobs that are not."""
        name, used = type(self._policy).__name__, Counter[int]()
        known = {job.number for job in view.jobs}
        for number, seats in placed.items():
            if number not in known:
                raise BadDecision(f"{name} placed job {number}, which is not in view.jobs")
            for node, gpus in seats:
                if not 0 <= node < len(view.capacity) or gpus < 1:
                    raise BadDecision(
                        f"{name} gave job {number} {gpus} GPUs of node {node}; expected at least 1 GPU of nodes 0 to "
                        f"{len(view.capacity) - 1}"
                    )
                used[node] += 0 if number in self._policy.borrowers else gpus
        for node, gpus in used.items():
            if gpus > view.capacity[node]:
                raise BadDecision(f"{name} gave {gpus} GPUs of node {node}, which has {view.capacity[node]}")

    def _move(self, job: SimulatedJob, seats: Seats) -> None:
        """Move the job, at a flat cost or at that of the product's path."""
        costs, path, seconds = self._scenario.moves, "requeue", self._restart[job.app.name]
        if costs is not None:
            path = job.allocation.move(placement(job.seats), placement(seats))
            seconds = costs.of(path) if seats else 0.0
        job.place(seats, self._now, seconds, path)


def trainings(
    submissions: Sequence[Submission],
    applications: Mapping[str, Application],
    policy: Agents,
    scenario: Scenario,
) -> tuple[SimulatedJob, ...]:
    """Return the trace's jobs before they are submitted, with agents as the policy wants them."""
    present = {job.application: applications[job.application] for job in submissions}
    memories = {name: Memory() for name in present} if policy.remembers else {}
    on = {name: _by_type(app, scenario) for name, app in present.items()}
    return tuple(
        _training(i, job, on[job.application], policy, scenario, memories.get(job.application))
        for i, job in enumerate(submissions)
    )


def _by_type(app: Application, scenario: Scenario) -> dict[str, Application]:
    """Return the application on each GPU type.

    Under the empty name where all nodes are alike.
    """
    if app.name in scenario.step_factors:
        app = CalibratedApplication(app, scenario.step_factors[app.name])
    if not scenario.groups:
        return {"": app}
    return {group.gpu_type: on_type(app, group.gpu_type, group.speed) for group in scenario.groups}


def _training(
    number: int,
    job: Submission,
    on: Mapping[str, Application],
    policy: Agents,
    scenario: Scenario,
    memory: Memory | None,
) -> SimulatedJob:
    if job.work != 1.0:
        on = {kind: ScaledApplication(app, job.work) for kind, app in on.items()}
    app = next(iter(on.values()))
    agent = Agent(
        app.limits,
        name=job.name,
        seed=scenario.seed,
        jitter=scenario.jitter,
        noise_jitter=scenario.noise_jitter,
        memory=memory,
        seconds_apart=policy.seconds_between_fits,
    )
    batch = app.fixed_batch if policy.chooses_batch else job.batch_size
    return SimulatedJob(
        number,
        job,
        app,
        batch_size=batch,
        agent=agent,
        measures=policy.chooses_batch,
        scenario=scenario,
        on=on,
    )
