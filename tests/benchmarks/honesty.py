"""Random honest lives of jobs: how many does `TrustedReports` doubt?

`make bench-honesty` writes the table of tests/benchmarks/honesty.md, from the lives in bench-out/honesty/. What lies
there is not run again, so the run can be divided into pieces.

A life is a training of one application of the simulator, moved between random numbers of GPUs. Its agent is the
simulator's (`polluxd.sim.agent`): it measures, fits, and chooses its batch size. polluxd sees only its reports, when
they arrive, and where the job is.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pollux.goodput import NoiseScale
from polluxd.cycle.progress_rates import TrainedOn
from polluxd.cycle.trusted_reports import Held, TrustedReports
from polluxd.model import Report
from polluxd.sim.agent import Agent, Memory
from polluxd.sim.applications import BUILT_IN, Application, most_gpus
from polluxd.sim.cluster import Scenario
from polluxd.sim.profiles import load_profiles
from polluxd.sim.simulated_job import Seats, SimulatedJob
from polluxd.sim.workload import Submission
from tests.benchmarks.results import ROOT, save

PAGE = Path(__file__).with_suffix(".md")
OUT = ROOT / "bench-out" / "honesty"
"""A file per block of lives; a block that is there is not lived again."""
LIVES = 10_000
CLUSTER = Scenario()
"""16 nodes of 4 GPUs."""
PARTS = 20
"""Of an epoch. After each one, an agent looks at its batch size."""
REPORT_S = 30.0
LOOK_S = 15.0
"""Longest step of a life; it ends earlier where the job moves, reports or is decided on."""
STALL_EVERY_S = 3600.0
"""Mean time between two stalls: a checkpoint to slow storage, a busy file server."""
DECISION_S = 60.0
BLOCK = 100
"""Lives that share the fits of earlier ones. The first of a block knows none, so blocks can run in any order."""
OFF = 0.1
"""Largest log-error of the step times that an agent measures: 10 %."""
NOISE_OFF, NOISE_OFF_MIN = 0.3, (3.0, 30.0)
"""Largest log-error of the noise scale beyond its statistics', and the minutes for which it stays."""
SHARES = 1.5
"""Shares of the error that `Agent` adds up for one step time: half for the run, one for the configuration."""
MOST_HOURS = 6.0
"""Of training in a life; most end sooner."""


