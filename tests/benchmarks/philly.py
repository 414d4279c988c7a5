"""Philly's virtual clusters under three policies, job by job as the log has them: waits, completions, GPU hours.

The log does not say how large a virtual cluster was. It gets as many nodes of 8 GPUs as it takes for the recorded GPU
hours to be LOAD of all, and no fewer than its largest job needs. Each run that has ended is kept in `bench-out/philly`.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from polluxd.sim.applications import BUILT_IN
from polluxd.sim.cluster import Scenario
from polluxd.sim.cluster_logs import Log, Recorded, read_log, recognise
from polluxd.sim.comparison import played
from polluxd.sim.policies import policy_named
from polluxd.sim.recorded import replayed

from .results import ROOT, parser_of, save
from .site_report import PAGE, placed_in

FOLDER = ROOT / "bench-out" / "philly"
TITLE = "## Philly's virtual clusters under three policies"
POLICIES = ("backfill", "pollux-paper", "pollux")
LOAD = 0.75
GPUS_PER_NODE = 8
LEAST_JOBS = 20
INTERVAL_S, POLL_S = 300.0, 60.0

Row = dict[str, Any]


def virtual_clusters(log: Log) -> dict[str, list[Recorded]]:
    """Return the jobs of each virtual cluster that has some, the largest first."""
    found: dict[str, list[Recorded]] = defaultdict(list)
    for job in log.jobs:
        found[str(job.line.values["cluster"])].append(job)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def nodes_of(jobs: Sequence[Recorded]) -> int:
    held = sum(job.seconds * job.gpus for job in jobs) / (jobs[-1].submitted - jobs[0].submitted)
    least = max(job.gpus for job in jobs)
    return max(math.ceil(held / LOAD / GPUS_PER_NODE), math.ceil(least / GPUS_PER_NODE))


def busiest(jobs: Sequence[Recorded], count: int) -> Sequence[Recorded]:
    """Return the jobs in a row that bring the most GPU hours an hour; all where there are no more."""
    if not count or count >= len(jobs):
        return jobs
    work = [0.0]
    for job in jobs:
        work.append(work[-1] + job.seconds * job.gpus)

    def rate(first: int) -> float:
        lasted = jobs[first + count - 1].submitted - jobs[first].submitted
        return (work[first + count] - work[first]) / max(lasted, 3600.0)

    first = max(range(len(jobs) - count + 1), key=rate)
    return jobs[first : first + count]


def run(jobs: Sequence[Recorded], nodes: int, policy: str) -> Row:
    """Play the jobs once, as if their users had tuned them."""
    scenario = Scenario(
        nodes=nodes, gpus_per_node=GPUS_PER_NODE, interval=INTERVAL_S, poll=POLL_S, floor=POLL_S
    )
    log = Log(tuple(jobs), {}, has_states=False)
    replay = replayed(log, BUILT_IN, tuned=True, cluster_gpus=scenario.gpus, gpus_per_node=GPUS_PER_NODE)
    begun = time.process_time()
    done = played(replay.jobs, BUILT_IN, policy_named(policy)(scenario), scenario).jobs
    completions = sorted((job.ended_at or 0.0) - job.submission.time for job in done)
    waits = [(job.started_at or 0.0) - job.submission.time for job in done]
    return {
        "jobs": len(done),
        "mean_h": statistics.fmean(completions) / 3600,
        "p99_h": completions[math.ceil(0.99 * len(completions)) - 1] / 3600,
        "wait_h": statistics.fmean(waits) / 3600,
        "recorded_gpu_hours": replay.recorded_gpu_hours,
        "cpu_s": time.process_time() - begun,
    }


def section(kept: Sequence[tuple[str, int, int, Row]], read: int, most: int) -> Iterator[str]:
    """Yield the lines of the page's section: virtual cluster, all its jobs, its nodes, and its runs by policy."""
    jobs, cpu = (
        sum(r[POLICIES[0]]["jobs"] for *_, r in kept),
        sum(x["cpu_s"] for *_, r in kept for x in r.values()),
    )
    yield TITLE
    yield ""
    yield (
        f"`make bench-philly{f' JOBS={most}' if most else ''}` played {jobs:,} of the log's {read:,} jobs of 60 s or "
        f"more, in {cpu / 60:.0f} minutes of CPU. "
        + (
            f"Of each virtual cluster these are the {most} jobs in a row (or all) that brought the most work: **this "
            "is no run of the whole log.** `make bench-philly` plays all of it. "
            if most
            else ""
        )
        + f"Nodes have {GPUS_PER_NODE} GPUs. The log does not say how many a virtual cluster had: it gets as many as "
        f"make its recorded GPU hours {100 * LOAD:.0f} % of all. Virtual clusters of fewer than {LEAST_JOBS} jobs are "
        f"left out. Users count as having tuned their jobs. Policies decide every {INTERVAL_S:.0f} s, and those that "
        f"react to news no more often than every {POLL_S:.0f} s, so a wait below that is none. A move takes 30 s."
        + (
            ""
            if all(len(runs) == len(POLICIES) for *_, runs in kept)
            else " Runs that had not ended when the page was written are missing (`not run`)."
        )
    )
    yield ""
    yield (
        "Every job is elastic and has the model of one of the paper's applications: the comparison with backfill is "
        "that of this assumption, not of Philly's code. In a busy stretch, backfill's jobs keep the GPUs that they "
        "asked for to their end."
    )
    yield ""
    yield (
        "| virtual cluster | jobs played | of | GPUs | mean completion [h]: backfill | paper | polluxd | p99 [h]: "
        "backfill | paper | polluxd | mean wait [h]: backfill | paper | polluxd |"
    )
    yield "|---|" + "---:|" * 12
    for name, all_jobs, nodes, runs in kept:
        cells = [
            f"{runs[policy][key]:.3g}" if policy in runs else "not run"
            for key in ("mean_h", "p99_h", "wait_h")
            for policy in POLICIES
        ]
        first = runs[POLICIES[0]]
        yield f"| {name} | {first['jobs']:,} | {all_jobs:,} | {GPUS_PER_NODE * nodes} | {' | '.join(cells)} |"
    whole = [runs for *_, runs in kept if len(runs) == len(POLICIES)]
    if whole:
        total = sum(runs[POLICIES[0]]["jobs"] for runs in whole)
        means = [
            sum(runs[policy]["mean_h"] * runs[policy]["jobs"] for runs in whole) / total
            for policy in POLICIES
        ]
        yield ""
        yield (
            f"Over the {total:,} jobs of the {len(whole)} virtual clusters with all three runs, the mean completion is "
            f"{means[0]:.3g} h under backfill, {means[1]:.3g} h under the paper's policy and {means[2]:.3g} h under "
            f"polluxd: {100 * (means[2] / means[1] - 1):+.0f} % against the paper's policy."
        )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--jobs", type=int, default=0, help="of each virtual cluster; 0: all")
    parser.add_argument(
        "--cpu", type=float, default=10800.0, help="begin no further run after so many seconds of CPU"
    )
    chosen = parser.parse_args()
    path = ROOT / os.environ.get("POLLUX_OSDI21", "../shared/data/osdi21") / "philly.csv"
    kind = recognise(path)
    if kind is None:
        raise SystemExit(f"{path}: is no log of Philly; POLLUX_OSDI21 names the folder that has it")
    log = read_log(path, kind)
    clusters = {name: jobs for name, jobs in virtual_clusters(log).items() if len(jobs) >= LEAST_JOBS}
    kept: dict[str, Row] = {name: {} for name in clusters}
    for policy in POLICIES:
        for name, jobs in clusters.items():
            file = FOLDER / f"{chosen.jobs}-{name}-{policy}.json"
            if not file.exists():
                if time.process_time() > chosen.cpu:
                    continue
                save(file, run(busiest(jobs, chosen.jobs), nodes_of(jobs), policy))
            kept[name][policy] = json.loads(file.read_text())
            print(name, policy, kept[name][policy], flush=True)
    rows = [
        (name, len(clusters[name]), nodes_of(clusters[name]), runs) for name, runs in kept.items() if runs
    ]
    placed_in(PAGE, TITLE, "\n".join(section(rows, len(log.jobs), chosen.jobs)))


if __name__ == "__main__":
    main()
