"""Forecasts at the drawn sites beside Slurm's own `squeue --start`: `make bench-forecast-slurm`.

The same jobs go to a control without polluxd at the same time. What happened is read from sacct alone.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any

from contrib.devcluster import DevCluster
from contrib.devcluster.interrupts import interruptible
from contrib.sites.generated import STREAM_S, DrawnJob, DrawnSite, draw
from contrib.sites.place import place
from polluxd.config.config_file import load_config
from polluxd.errors import PolluxError
from polluxd.forecast import service
from polluxd.forecast.intervals import Happened, score
from polluxd.forecast.picture import read
from tests.benchmarks.forecast import OUT, PAGE
from tests.benchmarks.results import parser_of, save
from tests.benchmarks.site_report import placed_in

TITLE = "## Five drawn sites on a real Slurm, beside `squeue --start`"
ROUNDS, LOAD = 3, 1.2
"""How often each job comes, and what they ask for together, against the GPUs of the site until the last one comes."""
LENGTHS_S = 16, 48
LIMITS = {"5": "1", "20": "2", "120": "3"}
"""Minutes, in place of those that `contrib.sites` draws for jobs of 4 to 12 s."""
EVERY_S = 10.0
MOST_S = 450.0
AS_SECONDS = ("env", "SLURM_TIME_FORMAT=%s")

Asked = list[tuple[int, float, float | None]]
"""Job, when it was asked for, and the start that was told; both in POSIX s."""


def starts(cluster: DevCluster) -> Asked:
    """What `squeue --start` says of each waiting job."""
    now, found = time.time(), []
    for line in cluster.command(*AS_SECONDS, "squeue", "--start", "-h", "-o", "%A|%S").splitlines():
        job, _, told = line.partition("|")
        found.append((int(job), now, float(told) if told.isdecimal() else None))
    return found


def happened(cluster: DevCluster) -> dict[int, tuple[float, float | None]]:
    """First start and last end of each job, by sacct."""
    found: dict[int, tuple[float, float | None]] = {}
    words = ("-n", "-P", "-D", "-a", "-X", "--starttime=now-1hour", "--format=JobIDRaw,Start,End")
    for line in cluster.command(*AS_SECONDS, "sacct", *words).splitlines():
        job, start, end = line.split("|")
        if start.isdecimal():
            first = min(float(start), found.get(int(job), (float(start), None))[0])
            found[int(job)] = first, float(end) if end.isdecimal() else None
    return found


def jobs(site: DrawnSite, seed: int) -> Iterator[tuple[float, DrawnJob]]:
    """When each job comes [s]. They are longer than drawn, and their limits a few times their length."""
    length = random.Random(f"forecast {seed}")
    drawn = [job for job in site.jobs if not job.trains and "--array" not in " ".join(job.lines)]
    work = sum(job.wish.gpus * job.wish.nodes for job in drawn) * fmean(LENGTHS_S)
    stretch = work / LOAD / (site.nodes * site.gpus_per_node * STREAM_S)
    for number in range(ROUNDS):
        for job in drawn:
            lines = tuple(re.sub(r"(?<=--time=)\d+", lambda m: LIMITS[m[0]], line) for line in job.lines)
            made = job._replace(name=f"{job.name}-{number}", lines=lines, seconds=length.randint(*LENGTHS_S))
            yield stretch * (number * STREAM_S + job.at), made


def foretold(config: Path) -> None:
    """Forecast once, as polluxd does every five minutes."""
    with suppress(PolluxError):  # it cannot tell yet
        service.run(load_config(config), lambda: False)


def played(seed: int) -> dict[str, Any]:
    """Play a site; return what was told and what happened."""
    drawn = draw(seed)
    size: Mapping[str, int] = {"nodes": drawn.nodes, "gpus_per_node": drawn.gpus_per_node}
    with (
        place(drawn.site, drawn.accounts, **size) as control,
        place(drawn.site, drawn.accounts, **size) as site,
        ProcessPoolExecutor(1) as pool,
    ):
        site.control = control
        site.start()
        ahead: Future[None] | None = None
        waiting, ours, told = list(jobs(drawn, seed)), list[int](), {"control": Asked(), "beside": Asked()}
        began, asks = time.monotonic(), 0
        while time.monotonic() < began + MOST_S and (
            waiting or not all(each.ended(each.submitted) for each in (site, control))
        ):
            now = time.monotonic() - began
            while waiting and waiting[0][0] <= now:
                job = waiting.pop(0)[1]
                with suppress(RuntimeError):  # the hook refuses an option that no move can keep, at both
                    number = site.sbatch(job.name, job.body, *job.lines, head=job.head, wish=job.wish)
                    ours += [number] if job.pollux else []
            if now >= asks * EVERY_S:
                asks += 1
                told["control"] += starts(control.cluster)
                told["beside"] += starts(site.cluster)
                ahead = pool.submit(foretold, site.daemon.config) if ahead is None or ahead.done() else ahead
            time.sleep(1.0)
        time.sleep(3.0)  # slurmdbd writes the last end
        found = {
            "site": f"{drawn.nodes} nodes of {drawn.gpus_per_node} GPUs",
            "jobs": dict(zip(site.submitted, control.submitted, strict=True)),
            "ours": ours,
            "told": told,
            "forecasts": site.store.forecasts(service.RUNS),
            "happened": happened(site.cluster),
            "in_control": happened(control.cluster),
        }
    for each in (control, site):
        shutil.rmtree(each.folder.parent)
    return found


def off(asked: Iterable[Sequence[Any]], started: Mapping[int, float], ours: Sequence[int]) -> str:
    """How far told starts were off, how many jobs had started by then, each job once, and questions without answer."""
    late, silent, count = defaultdict[int, list[float]](list), 0, 0
    for job, at, told in asked:
        if job in ours and started.get(job, 0.0) >= at:
            count += 1
            silent += told is None
            if told is not None:
                late[job].append(started[job] - told)
    if not late:
        return f"-, -, {count} of {count}"
    by_then = 100 * fmean(fmean(miss <= 0 for miss in of) for of in late.values())
    return (
        f"{median(fmean(map(abs, of)) for of in late.values()):.0f} s, {by_then:.0f} %, {silent} of {count}"
    )


def row(seed: str, found: Mapping[str, Any]) -> str:
    """The figures of a site."""
    real = {int(job): times for job, times in found["happened"].items()}
    forecasts, ours = read(found["forecasts"]), found["ours"]
    scored = score(forecasts, {job: Happened(*times) for job, times in real.items()})
    ends = "-, - | -"
    if scored is not None:
        ends = f"{100 * scored.within:.0f} %, {scored.jobs} | {scored.width_s:.0f} s, {scored.relative:.2f}"
    started, control = (
        {int(job): times[0] for job, times in found[name].items()} for name in ("happened", "in_control")
    )
    cells = (
        off(((each.job_id, each.at, each.told.get("starts")) for each in forecasts), started, ours),
        off(found["told"]["control"], control, [found["jobs"][str(job)] for job in ours]),
        off(found["told"]["beside"], started, ours),
    )
    return f"| {seed}: {found['site']} | {len(ours)} | {ends} | {' | '.join(cells)} |"


def section() -> str:
    """The figures of all sites that were played."""
    kept = sorted(OUT.glob("site-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    rows = [row(path.stem.partition("-")[2], json.loads(path.read_text())) for path in kept]
    low, high = LENGTHS_S
    return f"""{TITLE}

