"""Replay the paper's evaluation; write tests/benchmarks/simulator.md.

    python -m tests.benchmarks.simulator [--data DIR] [--seconds 36000] [--at-once 1] [--out FILE]

Runs are kept in bench-out/ under a digest of everything that they depend on (the policy's and the simulator's sources,
the data), so that an interrupted benchmark continues and no page mixes two versions. bench-out/sim.json has every run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is loaded: see polluxd.cli

import numpy as np

from polluxd.config.settings import PolicySettings
from polluxd.sim.cluster import Knowledge, NodeGroup, Scenario
from polluxd.sim.move_costs import MoveCosts
from polluxd.sim.policies import POLICIES
from tests.benchmarks.simulator_runs import Bench, Result, rows_of
from tests.benchmarks.simulator_tables import HEAD, MEASURES, Of, Pairs, averages, change, interval, table
from tests.unit.policy.states import rough

ROOT = Path(__file__).parents[2]
WORKLOADS = ("workload-1", "workload-2", "workload-3", "workload-6")
GENERATED = tuple(f"generated-{seed}" for seed in (*range(601, 611), *range(701, 711)))
"""Twenty traces that were not used for tuning."""
TUNED = tuple(f"generated-{seed}" for seed in (*range(21, 31), *range(401, 411), *range(501, 511)))
"""Thirty on which the price's discount and the tail's width were chosen."""
DOUBLED = tuple(f"doubled-{name.removeprefix('workload-')}" for name in WORKLOADS)
"""The same workloads in half the time: twice the load."""
SHORT = tuple(f"short-{seed}" for seed in range(201, 207))
"""Traces for comparisons of many settings."""
TYPES = tuple(f"short-{seed}" for seed in range(601, 613))
"""Traces on several GPU types, not used for tuning: twice as many, since their runs differ more."""
PUBLISHED = {
    "pollux-paper": (2089, 3323, 2188, 2446),
    "tiresias": (2474, 5145, 3876, 3470),
    "optimus": (4087, 6914, 3944, 5302),
}
SEEDS = (0, 1, 2)
PLAIN = Scenario()
SHARE = Scenario(policy=PolicySettings(objective="fair-share"))
PRODUCT = replace(PLAIN, moves=MoveCosts())
MIXED = replace(PLAIN, groups=(NodeGroup("t4", 8, 4), NodeGroup("v100", 4, 4), NodeGroup("a100", 2, 8)))
RIGID = ("rigid8", "rigid16", "rigid16-overload", "rigid32")
RIGID_SEEDS = (5, 6)
KAPPAS = (0.0, PLAIN.policy.kappa, 5.0, 10.0)
CLASSES: tuple[tuple[str, Sequence[str], Scenario, Sequence[str]], ...] = (
    *((kind, tuple(f"{kind}-{seed}" for seed in RIGID_SEEDS), PLAIN, ("size",)) for kind in RIGID),
    ("workloads", WORKLOADS, PLAIN, ("gpus", "application")),
    ("workloads at twice the load", DOUBLED, PLAIN, ("gpus", "application")),
    ("short traces, eight users", SHORT, replace(PLAIN, users=8), ("user",)),
)
"""Tables of classes: a title, traces, a scenario, the kinds of classes."""
RIVALS = ("sia", "themis")
WRONG = {
    "lengths off by 0.3 to 3 times": replace(PLAIN, lengths="wrong"),
    "half of the jobs declare no length": replace(PLAIN, lengths="missing"),
    "no job declares its length": replace(PLAIN, lengths="none"),
    "a quarter declare a tenth of it": replace(PLAIN, lengths="lies"),
    "half stop early, after 20 to 90 % of it": replace(PLAIN, lengths="early"),
    "noise scales off by 30 %": replace(PLAIN, noise_jitter=0.3),
}
ABLATION = {
    "without earlier runs' fits": replace(PLAIN, pollux=Knowledge(remembers=False)),
    "without the declared lengths": replace(PLAIN, lengths="none"),
    "without decisions on arrival and end": replace(PLAIN, floor=PLAIN.interval),
    "starting on one GPU, as the paper's": replace(PLAIN, policy=PolicySettings(start_gpus=1)),
    "with eight users, who divide the first starts": replace(PLAIN, users=8),
}


def fidelity(bench: Bench) -> str:
    rows = []
    for name, published in PUBLISHED.items():
        runs = [run for run in bench.of(name, WORKLOADS, PLAIN) if run is not None]
        if len(runs) < len(WORKLOADS):
            continue
        found = [r["avg_jct_s"] for r in runs]
        cells = [f"{f:.0f} / {p} ({change(f, p)})" for f, p in zip(found, published, strict=True)]
        rows.append([name, *cells, change(fmean(found), fmean(published))])
    return table(["policy", *WORKLOADS, "over the four"], rows)


def pairs(
    bench: Bench,
    title: str,
    workloads: Sequence[str],
    ours: Scenario,
    theirs: Scenario,
    *,
    seeds: Sequence[int] = (0,),
    rival: str = "pollux-paper",
    drawn: bool = False,
) -> Pairs:
    """Pair runs by trace and seed.

    Without `drawn` the rival draws nothing, and one run of it stands beside all seeds.
    """
    found = [
        (
            *bench.of("pollux", [workload], replace(ours, seed=seed)),
            *bench.of(rival, [workload], replace(theirs, seed=seed if drawn else seeds[0])),
        )
        for seed in seeds
        for workload in workloads
    ]
    return Pairs(title, [mine for mine, _ in found], [other for _, other in found])


def claims(bench: Bench) -> str:
    """What must hold, with its intervals."""
    found = [
        pairs(bench, "workloads, 30 s per restart", WORKLOADS, PLAIN, PLAIN, seeds=SEEDS),
        pairs(bench, "workloads at twice the load, 30 s", DOUBLED, PLAIN, PLAIN),
        pairs(bench, "generated, 30 s per restart", GENERATED, PLAIN, PLAIN),
        pairs(bench, "generated, those of tuning", TUNED, PLAIN, PLAIN),
        pairs(
            bench,
            "workloads, the product's moves (the paper's at 30 s)",
            WORKLOADS,
            PRODUCT,
            PLAIN,
            seeds=SEEDS,
        ),
        pairs(bench, "generated, the product's moves (the paper's at 30 s)", GENERATED, PRODUCT, PLAIN),
        roughly(bench, "rough conditions: workloads", WORKLOADS),
        roughly(bench, "rough conditions: short traces", SHORT),
        pairs(bench, "fair-share: workloads, 30 s", WORKLOADS, SHARE, PLAIN),
        pairs(bench, "fair-share: short traces, 30 s", SHORT, SHARE, PLAIN),
        *(pairs(bench, f"workloads, against {name}", WORKLOADS, PLAIN, PLAIN, rival=name) for name in RIVALS),
    ]
    return table(HEAD, [p.row() for p in found])


def roughly(bench: Bench, title: str, workloads: Sequence[str]) -> Pairs:
    """Pair runs under rough conditions, with a seed per workload."""
    found = [
        pairs(bench, "", [workload], rough(number), rough(number), seeds=(number,), drawn=True)
        for number, workload in enumerate(workloads, 1)
    ]
    return Pairs(title, [r for p in found for r in p.ours], [r for p in found for r in p.theirs])


def by_class(bench: Bench) -> str:
    """Each class of jobs by itself: a mean must not hide who waits."""
    rows = []
    for title, traces, scenario, kinds in CLASSES:
        made = pairs(bench, "", traces, scenario, scenario).made
        for kind in kinds:
            classes = [(ours["classes"][kind], theirs["classes"][kind]) for ours, theirs in made]
            for name in sorted(
                {name for ours, _ in classes for name in ours}, key=lambda name: (len(name), name)
            ):
                both = [(ours[name], theirs[name]) for ours, theirs in classes if name in ours]
                (mean, worst), (other, others) = (pooled(side) for side in zip(*both, strict=True))
                label = f"asks for {name} GPUs" if kind == "gpus" else name
                cells = [f"{mean:.0f} / {other:.0f}", change(mean, other), f"{worst:.1f} / {others:.1f}"]
                jobs = sum(ours["jobs"] for ours, _ in both)
                rows.append([title, label, str(jobs), *cells])
    return table(["traces", "class", "jobs", "mean JCT [s]", "change", "worst fairness"], rows)


def pooled(runs: Sequence[Result]) -> tuple[float, float]:
    """Return the mean completion time [s] of a class over several runs, and its worst fairness."""
    jobs = [run["jobs"] for run in runs]
    return float(np.average([run["avg_jct_s"] for run in runs], weights=jobs)), max(
        run["fairness_worst"] for run in runs
    )


def robust(bench: Bench) -> str:
    """Wrong knowledge."""
    rows = [
        pairs(bench, title, SHORT, scenario, scenario if scenario.noise_jitter else PLAIN).row()
        for title, scenario in WRONG.items()
    ]
    return table(HEAD, rows)


def knob(bench: Bench) -> str:
    """From the mean to the tail."""
    rows = []
    for title, traces in (("usual load", SHORT), ("twice the load", DOUBLED)):
        for kappa in KAPPAS:
            ours = replace(PLAIN, policy=PolicySettings(kappa=kappa))
            rows.append(pairs(bench, f"{title}, kappa {kappa:g}", traces, ours, PLAIN).row())
    return table(HEAD, rows)


def ablation(bench: Bench) -> str:
    """Parts taken away."""
    rows = [pairs(bench, "all that the daemon knows and does", SHORT, PLAIN, PLAIN).row()]
    for title, scenario in ABLATION.items():
        rows.append(pairs(bench, title, SHORT, scenario, PLAIN).row())
    return table(HEAD, rows)


def types(bench: Bench) -> str:
    """Several GPU types, against Sia's policy."""
    columns = [(of, form) for _, of, form in (*MEASURES[:3], MEASURES[4])]
    names = ("pollux", "sia", "gavel", "pollux-paper", "themis", "tiresias", "backfill")
    rows = [[name, *averages(bench.of(name, TYPES, MIXED), *columns)] for name in names]
    found = pairs(bench, "", TYPES, MIXED, MIXED, rival="sia")
    changed = ", ".join(f"{title} {interval(found.changes(of))}" for title, of, _ in MEASURES[:3])
    return (
        table(["policy", "mean JCT [s]", "p99 [s]", "makespan [s]", "fairness"], rows)
        + f"\n`pollux` against `sia`, over {len(found.made)} traces: {changed}.\n"
    )


