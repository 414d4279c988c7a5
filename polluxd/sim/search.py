"""Searches over hyper-parameters: `polluxctl simulate --search SAMPLER/PRUNER`.

Each job is a task of one array. Optuna chooses its values, and the rules that a real trial follows
(`pollux.search.study`) stop it, or let it go on from another one. Optuna keeps the study in memory.

What the values do is assumed, since nobody has measured it: the value of a trial is that of the application's measured
training after a part of the trial's progress.

    learning rate   too small by a factor f: the trial learns as after 1 / sqrt(f) of its progress. Too large by f < 10:
                    it learns faster at first, by sqrt(f), and no further than after 1 - 0.3 log10 f of the training.
                    Beyond that it learns nothing.
    decay           off by a factor f: it learns no further than after 1 - 0.1 |log10 f| of the training. Only the end
                    of a trial shows this.

Where both are right differs from seed to seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from optuna.storages import InMemoryStorage

from pollux.search.study import PRUNERS, SAMPLERS, STEPS, Search, SearchSettings
from polluxd.errors import ConfigError
from polluxd.sim.applications import Application
from polluxd.sim.cluster import Scenario
from polluxd.sim.engine import simulate
from polluxd.sim.policies import POLICIES
from polluxd.sim.profiles import MeasuredApplication, load_profiles
from polluxd.sim.simulated_job import Seats, SimulatedJob
from polluxd.sim.workload import Submission

SPACE: Mapping[str, tuple[float, float, float]] = {
    "log10_rate": (-4.0, 0.0, 0.125),
    "log10_decay": (-6.0, -2.0, 0.25),
}
"""Least and largest value, and the step: what grid search needs."""
_BEHIND = 0.2
"""Part of a training by which a checkpoint may be behind whoever goes on from it, as in `pollux.trial`."""


class SimulatedSearch:
    """One search, and what its trials' values do."""

    def __init__(self, app: MeasuredApplication, settings: SearchSettings, seed: int) -> None:
        self.app = app
        self.progress, self.values = app.learning_curve()
        settings = replace(settings, maximize=bool(self.values[-1] > self.values[0]))
        self.study = Search(Path(), "simulated", settings, storage=InMemoryStorage(), seed=seed)
        draw = np.random.default_rng([seed, 0x5EA])
        self._right = {
            name: low + float(draw.uniform(0.3, 0.7)) * (high - low) for name, (low, high, _) in SPACE.items()
        }
        self.jobs: dict[int, TrialJob] = {}
        """Of running trials, by number."""
        self.reports: list[tuple[float, float]] = []
        """Time and value of each report."""

    def learns(self, params: Mapping[str, float]) -> tuple[float, float]:
        """Return how fast a trial learns, against the measured training, and how far: parts of its progress."""
        rate = params["log10_rate"] - self._right["log10_rate"]
        decay = abs(params["log10_decay"] - self._right["log10_decay"])
        if rate >= 1.0:
            return 0.0, 0.0
        return 10.0 ** (rate / 2), 1.0 - 0.3 * max(rate, 0.0) - 0.1 * decay

    def value(self, learnt: float) -> float:
        """Return the value of a trial that has learnt as much as the measured training at a progress."""
        return float(np.interp(learnt, self.progress, self.values))

    def gain(self, value: float) -> float:
        """Return a value as a part of what the measured training gains: 1 at its best, 0 before its first epoch."""
        first = self.values[0]
        best = self.values.max() if self.values[-1] > first else self.values.min()
        return float((value - first) / (best - first))


