"""Decide the same states without one part of the policy at a time.

    python -m contrib.experiments.policy_ablation [--page FILE]

It writes contrib/experiments/policy_ablation.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from polluxd.config.settings import PolicySettings
from polluxd.model import Plan, Snapshot
from polluxd.policy import decide
from tests.benchmarks.policy_oracle import table
from tests.unit.policy import every_plan
from tests.unit.policy.states import FAIR_SHARE, life

Row = dict[str, Any]


def _unknown(*_args: object, **_options: object) -> float:
    return float("inf")


def _as_given(*args: Any) -> Any:
    """The bound from the counts, not tightened."""
    return args[-1]


PARTS: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "the assignment program": ("polluxd.policy.assignment.improve", _unknown),
    "the program of node patterns": ("polluxd.policy.patterns.improve", _unknown),
    "the certificate": ("polluxd.policy.steep.improve", _as_given),
    "the lift of the worst-off job": ("polluxd.policy.steep.lift", _as_given),
}
MAX_MIN = PolicySettings(objective="fair-share", power=float("-inf"))
SETTINGS = {
    "completion-time": PolicySettings(),
    "fair-share": FAIR_SHARE,
    "fair-share, p = -2": replace(FAIR_SHARE, power=-2.0),
    "max-min": MAX_MIN,
}
SIZES = ((512, 200), (64, 20), (64, 46))
"""GPUs, jobs."""
SMALL = 900
"""Small clusters of every kind: partitions, ceilings, drained nodes, GPUs of others."""


def rows() -> Iterator[Row]:
    for name, settings in SETTINGS.items():
        states = [
            state for gpus, jobs in SIZES for state in life(gpus, jobs, 0, 6, decide, settings=settings)
        ]
        states += [_small(seed, settings) for seed in range(SMALL)]
        whole, seconds = _decided(states)
        yield _row(name, "nothing", whole, whole, seconds)
        for part, (where, instead) in PARTS.items():
            with mock.patch(where, instead):
                plans, seconds = _decided(states)
            yield _row(name, part, plans, whole, seconds)


def _small(seed: int, settings: PolicySettings) -> Snapshot:
    snapshot = every_plan.small(seed)
    return replace(
        snapshot,
        settings=replace(
            snapshot.settings,
            objective=settings.objective,
            power=settings.power,
        ),
    )


def _decided(states: Sequence[Snapshot]) -> tuple[list[Plan], float]:
    begun = time.process_time()
    return [decide(state) for state in states], time.process_time() - begun


def _row(objective: str, part: str, plans: Sequence[Plan], whole: Sequence[Plan], seconds: float) -> Row:
    lost = [1.0 - a.objective / b.objective for a, b in zip(plans, whole, strict=True) if b.objective > 0]
    gaps = [plan.gap for plan in plans]
    return {
        "objective_name": objective,
        "without": part,
        "states": len(plans),
        "lost": statistics.mean(lost),
        "worst_lost": max(lost),
        "gap": statistics.mean(gaps),
        "worst_gap": max(gaps),
        "seconds": round(seconds / len(plans), 5),
    }


def page(found: Sequence[Row]) -> str:
    """Return the text of the committed page."""

    def percent(share: float) -> str:
        return f"{100 * share:.3f} %" if abs(share) > 5e-6 else "0 %"

    cells = [
        (
            r["objective_name"], r["without"], r["states"], percent(r["lost"]), percent(r["worst_lost"]),
            percent(r["gap"]), percent(r["worst_gap"]), r["seconds"],
        )
        for r in found
    ]  # fmt: skip
    head = ("objective", "without", "states", "lost", "worst", "gap", "worst gap", "decision [s]")
    return f"""# What each part of the policy brings

Written by `contrib.experiments.policy_ablation`.
The same states ({", ".join(f"{g} GPUs and {j} jobs" for g, j in SIZES)}; {SMALL}
small clusters with partitions, ceilings and drained nodes) are decided without one part. Lost: of the objective,
against the whole policy; below 0, the part makes the plan worse. Gap: to the proven bound. Decision: CPU seconds of one
thread, on a machine shared with other work.

{table(head, cells)}
The certificate works at powers of -2 and below only, and the lift of the worst-off job under max-min only. Two local
searches stood here until the program of node patterns: with it they brought nothing. `policy.md` says what the cache
saves.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    found = []
    for row in rows():
        print(row, flush=True)
        found.append(row)
    options.page.write_text(page(found))


if __name__ == "__main__":
    main()
