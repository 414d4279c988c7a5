"""polluxd's own controller in virtual time, over the Slurm and the database in memory.

Everything between a report and a move is the daemon's: what it believes, the snapshot, the decision, refusals,
cooldowns, contention, and the steps of each move. Slurm and the database are `polluxd.slurm.fake` and
`polluxd.store.fake`, which contract tests hold to the real ones. The jobs' agents are `polluxd.sim.ranks`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from polluxd.apply.reconciler import Reconciler
from polluxd.config.config_file import Config, parse_config
from polluxd.config.settings import CycleSettings, MoveSettings, PolicySettings
from polluxd.cycle.controller import Controller, StepResult
from polluxd.errors import ConfigError
from polluxd.model import Node, Plan, Snapshot, Step
from polluxd.policy import Cache, decide
from polluxd.sim.applications import TYPICAL_SPEEDS, Application
from polluxd.sim.cluster import Scenario
from polluxd.sim.engine import Moment, Progress, SimulationResult, Unfinished, View, trainings
from polluxd.sim.policies.daemon_view import nodes, spec
from polluxd.sim.policies.pollux import Pollux
from polluxd.sim.ranks import Ranks, Surroundings
from polluxd.sim.simulated_job import SimulatedJob, node_name
from polluxd.sim.workload import Submission
from polluxd.slurm.fake import FakeSlurm
from polluxd.slurm.fake.fake_power import PowerSaving
from polluxd.store.fake import FakeRows, FakeStore

NEWS_S = 0.5
"""Time between two looks of polluxd for news of moves."""
FORGETS_S = 300.0
"""slurm.conf's MinJobAge."""
PATIENCE = 3
"""Floors between two decisions after which an occasion is not put off any more."""
LONGEST = 400 * 86400.0
RENTED = "rented"
"""The feature that has the price. The cloud's `least` nodes are the cluster's own."""
Decide = Callable[..., Plan]
"""As `polluxd.policy.decide`."""


def simulate_daemon(
    submissions: Sequence[Submission],
    applications: Mapping[str, Application],
    scenario: Scenario,
    progress: Progress | None = None,
    decide: Decide = decide,
) -> SimulationResult:
    """Run the trace to its end under polluxd itself. `decide` is its policy, for whoever wants to watch it.

    Raises ConfigError where the scenario leaves polluxd no node to use.
    """
    quiet = logging.getLogger("polluxd")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        return _World(submissions, applications, scenario, decide).run(progress)
    finally:
        quiet.setLevel(level)


