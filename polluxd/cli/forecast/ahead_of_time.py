"""`polluxctl forecast`: when jobs start and end, how earlier forecasts held, and what a change would do."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from statistics import median
from typing import Annotated, Any

import typer

from polluxd.cli import access
from polluxd.cli.access import ConfigOption, JsonOption
from polluxd.cli.forecast import foretold as words
from polluxd.cli.output import Column, count, duration, emit_json, plain, table
from polluxd.config.setting_info import checked
from polluxd.errors import ConfigError
from polluxd.forecast.courses import Courses
from polluxd.forecast.intervals import Score, score
from polluxd.forecast.picture import CannotTell, Picture, compared, foretold, read, with_weights
from polluxd.slurm.notation import node_names
from polluxd.store import Store

RUNS = 300
"""Earlier runs that are scored: all that are kept, about a day of them."""


def _signed(value: float | None) -> str:
    if value is None:
        return "-"
    return "0s" if abs(value) < 0.5 else f"{'-' if value < 0 else '+'}{duration(abs(value))}"


COLUMNS = (
    Column("job_id", "JOB", right=True),
    Column("name", "NAME", flexible=True, least=8),
    Column("user", "USER", rank=2),
    Column("starts_by", "STARTS BY", words.when, rank=1),
    Column("ends_from", "ENDS FROM", words.when),
    Column("ends_by", "ENDS BY", words.when),
    Column("length_by", "LENGTH BY", plain, rank=3),
)
CHANGED = (
    *COLUMNS[:3],
    Column("ends_median", "ENDS NOW", words.when),
    Column("later_s", "LATER BY", _signed),
    Column("least_s", "LEAST", _signed, rank=1),
    Column("most_s", "MOST", _signed, rank=1),
    Column("courses", "COURSES", right=True, rank=3),
)


def forecast(
    drain: Annotated[
        str | None,
        typer.Option(
            "--drain", metavar="NODES", help="tell what changes if these nodes take no job any more"
        ),
    ] = None,
    at: Annotated[
        str | None, typer.Option("--at", metavar="TIME", help="from when on: noon, 18:00, 2026-11-20T08:00")
    ] = None,
    account_weight: Annotated[
        list[str] | None,
        typer.Option("--account-weight", metavar="ACCOUNT=W", help="tell what changes with this weight"),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Foretell when jobs start and end, and what a change would do.

    polluxd's policy runs ahead from the newest decision, several times, each with its own draws of what is not known.
    ENDS FROM and ENDS BY are to hold the end of four jobs in five, STARTS BY the start of four in five.
    With --drain or --account-weight the same draws run again with the change: LATER BY is the median over the courses.
    """
    store, now = access.open_store(config)[0], time.time()
    if at is not None and drain is None:
        raise ConfigError("--at says from when on nodes are drained: expected --drain NODES beside it")
    picture = Picture.read(store, now)
    if drain is None and not account_weight:
        _show(store, picture, as_json=as_json)
    else:
        show_change(picture, drain, moment(at, now), account_weight or [], as_json=as_json)


def _show(store: Store, picture: Picture, *, as_json: bool) -> None:
    """Print the newest forecast, or make one, and the score of earlier ones."""
    earlier, now = store.forecasts(RUNS), time.time()
    fresh = bool(earlier) and now - earlier[0]["at"] <= words.FRESH_S
    document = earlier[0] if fresh else foretold(picture, earlier)
    held = score(read(earlier), picture.outcomes)
    known = {job.job_id: job for job in picture.snapshot.jobs}
    found = {each["job_id"]: each for each in document["jobs"] if each["job_id"] in known}
    rows = [
        {
            "job_id": number,
            "name": job.name,
            "user": job.user,
            "length_by": "-" if number not in found else found[number]["by"] or "cannot tell",
            **words.row(found.get(number)),
        }
        for number, job in sorted(known.items())
    ]
    if as_json:
        about = {key: document[key] for key in ("cycle", "at", "courses", "days")}
        emit_json({**about, "jobs": rows, "score": None if held is None else asdict(held)})
        return
    console = access.console()
    console.print(
        table(rows, COLUMNS, console.width) if rows else "no Pollux jobs",
        soft_wrap=not rows and not console.is_terminal,
    )
    by = "polluxd's forecasts" if fresh else "this command: polluxd has made no forecast of late"
    console.print(
        f"\nBy {by}: {document['courses']} courses of the cluster from decision {document['cycle']} at "
        f"{words.when(document['at'], now)}, with arrivals as in the last {document['days']:g} days.\n{_held(held)}",
        markup=False,
        soft_wrap=True,
    )


