"""Measure the time of decisions, their gap to the bound, and rivals.

    python -m tests.benchmarks.policy [--quick] [--stages sizes,made-up,recorded,proven] [--data DIR]

`sizes`: a cluster of each size lives through a few cycles. Every cycle's snapshot is decided from scratch (goodput
tables, solver, placement and reasons included), and once more with a cache kept from the cycle before.
`made-up` and `recorded`: the paper's genetic algorithm decides the same states (population and generations of 100, its
repair held to the same placements). The recorded states come from the simulator and need the data of the paper's
artifact.
`proven`: thousands of small instances are compared with brute force and with HiGHS run to the end.

Times are CPU seconds of one thread, so that other work on the machine does not count. Each stage leaves its figures in
bench-out/ (policy.json: [{gpus, jobs, solver, median_s, worst_s, gap, objective, ...}]). tests/benchmarks/policy.md is
written from all figures in that folder, except those of `--quick` runs.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

from polluxd.config.settings import PolicySettings
from polluxd.model import Plan, Snapshot
from polluxd.policy import Cache, decide
from polluxd.sim.cluster import Scenario
from tests.benchmarks import policy_oracle
from tests.benchmarks.policy_oracle import table
from tests.benchmarks.results import ROOT, parser_of, save
from tests.unit.policy import genetic
from tests.unit.policy.states import CHURN, FAIR_SHARE, REFIT, life, recorded, rough

SIZES = (
    *((64, 46), (64, 160), (512, 200), (512, 1_000)),
    *((4_096, 4_000), (16_384, 10_000), (65_536, 40_000)),
)
MAX_MIN = replace(FAIR_SHARE, power=float("-inf"))
MAX_MIN_SIZES = ((128, 40), (512, 200))
TARGETS = {
    (64, 160): 0.05,
    (512, 200): 0.1,
    (512, 1_000): 0.3,
    (4_096, 4_000): 1.5,
    (16_384, 10_000): 6.0,
    (65_536, 40_000): 10.0,
}
TYPES = 4
TYPED_TARGETS = {(4_096, 4_000): 1.2, (16_384, 10_000): 4.0}
"""The project's goal for the median decision [s]."""
CHEAPER = 3.0
"""How many times cheaper than a decision from scratch an incremental one should be."""
SETTLING = 3
"""First cycles whose incremental decisions do not count: at the start every job is placed."""
KEPT = 40
"""How many states of each recorded run are used."""
Row = dict[str, Any]


def cost(work: Callable[[], Plan]) -> tuple[Plan, float, float]:
    """Return a plan and the CPU and wall-clock seconds that it took.

    Garbage of earlier work is collected first, so that its collection does not count.
    """
    gc.collect()
    begun, clock = time.process_time(), time.perf_counter()
    plan = work()
    return plan, time.process_time() - begun, time.perf_counter() - clock


def target(row: Row) -> float | None:
    """Return the goal of a row, if it has one [s]."""
    if row["objective_name"] == "max-min":
        return None
    return (TARGETS if row["types"] == 1 else TYPED_TARGETS).get((row["gpus"], row["jobs"]))


def measure(
    gpus: int, jobs: int, settings: PolicySettings, *, seeds: int, cycles: int, types: int = 1
) -> Row:
    """Time decisions from scratch, and the same decisions with a cache.

    It checks that both plans are equal.
    """
    plans: list[Plan] = []
    cold: list[float] = []
    walls: list[float] = []
    ratios: list[float] = []
    warm: list[float] = []
    changed: list[float] = []
    for seed in range(seeds):
        cache, cycle = Cache(), 0

        def both(snapshot: Snapshot, cache: Cache = cache) -> Plan:
            nonlocal cycle
            plan, seconds, wall = cost(lambda: decide(snapshot))
            kept, again, _ = cost(lambda: decide(snapshot, cache=cache))
            if kept != plan:
                raise AssertionError(
                    f"the cache changed the plan of {gpus} GPUs and {jobs} jobs, cycle {cycle}"
                )
            plans.append(plan)
            cold.append(seconds)
            walls.append(wall)
            if cycle >= SETTLING:
                warm.append(again)
                ratios.append(seconds / again)
                changed.append(cache.misses / jobs)
            cycle += 1
            return plan

        # The first state is a cold start, which places all jobs at once. It counts, as the worst case.
        for _ in life(gpus, jobs, seed, cycles, both, settings=settings, types=types):
            pass
    return {
        "objective_name": "max-min" if settings == MAX_MIN else settings.objective,
        "gpus": gpus,
        "jobs": jobs,
        "types": types,
        "solver": " and ".join(sorted({plan.solver for plan in plans})),
        "median_s": round(statistics.median(cold), 4),
        "worst_s": round(max(cold), 4),
        "gap": round(statistics.median(plan.gap for plan in plans), 6),
        "objective": round(statistics.mean(plan.objective for plan in plans), 6),
        "worst_gap": round(max(plan.gap for plan in plans), 6),
        "wall_median_s": round(statistics.median(walls), 4),
        "decisions": len(plans),
        "incremental_s": round(statistics.median(warm), 4),
        "changed": round(statistics.mean(changed), 3),
        "cheaper": round(statistics.median(ratios), 2),
    }


