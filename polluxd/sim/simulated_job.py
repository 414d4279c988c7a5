"""One simulated job: its progress, placement, restarts and times."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from polluxd.model import NO_PLACEMENT, Placement
from polluxd.sim.agent import Agent
from polluxd.sim.applications import Application, split_batch
from polluxd.sim.cluster import Scenario
from polluxd.sim.move_costs import HeldNodes
from polluxd.sim.workload import Submission

Seats = tuple[tuple[int, int], ...]
"""(node, GPUs) pairs, in the order of ranks."""


def node_name(number: int) -> str:
    """Names sort as their numbers do."""
    return f"n{number:05d}"


@lru_cache(maxsize=4096)
def placement(seats: Seats) -> Placement:
    """Return the placement of a job's seats; all its nodes are alike."""
    if not seats:
        return NO_PLACEMENT
    return Placement(tuple(node_name(node) for node, _ in seats), seats[0][1])


class SimulatedJob:
    """A job that trains by the application's truth.

    `batch_size` is held; None: its agent chooses. `measures`: some policy looks at what the agent measured.
    `on` is the application on each GPU type of the scenario's.
    """

    def __init__(
        self,
        number: int,
        submission: Submission,
        app: Application,
        *,
        batch_size: int | None,
        agent: Agent,
        measures: bool,
        scenario: Scenario,
        on: Mapping[str, Application],
    ) -> None:
        self.number = number
        self.on = on
        self._scenario = scenario
        self._types = scenario.types if scenario.groups else ()
        self.submission = submission
        self.app = app
        self.agent = agent
        self.batch_size = batch_size
        self.seats: Seats = ()
        self.gpus = 0
        """That it holds; with `seats`, see `place`."""
        self.epoch = 0
        self.progress = 0.0
        self.restarting = 0.0
        """Seconds until it trains again."""
        self.restarts = 0
        self.started_at: float | None = None
        self.moved_at: float | None = None
        self.trains_at = 0.0
        """When its last move is over."""
        self.ended_at: float | None = None
        self.lost_seconds = 0.0
        """To moves, the first start left out."""
        self.allocation = HeldNodes()
        self.costs: dict[str, list[float]] = {}
        """Seconds that moves took, by path, the first start left out."""
        self.gpu_seconds = 0.0
        self.efficient_seconds = 0.0
        """GPU-seconds of training, times the statistical efficiency then."""
        self.trained_seconds = 0.0
        self.held_at: float | None = None
        self._epochs = app.epochs
        self._end = app.progress(app.epochs)
        self._goal = app.progress(1)
        """Progress at which the present epoch ends."""
        self._declared = scenario.declared(submission.name)
        self._batch = (0, 0)
        self._rate: float | None = None
        self.efficiency = 1.0
        """Statistical, in the present configuration; of M0 until one is measured."""
        self._measures = measures
        self._chosen_for: tuple[int, object] | None = None

    @property
    def nodes(self) -> int:
        return len(self.seats)

    @property
    def total_batch(self) -> int:
        m, s = self._batch
        return m * (s + 1) * self.gpus

    @property
    def length(self) -> float:
        """M0-iterations that it really takes."""
        return self._end

    @property
    def target(self) -> float | None:
        """M0-iterations that its user declared; None: nothing was declared."""
        return None if self._declared is None else self._declared * self._end

    def place(self, seats: Seats, now: float, restart_seconds: float, path: str = "requeue") -> None:
        """Give the job GPUs, or none.

        It trains after the restart; without GPUs, its next start is a restart.
        """
        if self.seats:
            self.held_at = now
        self.seats = seats
        self.gpus = sum(gpus for _, gpus in seats)
        if not seats:
            self._rate = None
            return
        if self.started_at is None:
            self.started_at = now
        else:
            self.restarts += 1
            self.lost_seconds += restart_seconds
            self.costs.setdefault(path, []).append(restart_seconds)
        self.moved_at = now
        self.restarting = restart_seconds
        self.trains_at = now + restart_seconds
        if self._measures:
            self.agent.begin(self._slowest())
        self._choose()

    def fail(self, now: float, lost_share: float) -> None:
        """Take its nodes away: it falls back to the last checkpoint.

        `lost_share` is of the present epoch.
        """
        begun = self.app.progress(self.epoch)
        self.progress = begun + (self.progress - begun) * (1.0 - lost_share)
        self.place((), now, 0.0)

    def resume(self, other: SimulatedJob, restart_seconds: float) -> None:
        """Go on from another job's checkpoint, on the same GPUs."""
        self.progress, self.epoch = other.progress, other.epoch
        self.restarting = restart_seconds
        self._chosen_for = None
        self._reconsider()

    def _choose(self) -> None:
        """The batch size for the present placement, as the agent sees things now."""
        gpus, limits = self.gpus, self.app.limits
        if self.batch_size is not None:
            chosen = split_batch(self.batch_size, gpus, limits)
        else:
            chosen = self.agent.choose(self.nodes, gpus)
            if chosen[0] == 0:
                chosen = split_batch(max(limits.initial, limits.local_min * gpus), gpus, limits)
            top = limits.maximum // (gpus * (chosen[1] + 1))
            chosen = (max(1, min(chosen[0], top)), chosen[1])
        if chosen != self._batch or self._rate is not None:
            self._rate = None
        self._batch = chosen

    def _slowest(self) -> str:
        """Return the GPU type with the longest pass, which sets the pace."""
        kinds = sorted({self._types[node] for node, _ in self.seats}) if self._types else [""]
        if len(kinds) == 1:
            return kinds[0]
        m = max(self._batch[0], self.app.limits.local_min)
        return max(kinds, key=lambda kind: self.on[kind].times((1,), m)[0])

    def _measure(self) -> float:
        """Return M0-iterations per second now; the agent sees the measurement."""
        m, s = self._batch
        placement = tuple(gpus for _, gpus in self.seats)
        kind = self._slowest()
        step, sync = self.on[kind].times(placement, m)
        racks = self._scenario.racks(node for node, _ in self.seats)
        if racks > 1:
            longer = self._scenario.rack_slowdown * sync
            step, sync = step + longer, sync + longer
        batch = self.total_batch
        noise = self.app.noise(batch, self.epoch)
        scale = batch / self.app.limits.initial
        gain = (
            (noise.var + noise.sqr) / (noise.var / scale + noise.sqr) if noise.var + noise.sqr > 0 else scale
        )
        if self._measures:
            self.agent.measure(self.nodes, self.gpus, m, step, sync, noise, kind, racks)
        self.efficiency = gain / scale
        return gain / (step + s * (step - sync))

    def advance(self, now: float, seconds: float, speed: float = 1.0) -> None:
        """Train from `now` for so many seconds, at this part of its speed."""
        if not self.seats or self.ended_at is not None:
            return
        gpus = self.gpus
        self.agent.now = now
        delay = min(self.restarting, seconds)
        self.restarting -= delay
        self.gpu_seconds += delay * gpus
        left = seconds - delay
        while left > 0:
            if self._rate is None:
                self._rate = self._measure()
            rate = self._rate * speed
            if self.progress + rate * left < self._goal:
                self.progress += rate * left
                spent = left
            else:
                spent = min(max((self._goal - self.progress) / rate, 0.0), left)
                self.progress = self._goal
                self.epoch += 1
            self.gpu_seconds += spent * gpus
            self.trained_seconds += spent * gpus
            self.efficient_seconds += spent * gpus * self.efficiency
            left -= spent
            if self.epoch >= self._epochs:
                self.ended_at = now + seconds - left
                self.seats, self.gpus = (), 0
                return
            self._reconsider()

    def _reconsider(self) -> None:
        """Choose the batch size again where the epoch or the fit has changed."""
        known = (self.epoch, self.agent.params if self.batch_size is None else None)
        if known != self._chosen_for:
            self._chosen_for = known
            self._goal = self.app.progress(self.epoch + 1)
            self._rate = None
            self._choose()
