"""The report as one document: all figures, each with the way it was obtained."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from polluxd.sim.workload import TraceError

from . import right_sizes, waits
from .gpu_hours import CAUSES, DEMANDS, Division, divided, outcomes
from .job_log import FINISHED, RUNNING, STATES, JobLog, Numbers
from .machine import Holdings, Nodes, placed
from .step_functions import StepFunction, integrals

Row = dict[str, Any]

MOST_GROUPS = 12
"""Partitions and types of GPU that get a division of their own: each costs as much as that of the whole."""
MOST_ROWS = 50
_NOBODY = {True: "while nobody waited", False: "(this log cannot tell who waited)"}
_PATIENCE_S = 86400.0
"""A job that is recorded as running so long after its limit has ended, and accounting has lost its end."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What a report is made of."""

    records: JobLog
    nodes: Nodes
    since: float
    until: float
    events_known: bool
    reservations_known: bool


def period_of(records: JobLog) -> tuple[float, float]:
    """Return the time in which a log surely has all jobs: sacct lists those that ended after its `--starttime`.

    So the first end in it is not before that time. The last time in it is the end. Raises TraceError for no records.
    """
    if not len(records):
        why = (
            "; ".join(f"{count:,} {reason}" for reason, count in records.left_out.items()) or "no row at all"
        )
        raise TraceError(
            f"no record of a job with GPUs among {records.read:,} rows ({why}). Slurm records GPUs where "
            "AccountingStorageTRES has gres/gpu"
        )
    ended = records.end[~np.isnan(records.end)]
    every = np.concatenate([times[~np.isnan(times)] for times in (records.submit, records.start, ended)])
    # A row with a broken time must not make the period years long: a thousandth of the ends lie outside of it.
    first = float(np.quantile(ended if len(ended) else every, 0.001, method="lower"))
    return first, float(np.quantile(every, 0.999, method="higher"))


def settled(records: JobLog, until: float) -> tuple[JobLog, list[str]]:
    """Return the records without what accounting is known to get wrong, and say what that was."""
    said = []
    order = np.lexsort((~np.isnan(records.end), records.start, records.submit, records.job))
    keys = np.nan_to_num(np.stack([records.job, records.submit, records.start])[:, order])
    twice = order[:-1][(keys[:, 1:] == keys[:, :-1]).all(axis=0)]
    if len(twice):
        said.append(
            f"{len(twice)} records stand twice, as in files of two months put together: they count once"
        )
        chosen = np.ones(len(records), dtype=bool)
        chosen[twice] = False
        records = records.only(chosen)
    end = records.end.copy()
    lost = np.isnan(end) & (records.start + records.limit + _PATIENCE_S < until)
    end[lost] = (records.start + records.limit)[lost]
    if lost.any():
        said.append(
            f"{lost.sum()} jobs run since more than a day past their limit, by the log: they count up to their limit "
            "(sacctmgr show runawayjobs)"
        )
    order = np.lexsort((records.start, records.job))
    here, after = order[:-1], order[1:]
    over = (records.job[here] == records.job[after]) & (
        (end[here] > records.start[after]) | np.isnan(end[here])
    )
    over &= records.start[after] > records.start[here]
    end[here[over]] = records.start[after[over]]
    if over.any():
        said.append(f"{over.sum()} runs of requeued jobs overlap the next run: they count up to its start")
    return replace(records, end=end), said


def made(site: Sources) -> Row:
    """Return the report of a site, ready for JSON."""
    since, until = site.since, site.until
    records, mended = settled(site.records, until)
    holdings = placed(records, site.nodes)
    edges = _months(since, until)
    whole = divided(records, holdings, site.nodes.closed, edges)
    experiments = right_sizes.experiments(records, (since, until))
    return {
        "since": since,
        "until": until,
        "rows": records.read,
        "records": len(records),
        "left_out": dict(records.left_out),
        "obtained": [*_obtained(site, holdings, whole), *mended],
        "waits_known": records.waits_known,
        "capacity_gpu_hours": whole.capacity / 3600,
        "causes": _causes(whole, records.waits_known),
        "lost_by_state": {
            state: hours / 3600 for state, hours in sorted(whole.lost.items(), key=lambda i: -i[1])
        },
        "by_month": [
            {
                "name": _month(begin),
                **{cause: float(part[place] / 3600) for cause, part in whole.causes.items()},
            }
            for place, begin in enumerate(edges[:-1])
        ],
        "by_partition": _divisions(records, holdings, site, edges, "partition"),
        "by_gpu_type": _divisions(records, holdings, site, edges, "type"),
        "by_account": _held_by(records, (since, until), records.codes["account"], records.names["account"]),
        "by_user": _held_by(records, (since, until), records.codes["user"], records.names["user"]),
        "by_size": _held_by(
            records, (since, until), waits.size_names(records.gpus), [name for _, name in waits.SIZES]
        ),
        "waits_by_size": waits.by_group(
            records, whole.waits, waits.size_names(records.gpus), [name for _, name in waits.SIZES]
        ),
        "waits_by_account": waits.by_group(
            records, whole.waits, records.codes["account"], records.names["account"]
        )[:MOST_ROWS],
        "wait_by_hour": waits.by_hour(records, whole.waits),
        "waited_where": waits.where(whole.waits, np.ones(len(whole.waits.record), dtype=bool)),
        "limits": waits.limits(records),
        "experiments": experiments[:MOST_ROWS],
        "experiments_found": len(experiments),
        "past_half": right_sizes.past_half(experiments),
        "over_time": {
            name: _points(steps.times, steps.values, since, until)
            for name, steps in (("held", whole.held), ("idle", whole.idle), ("waiting", whole.waiting))
        },
    }