def against_reference(what: str, states: Iterable[Snapshot]) -> Row:
    """Compare the policy with the genetic algorithm on the same states."""
    ours_s, theirs_s, shortfalls, leads = 0.0, 0.0, [], []
    for number, snapshot in enumerate(states):
        begun = time.process_time()
        ours = decide(snapshot).objective
        between = time.process_time()
        theirs = genetic.decide(snapshot, seed=number).objective
        ours_s, theirs_s = ours_s + between - begun, theirs_s + time.process_time() - between
        shortfalls.append(max(1.0 - ours / theirs, 0.0) if theirs > 0 else 0.0)
        leads.append(ours / theirs if theirs > 0 else 1.0)
    worse = sum(short > 1e-9 for short in shortfalls)
    return {
        "states_of": what,
        "states": len(leads),
        "ours_worse": worse,
        "worst_shortfall": round(max(shortfalls, default=0.0), 6),
        "ours_over_theirs": round(statistics.mean(leads), 5),
        "ours_s": round(ours_s / len(leads), 4),
        "theirs_s": round(theirs_s / len(leads), 4),
        "time_ratio": round(theirs_s / ours_s, 1),
    }


def sizes(quick: bool) -> Iterator[Row]:
    for settings in (PolicySettings(), FAIR_SHARE):
        for gpus, jobs in SIZES[:3] if quick else SIZES:
            small = gpus <= 512
            cycles = 8 if small else 7 if gpus < 65_536 else SETTLING + 1
            yield measure(gpus, jobs, settings, seeds=3 if small and not quick else 1, cycles=cycles)
    for gpus, jobs in () if quick else TYPED_TARGETS:
        yield measure(gpus, jobs, PolicySettings(), seeds=1, cycles=7, types=TYPES)
    for gpus, jobs in MAX_MIN_SIZES:
        yield measure(gpus, jobs, MAX_MIN, seeds=1 if quick else 3, cycles=8)


def made_up(quick: bool) -> Iterator[Row]:
    for jobs in (10, 25, 46, 160):
        # Seeds that nothing was tuned on.
        states = [s for seed in range(100, 101 if quick else 106) for s in life(64, jobs, seed, 8, decide)]
        yield against_reference(f"made up, {jobs} jobs", states)


def from_runs(data: Path, quick: bool) -> Iterator[Row]:
    runs = [(f"workloads/workload-{n}", Scenario(), "") for n in (1, 2, 3, 6)]
    runs += [(f"workloads-realistic/workload-{n}", rough(1), ", rough") for n in (1, 2, 3, 6)]
    for workload, scenario, how in runs[:1] if quick else runs:
        yield against_reference(workload + how, recorded(data, workload, scenario, KEPT))


