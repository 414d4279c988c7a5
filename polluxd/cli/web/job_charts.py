"""The charts of the live page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polluxd.store import HistoryPoint

from ..output import count
from ..report.drawings import Chart, Mark, Polyline, chart

_OF_JOB = (
    ("gpus", "GPUs", "c0"),
    ("batch_size", "Batch size", "c2"),
    ("noise_scale", "Gradient noise scale [examples]", "c3"),
    ("lr_factor", "Factor on the learning rate", "c4"),
    ("goodput", "Goodput [examples/s]", "c1"),
)


def of_job(points: Sequence[HistoryPoint]) -> list[Chart]:
    """Draw what a job reported over time. A value of 0, or none, was not measured."""
    return [
        chart(
            title,
            [
                Polyline(
                    title, colour, [(p.at, float(v)) for p in points if (v := getattr(p, key))], steps=True
                )
            ],
            times=True,
        )
        for key, title, colour in _OF_JOB
    ]


def of_cluster(overview: Mapping[str, Any]) -> list[Chart]:
    """Draw the use of the cluster, its goodput, and what moves cost."""
    use = overview["use"]
    lines = [
        Polyline(label, colour, use[key], steps=True, filled=key == "held")
        for key, label, colour in (
            ("held", "held by Pollux jobs", "c0"),
            ("plain", "held by plain jobs", "plain"),
            ("idle", "idle", "c4"),
            ("waiting", "that waiting jobs need at least", "c1"),
        )
    ]
    lost = [
        (overview["since"], 0.0),
        *overview["lost"],
        (overview["at"], (overview["lost"] or [(0, 0)])[-1][1]),
    ]
    return [
        chart("GPUs", lines, times=True),
        chart(
            "Goodput against the fair share, mean of the jobs with GPUs",
            [Polyline("predicted speedup", "c2", overview["speedup"], steps=True)],
            times=True,
        ),
        chart(
            "Training lost to moves [s]", [Polyline("lost", "c4", lost, steps=True, filled=True)], times=True
        ),
    ]


def goodput(explained: Mapping[str, Any]) -> Chart:
    """Draw goodput over GPUs: the job's size, the next one, and what that one would have to bring."""
    best: dict[int, float] = {}
    for row in explained["sizes"]:
        best[row["gpus"]] = max(best.get(row["gpus"], 0.0), row["goodput"] or 0.0)
    here = next((row for row in explained["sizes"] if row["note"] == "now" and row["goodput"]), None)
    why = (explained["decision"] or {}).get("explanation") or {}
    lines = [Polyline("predicted goodput", "c0", sorted(best.items()))]
    marks = []
    if here is not None:
        gpus, now = here["gpus"], here["goodput"]
        marks.append(Mark(gpus, now, f"you are here: {count(gpus, 'GPU')}"))
        more = why.get("next_gpus")
        if more is not None and more > gpus:
            marks.append(Mark(more, why["next_goodput"], f"next size: {more}"))
            lines += _price(why, (gpus, now), max(best))
    return chart("Goodput over GPUs [examples/s]", lines, marks=marks, ticks=sorted(best))


def _price(why: Mapping[str, Any], here: tuple[int, float], most: int) -> list[Polyline]:
    """Draw the goodput that more GPUs would have to bring at their present price.

    Near the present size utility grows with goodput alike: where the next size is worth `marginal` of it per GPU, and a
    GPU costs `price`, it would have to bring price / marginal times as much more goodput.
    """
    gpus, now = here
    price = why["price"] if why["gpu_price"] is None else why["gpu_price"]
    rise = (why["next_goodput"] - now) / (why["next_gpus"] - gpus)
    if not (price and price > 0 and why["marginal"] > 0 and rise > 0):
        return []
    end = now + (most - gpus) * rise * price / why["marginal"]
    return [Polyline("worth the price of the GPUs", "c4", [here, (most, end)], clipped=True)]