def everyone(bench: Bench) -> str:
    columns: list[tuple[Of, str]] = [
        *((of, form) for _, of, form in MEASURES[:4]),
        (lambda r: r["avg_efficiency"], ".2f"),
        (lambda r: r["finish_time_fairness"]["mean"], ".2f"),
        (lambda r: r["finish_time_fairness"]["worst"], ".1f"),
        (lambda r: r["decision_ms"]["median"], ".2f"),
        (lambda r: r["cpu_s"], ".1f"),
    ]
    rows = [[name, *averages(bench.of(name, WORKLOADS, PLAIN), *columns)] for name in POLICIES]
    head = ["policy", "mean JCT [s]", "p99 [s]", "makespan [s]", "restarts", "efficiency"]
    return table([*head, "fairness", "worst", "decision [ms]", "run [CPU s]"], rows)


def ask(bench: Bench) -> None:
    """Ask for one pass over every claim first, in case time runs out."""
    for moves in (PLAIN, PRODUCT):
        pairs(bench, "", WORKLOADS, moves, PLAIN)
    roughly(bench, "", SHORT)
    pairs(bench, "", GENERATED, PLAIN, PLAIN)
    pairs(bench, "", TYPES, MIXED, MIXED, rival="sia")
    for rival in RIVALS:
        pairs(bench, "", WORKLOADS, PLAIN, PLAIN, rival=rival)
    for moves in (PLAIN, PRODUCT):
        pairs(bench, "", WORKLOADS, moves, PLAIN, seeds=SEEDS)
    robust(bench)
    roughly(bench, "", WORKLOADS)
    for section in (by_class, knob, ablation, fidelity, types, everyone, page):
        section(bench)