def page(of_sizes: Sequence[Row], reference: Sequence[Row], proven: Sequence[Row]) -> str:
    """Return the text of the committed page."""
    speed = table(
        (
            "objective", "GPUs / jobs", "median [s]", "worst [s]", "target [s]", "gap", "worst gap",
            "incremental [s]", "jobs changed", "times cheaper", "solver",
        ),
        [
            (
                r["objective_name"] + (f", {r['types']} GPU types" if r["types"] > 1 else ""),
                f"{r['gpus']:,} / {r['jobs']:,}", r["median_s"], r["worst_s"], target(r) or "-",
                f"{100 * r['gap']:.2f} %", f"{100 * r['worst_gap']:.2f} %", r["incremental_s"],
                f"{100 * r['changed']:.1f} %", r["cheaper"], r["solver"],
            )
            for r in of_sizes
        ],
    )  # fmt: skip
    states, worse = sum(r["states"] for r in reference), sum(r["ours_worse"] for r in reference)
    summary = (
        f"Ours is no worse in {states - worse} of {states} states ({100 * (1 - worse / states):.1f} %)."
        if states
        else "Not compared yet."
    )
    rivals = table(
        ("states", "number", "ours worse", "worst shortfall", "ours / theirs", "ours [s]", "theirs [s]", "time ratio"),
        [
            (
                r["states_of"], r["states"], r["ours_worse"], f"{100 * r['worst_shortfall']:.3f} %",
                r["ours_over_theirs"], r["ours_s"], r["theirs_s"], r["time_ratio"],
            )
            for r in reference
        ],
    )  # fmt: skip
    return f"""# What a decision takes, and how good it is

Written by `make bench-policy`; CPU seconds of one thread, on a machine shared with other work.

## From scratch, and with what is known from the cycle before

{speed}
A whole decision: goodput tables, counts, placement, reasons. Worst: the cold start included, where everybody is placed
at once. Gap: distance to the proven bound. Incremental: the same snapshot with the cache of the cycle before, a minute
later, the plan applied, {100 * REFIT:.0f} % of the running jobs measured again and {100 * CHURN:.0f} % of all replaced
by new ones; the rest of the changed are those that grew and may grow further. The plans are equal, bit for bit.

## Against the paper's genetic algorithm

{summary} 64 GPUs, p = -1; population and generations of 100.

{rivals}
The algorithm (`tests/unit/policy/genetic.py`) is repaired to the placements that ours may use, and both are scored by
the same objective. Recorded: every so many of the states that a simulated run passes through, under the daemon's policy
and settings; rough: noisy measurements, restarts of 15 to 250 s, failing nodes. Made up: seeds nothing was tuned on.

{policy_oracle.section(proven)}"""


def main() -> int:
    parser = parser_of(__doc__)
    stages = ("sizes", "made-up", "recorded", "proven")
    parser.add_argument("--quick", action="store_true", help="small sizes and few states only; no page")
    parser.add_argument("--stages", default=",".join(stages), help="which to run (default: all)")
    parser.add_argument(
        "--data", type=Path, default=ROOT / os.environ.get("POLLUX_OSDI21", "../shared/data/osdi21")
    )
    parser.add_argument("--out", type=Path, default=ROOT / "bench-out", help="where figures go")
    parser.add_argument("--page", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    wanted = options.stages.split(",")
    if not set(wanted) <= set(stages):
        parser.error(f"--stages {options.stages}: expected some of {', '.join(stages)}")
    files = {
        "sizes": options.out / "policy.json",
        "made-up": options.out / "policy-made-up.json",
        "recorded": options.out / "policy-recorded.json",
        "proven": options.out / "policy-proven.json",
    }
    running: dict[str, Callable[[bool], Iterator[Row]]] = {
        "sizes": sizes,
        "made-up": made_up,
        "recorded": partial(from_runs, options.data),
        "proven": policy_oracle.rows,
    }
    for stage in wanted:
        if stage == "recorded" and not options.data.is_dir():
            print(
                f"no recorded states: no data at {options.data}; set POLLUX_OSDI21 to its folder",
                file=sys.stderr,
            )
            continue
        found_so_far: list[Row] = []
        for row in running[stage](options.quick):
            print(row, flush=True)
            # Row by row, so that an interrupted run keeps its finished rows.
            found_so_far.append(row)
            save(files[stage], found_so_far)
    found = {stage: json.loads(path.read_text()) if path.exists() else [] for stage, path in files.items()}
    text = page(found["sizes"], [*found["recorded"], *found["made-up"]], found["proven"])
    print("\n" + text)
    if not options.quick:
        options.page.write_text(text)
    timed = [(r, limit) for r in found["sizes"] if (limit := target(r)) is not None]
    late = [r for r, limit in timed if r["median_s"] > limit]
    slow = [r for r, _ in timed if r["cheaper"] < CHEAPER]
    for row in late:
        print(
            f"over its target: {row['gpus']} GPUs, {row['jobs']} jobs: {row['median_s']} s", file=sys.stderr
        )
    for row in slow:
        print(
            f"{row['gpus']} GPUs, {row['jobs']} jobs: only {row['cheaper']} times cheaper with a cache",
            file=sys.stderr,
        )
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
