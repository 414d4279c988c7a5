"""`polluxctl top`: the jobs, redrawn every few seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from polluxd.errors import PolluxError

from . import access, answers
from .access import ConfigOption, JsonOption, UserOption
from .columns import JOB_COLUMNS
from .output import Column, Row, duration, emit_json, table


class SortKey(StrEnum):
    """What `--sort` orders by, and the key of the column."""

    job = "job"
    name = "name"
    user = "user"
    account = "account"
    state = "state"
    gpus = "gpus"
    batch = "batch"
    goodput = "goodput"
    speedup = "speedup"
    done = "done"
    moves = "moves"
    age = "age"


_COLUMN_OF = {
    SortKey.job: "job_id",
    SortKey.batch: "batch_size",
    SortKey.done: "progress",
    SortKey.age: "age_s",
}
_ASCENDING = (SortKey.job, SortKey.name, SortKey.user, SortKey.account, SortKey.state)


def chosen(rows: Sequence[dict[str, Any]], user: str | None, sort: SortKey) -> list[dict[str, Any]]:
    """Return the rows of one user, or of all, in the order that `sort` names.

    Texts and job ids ascend, other numbers descend; rows without a value come last.
    """
    column = _COLUMN_OF.get(sort, sort.value)
    kept = [row for row in rows if user in (None, row["user"])]
    known = [row for row in kept if row[column] is not None]
    unknown = [row for row in kept if row[column] is None]
    return sorted(known, key=lambda row: row[column], reverse=sort not in _ASCENDING) + unknown


def headline(status: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], now: float) -> Text:
    """One line: what polluxd does and how long ago it last decided."""
    running = sum(row["state"] == "RUNNING" for row in rows)
    waiting = sum(row["state"] == "PENDING" for row in rows)
    gpus = sum(row["gpus"] or 0 for row in rows)
    decided = status.get("decided_at")
    words: list[str | tuple[str, str]] = [("polluxd ", "bold"), str(status.get("cluster", ""))]
    if status.get("paused"):
        words.append(("  PAUSED", "bold yellow"))
    else:
        words.append(f"  {status.get('mode') or 'never ran'}")
    words.append(f"  {running} running, {waiting} waiting, {gpus} GPUs held")
    if decided is not None:
        words.append(f"  decided {duration(now - decided)} ago")
    return Text.assemble(*words)


def screen(
    status: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], width: int, height: int, now: float
) -> RenderableType:
    """Everything that fits on the terminal."""
    room = max(height - 4, 1)
    parts: list[RenderableType] = [headline(status, rows, now), Text()]
    if rows:
        parts.append(table(rows[:room], JOB_COLUMNS, width))
        if len(rows) > room:
            parts.append(Text(f"and {len(rows) - room} more", style="dim"))
    else:
        parts.append(Text("no Pollux jobs", style="dim"))
    return Group(*parts)


def newest(rows: Sequence[Row], columns: Sequence[Column], console: Console) -> RenderableType:
    """The last rows that fit on the terminal."""
    return table(rows[-max(console.height - 2, 1) :], columns, console.width) if rows else Text("none yet")


def redraw(draw: Callable[[], RenderableType], console: Console, every_s: float = 2.0) -> None:
    """Redraw until Ctrl-C, and seldom where drawing takes long.

    Where the database or the server stops answering, the last view stays, and the last line says so.
    """
    shown: RenderableType = Text("reading ...", style="dim")
    with (
        contextlib.suppress(KeyboardInterrupt),  # how one leaves it
        Live(shown, console=console, auto_refresh=False, screen=True) as live,
    ):
        while True:
            began = time.monotonic()
            try:
                shown = draw()
                live.update(shown, refresh=True)
            except PolluxError as error:
                live.update(Group(shown, Text(str(error), style="red")), refresh=True)
            time.sleep(max(every_s, 10 * (time.monotonic() - began)))


def top(
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
    """Watch the jobs live. Ctrl-C ends it.

    With --json, and where standard output is no terminal, it prints once.
    """
    source, console = answers.source(config), access.console()

    def read() -> tuple[Row, list[dict[str, Any]]]:
        status, rows = source.top()
        return status, chosen(rows, answers.whose(user, config), sort)

    status, rows = read()
    if as_json:
        emit_json({"status": status, "jobs": [{c.key: row.get(c.key) for c in JOB_COLUMNS} for row in rows]})
    elif console.is_terminal:
        redraw(lambda: screen(*read(), console.width, console.height, time.time()), console, interval)
    else:
        console.print(screen(status, rows, console.width, len(rows) + 5, time.time()))