class _World:
    """Slurm, the database, the jobs and polluxd, and the time that passes for all of them."""

    def __init__(
        self,
        submissions: Sequence[Submission],
        applications: Mapping[str, Application],
        scenario: Scenario,
        decide: Decide,
    ) -> None:
        self._scenario, self._policy = scenario, decide
        self._jobs = trainings(submissions, applications, Pollux(scenario), scenario)
        cloud = scenario.cloud
        self._saving = None if cloud is None else PowerSaving(cloud.boot_seconds, cloud.idle_seconds)
        self.slurm = FakeSlurm(_nodes(scenario), now=0.0, forgets_s=FORGETS_S, saving=self._saving)
        self._rows = FakeRows(self.slurm.clock)
        self._around = Surroundings(self.slurm, self._rows, scenario)
        self._unused = 0.0
        """Node-seconds before the first job came."""
        self._ranks: dict[int, Ranks] = {}
        self._waiting = list(self._jobs)
        self._ended = 0
        self._decision_seconds: list[float] = []
        self._moments: list[Moment] = []
        self._idle_seconds = 0.0
        self._happened = False
        """A job came, or a node went or came back."""
        self._outages = scenario.outages(max(job.time for job in submissions) + 30 * 86400.0)
        self._down: dict[str, float] = {}
        self._config = _configuration(scenario)
        store = FakeStore(self._rows, lease_s=math.inf)
        epoch = store.lead()
        assert epoch is not None
        reconciler = Reconciler(
            self.slurm,
            store,
            limits=self._config.moves,
            lease=self._config.slurm.lease_s,
            authorize=lambda: epoch,
            clock=self.slurm.clock,
            monotonic=self.slurm.clock,
        )
        self._controller = Controller(
            self._config,
            self.slurm,
            store,
            reconciler,
            monotonic=self.slurm.clock,
            policy=self._decide,
        )

    def run(self, progress: Progress | None) -> SimulationResult:
        pause = self._scenario.poll
        while self._waiting or self._ranks:
            now = self.slurm.clock()
            if not self._ranks and self._waiting[0].submission.time > now + pause:
                self.slurm.advance(self._waiting[0].submission.time - now)
            news = self._pass_time(pause)
            if not news and self._looks_in_vain():
                continue
            if progress is not None:
                progress(self._ended, len(self._jobs))
            result = self._controller.step()
            now = self.slurm.clock()
            for number in list(self._rows.open):
                move = self._rows.moves[number - 1]
                ranks = self._ranks.get(move.job_id)
                news |= ranks is not None and ranks.obey(move, now)
            if result.decided:
                self._note(result, now)
            pause = self._pause(result, now)
            if now > LONGEST:
                left = len(self._waiting) + len(self._ranks)
                raise Unfinished(left)
        return SimulationResult(
            self._jobs,
            tuple(self._moments),
            tuple(self._decision_seconds),
            self._nodes_on() - self._unused,
            self._idle_seconds,
        )

    def _nodes_on(self) -> float:
        """Return the node-seconds for which nodes were on."""
        return (
            self._scenario.nodes * self.slurm.clock() if self._saving is None else self._saving.node_seconds
        )

    def _looks_in_vain(self) -> bool:
        """Tell whether a look of polluxd now would change nothing, since nothing has happened since its last one."""
        cycle = self._config.cycle
        since = self.slurm.clock() - (self._moments[-1].time if self._moments else -math.inf)
        return not self._rows.open and PATIENCE * cycle.floor_s < since < cycle.interval_s

    def _pause(self, result: StepResult, now: float) -> float:
        """Return the seconds to polluxd's next look."""
        cycle = self._config.cycle
        if not result.open_moves:
            return cycle.poll_s
        moves = [self._rows.moves[number - 1] for number in self._rows.open]
        if any(move.step in (Step.CHECKPOINTED, Step.DRAINING) for move in moves):
            return NEWS_S
        # polluxd looks every second. Looks while every move waits for a first step, and before it, change nothing.
        if all(move.step is Step.STARTED and not move.in_allocation for move in moves):
            steps = (self._ranks[move.job_id].first_step_due for move in moves if move.job_id in self._ranks)
            return min(max(min(steps, default=0.0) - now + NEWS_S / 2, cycle.busy_poll_s), cycle.poll_s)
        return cycle.busy_poll_s

    def _pass_time(self, seconds: float) -> bool:
        """Let Slurm and the jobs live on; tell whether polluxd has news."""
        before = self.slurm.clock()
        until = before + seconds
        self._fail_nodes(until)
        while self._waiting and self._waiting[0].submission.time <= until:
            job = self._waiting.pop(0)
            self.slurm.advance(max(job.submission.time - self.slurm.clock(), 0.0))
            self._submit(job)
        self.slurm.advance(max(until - self.slurm.clock(), 0.0))
        news, ended = self._happened, list[int]()
        self._happened = False
        for job_id, ranks in self._ranks.items():
            news |= ranks.live(before, until)
            if ranks.job.ended_at is not None:
                ended.append(job_id)
        for job_id in ended:
            del self._ranks[job_id]
        if ended:
            news = True
            self._ended += len(ended)
            self.slurm.advance(0.2)  # their processes exit
        return news

    def _submit(self, job: SimulatedJob) -> None:
        self._happened = True
        if job.number == 0:
            self._unused = self._nodes_on()
        user = job.number % self._scenario.users + 1
        job_id = self.slurm.submit(
            spec(job, self._scenario.gpus),
            name=job.submission.name,
            user=f"user-{user}",
            uid=1000 + user,
            lease=self._config.slurm.lease_s,
        )
        self._ranks[job_id] = Ranks(job, job_id, self._around)

    def _fail_nodes(self, until: float) -> None:
        """Take down nodes and their jobs; bring repaired nodes back."""
        for name in [name for name, back in self._down.items() if back <= until]:
            del self._down[name]
            self._happened = True
            self.slurm.set_schedulable(name, True)
        while self._outages and self._outages[0][0] <= until:
            at, number = self._outages.pop(0)
            name = node_name(number)
            if name not in self._down:
                self._happened = True
                self._down[name] = at + self._scenario.repair_seconds
                self.slurm.break_node(name)

    def _decide(self, snapshot: Snapshot, cache: Cache) -> Plan:
        began = time.perf_counter()
        plan = self._policy(snapshot, cache=cache)
        self._decision_seconds.append(time.perf_counter() - began)
        return plan

    def _note(self, result: StepResult, now: float) -> None:
        jobs = [ranks.job for ranks in self._ranks.values()]
        busy = sum(job.gpus for job in jobs)
        weight = sum(job.gpus * job.efficiency for job in jobs)
        since = now - self._moments[-1].time if self._moments else 0.0
        self._idle_seconds += since if any(not idle.stated for idle in result.idle) else 0.0
        self._moments.append(Moment(now, len(jobs), busy, weight / busy if busy else 0.0))