def _held(held: Score | None) -> str:
    if held is None:
        return (
            "Earlier forecasts: no job that was forecast has ended yet, so nothing says how far these hold."
        )
    starts = (
        "" if held.by_start is None else f" {100 * held.by_start:.0f} % started by the time that was told."
    )
    return (
        f"Earlier forecasts, of {count(held.jobs, 'job')} that have ended: {100 * held.within:.0f} % ended within the "
        f"interval (it is to be 80 %). Its median width was {duration(held.width_s)}, {held.relative:.2f} times "
        f"the job's time from start to end.{starts}"
    )


def show_change(
    picture: Picture, drain: str | None, at: float, weights: Sequence[str], *, as_json: bool
) -> None:
    """Run the same draws without the change and with it, and print what differs."""
    drains = {name: max(at - picture.snapshot.taken_at, 0.0) for name in node_names(drain or "")}
    unknown = sorted(drains.keys() - {node.name for node in picture.snapshot.nodes})
    if unknown:
        raise ConfigError(f"--drain: no node {unknown[0]} in polluxd's last decision; `sinfo -N` shows nodes")
    changed = replace(picture, snapshot=with_weights(picture.snapshot, _weights(weights)))
    if not picture.snapshot.jobs:
        raise CannotTell("there are no Pollux jobs, so the change changes nothing for any")
    before, after = picture.ahead(), changed.ahead(drains=drains)
    rows = [
        {"name": job.name, "user": job.user, **_difference(job.job_id, picture, before, after)}
        for job in picture.snapshot.jobs
    ]
    if as_json:
        emit_json({"cycle": picture.cycle, "at": picture.snapshot.taken_at, "jobs": rows})
        return
    console = access.console()
    console.print(table(rows, CHANGED, console.width))
    console.print(
        f"\nFrom {before.draws} courses of the cluster from decision {picture.cycle}, each run without the change and "
        "with it. LEAST and MOST are over the courses; a job that a course did not end either way has none of it.",
        markup=False,
        soft_wrap=True,
    )


def _difference(job: int, picture: Picture, before: Courses, after: Courses) -> dict[str, Any]:
    later = [seconds for seconds in compared(before, after)[job] if seconds is not None]
    ends = [course.ends for course in before.found[job] if course.ends is not None]
    told = bool(later) and bool(before.by[job])
    return {
        "job_id": job,
        "ends_median": picture.snapshot.taken_at + median(ends) if ends and before.by[job] else None,
        "later_s": median(later) if told else None,
        "least_s": min(later) if told else None,
        "most_s": max(later) if told else None,
        "courses": len(later),
    }


def _weights(given: Sequence[str]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for text in given:
        account, _, weight = text.partition("=")
        try:
            found[account] = float(weight)
        except ValueError:
            raise ConfigError(f"--account-weight: expected ACCOUNT=WEIGHT, got {text!r}") from None
    return checked("account_weights", found)  # type: ignore[no-any-return]


def moment(text: str | None, now: float) -> float:
    """Return a POSIX time: the next `noon` or `HH:MM`, or a local date and time; now where nothing is said."""
    if text is None:
        return now
    present = datetime.fromtimestamp(now)
    clock = re.fullmatch(r"(\d{1,2}):(\d{2})", "12:00" if text == "noon" else text)
    try:
        if clock is None:
            return datetime.fromisoformat(text).timestamp()
        then = present.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"--at: expected a time such as noon, 18:00 or 2026-11-20T08:00, got {text!r}"
        ) from None
    return (then if then > present else then + timedelta(days=1)).timestamp()
