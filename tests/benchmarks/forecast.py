"""Forecasts of the private cluster in virtual time, held against what its daemon then did.

polluxd's controller runs over the Slurm in memory. Every EVERY_S, the forecasts run ahead from the snapshot that it
decided on. They know of the past what the database would have: the jobs that have ended by then.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from polluxd.forecast.ahead import Course
from polluxd.forecast.courses import run_ahead
from polluxd.forecast.history import ANYBODY, DECLARED, SAME_NAME, SAME_USER, History
from polluxd.forecast.intervals import Forecast, Happened, Misses, drawn, score
from polluxd.model import Plan, Snapshot, SnapshotJob
from polluxd.policy import Cache, decide
from polluxd.sim.applications import BUILT_IN
from polluxd.sim.cluster import Scenario
from polluxd.sim.daemon_engine import simulate_daemon
from polluxd.sim.generator import Trace, generate, stiffened
from polluxd.store import EndedJob
from tests.benchmarks.results import ROOT, parser_of
from tests.benchmarks.site_report import placed_in

PAGE = Path(__file__).with_suffix(".md")
OUT = ROOT / "bench-out" / "forecast"
"""Days that were run: a further call goes on from them."""
NODES, GPUS = 4, 4
JOBS, HOURS = 24, 5.0
LENGTH = 0.9
"""Of trainings, against those of the shipped applications."""
EVERY_S = 2700.0
DRAWS = 8
DAY_S = 86400.0
DAYS = 14
"""Days before whose jobs are known."""
LENGTHS = {
    "true": "Every training tells how long it is (`job.epochs(N)`)",
    "early": "Every training tells how long it is, and half of them stop early, after 20 to 90 % of it",
    "missing": "Half of the trainings do not tell how long they are",
}
TRACE = Trace(rigid_share=0.3, rigid_gpus=8)


@dataclass(frozen=True)
class Moment:
    """A decision, and what the database would know then."""

    snapshot: Snapshot
    ended: tuple[EndedJob, ...]
    submitted: tuple[float, ...]
    held_s: Mapping[int, float]


@dataclass(frozen=True)
class Day:
    """What one day of the cluster showed."""

    moments: tuple[Moment, ...]
    ended: tuple[EndedJob, ...]
    happened: Mapping[int, Happened]


@dataclass
class Seen:
    """What was foretold on one day."""

    courses: list[tuple[int, float, str, tuple[Course, ...], str]] = field(default_factory=list)
    """Of each job at each moment: what `drawn` makes a forecast of."""
    happened: Mapping[int, Happened] = field(default_factory=dict)
    cpu_s: list[float] = field(default_factory=list)
    """Of each run ahead."""
    jobs: list[int] = field(default_factory=list)
    """Jobs of each snapshot."""

    @property
    def forecasts(self) -> list[Forecast]:
        return [drawn(*each) for each in self.courses]


class Watcher:
    """Decides as polluxd does, and takes down moments."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.ended: dict[int, EndedJob] = {}
        self._at = 0.0
        self._last: dict[int, SnapshotJob] = {}
        """Each job as the newest snapshot had it."""
        self._started: dict[int, float] = {}

    def decide(self, snapshot: Snapshot, *, cache: Cache) -> Plan:
        now, here = snapshot.taken_at, {job.job_id: job for job in snapshot.jobs}
        self._started |= {
            j.job_id: now for j in snapshot.jobs if j.placement and j.job_id not in self._started
        }
        for number in self._last.keys() - here.keys() - self.ended.keys():
            self.ended[number] = self._over(self._last[number], now)
        self._last |= here
        if now - self._at >= EVERY_S and snapshot.jobs:
            self._at = now
            submitted = tuple(job.submitted_at for job in self._last.values())
            held = {job: now - since for job, since in self._started.items() if job in here}
            self.moments.append(Moment(snapshot, tuple(self.ended.values()), submitted, held))
        return decide(snapshot, cache=cache)

    def _over(self, job: SnapshotJob, now: float) -> EndedJob:
        times = (job.submitted_at, self._started.get(job.job_id, now), now)
        return EndedJob(
            *(job.job_id, job.user, job.name, job.account, job.partition, job.spec), *times, report=job.report
        )