def _configuration(scenario: Scenario) -> Config:
    """Return polluxd's configuration: the defaults, and what the scenario says."""
    cycle, moves = CycleSettings(), MoveSettings()
    longest = max([scenario.restart_seconds, *scenario.restarts.values()])
    found = parse_config(
        {
            "mode": "enforce",
            "slurm": {"cluster": "simulated", "gpu_speeds": _speeds(scenario)},
            "database": {"url": "postgresql://nobody@127.0.0.1/nothing"},
            "cycle": {
                "interval_s": scenario.interval,
                "floor_s": scenario.floor,
                "poll_s": scenario.poll,
                "busy_poll_s": min(cycle.busy_poll_s, scenario.poll),
            },
            "moves": {
                "paths": ["requeue"] if scenario.moves is None else list(moves.paths),
                "training_timeout_s": max(moves.training_timeout_s, 2 * longest),
            },
        },
        "simulation",
    )
    return found.model_copy(update={"policy": _settings(scenario)})


def _settings(scenario: Scenario) -> PolicySettings:
    """Return the policy's settings: the scenario's, with what its cloud costs and takes."""
    cloud, settings = scenario.cloud, scenario.policy
    if cloud is None:
        return settings
    if not cloud.least and not settings.cloud_hour_value:
        raise ConfigError(
            "cloud.least is 0, and polluxd rents no node while policy.cloud_hour_value is 0: expected what it is worth "
            "that a job ends an hour sooner, in the money of cloud.price; set cloud_hour_value under [policy]"
        )
    return replace(
        settings,
        cloud_prices={RENTED: cloud.price},
        cloud_boot_s=cloud.boot_seconds,
        cloud_return_s=cloud.idle_seconds + MoveSettings().default_cost_s,
    )


def _nodes(scenario: Scenario) -> tuple[Node, ...]:
    """Return the cluster before the first job: rented nodes are off."""
    found = nodes(View(0.0, scenario, scenario.sizes, ()))
    if scenario.cloud is None:
        return found
    own, rented = found[: scenario.cloud.least], found[scenario.cloud.least :]
    return (*own, *(replace(node, features=frozenset({RENTED}), power="off") for node in rented))


def _speeds(scenario: Scenario) -> dict[str, float]:
    """Return the speed of each GPU type as an administrator would configure it."""
    return {
        group.gpu_type: TYPICAL_SPEEDS.get(group.gpu_type.lower(), 1.0) * group.speed
        for group in (scenario.groups if scenario.pollux.gpu_speeds else ())
        if group.gpu_type.lower() in TYPICAL_SPEEDS or group.speed != 1.0
    }