`make bench-forecast-slurm` plays the sites that `make sites` draws, without acts of administrators, arrays and
trainings: their partitions, options, GPU types and plain jobs stay. Each job comes {ROUNDS} times, lasts {low} to
{high} s, and has a time limit of 1 to 3 minutes; together they ask for {LOAD:g} times the GPUs. All have one name: the
best interval of 80 % of their lengths is 0.8 of the median wide. polluxd forecasts every {EVERY_S:.0f} s, and knows
nothing before the first job. Only jobs under polluxd are counted, and the same ones in a control without it, where
`squeue --start` foretells what Slurm then does. Of starts, the columns say how far they were off (the median of the
jobs' means), how many jobs had started by then, and how many questions about a waiting job had no answer. Two things
cost polluxd most here: its courses leave plain jobs their GPUs, and decide once a minute, where these jobs last less.

| site | jobs | ended within, of | width, over the job's time | polluxd's start | `squeue --start` in the control \
| `squeue --start` beside polluxd |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
{chr(10).join(rows)}
"""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--site", type=int, action="append", help="play this one alone [default: 1 to 5]")
    for seed in parser.parse_args().site or range(1, 6):
        with interruptible():
            save(OUT / f"site-{seed}.json", played(seed))
        placed_in(PAGE, TITLE, section())


if __name__ == "__main__":
    main()