def played(lengths: Any, seed: int) -> Day:
    """Run one day."""
    scenario = Scenario(nodes=NODES, gpus_per_node=GPUS, seed=seed, users=4, jitter=0.05, lengths=lengths)
    made = generate(BUILT_IN, JOBS, HOURS, cluster_gpus=scenario.gpus, seed=seed, length=LENGTH)
    watcher = Watcher()
    result = simulate_daemon(
        stiffened(made, BUILT_IN, TRACE, seed), BUILT_IN, scenario, decide=watcher.decide
    )
    # Slurm in memory numbers jobs as they come. An agent's last report is of its training's end.
    happened = {job.number + 1: Happened(job.started_at, job.ended_at) for job in result.jobs}
    made = {job.number + 1: job.length for job in result.jobs}
    ended = {
        past.job_id: replace(past, report=past.report and replace(past.report, progress=made[past.job_id]))
        for past in watcher.ended.values()
    }
    moments = (replace(each, ended=tuple(ended[p.job_id] for p in each.ended)) for each in watcher.moments)
    return Day(tuple(moments), tuple(ended.values()), happened)


def _shifted(past: EndedJob, days: int) -> EndedJob:
    names = ("submitted_at", "started_at", "ended_at")
    return replace(past, **{name: getattr(past, name) - days * DAY_S for name in names})


def forecast(lengths: str, seed: int) -> Seen:
    """Forecast from each moment of a day. The days before it are those of the seeds before."""
    past = [
        _shifted(each, day)
        for day in range(1, DAYS + 1)
        for each in kept(f"day-{lengths}", partial(played, lengths), seed - day).ended
    ]
    day: Day = kept(f"day-{lengths}", partial(played, lengths), seed)
    seen = Seen(happened=day.happened)
    for moment in day.moments:
        began = time.process_time()
        submitted = (*(each.submitted_at for each in past), *moment.submitted)
        history = History([*past, *moment.ended], submitted, -DAYS * DAY_S)
        found = run_ahead(moment.snapshot, history, moment.held_s, draws=DRAWS, seed=seed)
        at = moment.snapshot.taken_at
        seen.courses += [
            (job.job_id, at, found.by[job.job_id], found.found[job.job_id], job.user)
            for job in moment.snapshot.jobs
        ]
        seen.cpu_s.append(time.process_time() - began)
        seen.jobs.append(len(moment.snapshot.jobs))
    return seen


