"""What another policy would do with a log: first how far a replay can be believed, then a range.

The log's jobs run through the simulator, each as long as it did, on the GPUs that it had. Under plain Slurm's order
the simulated waits and completions are held against the recorded ones: that is the error of the replay. A change that
is smaller than this error is none. What the log does not say, how trainings scale and whether their batch sizes were
tuned, is assumed both ways (polluxd.sim.recorded): the result is a range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from polluxd.sim.applications import BUILT_IN
from polluxd.sim.cluster import Scenario
from polluxd.sim.cluster_logs import SHORTEST, Log, Recorded
from polluxd.sim.comparison import played
from polluxd.sim.policies import policy_named
from polluxd.sim.recorded import replayed
from polluxd.sim.simulated_job import SimulatedJob
from polluxd.sim.workload import Line, Submission, TraceError

from .document import Sources, settled, span
from .job_log import FINISHED, STATES, JobLog, Numbers
from .machine import placed

Row = dict[str, Any]

LEAST_JOBS = 20
ELASTIC = (0.1, 0.5, 1.0)
"""Shares of the completed trainings that may change size."""
SITE_ORDER = "backfill"
"""Slurm's sched/backfill with all jobs of one priority: the log says nothing of priorities."""
BELIEVED = 0.5
"""Error of the mean completion, as a share of the recorded one, above which no change is told."""
_GPUS_PER_NODE = 8
"""Where the log does not say which nodes jobs had."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Jobs in a row, and those that ran when the first of them came."""

    log: Log
    waited: Mapping[str, float]
    """Recorded waits [s] of the jobs in the row, by name."""
    completed: Mapping[str, float]
    """And their completions, from Eligible to End [s]."""
    trainings: frozenset[str]
    """Those that completed: they may be elastic."""


def replayed_log(site: Sources, most_jobs: int) -> Row:
    """Return the replay's error, and the range of what policy pollux would change; or why this log cannot tell.

    Of the log, the `most_jobs` jobs in a row that waited longest are replayed.
    """
    if not most_jobs:
        return {"not_asked": True}
    if not site.records.waits_known:
        return {"cannot_tell": "it has no starts, so no simulated wait can be held against a recorded one"}
    try:
        return _replayed(site, most_jobs)
    except TraceError as error:
        return {"cannot_tell": str(error)}


def _replayed(site: Sources, most_jobs: int) -> Row:
    records, _ = settled(site.records, site.until)
    stretch = _stretch(records, (site.since, site.until), most_jobs)
    per_node, nodes = _cluster(site, records)
    scenario = Scenario(nodes=nodes, gpus_per_node=per_node)
    found: Row = {"jobs": len(stretch.waited), "nodes": nodes, "gpus_per_node": per_node, "changes": []}
    for tuned in (False, True):
        jobs = replayed(
            stretch.log, BUILT_IN, tuned=tuned, cluster_gpus=scenario.gpus, gpus_per_node=per_node
        ).jobs
        if not tuned:
            found["too_large"] = len(stretch.log.jobs) - len(jobs)
        # A start's cost is part of what a job took; only moves add to it.
        own = _run(jobs, frozenset(), SITE_ORDER, replace(scenario, restart_seconds=0.0), stretch)
        before = _mean_completion(own)
        if not tuned:
            found["error"] = _error(own, stretch)
            if found["error"]["completion"] > BELIEVED:
                return found | {
                    "cannot_tell": "the replay in the site's own order is too far from what happened (an error of "
                    f"{100 * found['error']['completion']:.0f} % of the mean completion), so no change is told"
                }
        draw = np.random.default_rng(0).permutation(sorted(stretch.trainings)).tolist()
        for share in ELASTIC:
            elastic = frozenset(draw[: round(share * len(draw))])
            after = _run(jobs, elastic, "pollux", scenario, stretch)
            change = _mean_completion(after) / before - 1.0
            found["changes"].append({"elastic": share, "tuned": tuned, "change": change})
    return found


def _run(
    jobs: Sequence[Submission], elastic: frozenset[str], policy: str, scenario: Scenario, stretch: _Stretch
) -> list[SimulatedJob]:
    """Return the jobs in the row, as they went; those that are not elastic keep the GPUs that they had."""
    given = tuple(replace(job, rigid=job.name not in elastic) for job in jobs)
    run = played(given, BUILT_IN, policy_named(policy)(scenario), scenario)
    return [job for job in run.jobs if job.submission.name in stretch.waited]


