"""Users whose jobs lie: what a liar gains over honesty.

The cluster has 16 GPUs and 4 jobs, for 100 cycles of a minute in the tests. `make bench-lying` plays ten hours and
prints the table (tests/benchmarks/lying.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from pollux.goodput import BatchLimits, Goodput, NoiseScale, ThroughputParams
from polluxd.config.settings import PolicySettings
from polluxd.cycle.trusted_reports import Held, TrustedReports
from polluxd.model import NO_PLACEMENT, JobSpec, Node, Placement, Report, Snapshot, SnapshotJob
from polluxd.policy import decide

CYCLES, LONG, CYCLE_S, MOVE_S = 100, 600, 60.0, 30.0
NODES = tuple(Node(f"n{i}", gpus=4) for i in range(4))
TRUTH = ThroughputParams(0.02, 0.004, 0.03, 0.004, 0.06, 0.006, 1.6)
NOISE = NoiseScale(1.0, 4.0)
LIMITS = BatchLimits(128, 4096, 16, 256)
TARGET = 1e6
PAGE = Path(__file__).parents[1] / "benchmarks" / "lying_table.md"
PERFECT = ThroughputParams(0.0, TRUTH.beta_grad + TRUTH.alpha_grad / 128, 0.0, 0.0, 0.0, 0.0, 1.0)

FAIR_SHARE = {
    f"fair share, p = {p:g}": PolicySettings(objective="fair-share", power=p)
    for p in (-1.0, 0.0, 1.0, -math.inf)
}
COMPLETION = {f"completion time, kappa = {k:g}": PolicySettings(kappa=k) for k in (2.0, 0.0)}
OBJECTIVES = COMPLETION | FAIR_SHARE

Lie = Callable[[Report, int], Report]

LIES: dict[str, Lie] = {
    "noise scale of infinity": lambda r, _: replace(r, noise=NoiseScale(1e-9, 1e9)),
    "perfect curve": lambda r, _: replace(r, params=PERFECT),
    "goodput x 1000": lambda r, _: replace(
        r, goodput=r.goodput * 1000, params=ThroughputParams(*(x / 1000 for x in TRUTH[:6]), TRUTH.gamma)
    ),
    "explored 1,000,000 GPUs": lambda r, _: replace(r, explored_gpus=10**6, explored_nodes=10**6),
    "no remaining work": lambda r, _: replace(r, target=r.progress + 1.0),
    "target met": lambda r, _: replace(r, progress=TARGET - 1.0),
    "all of these": lambda r, _: replace(
        r,
        noise=NoiseScale(1e-9, 1e9),
        params=ThroughputParams(0.0, TRUTH.beta_grad, 0.0, 0.0, 0.0, 0.0, 1.0),
        explored_gpus=10**6,
        explored_nodes=10**6,
        target=r.progress + 1.0,
    ),
    "measured earlier on 1,000,000 GPUs, perfect curve": lambda r, _: replace(
        r, params=PERFECT, prior_gpus=10**6, prior_nodes=10**6
    ),
    "a tenth of the work": lambda r, _: replace(r, target=TARGET / 10),
    "a tenth of the work, perfect curve": lambda r, _: replace(
        r, params=PERFECT, noise=NoiseScale(1e-9, 1e9), target=TARGET / 10
    ),
    "ten times the work": lambda r, _: replace(r, target=TARGET * 10),
    "one step left, every other minute": lambda r, _: (
        replace(r, target=r.progress + 1.0) if r.at // CYCLE_S % 2 else r
    ),
    "a new M0 in each attempt, a step left": lambda r, _: replace(
        r, limits=replace(r.limits, initial=128 + r.attempt), target=r.progress + 1.0
    ),
}


class World:
    """Four jobs of one kind; the first may lie, or sleep."""

    def __init__(
        self,
        settings: PolicySettings,
        lie: Lie | None,
        *,
        sleeps: bool = False,
        trusting: bool = False,
        cycles: int = CYCLES,
    ) -> None:
        self.settings, self.cycles = settings, cycles
        self.lie, self.sleeps, self.trusting = lie, sleeps, trusting
        self.trusted = TrustedReports()
        self.placements = [NO_PLACEMENT] * 4
        self.most = [(0, 0)] * 4
        self.progress = [0.0] * 4
        self.moves = [0] * 4
        self.attempts = [0] * 4
        self.held = 0.0
        self.doubts: set[str] = set()

    def run(self) -> float:
        """GPU-cycles of the first job."""
        for cycle in range(self.cycles):
            self._decide(1e6 + cycle * CYCLE_S, cycle)
            self.held += self.placements[0].gpus
        return self.held

    def _decide(self, now: float, cycle: int) -> None:
        reports = {j: self._report(j, now) for j in range(4) if self.placements[j]}
        told = {j: Held(p.gpus, len(p.nodes), *self.most[j], 4.0) for j, p in enumerate(self.placements)}
        if not self.trusting:
            reports, doubts, _ = self.trusted.trust(reports, told, now)
            self.doubts |= set().union(*doubts.values()) if doubts else set()
        age = CYCLE_S * cycle + 300.0
        jobs = tuple(
            SnapshotJob(
                **{"job_id": j, "name": "", "user": f"u{j}", "account": "", "partition": ""},
                **{"spec": JobSpec(), "submitted_at": 1e6 - 300, "age": age, "placement": self.placements[j]},
                **{"report": reports.get(j), "started": cycle > 0, "moves": self.moves[j]},
                **{"lost_seconds": MOVE_S * self.moves[j], "move_cost": MOVE_S},
            )
            for j in range(4)
        )
        plan = decide(Snapshot("c", now, NODES, jobs, self.settings))
        for allocation in plan.allocations:
            j, target = allocation.job_id, allocation.placement
            moved = target != self.placements[j]
            if moved and self.placements[j]:
                self.moves[j] += 1
                self.attempts[j] += 1
            self.placements[j] = target
            self.most[j] = (max(self.most[j][0], target.gpus), max(self.most[j][1], len(target.nodes)))
            if target and not (self.sleeps and j == 0):
                trained = CYCLE_S - (MOVE_S if moved else 0.0)
                self.progress[j] += trained * self._goodput(target) / LIMITS.initial

    def _goodput(self, placement: Placement) -> float:
        return float(
            Goodput(TRUTH, NOISE, LIMITS, True).optimize(len(placement.nodes), placement.gpus).goodput
        )

    def _report(self, j: int, now: float) -> Report:
        here = self.placements[j]
        gpus, nodes = self.most[j]
        report = Report(
            **{"attempt": self.attempts[j], "at": now, "limits": LIMITS, "params": TRUTH, "noise": NOISE},
            **{"explored_gpus": gpus, "explored_nodes": nodes, "gpus": here.gpus, "nodes": len(here.nodes)},
            **{
                "goodput": self._goodput(here),
                "throughput": self._goodput(here),
                "progress": self.progress[j],
            },
            **{"target": TARGET, "first_step_at": now - 30.0},
        )
        return self.lie(report, j) if self.lie and j == 0 else report


@cache
def honest(objective: str, cycles: int) -> float:
    """GPU-cycles of an honest job."""
    return World(OBJECTIVES[objective], None, cycles=cycles).run()


def gain(
    objective: str, lie: Lie | None, *, sleeps: bool = False, trusting: bool = False, cycles: int = CYCLES
) -> float:
    """GPU-cycles of a liar over those of honesty, less 1."""
    held = World(OBJECTIVES[objective], lie, sleeps=sleeps, trusting=trusting, cycles=cycles).run()
    return held / honest(objective, cycles) - 1.0


# The others are in the benchmark: its runs take minutes.
@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("all of these", "fair share, p = -1"),
        ("goodput x 1000", "fair share, p = -1"),
        ("all of these", "fair share, p = 1"),
        ("noise scale of infinity", "completion time, kappa = 0"),
        ("measured earlier on 1,000,000 GPUs, perfect curve", "completion time, kappa = 2"),
        ("a tenth of the work, perfect curve", "completion time, kappa = 0"),
    ],
)
def test_a_liar_gains_at_most_a_tenth(name: str, objective: str) -> None:
    assert gain(objective, LIES[name]) <= 0.10


def test_a_sleeping_job_gains_nothing() -> None:
    assert gain("fair share, p = -1", None, sleeps=True) <= 0.10


def test_the_same_lies_pay_where_reports_are_believed_but_not_under_fair_share() -> None:
    assert gain("completion time, kappa = 0", LIES["noise scale of infinity"], trusting=True) > 0.5
    assert gain("fair share, p = -1", LIES["goodput x 1000"], trusting=True) <= 0.10


def main() -> None:
    """Write the tables; fail where a liar gains over a tenth."""
    worst, tables = 0.0, []
    for objectives in (COMPLETION, FAIR_SHARE):
        table = ["| lie | " + " | ".join(objectives) + " |", "|---|" + "---|" * len(objectives)]
        for title, lie in [*LIES.items(), ("sleeping", None)]:
            cells = []
            for objective in objectives:
                before, after = (
                    gain(objective, lie, sleeps=lie is None, trusting=trusting, cycles=LONG)
                    for trusting in (True, False)
                )
                cells.append(f"{before:+.0%} -> {after:+.0%}")
                worst = max(worst, after)
            table.append(f"| {title} | " + " | ".join(cells) + " |")
            print(table[-1], flush=True)
        tables.append("\n".join(table))
    PAGE.write_text("\n\n".join(tables) + "\n")
    if worst > 0.10:
        raise SystemExit(f"a liar gained {worst:.0%}")


if __name__ == "__main__":
    main()