def kept(name: str, run: Callable[[int], Any], seed: int) -> Any:
    """Run one day, or read it where it was run before."""
    path = OUT / f"{name}-{seed}.pickle"
    if not path.exists():
        found = run(seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_bytes(pickle.dumps(found))
        written.rename(path)
    return pickle.loads(path.read_bytes())


def told(days: Mapping[int, Seen]) -> dict[int, list[Forecast]]:
    """Return the forecasts of each day as they were told: moved by what those of the two days before had missed."""
    found = {}
    for seed, seen in days.items():
        known = [day for day in (seed - 2, seed - 1) if day in days]
        if not known:
            continue
        # Numbers of jobs begin at 1 each day.
        forecasts = [replace(f, job_id=f.job_id + 1000 * day) for day in known for f in days[day].forecasts]
        outcomes = {job + 1000 * day: was for day in known for job, was in days[day].happened.items()}
        misses = Misses(forecasts, outcomes)
        found[seed] = [misses.move(forecast) for forecast in seen.forecasts]
    return found


def table(lengths: str, days: Mapping[int, Seen]) -> str:
    """The figures of days with such lengths."""
    moved = told(days)
    outcomes = {job + 1000 * day: was for day in moved for job, was in days[day].happened.items()}

    def scored(name: str, forecasts: Mapping[int, Sequence[Forecast]], by: str | None = None) -> str:
        chosen = [
            replace(f, job_id=f.job_id + 1000 * day)
            for day, found in forecasts.items()
            for f in found
            if by is None or f.by == by
        ]
        found = score(chosen, outcomes)
        if found is None:
            return ""
        starts = "-" if found.by_start is None else f"{100 * found.by_start:.0f} %"
        shares = f"{100 * found.within:.0f} % | {found.width_s / 60:.0f} | {found.relative:.2f} | {starts}"
        return f"| {name} | {found.jobs} | {shares} |\n"

    known = {DECLARED: "told by the job", SAME_NAME: "jobs of its name", SAME_USER: "jobs of its user"}
    rows = [
        scored("as told", moved),
        scored("before they were moved", {day: days[day].forecasts for day in moved}),
    ]
    rows += [
        scored(f"as told, length by: {name}", moved, by)
        for by, name in (known | {ANYBODY: "all jobs"}).items()
    ]
    cpu = [seconds for seen in days.values() for seconds in seen.cpu_s]
    jobs = [count for seen in days.values() for count in seen.jobs]
    every = [f for found in moved.values() for f in found]
    return f"""## {LENGTHS[lengths]}

| {len(moved)} days | jobs | ended within | median width [min] | width over the job's time | started by then |
| --- | ---: | ---: | ---: | ---: | ---: |
{"".join(rows)}
Of {len(every)} forecasts, {sum("last" not in f.told for f in every)} told no end: nothing said how long the job lasts.
{len(cpu)} runs ahead, with {median(jobs):.0f} jobs in the median and at most {max(jobs)}, took {fmean(cpu):.1f} s of
CPU on average and at most {max(cpu):.1f} s.
"""


HEAD = f"""# Forecasts

Written by `make bench-forecast`. Each day has {JOBS} jobs over {HOURS:g} hours on {NODES} nodes of {GPUS} GPUs in
virtual time, of 4 users; three in ten need 8 GPUs. The lengths of trainings of one name are drawn with a
logarithmic deviation of 0.5: where only past lengths are known, the best interval of 80 % is 1.4 of the median wide.
Where half stop early, the best one at the start of a training is 0.66 of the length that it tells.
The jobs of the {DAYS} days before are known. polluxd's own controller runs the cluster.
Every {EVERY_S / 60:.0f} minutes, {DRAWS} courses run ahead from the snapshot that it decided on.
Forecasts are moved by what those of the two days before missed; the first day that was run has none before it, and
is left out. Each job counts once, however often it was forecast. The goal is an interval of 80 % that holds for 75 to
85 % of the jobs, and is less wide than half of the job's time on GPUs.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--lengths", choices=LENGTHS, action="append", help="these alone [default: all]")
    options = parser.parse_args(arguments)
    PAGE.write_text(HEAD + "".join(PAGE.read_text().partition("\n## ")[1:]))
    # Of the first day, no earlier forecasts are known.
    seeds = range(DAYS, DAYS + options.seeds + 1)
    with ProcessPoolExecutor(options.processes) as pool:
        for lengths in options.lengths or LENGTHS:
            days: dict[int, Seen] = {}
            list(pool.map(partial(kept, f"day-{lengths}", partial(played, lengths)), range(DAYS + 1)))
            ahead = pool.map(partial(kept, f"ahead-{lengths}", partial(forecast, lengths)), seeds)
            for seed, seen in zip(seeds, ahead, strict=True):
                days[seed] = seen
                # A run that is ended early leaves a page of the days so far.
                if len(days) > 1:
                    placed_in(PAGE, f"## {LENGTHS[lengths]}", table(lengths, days))
    print(PAGE.read_text())


if __name__ == "__main__":
    # Days that are kept name the classes of this module, however it is called.
    from tests.benchmarks import forecast as itself

    itself.main()
