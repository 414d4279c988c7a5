"""`polluxctl jobs`, `top`, `explain`, `history`, `usage`, `moves`, `cost` and `audit`: tables and JSON."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby
from operator import itemgetter
from statistics import fmean
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from polluxd.errors import PolluxError, SlurmRefused
from polluxd.printable import printable
from polluxd.slurm.accounting import read_usage
from polluxd.slurm.configuration import Slurm

from . import access, answering, plain_jobs
from .access import ConfigOption, JobArgument, JsonOption, SinceOption, UserOption, WatchOption, job_id, point
from .explained import SIZE_COLUMNS
from .output import Column, Row, clock, duration, emit, emit_json, newest, number, plain, redraw, table
from .slurm_view import PLAIN_COLUMNS, Beside, gpus_held, slurm_view
from .table_rows import JOB_COLUMNS, MOVE_COLUMNS, job_columns, move_rows

CostBy = Literal["account", "user", "job", "type", "day"]
_COST_KEYS = {"account": "account", "user": "user_name", "job": "job_id", "type": "type", "day": "day"}

AUDIT_COLUMNS = (
    Column("at", "WHEN", clock),
    Column("who", "WHO"),
    Column("name", "SETTING"),
    Column("from", "FROM", plain, flexible=True),
    Column("to", "TO", plain, flexible=True),
)

COST_COLUMNS = (
    Column("name", "NAME"),
    Column("node_hours", "NODE HOURS", number(2), right=True),
    Column("gpu_hours", "GPU HOURS", number(2), right=True),
    Column("cost", "COST", number(2), right=True),
    Column("share", "SHARE", number(3), right=True, rank=1),
    Column("saved_hours", "HOURS SAVED", number(2), right=True),
)


def jobs(
    config: ConfigOption = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="finished jobs too")] = False,
    user: UserOption = None,
    as_json: JsonOption = False,
) -> None:
    """List Pollux jobs: GPUs, batch size, goodput, reason.

    MODE: what the agent may change. GOODPUT: useful examples per second. SPEEDUP: against an equal share of the
    cluster. DONE: of the declared training. REASON: of the last decision. A narrow terminal gets fewer columns.
    ENDS FROM and ENDS BY hold the ends of four jobs in five, STARTS BY four starts in five: see `forecast`.
    """
    shown = answering.source(config)("jobs", ended=everything)
    chosen = access.whose(user, config)
    rows = [row for row in shown if chosen in (None, row["user"])]
    emit(
        rows,
        JOB_COLUMNS if as_json else job_columns(rows),
        as_json=as_json,
        console=access.console(),
        empty="no Pollux jobs",
    )


def moves(
    job: Annotated[
        int | None, typer.Argument(metavar="[JOB]", parser=job_id, help="of this job only")
    ] = None,
    watch: WatchOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List moves: from, to, seconds by part, why."""
    store, console = access.open_store(config)[0], access.console()
    if watch and console.is_terminal:
        redraw(lambda: newest(move_rows(store, job), MOVE_COLUMNS, console), console)
    else:
        emit(move_rows(store, job), MOVE_COLUMNS, as_json=as_json, console=console, empty="no moves")


def cost(
    config: ConfigOption = None,
    by: Annotated[
        CostBy,
        typer.Option(help="account, user, job, type of node, or day; no name: no job was on the nodes"),
    ] = "account",
    since: SinceOption = "30d",
    as_json: JsonOption = False,
) -> None:
    """Show what rented nodes cost, and the hours that jobs save by them. Days are those of UTC."""
    found: dict[str, list[float]] = {}
    for row in access.open_store(config)[0].rentals(point(since, time.time(), "--since")):
        sums = found.setdefault(str(row[_COST_KEYS[by]] or ""), [0.0, 0.0, 0.0, 0.0])
        for place, name in enumerate(("node_seconds", "gpu_seconds", "cost", "saved_seconds")):
            sums[place] += row[name]
    whole = sum(sums[2] for sums in found.values())
    rows = [
        {
            **{"name": name, "node_hours": n / 3600.0, "gpu_hours": g / 3600.0, "cost": c},
            **{"share": c / whole if whole else 0.0, "saved_hours": saved / 3600.0},
        }
        for name, (n, g, c, saved) in sorted(found.items(), key=lambda item: (-item[1][2], item[0]))
    ]
    emit(rows, COST_COLUMNS, as_json=as_json, console=access.console(), empty="no node was rented")


