"""The charts of jobs, of searches and of the cluster. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..output import count
from ..report.drawings import Chart, Points, Polyline, chart, use_chart

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from pollux.search.study import Search

_OF_JOB = (
    ("gpus", "GPUs", "c0"),
    ("batch_size", "Batch size", "c2"),
    ("noise_scale", "Gradient noise scale [examples]", "c3"),
    ("lr_factor", "Factor on the learning rate", "c4"),
    ("goodput", "Measured goodput [examples/s]", "c1"),
)


def of_job(points: Sequence[Mapping[str, Any]], moves: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Draw what a job reported over time, and its moves. A value of 0, or none, was not measured."""
    moments = [(m["at"], f"move from {m['from']} to {m['to']}") for m in moves if m["at"] is not None]
    return [
        chart(
            title,
            [Polyline(title, colour, [(p["at"], float(p[key])) for p in points if p[key]], steps=True)],
            times=True,
            moments=moments,
        )
        for key, title, colour in _OF_JOB
    ]


def of_cluster(overview: Mapping[str, Any], since: float) -> list[Chart]:
    """Draw the use of the cluster, its goodput, and what moves cost, from a POSIX time on."""
    lost = [(overview["since"], 0.0), *overview["lost"]]
    lost.append((overview["at"], lost[-1][1]))
    speedup = Polyline("predicted speedup", "ink", _cut(overview["speedup"], since), steps=True)
    cost = Polyline("lost", "ink", _cut(lost, since), steps=True, filled=True)
    return [
        use_chart({name: _cut(steps, since) for name, steps in overview["use"].items()}),
        chart("Goodput against the fair share, mean of the jobs with GPUs", [speedup], times=True),
        chart("Training lost to moves [s]", [cost], times=True),
    ]


def _cut(steps: Points, since: float) -> Points:
    """Leave out what was before a time, except the value at that time."""
    before = [point for point in steps if point[0] <= since]
    return [(since, before[-1][1]), *steps[len(before) :]] if before else steps


def goodput(explained: Mapping[str, Any]) -> Chart:
    """Draw goodput over GPUs: the job's size and the next one."""
    best: dict[int, float] = {}
    for row in explained["sizes"]:
        best[row["gpus"]] = max(best.get(row["gpus"], 0.0), row["goodput"] or 0.0)
    here = next((row for row in explained["sizes"] if row["note"].startswith("now") and row["goodput"]), None)
    why = (explained["decision"] or {}).get("explanation") or {}
    lines = [Polyline("fitted goodput", "c0", sorted(best.items()))]
    marks = []
    if here is not None:
        gpus, now = here["gpus"], here["goodput"]
        marks.append((gpus, now, f"you are here: {count(gpus, 'GPU')}"))
        more = why.get("next_gpus")
        if more is not None and more > gpus:
            marks.append((more, why["next_goodput"], f"next size: {more}"))
    return chart("Fitted goodput over GPUs [examples/s]", lines, marks=marks, ticks=sorted(best))


def of_search(search: Search) -> list[Chart]:
    """Draw the values of all trials over their training, and what they were trained with.

    The best quarter by the last value is in colour, and above the others.
    """
    from pollux.search.study import STEPS  # noqa: PLC0415 - brings Optuna in

    metric = search.settings.metric
    known = [(t, t.intermediate_values[t.last_step]) for t in search.trials() if t.last_step is not None]
    known.sort(key=lambda each: each[1], reverse=not search.settings.maximize)
    best = {trial.number for trial, _ in known[-math.ceil(len(known) / 4) :]}
    last = [(trial, value, "c0" if trial.number in best else "plain") for trial, value in known]
    least = min([0.0, *(v for trial, _ in known for v in trial.intermediate_values.values())])
    curves = [
        Polyline(
            f"trial {trial.number}: {value:.4g}",
            colour,
            [(100 * at / STEPS, v - least) for at, v in sorted(trial.intermediate_values.items())],
        )
        for trial, value, colour in last
    ]
    above = f" above {least:.4g}" if least < 0 else ""
    title = f"{metric}{above} over % of the training; in colour: the best quarter"
    return [chart(title, curves), _coordinates(last, metric)]


def _coordinates(trials: Sequence[tuple[FrozenTrial, float, str]], metric: str) -> Chart:
    """Draw parallel coordinates: from the least value of each parameter to its largest."""
    names = sorted({name for trial, _, _ in trials for name in trial.params})
    scales = {name: [_place(trial, name) for trial, _, _ in trials if name in trial.params] for name in names}
    values = [value for _, value, _ in trials]
    lines = []
    for trial, value, colour in trials:
        points = [
            (float(x), _scaled(_place(trial, name), scales[name]))
            for x, name in enumerate(names)
            if name in trial.params
        ]
        label = ", ".join(f"{name}={trial.params[name]}" for name in names if name in trial.params)
        end = (float(len(names)), _scaled(value, values))
        lines.append(Polyline(f"trial {trial.number}: {label}: {value:.4g}", colour, [*points, end]))
    drawn = chart("Parameters, each from its least to its largest value", lines, ticks=range(len(names) + 1))
    named = zip(drawn.x_ticks, [*names, metric], strict=True)
    return replace(drawn, x_ticks=[(x, name) for (x, _), name in named], y_ticks=())


def _place(trial: FrozenTrial, name: str) -> float:
    value, bounds = trial.params[name], trial.distributions[name]
    choices: Sequence[Any] | None = getattr(bounds, "choices", None)
    if choices is not None:
        return float(choices.index(value))
    return math.log(value) if getattr(bounds, "log", False) else float(value)


def _scaled(value: float, values: Sequence[float]) -> float:
    low, high = min(values), max(values)
    return (value - low) / (high - low) if high > low else 0.5
