"""How long a decision takes, and how near the bound it ends: `python tests/benchmarks/policy.py [--quick]`.

Each size lives through a few cycles: jobs arrive, are measured on what they get, and leave; every cycle's snapshot is
decided from scratch, goodput tables, solver, placement and reasons included. Times are CPU seconds of one thread, so
that neighbours on the machine do not count. Writes bench-out/policy.json:
[{gpus, jobs, solver, median_s, worst_s, gap, objective}], beside it policy-reference.json, the same states under the
paper's genetic algorithm (population and generations of 100, its repair held to the same placements), and
policy-incremental.json: the same cycles decided with a cache kept from one to the next, some 5 to 10 % of jobs new or
measured anew in each, everybody older.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams  # noqa: E402
from polluxd.model import Job, JobSpec, Node, Report, Snapshot  # noqa: E402
from polluxd.policy import Cache, decide  # noqa: E402
from polluxd.policy.reference import genetic  # noqa: E402

SIZES = ((64, 46), (64, 160), (512, 200), (512, 1_000), (4_096, 4_000), (16_384, 10_000))
TARGETS = {(64, 160): 0.05, (512, 1_000): 0.3, (4_096, 4_000): 1.5, (16_384, 10_000): 6.0}
"""Median seconds that the project holds itself to."""
INCREMENTAL = ((512, 1_000), (4_096, 4_000))
CHEAPER = 3.0
"""How many times cheaper an incremental decision is meant to be than one from scratch."""
CHURN = 0.05
INTERVAL = 60.0


def arrival(rng: random.Random, number: int) -> tuple[Job, Report]:
    """A job never seen before, and what its agent will report once it runs."""
    theta = ThroughputParams(
        rng.uniform(0.01, 0.2),
        10 ** rng.uniform(-4, -2.3),
        10 ** rng.uniform(-3, -0.7),
        10 ** rng.uniform(-5, -1.7),
        10 ** rng.uniform(-2, -0.3),
        10 ** rng.uniform(-5, -1.3),
        rng.uniform(1, 5),
    )
    initial = rng.choice([32, 64, 128, 256])
    limits = BatchLimits(initial, initial * 64, 8, 512)
    report = Report(0, 0.0, limits, theta, NoiseScale(1.0, 10 ** rng.uniform(-1, 2.5)), explored_gpus=1)
    spec = JobSpec(min_gpus=rng.choice([1] * 9 + [2, 4]), max_gpus=rng.choice([None, None, None, 4, 16]))
    job = Job(
        number,
        f"job{number}",
        "user",
        "account",
        "main",
        spec,
        0.0,
        0.0,
        reallocation_cost=rng.uniform(10, 40),
    )
    return job, report


def life(gpus: int, jobs: int, seed: int, cycles: int, per_node: int = 4) -> Iterator[Snapshot]:
    """Snapshots of a cluster in which about `jobs` jobs live, from an hour in: arrivals replace departures."""
    rng = random.Random(seed)
    nodes = tuple(
        Node(f"n{i:05d}", per_node, partitions=frozenset({"main"})) for i in range(gpus // per_node)
    )
    alive: dict[int, Job] = {}
    agents: dict[int, Report] = {}
    newest = 0
    for _ in range(jobs):
        newest += 1
        job, agents[newest] = arrival(rng, newest)
        # At the outset everybody has run before, for one minute to about nine hours, and grown some.
        agents[newest] = replace(agents[newest], explored_gpus=rng.choice([1, 1, 2, 2, 4, 8, 16]))
        alive[newest] = replace(job, age=10 ** rng.uniform(1.8, 4.5), report=agents[newest], started=True)
    for _ in range(cycles):
        snapshot = Snapshot("bench", 0.0, nodes, tuple(alive.values()))
        yield snapshot
        for a in decide(snapshot).allocations:
            job, held = alive[a.job_id], a.placement.gpus
            report = job.report or (agents[a.job_id] if held else None)
            if report is not None:
                report = replace(report, explored_gpus=max(report.explored_gpus, held))
            lost = job.reallocation_cost if a.changed and job.started else 0.0
            alive[a.job_id] = replace(
                job,
                placement=a.placement,
                report=report,
                started=job.started or held > 0,
                age=job.age + INTERVAL,
                lost_seconds=job.lost_seconds + lost,
                reallocations=job.reallocations + (lost > 0),
            )
        for number in [n for n in alive if rng.random() < CHURN]:
            del alive[number]
            newest += 1
            alive[newest], agents[newest] = arrival(rng, newest)


def measure(gpus: int, jobs: int, *, seeds: int, cycles: int) -> dict[str, object]:
    times, gaps, objectives, solvers = [], [], [], set()
    for seed in range(seeds):
        # The first state is a cold start: everything is placed at once. It counts as the worst case it is.
        for snapshot in life(gpus, jobs, seed, cycles):
            begun = time.process_time()
            plan = decide(snapshot)
            times.append(time.process_time() - begun)
            gaps.append(plan.gap)
            objectives.append(plan.objective)
            solvers.add(plan.solver)
    return {
        "gpus": gpus,
        "jobs": jobs,
        "solver": " and ".join(sorted(solvers)),
        "median_s": round(statistics.median(times), 4),
        "worst_s": round(max(times), 4),
        "gap": round(statistics.median(gaps), 6),
        "worst_gap": round(max(gaps), 6),
        "objective": round(statistics.mean(objectives), 6),
        "decisions": len(times),
    }


def incremental(gpus: int, jobs: int, *, cycles: int) -> dict[str, object]:
    """The same cycles from scratch and with a cache kept; the first, which fills the cache, is not counted."""
    cache, cold, warm, changed = Cache(), [], [], []
    for number, snapshot in enumerate(life(gpus, jobs, 0, cycles + 1)):
        begun = time.process_time()
        plan = decide(snapshot)
        between = time.process_time()
        kept = decide(snapshot, cache=cache)
        ended = time.process_time()
        if kept != plan:
            raise AssertionError(f"the cache changed the plan of {gpus} GPUs and {jobs} jobs, cycle {number}")
        if number:
            cold.append(between - begun)
            warm.append(ended - between)
            changed.append(cache.misses / jobs)
    return {
        "gpus": gpus,
        "jobs": jobs,
        "changed": round(statistics.mean(changed), 3),
        "cold_s": round(statistics.median(cold), 4),
        "incremental_s": round(statistics.median(warm), 4),
        "ratio": round(statistics.median(c / w for c, w in zip(cold, warm, strict=True)), 2),
    }


def against_reference(*, seeds: int, cycles: int) -> list[dict[str, object]]:
    """The same states under the genetic algorithm, at the paper's size of cluster."""
    rows: list[dict[str, object]] = []
    for jobs in (10, 25, 46, 160):
        ours, theirs, worse, states = 0.0, 0.0, 0, 0
        ratios = []
        for seed in range(seeds):
            for number, snapshot in enumerate(life(64, jobs, seed, cycles)):
                begun = time.process_time()
                plan = decide(snapshot)
                between = time.process_time()
                evolved = genetic.decide(snapshot, seed=number)
                ended = time.process_time()
                ours, theirs = ours + between - begun, theirs + ended - between
                worse += plan.objective < evolved.objective * (1 - 1e-9)
                ratios.append(evolved.objective / plan.objective)
                states += 1
        rows.append(
            {
                "gpus": 64,
                "jobs": jobs,
                "states": states,
                "ours_worse": worse,
                "their_objective_over_ours": round(statistics.mean(ratios), 4),
                "ours_s": round(ours / states, 4),
                "theirs_s": round(theirs / states, 4),
                "time_ratio": round(theirs / ours, 1),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few states only")
    parser.add_argument(
        "--out", type=Path, default=Path("bench-out"), help="where to write (default: bench-out)"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    print(f"{'GPUs':>7} {'jobs':>7} {'median s':>9} {'worst s':>9} {'gap':>9} {'worst':>9}  solver")
    for gpus, jobs in SIZES[:3] if options.quick else SIZES:
        small = gpus <= 512
        row = measure(gpus, jobs, seeds=3 if small and not options.quick else 1, cycles=8 if small else 4)
        rows.append(row)
        print(
            f"{gpus:>7} {jobs:>7} {row['median_s']:>9} {row['worst_s']:>9} {row['gap']:>9} {row['worst_gap']:>9}"
            f"  {row['solver']}",
            flush=True,
        )
    (options.out / "policy.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\n{'GPUs':>7} {'jobs':>7} {'changed':>8} {'cold s':>9} {'incr. s':>9} {'ratio':>7}")
    warm = [incremental(*size, cycles=5) for size in INCREMENTAL[: 1 if options.quick else None]]
    for row in warm:
        print(
            f"{row['gpus']:>7} {row['jobs']:>7} {row['changed']:>8} {row['cold_s']:>9} {row['incremental_s']:>9} "
            f"{row['ratio']:>7}{'' if float(str(row['ratio'])) >= CHEAPER else f'  below {CHEAPER:g}'}"
        )
    (options.out / "policy-incremental.json").write_text(json.dumps(warm, indent=1) + "\n")
    reference = against_reference(seeds=1 if options.quick else 3, cycles=3 if options.quick else 8)
    print(f"\n{'GPUs':>7} {'jobs':>7} {'states':>7} {'worse':>6} {'theirs/ours':>12} {'time ratio':>11}")
    for row in reference:
        print(
            f"{row['gpus']:>7} {row['jobs']:>7} {row['states']:>7} {row['ours_worse']:>6} "
            f"{row['their_objective_over_ours']:>12} {row['time_ratio']:>11}"
        )
    (options.out / "policy-reference.json").write_text(json.dumps(reference, indent=1) + "\n")
    late = [row for row in rows if float(str(row["median_s"])) > TARGETS.get((row["gpus"], row["jobs"]), 1e9)]  # type: ignore[arg-type]
    for row in late:
        print(
            f"over its target: {row['gpus']} GPUs, {row['jobs']} jobs: {row['median_s']} s", file=sys.stderr
        )
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