def audit(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List changes of settings: when, who, from what, to what."""
    changes = access.open_store(config)[0].setting_audit()
    rows = [
        {"at": c.at, "who": c.who, "name": c.name, "from": c.from_value, "to": c.to_value} for c in changes
    ]
    emit(rows, AUDIT_COLUMNS, as_json=as_json, console=access.console(), empty="no changes yet")


def explain(
    job: JobArgument, watch: WatchOption = False, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Say why a job has what it has, and what more would do.

    First the one sentence that matters: what it has, what keeps it from more, what you can do. Then its fair share, the
    next larger size, who has the GPUs instead, what a move costs, and what was measured. MEASURED goodput is of the
    last report, FITTED goodput of a model of all of them, so the two differ. Of a job without a #POLLUX line it tells
    what Slurm shows.
    """
    console = access.console()
    try:
        ask = answering.source(config)
        if watch and console.is_terminal:
            redraw(lambda: Group(*_parts(ask("explain", job), console)), console)
            return
        answer = ask("explain", job)
    except PolluxError:
        if not (plain_job := plain_jobs.told(job)):
            raise
        if as_json:
            emit_json(plain_job)
        else:
            console.print(Text(" ".join(plain_job["said"])), soft_wrap=not console.is_terminal)
        return
    if as_json:
        emit_json({key: answer[key] for key in ("job", "decision", "sizes", "moves", "settings")})
        return
    if answer["job"]["ended_at"] is not None:
        answer["story"] += slurm_view(config).ending(job)
    for part in _parts(answer, console):
        console.print(part, soft_wrap=isinstance(part, Text) and not console.is_terminal)


def _parts(answer: Mapping[str, Any], console: Console) -> Iterator[RenderableType]:
    first, *rest = answer["story"]
    yield Text(first, style="bold")
    if rest:
        yield Text()
        yield from map(Text, rest)
    if answer["sizes"]:
        yield Text()
        title = "What other sizes would bring" + (
            f", on GPUs of type {answer['sizes_of']}" if answer["sizes_of"] else ""
        )
        yield table(answer["sizes"], SIZE_COLUMNS, console.width, printable(title))
    if answer["moves"]:
        yield Text()
        columns = [c for c in MOVE_COLUMNS if c.key not in ("id", "job_id")]
        yield table(answer["moves"][-8:], columns, console.width, "Its latest moves")


HISTORY_COLUMNS = (
    Column("at", "FROM", clock),
    Column("lasted_s", "FOR", duration, right=True),
    Column("gpus", "GPUS", right=True),
    Column("nodes", "NODES", right=True, rank=5),
    Column("batch_size", "BATCH", right=True),
    Column("lr_factor", "LR", lambda v: f"x{number(3)(v)}", right=True, rank=4),
    Column("goodput", "GOODPUT", number(3), right=True),
    Column("throughput", "THROUGHPUT", number(3), right=True, rank=3),
    Column("noise_scale", "NOISE SCALE", number(3), right=True),
    Column("done", "DONE", lambda v: "-" if v is None else f"{100 * v:.0f}%", right=True, rank=1),
    Column("attempt", "ATTEMPT", right=True, rank=2),
)


def history(
    job: JobArgument,
    since: SinceOption = "",
    watch: WatchOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a job's GPUs, batch size, goodput and noise scale changed.

    One line for each stretch of time with the same GPUs and batch size. JSON has every report.
    """
    begin = point(since, time.time(), "--since") if since else 0.0
    ask, console = answering.source(config), access.console()
    if watch and console.is_terminal:
        redraw(
            lambda: newest(stretches(ask("history", job, since=begin)["points"]), HISTORY_COLUMNS, console),
            console,
        )
        return
    points = ask("history", job, since=begin)["points"]
    if not points:
        raise PolluxError(
            f"job {job} has no reports{' in this time' if since else ''}: it is no Pollux job, has not reached its "
            "first steps, or its reports are older than database.history_days"
        )
    if as_json:
        emit_json(points)
    else:
        console.print(table(stretches(points), HISTORY_COLUMNS, console.width))


def stretches(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per stretch with the same attempt, GPUs and batch size.

    Rates are means over the stretch; the noise scale and the progress are its last.
    """
    same = itemgetter("attempt", "gpus", "nodes", "batch_size")
    groups = [list(group) for _, group in groupby(points, key=same)]
    ends = [group[0]["at"] for group in groups[1:]] + [point["at"] for point in points[-1:]]
    return [
        {
            **{key: first[key] for key in ("at", "gpus", "nodes", "batch_size", "attempt")},
            "lasted_s": max(end - first["at"], 0.0),
            "lr_factor": last["lr_factor"],
            "goodput": _mean(p["goodput"] for p in group),
            "throughput": _mean(p["throughput"] for p in group),
            "noise_scale": last["noise_scale"],
            "done": min(last["progress"] / last["target"], 1.0) if last["target"] else None,
        }
        for group, end in zip(groups, ends, strict=True)
        for first, last in [(group[0], group[-1])]
    ]


def _mean(values: Iterable[float]) -> float | None:
    """Mean of the values above 0: a first report has measured nothing."""
    found = [value for value in values if (value or 0.0) > 0]
    return fmean(found) if found else None


USAGE_COLUMNS = (
    Column("job_id", "JOB", right=True),
    Column("state", "STATE", plain),
    Column("submitted_at", "SUBMITTED", clock, rank=3),
    Column("ended_at", "ENDED", clock, rank=2),
    Column("waited_s", "WAITED", duration, right=True),
    Column("wall_s", "RAN", duration, right=True),
    Column("restarts", "RESTARTS", right=True),
    Column("companions", "COMPANIONS", right=True, rank=4),
    Column("companion_gpu_s", "THEIR GPU SECONDS", plain, right=True, rank=1),
    Column("gpu_s", "GPU SECONDS", plain, right=True),
    Column("energy_j", "ENERGY [J]", plain, right=True, rank=5),
)


def usage(job: JobArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Add up what a job used over its moves and companions, from sacct. It needs slurmdbd."""
    try:
        conf = access.configuration(config).slurm.conf if access.may_read_database(config) else None
        found = read_usage(Slurm(conf, timeout=60.0).ask, job)
    except SlurmRefused as error:
        raise PolluxError(
            f"{error}; usage needs Slurm's accounting (slurmdbd). Without it, polluxctl history {job} shows the GPUs "
            "over time"
        ) from None
    if found is None:
        raise PolluxError(f"Slurm's accounting shows you no job {job} (`sacct --duplicates -j {job}`)")
    emit([asdict(found)], USAGE_COLUMNS, as_json=as_json, console=access.console(), empty="")


SortKey = StrEnum("SortKey", "job name user account state gpus batch goodput speedup done moves age")
"""What `--sort` orders by."""
_COLUMN_OF = {"job": "job_id", "batch": "batch_size", "done": "progress", "age": "age_s"}


def chosen(rows: Sequence[dict[str, Any]], user: str | None, sort: str) -> list[dict[str, Any]]:
    """Return the rows of one user, or of all, in the order that `sort` names.

    Texts and job ids ascend, other numbers descend; rows without a value come last.
    """
    column = _COLUMN_OF.get(sort, sort)
    kept = [row for row in rows if user in (None, row["user"])]
    known = [row for row in kept if row[column] is not None]
    unknown = [row for row in kept if row[column] is None]
    descends = sort not in ("job", "name", "user", "account", "state")
    return sorted(known, key=lambda row: row[column], reverse=descends) + unknown


def headline(
    status: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], now: float, beside: Beside | None = None
) -> Text:
    """One line: what polluxd does, how the GPUs are used, and how long ago it last decided."""
    running = sum(row["state"] == "RUNNING" for row in rows)
    waiting = sum(row["state"] == "PENDING" for row in rows)
    decided = status.get("decided_at")
    words: list[str | tuple[str, str]] = [("polluxd ", "bold"), str(status.get("cluster", ""))]
    if status.get("paused"):
        words.append(("  PAUSED", "bold yellow"))
    else:
        words.append(f"  {status.get('mode') or 'never ran'}")
    words.append(f"  {running} running, {waiting} waiting  {gpus_held(beside, rows)}")
    if decided is not None:
        words.append(f"  decided {duration(now - decided)} ago")
    return Text.assemble(*words)


@dataclass
class Screen:
    """What `top` draws: the order of the jobs, and whether plain jobs stand below them. Keys change both."""

    sort: SortKey
    plain: bool = True

    def press(self, key: str) -> None:
        """`s`: the next order. `p`: plain jobs come or go."""
        if key == "s":
            orders = list(SortKey)
            self.sort = orders[(orders.index(self.sort) + 1) % len(orders)]
        if key == "p":
            self.plain = not self.plain

    def draw(self, found: Seen, width: int, height: int, now: float, *, keys: bool = True) -> RenderableType:
        """Everything that fits on the terminal. `keys`: name them."""
        rows = chosen(found.rows, found.user, self.sort)
        beside = found.beside.plain_jobs if self.plain and found.beside is not None else []
        # Jobs of Pollux come first; plain jobs have what they leave, and a third of the screen where there are many.
        room = max(height - 5, 1)
        for_plain = min(len(beside), max(room - len(rows), room // 3) - 2) if beside else 0
        for_jobs = max(room - (for_plain + 2 if for_plain > 0 else 0), 1)
        parts: list[RenderableType] = [headline(found.status, found.rows, now, found.beside), Text()]
        parts += _lines(rows, job_columns(rows), width, for_jobs, "no Pollux jobs")
        if for_plain > 0:
            parts += [Text(), *_lines(beside, PLAIN_COLUMNS, width, for_plain, "")]
        parts.append(
            Text(f"q quit   s sort ({self.sort})   p plain jobs {'off' if self.plain else 'on'}", "dim")
        )
        return Group(*parts)


@dataclass(frozen=True)
class Seen:
    """One look: polluxd's answer, and what Slurm shows beside it. `user`: whose jobs to list; None: everybody's."""

    status: Row
    rows: list[dict[str, Any]]
    beside: Beside | None
    user: str | None


def _lines(
    rows: Sequence[Row], columns: Sequence[Column], width: int, room: int, empty: str
) -> list[RenderableType]:
    if not rows:
        return [Text(empty, style="dim")]
    parts: list[RenderableType] = [table(rows[:room], columns, width)]
    return [*parts, Text(f"and {len(rows) - room} more", style="dim")] if len(rows) > room else parts


def top(
    job: Annotated[str | None, typer.Argument(hidden=True)] = None,
    config: ConfigOption = None,
    interval: Annotated[
        float, typer.Option("--interval", "-n", min=0.2, help="seconds between redraws")
    ] = 2.0,
    user: UserOption = None,
    sort: Annotated[
        SortKey, typer.Option("--sort", "-s", help="order: numbers from the largest, texts from A")
    ] = SortKey.job,
    as_json: JsonOption = False,
) -> None:
    """Watch the jobs live.

    Pollux jobs, then plain Slurm jobs; the first line has the cluster's GPUs. Keys: q or Ctrl-C quits, s sorts by the
    next column, p hides or shows plain jobs. With --json, and where standard output is no terminal, it prints once.
    """
    if job is not None:
        raise typer.BadParameter(f"top shows all jobs; `polluxctl explain {job} --watch` shows one, live")
    ask, console = answering.source(config), access.console()
    slurm, view = slurm_view(config), Screen(sort)

    def read() -> Seen:
        found = ask("top")
        return Seen(found["status"], found["jobs"], slurm.read(), access.whose(user, config))

    first = read()
    if as_json:
        rows = [
            {c.key: row.get(c.key) for c in JOB_COLUMNS} for row in chosen(first.rows, first.user, view.sort)
        ]
        emit_json({"status": first.status, "jobs": rows, "slurm": first.beside and asdict(first.beside)})
    elif console.is_terminal:
        redraw(
            lambda: view.draw(read(), console.width, console.height, time.time()),
            console,
            interval,
            view.press,
        )
    else:
        lines = len(first.rows) + len(first.beside.plain_jobs if first.beside else ()) + 9
        console.print(view.draw(first, console.width, lines, time.time(), keys=False))
