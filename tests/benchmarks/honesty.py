"""Random honest lives of jobs: how many does `TrustedReports` doubt?

`make bench-honesty` writes the table of tests/benchmarks/honesty.md, from the lives in bench-out/honesty/. What lies
there is not run again, so the run can be divided into pieces.

A life is a training of one application of the simulator, moved between random numbers of GPUs. What polluxd sees is the
real agent's report (`tests.benchmarks.honest_training`), when it arrives, and where the job is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from pollux.goodput import BatchLimits
from polluxd.cycle.progress_rates import TrainedOn
from polluxd.cycle.trusted_reports import Held, TrustedReports
from polluxd.model import Report
from polluxd.sim.applications import BUILT_IN, Application, most_gpus
from polluxd.sim.cluster import Scenario
from polluxd.sim.profiles import load_profiles
from tests.benchmarks.honest_training import HonestTraining
from tests.benchmarks.results import ROOT, save

PAGE = Path(__file__).with_name("honesty_table.md")
OUT = ROOT / "bench-out" / "honesty"
"""A file per block of lives; a block that is there is not lived again."""
LIVES = 1_200
CLUSTER = Scenario()
"""16 nodes of 4 GPUs."""
REPORT_S = 30.0
LOOK_S = 15.0
"""Longest step of a life; it ends earlier where the job moves, reports or is decided on."""
STALL_EVERY_S = 3600.0
"""Mean time between two stalls: a checkpoint to slow storage, a busy file server."""
DECISION_S = 60.0
BLOCK = 50
MOST_HOURS = 6.0
"""Of training in a life; most end sooner."""
BEHAVIOURS = (
    "plain",
    "statistical epochs",
    "epochs raised by 20 to 100 %",
    "another M0 after a restart",
    "resumed: polluxd knows nothing of its past",
    "ends early",
    "sequences lengthen: steps x2 at 30, 60, 80 %",
    "two phases: steps x3, noise / 10 at 40 %",
    "curriculum: noise x4 at three decays",
    "noise rises and falls 2 to 10 times",
    "evaluations of 10 to 20 min",
    "evaluations take half of the time",
    "checkpoints of 1 to 5 min",
    "step times drift (sd 0.25)",
    "bursts of 1.5 to 4 times slower steps",
    "30 % slower after ten minutes (heat)",
)
"""What makes a life different. All have a noise scale that grows, evaluations, stalls and moves."""
_PAUSES = {"evaluations of 10 to 20 min": (10, 20, 30, 120), "checkpoints of 1 to 5 min": (1, 5, 10, 30)}
"""Least and most minutes of a pause, and of the time to the next one."""


@dataclass(frozen=True, slots=True)
class Life:
    """What became of one life."""

    behaviour: str
    application: str
    hours: float
    moves: int
    doubts: tuple[str, ...]
    unconfirmed: float
    """Share of the decisions at which polluxd did not count on something, without a doubt."""
    held_back_s: float
    """Longest time in one place for which polluxd let the job have no more GPUs."""


def honest_life(seed: int, applications: Mapping[str, Application], hours: float = MOST_HOURS) -> Life:
    """Live one random life, for so many hours at most."""
    draw = np.random.default_rng([0x40E57, seed])
    behaviour = BEHAVIOURS[seed % len(BEHAVIOURS)]
    app = applications[sorted(applications)[int(draw.integers(len(applications)))]]
    job = _Job(behaviour, app, draw)
    doubts = tuple(job.doubts(hours))
    share = job.unconfirmed / max(job.decisions, 1)
    return Life(behaviour, app.name, job.now / 3600.0, job.moves, doubts, share, job.held_back_s)


class _Job:
    """One job, polluxd's look at it, and the hand that moves it."""

    def __init__(self, behaviour: str, app: Application, draw: np.random.Generator) -> None:
        self._draw, self._app, self._behaviour = draw, app, behaviour
        statistical = behaviour == "statistical epochs" or (behaviour == "plain" and draw.random() < 0.3)
        self._training = HonestTraining(app, draw, statistical=statistical)
        self._training.growth = float(100.0 ** draw.random())
        # Short trainings are lived several times over: a life is to last hours.
        self._lengthen(float(draw.uniform(1, 3)))
        self._evaluates = draw.random() < 0.7
        self._evaluation_share = float(draw.uniform(0.02, 0.2))
        self._ends_at = float(draw.uniform(0.2, 0.9)) if behaviour == "ends early" else 1.0
        self._wave = (float(draw.uniform(2, 10)), float(draw.uniform(1200, 7200)))
        self._drift = 0.0
        self._burst = (math.inf, -math.inf)
        self._trusted = TrustedReports()
        self._most = (0, 0)
        self._at = (0, 0)
        """Nodes and GPUs that it holds."""
        self._report: Report | None = None
        self._first_step_at: float | None = None
        self._trains_at = 0.0
        self._since = 0.0
        """When it came to its present place."""
        self._happened = False
        self.now, self.attempt, self.moves = 0.0, 0, 0
        self.decisions = self.unconfirmed = 0
        self._free_at, self.held_back_s = 0.0, 0.0
        self._stalls_at = float(draw.exponential(STALL_EVERY_S))
        self._long_at = 60.0 * float(draw.uniform(10, 30))
        self._paused_until, self._epoch, self._epoch_began = 0.0, 0, 0.0

    def _lengthen(self, factor: float) -> None:
        progress = self._training.progress
        if progress.target is not None:
            progress.target *= factor
        elif progress.passes is not None:
            progress.passes *= factor

    def doubts(self, hours: float) -> list[str]:
        """Train to the end, or for so many hours; return all that was doubted."""
        found: list[str] = []
        draw, training = self._draw, self._training
        moves_at, next_report, next_decision = 0.0, 0.0, float(draw.uniform(0, DECISION_S))
        while training.done < self._ends_at and self.now < hours * 3600:
            if self.now >= moves_at:
                self._move()
                self._epoch_began = self.now
                moves_at = self.now + 60.0 * float(draw.choice([3, 8, 20, 60]) * draw.uniform(0.5, 1.5))
            events = (moves_at, self._stalls_at, next_report, next_decision, self._trains_at)
            until = min(self.now + LOOK_S, *(at for at in events if at > self.now))
            self._train(until)
            self.now = training.now = until
            self._pause()
            place = self._place
            if self.now >= next_report and self._at[1]:
                next_report = self.now + REPORT_S
                self._report = self._published()
                self._trusted.observe({1: self._report}, {1: Held(place.gpus, place.nodes, *self._most)})
            if self.now >= next_decision:
                next_decision = self.now + DECISION_S
                if self._report is not None:
                    found += self._decide(self._report, place)
        return found

    def _train(self, until: float) -> None:
        """Train up to then, unless it pauses or moves."""
        training = self._training
        begins = min(max(self.now, self._paused_until, self._trains_at), until)
        if not self._at[1] or begins >= until:
            return
        training.now = begins
        self._change(until - begins)
        training.train(until - begins, int(min(training.done, 0.999) * self._app.epochs))
        if self._first_step_at is None:
            self._first_step_at = self._trains_at

    def _pause(self) -> None:
        """Begin an evaluation, a checkpoint or a stall that is due."""
        draw, done, pauses = self._draw, self._training.done, [0.0]
        if int(done * self._app.epochs) != self._epoch:
            self._epoch = int(done * self._app.epochs)
            took = self.now - self._epoch_began
            if self._behaviour == "evaluations take half of the time":
                pauses.append(min(took, 1200.0))
            elif self._evaluates:
                pauses.append(min(self._evaluation_share * took, 120.0))
            self._epoch_began = max(self.now + pauses[-1], self._paused_until)
        if self.now >= self._stalls_at:
            pauses.append(float(draw.uniform(5, 60)))
            self._stalls_at = self.now + float(draw.exponential(STALL_EVERY_S))
        if self._behaviour in _PAUSES and self.now >= self._long_at:
            least, most, soonest, latest = _PAUSES[self._behaviour]
            pauses.append(60.0 * float(draw.uniform(least, most)))
            self._long_at = self.now + 60.0 * float(draw.uniform(soonest, latest))
        self._paused_until = max(self._paused_until, self.now + max(pauses))

    def _decide(self, report: Report, place: TrainedOn) -> tuple[str, ...]:
        held = Held(place.gpus, place.nodes, *self._most, float(self._draw.choice([4.0, 16.0])))
        reports, doubts, unconfirmed = self._trusted.trust({1: report}, {1: held}, self.now)
        self.decisions += 1
        self.unconfirmed += bool(unconfirmed)
        if reports[1].most_gpus is None or not place.gpus:
            self._free_at = self.now
        self.held_back_s = max(self.held_back_s, self.now - self._free_at)
        return doubts.get(1, ())

    @property
    def _place(self) -> TrainedOn:
        nodes, gpus = self._at
        return TrainedOn(gpus, nodes) if gpus and self.now >= self._trains_at else TrainedOn(0, 0)

    def _change(self, seconds: float) -> None:
        """Let the training's speed and noise change as its behaviour says."""
        draw, training, done = self._draw, self._training, self._training.done
        match self._behaviour:
            case "sequences lengthen: steps x2 at 30, 60, 80 %":
                training.slowness = 2.0 ** sum(done >= part for part in (0.3, 0.6, 0.8))
            case "two phases: steps x3, noise / 10 at 40 %":
                training.slowness, training.jump = (3.0, 0.1) if done >= 0.4 else (1.0, 1.0)
            case "curriculum: noise x4 at three decays":
                training.jump = 4.0 ** sum(done >= part for part in (0.3, 0.6, 0.8))
            case "noise rises and falls 2 to 10 times":
                most, period = self._wave
                training.jump = most ** math.sin(2 * math.pi * self.now / period)
            case "step times drift (sd 0.25)":
                kept = math.exp(-seconds / 900.0)
                self._drift = kept * self._drift + 0.25 * math.sqrt(1 - kept**2) * float(draw.normal())
                training.slowness = math.exp(self._drift)
            case "bursts of 1.5 to 4 times slower steps":
                begins, ends = self._burst
                if self.now > ends:
                    begins = self.now + float(draw.exponential(600.0))
                    ends = begins + float(draw.uniform(30, 150))
                    self._burst = begins, ends
                    self._wave = (float(draw.uniform(1.5, 4)), 0.0)
                training.slowness = self._wave[0] if begins <= self.now else 1.0
            case "30 % slower after ten minutes (heat)":
                full = self._at[1] >= CLUSTER.gpus_per_node
                training.slowness = 1.3 if full and self.now > self._since + 600.0 else 1.0

    def _move(self) -> None:
        """Change the number of GPUs, by a restart or in place; at times to 0."""
        draw, training = self._draw, self._training
        if self._at[1] and draw.random() < 0.1:
            self._at, self._first_step_at = (0, 0), None
            training.restart()
            self.attempt += 1
            return
        cap = min(most_gpus(self._app), 2 * max(self._most[0], 2), CLUSTER.gpus)
        gpus = int(min(2 ** draw.uniform(0, np.log2(cap) + 0.2), cap))
        full, rest = divmod(gpus, CLUSTER.gpus_per_node)
        at = (full, full * CLUSTER.gpus_per_node) if full else (1, rest)
        if at == self._at:
            return
        self.moves, self._free_at = self.moves + 1, self.now
        in_place = bool(self._at[1]) and draw.random() < 0.5
        if not in_place:
            limits = None
            self.attempt += 1
            if not self._happened and training.done > 0.3:
                limits = self._user_changes()
            training.restart(limits)
        self._trains_at = self.now + float(draw.uniform(1, 5) if in_place else draw.uniform(5, 180))
        training.now = self._since = self._trains_at
        training.place(*at)
        training.now = self.now
        self._at = at
        self._most = (max(self._most[0], at[1]), max(self._most[1], at[0]))
        self._first_step_at = self._first_step_at if in_place else None

    def _user_changes(self) -> BatchLimits | None:
        """What the user of such a life changes before a restart; return new limits of the batch size."""
        self._happened = True
        draw, limits = self._draw, self._training.limits
        match self._behaviour:
            case "epochs raised by 20 to 100 %":
                self._lengthen(float(draw.uniform(1.2, 2.0)))
            case "resumed: polluxd knows nothing of its past":
                self._trusted, self._report = TrustedReports(), None
            case "another M0 after a restart":
                most = self._training.most
                double = 2 * limits.initial <= most and draw.random() < 0.5
                initial = 2 * limits.initial if double else max(limits.initial // 2, limits.local_min)
                return replace(limits, initial=initial, maximum=most)
        return None

    def _published(self) -> Report:
        arrived = self.now + float(self._draw.uniform(0, 1))
        return self._training.report(self.attempt, arrived, self._first_step_at)


def applications() -> dict[str, Application]:
    """The shipped applications, and the paper's where its data is present."""
    profiles = ROOT / os.environ.get("POLLUX_OSDI21", "../shared/data/osdi21") / "profiles"
    return {**BUILT_IN, **(load_profiles(profiles) if profiles.is_dir() else {})}


def table(lives: Sequence[Life]) -> str:
    """Return the table by behaviour."""
    rows = [
        "| behaviour | lives | hours | moves | doubted | not confirmed [% of decisions] | held back [min] |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in (*BEHAVIOURS, "all"):
        mine = [life for life in lives if kind in (life.behaviour, "all")]
        if not mine:
            continue
        hours, moves = sum(life.hours for life in mine), sum(life.moves for life in mine)
        doubted = sum(bool(life.doubts) for life in mine)
        longest = max(life.held_back_s for life in mine) / 60
        unsure = 100 * sum(life.unconfirmed for life in mine) / len(mine)
        counts = f"{len(mine):,} | {hours:,.0f} | {moves:,} | {doubted} | {unsure:.1f}"
        rows.append(f"| {kind} | {counts} | {longest:.0f} |")
    return "\n".join(rows)


def main() -> None:
    """Live the lives and write the figures; fail where one is doubted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lives", type=int, default=LIVES)
    parser.add_argument("--first", type=int, default=0, help="seed of the first life, a multiple of 50")
    parser.add_argument(
        "--page", action="store_true", help="write the page, from all lives that stand in OUT"
    )
    arguments = parser.parse_args()
    known = applications()
    for first in range(arguments.first, arguments.first + arguments.lives, BLOCK):
        path = OUT / f"{first:05d}.json"
        if path.exists():
            continue
        lives = list[Life]()
        for seed in range(first, min(first + BLOCK, arguments.first + arguments.lives)):
            lives.append(honest_life(seed, known))
            if lives[-1].doubts:
                one = lives[-1]
                print(f"life {seed}, {one.behaviour}, {one.application}: {one.doubts[0]}", flush=True)
        save(path, [asdict(life) for life in lives])
    lives = [Life(**life) for path in sorted(OUT.glob("*.json")) for life in json.loads(path.read_text())]
    print(table(lives))
    if arguments.page:
        head = "# Honest lives\n\nWritten by `make bench-honesty`; [honesty.md](honesty.md) explains it."
        PAGE.write_text(f"{head}\n\n{table(lives)}\n")
    if any(life.doubts for life in lives):
        raise SystemExit("an honest job was doubted")


if __name__ == "__main__":
    main()