def page(bench: Bench) -> str:
    """Return the text of the committed page."""
    asked = len(bench.tasks)
    return f"""# The simulator's results

{asked - len(bench.missing)} of {asked} runs are made.
Regenerate with `make bench-sim` ({platform.machine()}, Python {platform.python_version()}; sources and data
{bench.version}). OSDI 2021 workloads of 160 jobs on 16 nodes of 4 GPUs, decisions every 60 s, 30 s per restart unless
said otherwise. Each cell is the mean change against the paper's policy on the same traces, with its 95 % interval over
the pairs (trace and seed); negative is less, and less is better in every column. One such run is
`polluxctl simulate workload-6.csv --profiles profiles --policy pollux --objective completion-time`.

## Ahead of the paper

{claims(bench)}
`pollux` minimises completion time by a price per GPU (`--objective completion-time`) unless a row says fair-share: the
paper's objective. Seeds differ in what earlier runs are drawn to have left. The moves
of the product: 0.4 s in place, 5 s through the queue (`realloc.md`), by the rules of polluxd; the
daemon expects its default costs until it has measured a job's own. Rough conditions: measurements off by 10 %,
restarts of 15 to 250 s by application, two node failures a day; a seed per workload. The generated traces are 120 jobs
over 12 hours by `--generate`. Nothing was tuned on the twenty of seeds 601 to 610 and 701 to 710. How `kappa` grows
with the jobs was chosen on workloads 1 and 6, the doubled workloads, three of the short traces, three overloaded ones
(seeds 911 to 913) and Sia's. The thirty of tuning (seeds 21 to 30, 401 to 410, 501 to 510) are those on which the
discount of the price and the width of the tail were chosen. The p99 of 120 jobs is nearly the time of the second
longest one.

`pollux` is polluxd's own controller in virtual time: its moves wait for each other, and its reports are up to 30 s old.
The other policies move jobs at once.

`pollux` knows what a real daemon knows. Of earlier runs: per application and GPU type one fit, that of the run which
saw most GPUs, from the moment that the agent starts and asks for it (the database begins empty; each term is off by 5 %
for the next run, and all of them together by 5 % more). Of the job: what it measured, the training length that its
user declared, what its own moves cost. Agents publish every 30 s. It decides on arrivals and ends too. A job that was
never measured starts on up to 4 GPUs of one node. A user's unmeasured jobs divide the user's equal share of the
GPUs; all jobs of a trace belong to one user unless said otherwise.

## Classes of jobs

{by_class(bench)}
pollux / pollux-paper. The rigid jobs run on 8, 16 or 32 GPUs and on no other number, among elastic ones: 17 % of 100
jobs in 8 hours, 11 % of 100 in 10, 8 % of 130 in 8, 5 % of 100 in 9.

## Wrong knowledge

{robust(bench)}
Over six generated traces of 50 jobs in 5 hours. A scenario's `lengths` and `noise_jitter` reproduce the rows.

## From the mean to the tail

{knob(bench)}
Usual load: the same six traces. Twice the load: the four workloads in half the time. `--kappa`: what the last job to
end counts beyond its share of the mean, and again for each ten jobs.

## What brings what

{ablation(bench)}
## Fidelity: mean JCT [s], here / published artifact

{fidelity(bench)}
What differs: our exact solver stands for the genetic algorithm of `pollux-paper`; step times are interpolated by a
newer scipy; completion is not rounded to whole seconds. Agents refit where a measurement is off their fit by over 5 %.

## Several GPU types

{types(bench)}
8 nodes of 4 t4, 4 of 4 v100 and 2 of 8 a100; twelve generated traces of 50 jobs in 5 hours. A job knows a type once
it, or an earlier run, was measured there. `pollux`, `sia` and `gavel` tell types apart; the others take what GPUs come.

## Every policy, mean over the four workloads

{everyone(bench)}
Simplifications of each rival stand in its module under `polluxd/sim/policies/`. Finish-time fairness is against a job
alone on 1/contention of the cluster with its batch size tuned in every epoch, which is stricter than most papers take
it: few reach 1 under load. Decision times are wall-clock, on a machine shared with other work.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / os.environ.get("POLLUX_OSDI21", "../shared/data/osdi21")
    parser.add_argument("--data", type=Path, default=default, help="folder of profiles/ and workloads/")
    parser.add_argument("--seconds", type=float, default=36_000.0, help="no run is begun after that")
    parser.add_argument("--at-once", type=int, default=1, help="runs made at once, a process each")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    asked = parser.parse_args()
    bench = Bench(asked.data, ROOT / "bench-out" / "simulator.json")
    ask(bench)
    bench.work(asked.seconds, asked.at_once)
    bench.kept.parent.mkdir(exist_ok=True)
    (ROOT / "bench-out" / "sim.json").write_text(json.dumps(rows_of(bench), indent=1) + "\n")
    asked.out.write_text(page(bench))
    left = len(bench.missing)
    print(f"wrote {asked.out}" + (f"; {left} runs are still to be made: run it again" if left else ""))


if __name__ == "__main__":
    main()