class TrialJob(SimulatedJob):
    """A job that trains with the values of its trial, and reports."""

    def __init__(self, search: SimulatedSearch, number: int, *rest: Any, **named: Any) -> None:
        super().__init__(number, *rest, **named)
        self._search = search
        self._learnt = self._seen = 0.0
        """Progress of the measured training that the trial is like; own progress at the last look."""
        self._step = 0

    def place(self, seats: Seats, now: float, restart_seconds: float, path: str = "requeue") -> None:
        first = seats and self.started_at is None
        super().place(seats, now, restart_seconds, path)
        if first:
            # Slurm starts the script, which asks for values.
            self._train(self._search.study.begin(str(self.number), lambda: None))

    def _train(self, trial: Any) -> None:
        study = self._search.study
        self._trial = study.live(trial)
        self._search.jobs[trial.number] = self
        for name, (low, high, step) in SPACE.items():
            self._trial.suggest_float(name, low, high, step=step)
        self._speed, self._far = self._search.learns(self._trial.params)

    def advance(self, now: float, seconds: float, slowdown: float = 0.0) -> None:
        if not self.seats:
            return
        super().advance(now, seconds, slowdown)
        made = self._speed * (self.progress - self._seen)
        self._learnt = min(self._learnt + made, max(self._learnt, self._far * self.length))
        self._seen = self.progress
        step = STEPS if self.ended_at is not None else int(STEPS * self.progress / self.length)
        if step > self._step:
            self._report(step, now + seconds)

    def _report(self, step: int, now: float) -> None:
        search, study = self._search, self._search.study
        self._step = step
        value = search.value(self._learnt)
        search.reports.append((self.ended_at or now, value))
        if study.report(self._trial, step, value, self.gpu_seconds, self.gpus):
            self.ended_at, self.seats, self.gpus = now, (), 0
        elif self.ended_at is not None:
            study.complete(self._trial, value)
        else:
            self._go_on_from_a_better_one()
        self.search_rank = study.claim(self._trial)

    def _go_on_from_a_better_one(self) -> None:
        for other in self._search.study.better(self._trial):
            source = self._search.jobs[other.number]
            if source.ended_at is None and source.progress >= self.progress - _BEHIND * self.length:
                break
        else:
            return
        self._learnt, self._seen, self._step = source._learnt, source._seen, source._step
        self._train(self._search.study.go_on_from(self._trial, other, "", self._step))
        self.resume(source, self._scenario.restart_of(self.app.name))


def compare_searches(
    methods: Sequence[str], profiles: Path | None, policies: Sequence[str], scenario: Scenario
) -> list[dict[str, Any]]:
    """Return the figures of each search (SAMPLER/PRUNER), by policy. Raises ConfigError.

    Where the policy does not size jobs, once for each number of GPUs in the scenario's `search.fixed_gpus`.
    """
    parts = [_parts(method) for method in methods]
    app = _application(profiles, scenario.search.application)
    return [
        _figures(app, sampler, pruner, name, gpus, scenario)
        for sampler, pruner in parts
        for name in policies
        for gpus in ([1] if POLICIES[name](scenario).chooses_batch else scenario.search.fixed_gpus)
    ]


def _application(profiles: Path | None, name: str) -> MeasuredApplication:
    if profiles is None:
        raise ConfigError(
            "--search needs learning curves: give --profiles the folder of measured applications"
        )
    found = load_profiles(profiles, [name])
    if name not in found:
        raise ConfigError(f"search.application: expected an application of {profiles}, got {name!r}")
    return found[name]


def _parts(method: str) -> tuple[str, str]:
    sampler, _, pruner = method.partition("/")
    if sampler not in SAMPLERS or pruner not in PRUNERS:
        raise ConfigError(
            f"--search {method}: expected SAMPLER/PRUNER, of {', '.join(SAMPLERS)} and {', '.join(PRUNERS)}"
        )
    return sampler, pruner


def _figures(
    app: MeasuredApplication, sampler: str, pruner: str, policy: str, gpus: int, scenario: Scenario
) -> dict[str, Any]:
    wanted, rule = scenario.search, POLICIES[policy](scenario)
    applications: Mapping[str, Application] = {app.name: app}
    batch = min(max(app.limits.initial, app.limits.local_min) * gpus, app.limits.maximum)
    tasks = [
        Submission(f"task-{n}", 0.0, app.name, gpus, app.fixed_batch or batch, search="simulated")
        for n in range(wanted.trials)
    ]
    settings = SearchSettings(trials=wanted.trials, sampler=sampler, pruner=pruner)
    search = SimulatedSearch(app, settings, scenario.seed)
    # A population trains at the same time.
    at_once = wanted.trials if pruner == "pbt" else wanted.parallel
    run = simulate(tasks, applications, rule, scenario, make=partial(TrialJob, search), at_once=at_once)
    gains = [(at, search.gain(value)) for at, value in search.reports]
    best = max(gain for _, gain in gains)
    states = [trial.state.name for trial in search.study.trials()]
    return {
        "search": f"{sampler}/{pruner}",
        "policy": policy if rule.chooses_batch else f"{policy}, {gpus} GPU{'s'[: gpus > 1]} each",
        "to_target_s": min((at for at, gain in gains if gain >= wanted.target), default=math.inf),
        "to_best_s": min(at for at, gain in gains if gain == best),
        "best_gain": best,
        "ended_s": max(job.ended_at or 0.0 for job in run.jobs),
        "gpu_hours": sum(job.gpu_seconds for job in run.jobs) / 3600.0,
        "complete": states.count("COMPLETE"),
        "stopped": states.count("PRUNED"),
    }