def _mean_completion(jobs: Sequence[SimulatedJob]) -> float:
    return float(np.mean([(job.ended_at or 0.0) - job.submission.time for job in jobs]))


def _error(own: Sequence[SimulatedJob], stretch: _Stretch) -> Row:
    names = [job.submission.name for job in own]
    simulated = np.array([(job.started_at or 0.0) - job.submission.time for job in own])
    recorded = np.array([stretch.waited[name] for name in names])
    took = _mean_completion(own)
    was = float(np.mean([stretch.completed[name] for name in names]))
    return {
        "recorded_wait_s": float(recorded.mean()),
        "simulated_wait_s": float(simulated.mean()),
        "mean_error_s": float(np.abs(simulated - recorded).mean()),
        "completion": abs(took / was - 1.0),
    }


def _stretch(records: JobLog, period: tuple[float, float], most_jobs: int) -> _Stretch:
    since, until = period
    ended = np.where(np.isnan(records.end), until, records.end)
    started = np.flatnonzero(
        ~np.isnan(records.start) & (records.eligible >= since) & (ended - records.start >= 1)
    )
    order = started[np.argsort(records.eligible[started], kind="stable")]
    if len(order) < LEAST_JOBS:
        raise TraceError(f"{len(order)} jobs with GPUs started in the period; {LEAST_JOBS} are needed")
    chosen = _longest_waits(records, order, most_jobs)
    begin = float(records.eligible[chosen[0]])
    running = np.flatnonzero((records.start <= begin) & (ended > begin + 1) & (records.eligible < begin))
    jobs, waited, completed, trainings = [], {}, {}, set()
    for number in [*running.tolist(), *chosen.tolist()]:
        name, start = f"job-{number}", float(records.start[number])
        eligible = max(float(records.eligible[number]), begin)
        seconds = float(ended[number]) - max(start, begin)
        line = Line(Path(), number, {})
        jobs.append(Recorded(line, name, eligible, seconds, int(records.gpus[number])))
        if records.eligible[number] >= begin and number not in running:
            waited[name], completed[name] = start - eligible, float(ended[number]) - eligible
            if records.state[number] == STATES.index(FINISHED) and seconds >= SHORTEST:
                trainings.add(name)
    return _Stretch(Log(tuple(jobs), {}, has_states=True), waited, completed, frozenset(trainings))


def _longest_waits(records: JobLog, order: Numbers, most_jobs: int) -> Numbers:
    """Return so many records in a row, of those in this order, that waited longest."""
    summed = np.concatenate([[0.0], np.cumsum((records.start - records.eligible)[order])])
    count = min(most_jobs, len(order))
    first = int(np.argmax(summed[count:] - summed[:-count]))
    chosen: Numbers = order[first : first + count]
    return chosen


def _cluster(site: Sources, records: JobLog) -> tuple[int, int]:
    """Return GPUs per node and nodes: the simulated cluster has one kind of node, and no partitions."""
    holdings = placed(records, site.nodes)
    total = float(holdings.gpus.sum())
    if any("which nodes" in missing for missing in records.missing):
        each = _GPUS_PER_NODE
    else:
        kinds, of = np.unique(holdings.gpus[holdings.gpus > 0], return_inverse=True)
        each = int(kinds[np.argmax(np.bincount(of, weights=kinds[of]))])
    return min(each, 64), max(round(total / each), 1)


def lines(found: Row) -> list[str]:
    """Return what the replay says, in a line or two."""
    if "not_asked" in found:
        return ["Under Pollux: not asked for; --replay 300 replays 300 jobs, which takes minutes"]
    said = []
    if (error := found.get("error")) is not None:
        said.append(
            f"Replay of {found['jobs']} jobs in plain Slurm's order on {found['nodes']} x {found['gpus_per_node']} "
            f"GPUs: mean wait {span(error['simulated_wait_s'])} against {span(error['recorded_wait_s'])} recorded, a "
            f"mean error of {span(error['mean_error_s'])} per job; mean completion off by "
            f"{100 * error['completion']:.0f} %"
        )
    if "cannot_tell" in found:
        return [*said, f"Under Pollux: this log cannot tell: {found['cannot_tell']}"]
    ranges = []
    for share in ELASTIC:
        changes = [100 * row["change"] for row in found["changes"] if row["elastic"] == share]
        ranges.append(
            f"{min(changes):+.0f} to {max(changes):+.0f} % with {100 * share:.0f} % of the trainings elastic"
        )
    return [*said, f"Under Pollux, mean completion (a change within the error is none): {'; '.join(ranges)}"]