def _causes(division: Division, waits_known: bool) -> list[Row]:
    capacity = division.capacity
    return [
        {
            "cause": cause,
            "means": means if waits_known or cause != "no_demand" else "idle, and the log has no waits",
            "gpu_hours": division.total(cause) / 3600,
            "share": division.total(cause) / capacity if capacity else 0.0,
        }
        for cause, means in CAUSES.items()
    ]


def _obtained(site: Sources, holdings: Holdings, whole: Division) -> list[str]:
    days = (site.until - site.since) / 86400
    gpus = float(holdings.gpus.sum())
    known = len(holdings.names) - holdings.guessed
    said = [
        f"Capacity: {gpus:g} GPUs on {len(holdings.names)} nodes over {days:.1f} days"
        + (f"; {known} nodes by the node list" if known else "")
        + (
            f"; {holdings.guessed} nodes with the most GPUs that jobs held there at a time, a lower bound"
            if holdings.guessed
            else ""
        ),
        "Held: AllocTRES from Start to End, divided evenly over the nodes of a job",
        "Waits: from Eligible to Start, so time in which a dependency, a begin time or a hold barred a job is none. "
        "sacct leaves out jobs that were never eligible, such as those held to the end: they are not in this report",
        "Fits: enough idle GPUs on as many nodes of its partitions as the job had or asked for. CPUs, memory, "
        "features, limits and holds are not in the log: a job that fits by its GPUs may have waited for one of these",
        "Lost work: what a job's state says. A job that timed out or was cancelled may have kept a checkpoint, or may "
        "have done its work: the log cannot tell",
        "How well the held GPUs were used: this log cannot tell",
    ]
    if not site.events_known:
        said.append(
            "Down and drained: no events of nodes were given, so only nodes that are closed now count, from the time "
            "in their reason; the rest counts as idle"
        )
    if not site.reservations_known:
        said.append("Reserved: no reservations were given, so reserved GPUs count as idle")
    if whole.excess > 0:
        said.append(
            f"{whole.excess / 3600:.3g} GPU hours are held beyond what their nodes have; they count as capacity. "
            "Either the node list is younger than the log, or jobs were spread unevenly"
        )
    if site.nodes.unreadable:
        said.append(f"{site.nodes.unreadable} lines on nodes could not be read, and count for nothing")
    return [*said, *(f"The log: {missing}" for missing in site.records.missing)]


def _divisions(
    records: JobLog, holdings: Holdings, site: Sources, edges: Sequence[float], by: str
) -> list[Row]:
    """Return the causes of each partition's or type's nodes; nodes of two partitions count in both."""
    of_node = holdings.partitions if by == "partition" else [frozenset({kind}) for kind in holdings.kind]
    sizes_of: dict[str, float] = {}
    for names, gpus in zip(of_node, holdings.gpus.tolist(), strict=True):
        for name in names:
            sizes_of[name] = sizes_of.get(name, 0.0) + gpus
    found = []
    for name in sorted(sizes_of, key=lambda name: (-sizes_of[name], name))[:MOST_GROUPS]:
        if not sizes_of[name] or (by == "type" and not name and len(sizes_of) == 1):
            continue
        wanted = {
            code
            for code, text in enumerate(records.names[by])
            if name in (text.split(",") if by == "partition" else (text, ""))
        } | ({code for code, text in enumerate(records.names[by]) if not text} if by == "type" else set())
        waiting = np.isin(records.codes[by], list(wanted))
        nodes = np.array([name in names for names in of_node], dtype=bool)
        part = divided(records, holdings, site.nodes.closed, edges, nodes=nodes, waiting=waiting)
        row = {cause: part.total(cause) / 3600 for cause in CAUSES}
        found.append({"name": name or "no type", "gpus": sizes_of[name], **row})
    return found


def _held_by(records: JobLog, period: tuple[float, float], group: Numbers, names: Sequence[str]) -> list[Row]:
    """Return GPU hours held by group, finished, running and lost."""
    since, until = period
    ended = np.where(np.isnan(records.end), until, records.end)
    held = (
        np.nan_to_num(np.clip(ended, since, until) - np.clip(records.start, since, until))
        * records.gpus
        / 3600
    )
    state = outcomes(records)
    parts = {"finished": state == STATES.index(FINISHED), "running": state == STATES.index(RUNNING)}
    parts["lost"] = ~(parts["finished"] | parts["running"])
    sums = {key: np.bincount(group, held * own, len(names)) for key, own in parts.items()}
    jobs = np.bincount(group, held > 0, len(names))
    total = sum(sums.values(), np.zeros(len(names)))
    rows = [
        {
            "name": names[number],
            "jobs": int(jobs[number]),
            "gpu_hours": float(total[number]),
            **{key: float(part[number]) for key, part in sums.items()},
        }
        for number in np.argsort(-total, kind="stable").tolist()
        if total[number] > 0
    ]
    return rows[:MOST_ROWS]


