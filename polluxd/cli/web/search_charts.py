"""The charts of a search over hyper-parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..report.drawings import Chart, Polyline, chart

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from pollux.search.study import Search

_OTHERS, _BEST = "plain", "c0"


def of_search(search: Search) -> list[Chart]:
    """Draw the values of all trials over their training, and what they were trained with.

    The best quarter by the last value is in colour, and above the others.
    """
    from pollux.search.study import STEPS  # noqa: PLC0415 - brings Optuna in

    metric = search.settings.metric
    known = [(t, t.intermediate_values[t.last_step]) for t in search.trials() if t.last_step is not None]
    known.sort(key=lambda each: each[1], reverse=not search.settings.maximize)
    best = {trial.number for trial, _ in known[-math.ceil(len(known) / 4) :]}
    last = [(trial, value, _BEST if trial.number in best else _OTHERS) for trial, value in known]
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