@dataclass(frozen=True)
class GrowingNoise:
    """An application whose noise scale grows by `growth`, beyond its own.

    Its epochs are divided into parts, since an agent chooses its batch size all through an epoch, not only after it.
    """

    app: Application
    growth: float

    def __getattr__(self, name: str) -> Any:
        """All else is the application's: its name, limits, step times, most GPUs."""
        return getattr(self.app, name)

    @property
    def epochs(self) -> int:
        return self.app.epochs * PARTS

    def noise(self, batch_size: int, epoch: int) -> NoiseScale:
        own = self.app.noise(batch_size, min(epoch // PARTS, self.app.epochs - 1))
        return own._replace(var=own.var * self.growth ** (epoch / (self.epochs - 1)))

    def progress(self, epoch: int) -> float:
        whole, part = divmod(epoch, PARTS)
        begun = self.app.progress(whole)
        return begun + (self.app.progress(whole + 1) - begun) * part / PARTS if part else begun

    def iterations(self, batch_size: int, epoch: int) -> float:
        return self.app.iterations(batch_size, epoch // PARTS)


class RoughAgent(Agent):
    """An agent whose step times are off by at most `OFF`, and its gradient statistics by more."""

    _noise_off, _noise_off_until = 1.0, 0.0

    def measure(self, *row: Any) -> None:
        super().measure(*row)
        if self.now >= self._noise_off_until:
            self._noise_off = float(np.exp(self._random.uniform(-NOISE_OFF, NOISE_OFF)))
            self._noise_off_until = self.now + 60.0 * float(self._random.uniform(*NOISE_OFF_MIN))
        self.noise = self.noise._replace(var=self.noise.var * self._noise_off)

    def _error(self, share: float = 1.0) -> float:
        return float(np.exp(self._random.uniform(-OFF, OFF) * share / SHARES))


@dataclass(frozen=True, slots=True)
class Life:
    """What became of one life."""

    application: str
    hours: float
    moves: int
    doubts: tuple[str, ...]
    held_back_s: float
    """Longest time in one place for which polluxd let the job have no more GPUs."""


def honest_life(seed: int, applications: Mapping[str, Application], memories: dict[str, Memory]) -> Life:
    """Live one random life; `memories` are the fits that earlier lives left."""
    draw = np.random.default_rng([0x40E57, seed])
    name = sorted(applications)[int(draw.integers(len(applications)))]
    app = GrowingNoise(applications[name], float(100.0 ** draw.random()))
    job = _Training(seed, app, draw, memories.setdefault(name, Memory()) if draw.random() < 0.5 else None)
    doubts = tuple(job.doubts())
    return Life(name, job.now / 3600.0, job.moves, doubts, job.held_back_s)


class _Training:
    """One job, polluxd's look at it, and the hand that moves it."""

    def __init__(self, seed: int, app: Application, draw: np.random.Generator, memory: Memory | None) -> None:
        self._draw, self._app = draw, app
        agent = RoughAgent(app.limits, name=str(seed), seed=seed, memory=memory, seconds_apart=30.0)
        self._job = SimulatedJob(
            seed, Submission(str(seed), 0.0, app.name, 1, app.limits.initial), app,
            batch_size=app.fixed_batch, agent=agent, measures=True, scenario=CLUSTER, on={"": app},
        )  # fmt: skip
        self._length_off = float(3.0 ** draw.uniform(-1, 1))
        self._evaluates = draw.random() < 0.7
        self._evaluation_share = float(draw.uniform(0.02, 0.2))
        self._trusted = TrustedReports()
        self._most = (0, 0)
        self._report: Report | None = None
        self._first_step_at: float | None = None
        self.now, self.attempt, self.moves = 0.0, 0, 0
        self._free_at, self.held_back_s = 0.0, 0.0

    def doubts(self) -> list[str]:
        """Train to the end, or for `MOST_HOURS`; return all that was doubted."""
        found: list[str] = []
        draw, job = self._draw, self._job
        moves_at, stalls_at = 0.0, float(draw.exponential(STALL_EVERY_S))
        paused_until, epoch, epoch_began = 0.0, 0, 0.0
        next_report, next_decision = 0.0, float(draw.uniform(0, DECISION_S))
        observed: tuple[Report | None, TrainedOn | None] = (None, None)
        while job.ended_at is None and self.now < MOST_HOURS * 3600:
            if self.now >= moves_at:
                self._move()
                epoch_began = self.now
                moves_at = self.now + 60.0 * float(draw.choice([3, 8, 20, 60]) * draw.uniform(0.5, 1.5))
            events = (moves_at, stalls_at, next_report, next_decision, job.trains_at)
            until = min(self.now + LOOK_S, *(at for at in events if at > self.now))
            begins = min(max(self.now, paused_until), until)
            job.advance(begins, until - begins)
            self.now = until
            if job.restarting <= 0 and job.seats and self._first_step_at is None:
                self._first_step_at = job.trains_at
            if job.epoch // PARTS != epoch:
                if self._evaluates:
                    took = self.now - epoch_began
                    paused_until = self.now + min(self._evaluation_share * took, 120.0)
                epoch, epoch_began = job.epoch // PARTS, max(paused_until, self.now)
            if self.now >= stalls_at:
                paused_until = max(paused_until, self.now + float(draw.uniform(5, 60)))
                stalls_at = self.now + float(draw.exponential(STALL_EVERY_S))
            if self.now >= next_report and job.seats:
                next_report = self.now + REPORT_S
                self._report = self._published()
            if self._report is None:
                continue
            place = self._place
            # A look that finds nothing new changes nothing.
            if observed != (self._report, place):
                observed = self._report, place
                self._trusted.observe({1: self._report}, {1: Held(place.gpus, place.nodes, *self._most)})
            if self.now >= next_decision:
                next_decision = self.now + DECISION_S
                held = Held(place.gpus, place.nodes, *self._most, float(draw.choice([4.0, 16.0])))
                reports, doubts, _ = self._trusted.trust({1: self._report}, {1: held}, self.now)
                found += doubts.get(1, ())
                if reports[1].most_gpus is None or not place.gpus:
                    self._free_at = self.now
                self.held_back_s = max(self.held_back_s, self.now - self._free_at)
        return found

    @property
    def _place(self) -> TrainedOn:
        job = self._job
        moving = not job.seats or job.restarting > 0
        return TrainedOn(0, 0) if moving else TrainedOn(job.gpus, job.nodes)

    def _move(self) -> None:
        """Change the number of GPUs, by a restart or in place; at times to 0."""
        draw, job = self._draw, self._job
        if job.seats and draw.random() < 0.1:
            job.fail(self.now, float(draw.choice([0.0, 0.5])))
            return
        cap = min(most_gpus(self._app), 2 * max(self._most[0], 2), CLUSTER.gpus)
        gpus = int(min(2 ** draw.uniform(0, np.log2(cap) + 0.2), cap))
        full, rest = divmod(gpus, CLUSTER.gpus_per_node)
        if full and rest:
            rest = 0
        seats: Seats = tuple((node, CLUSTER.gpus_per_node) for node in range(full)) or ((0, rest),)
        if seats == job.seats:
            return
        self.moves, self._free_at = self.moves + 1, self.now
        in_place = bool(job.seats) and draw.random() < 0.5
        if not in_place:
            self.attempt += 1
        job.place(seats, self.now, float(draw.uniform(1, 5) if in_place else draw.uniform(5, 180)))
        self._most = (max(self._most[0], job.gpus), max(self._most[1], job.nodes))
        self._first_step_at = self._first_step_at if in_place else None

    def _published(self) -> Report | None:
        job, agent = self._job, self._job.agent
        if self._first_step_at is None:
            return self._report and replace(
                self._report, attempt=self.attempt, at=self.now, first_step_at=None
            )
        return Report(
            attempt=self.attempt,
            at=self.now + float(self._draw.uniform(0, 1)),
            limits=self._app.limits,
            params=agent.params,
            noise=agent.noise,
            explored_gpus=agent.explored_gpus,
            explored_nodes=agent.explored_nodes,
            prior_gpus=agent.prior_gpus,
            prior_nodes=agent.prior_nodes,
            gpus=job.gpus,
            nodes=job.nodes,
            batch_size=job.total_batch,
            progress=job.progress,
            target=job.length * self._length_off,
            checkpointed=True,
            first_step_at=self._first_step_at,
        )


def applications() -> dict[str, Application]:
    """The shipped applications, and the paper's where its data is present."""
    profiles = ROOT / os.environ.get("POLLUX_OSDI21", "../shared/data/osdi21") / "profiles"
    return {**BUILT_IN, **(load_profiles(profiles) if profiles.is_dir() else {})}


def table(lives: Sequence[Life]) -> str:
    """Return the table by application."""
    rows = [
        "| application | lives | hours of training | moves | doubted | held back [min] |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    kinds = [*sorted({life.application for life in lives}), "all"]
    for kind in kinds:
        mine = [life for life in lives if kind in (life.application, "all")]
        hours, moves = sum(life.hours for life in mine), sum(life.moves for life in mine)
        doubted = sum(bool(life.doubts) for life in mine)
        longest = max(life.held_back_s for life in mine) / 60
        rows.append(f"| {kind} | {len(mine):,} | {hours:,.0f} | {moves:,} | {doubted} | {longest:.0f} |")
    return "\n".join(rows)


def main() -> None:
    """Live the lives and write the figures; fail where one is doubted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lives", type=int, default=LIVES)
    parser.add_argument("--first", type=int, default=0, help="seed of the first life, a multiple of 100")
    parser.add_argument(
        "--page", action="store_true", help="write the page, from all lives that stand in OUT"
    )
    arguments = parser.parse_args()
    known = applications()
    for first in range(arguments.first, arguments.first + arguments.lives, BLOCK):
        path = OUT / f"{first:05d}.json"
        if path.exists():
            continue
        memories, lives = dict[str, Memory](), list[Life]()
        for seed in range(first, min(first + BLOCK, arguments.first + arguments.lives)):
            lives.append(honest_life(seed, known, memories))
            if lives[-1].doubts:
                print(f"life {seed}, {lives[-1].application}: {lives[-1].doubts[0]}", flush=True)
        save(path, [asdict(life) for life in lives])
    lives = [Life(**life) for path in sorted(OUT.glob("*.json")) for life in json.loads(path.read_text())]
    print(table(lives))
    if arguments.page:
        head = PAGE.read_text().partition("\n| application")[0]
        PAGE.write_text(f"{head}\n{table(lives)}\n")
    if any(life.doubts for life in lives):
        raise SystemExit("an honest job was doubted")


if __name__ == "__main__":
    main()