def _months(since: float, until: float) -> list[float]:
    """Return the begin, the turns of months (UTC) and the end."""
    at, edges = datetime.fromtimestamp(since, UTC), [since]
    while True:
        at = datetime(at.year + at.month // 12, at.month % 12 + 1, 1, tzinfo=UTC)
        if at.timestamp() >= until or len(edges) > 1200:
            return [*edges, until]
        edges.append(at.timestamp())


def _month(begin: float) -> str:
    return time.strftime("%Y-%m", time.gmtime(begin))


def _points(times: Numbers, values: Numbers, since: float, until: float) -> list[tuple[float, float]]:
    """Return the mean of each of 300 equal parts of the period: no page shows more."""
    edges = np.linspace(since, until, 301)
    width = max(edges[1] - edges[0], 1e-9)
    return [
        (float(a), float(v))
        for a, v in zip(edges, integrals(StepFunction(times, values), edges) / width, strict=False)
    ]


def anonymised(site: Sources) -> Sources:
    """Hash the names of partitions, accounts, users, jobs and GPU types.

    The key is forgotten, so nobody can find a name by trying.
    """
    key = secrets.token_bytes(32)

    def hashed(kind: str, name: str) -> str:
        return f"{kind}-{hashlib.blake2b(name.encode(), key=key, digest_size=5).hexdigest()}" if name else ""

    def parts(names: Iterable[str]) -> Iterable[str]:
        return (hashed("partition", name) for name in names)

    names = dict(site.records.names)
    for kind in ("account", "user", "name", "type"):
        names[kind] = tuple(hashed(kind, name) for name in names[kind])
    names["partition"] = tuple(",".join(parts(text.split(","))) for text in names["partition"])
    nodes = replace(
        site.nodes,
        kind={node: hashed("type", kind) for node, kind in site.nodes.kind.items()},
        partitions={node: tuple(parts(names)) for node, names in site.nodes.partitions.items()},
    )
    return replace(site, records=replace(site.records, names=names), nodes=nodes)


def summary(report: Mapping[str, Any]) -> list[str]:
    """Return the report in five lines; the replay adds the sixth."""
    shares = {row["cause"]: row["share"] for row in report["causes"]}
    idle = sum(shares[cause] for cause in (*DEMANDS, "no_demand"))
    broken = {reason: count for reason, count in report["left_out"].items() if reason.startswith("broken")}
    where = report["waited_where"]
    sizes_said = report["waits_by_size"]
    return [
        f"{_day(report['since'])} to {_day(report['until'])}: {report['capacity_gpu_hours']:,.0f} GPU hours of "
        f"capacity, from {report['records']:,} records with GPUs among {report['rows']:,} rows "
        f"({sum(broken.values()):,} broken)",
        f"Held: {_percent(shares['finished'])} finished work, {_percent(shares['lost'])} lost"
        + _named(report["lost_by_state"], report["capacity_gpu_hours"])
        + f", {_percent(shares['running'])} still running",
        f"Idle: {_percent(idle)} ({_percent(shares['no_demand'])} {_NOBODY[report['waits_known']]}, "
        f"{_percent(shares['fits'])} while a waiting job would have fitted, {_percent(shares['fragments'])} spread "
        f"over too many nodes, {_percent(shares['walls'])} in partitions that waiting jobs may not use, "
        f"{_percent(shares['few'])} too few for any). Closed: {_percent(shares['down'])} down or drained, "
        f"{_percent(shares['reserved'])} reserved and idle",
        "Waits: "
        + (
            "; ".join(
                f"{row['name']} median {span(row['median_s'])}, 1 in 10 above {span(row['p90_s'])}"
                for row in sizes_said
            )
            or ("none" if report["waits_known"] else "this log cannot tell")
        )
        + (
            f"; in {_percent(where['fragments'] + where['walls'])} of the time waited, enough GPUs were idle in the "
            "wrong place"
            if where["fits"] is not None
            else ""
        ),
        f"Sizes: {report['experiments_found']:,} times one training ran at two sizes; "
        f"{sum(row['gpu_hours'] for row in report['past_half']):,.0f} GPU hours at sizes that are surely below 50 % of "
        "linear speedup",
    ]


def _named(lost: Mapping[str, float], capacity: float) -> str:
    shown: Iterable[str] = (
        f"{state} {_percent(hours / capacity)}" for state, hours in list(lost.items())[:3]
    )
    return f" ({', '.join(shown)})" if lost and capacity else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))


def span(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
