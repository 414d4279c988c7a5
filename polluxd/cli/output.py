"""Print rows and columns: a table for people or JSON for programs.

A column says how a value is shown and how dear it is: on a narrow terminal the cheap columns go first, so
that no line wraps. JSON always carries every value, unrounded, under the column's key."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import typer
from pydantic_core import to_jsonable_python
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pollux.private_folder import require_named, write_named
from polluxd.errors import ConfigError, PolluxError
from polluxd.printable import printable

Row = Mapping[str, Any]


class PrintableConsole(Console):
    """Show control characters of users' text as their escapes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                text = "\n".join(map(printable, segment.text.split("\n")))
                yield Segment(text, segment.style)


def plain(value: Any) -> str:
    """A value as text that moves no cursor; nothing as a dash."""
    return "-" if value is None or value == "" else printable(str(value))


def count(how_many: int, what: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{how_many} {what}" + ("" if how_many == 1 else "s")


def require_writable(*paths: Path | None) -> None:
    """Raise ConfigError before long work whose result could not be written."""
    for path in filter(None, paths):
        try:
            require_named(path)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}: give another file") from None


def write_page(path: Path, text: str) -> None:
    """Write a file that the user named, and say so. Raises ConfigError."""
    try:
        write_named(path, text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    typer.echo(f"written: {path}", err=True)


FEW_JOBS = 20
"""Of fewer jobs, each is more than a twentieth of a mean over them: one more job may change a conclusion."""


def of_few_jobs(jobs: int) -> str:
    """Warn of a conclusion from so many jobs; empty where they are not few."""
    if jobs >= FEW_JOBS:
        return ""
    return f"This rests on {count(jobs, 'job')}: with fewer than {FEW_JOBS}, one more can change the result."


def number(digits: int = 3) -> Callable[[Any], str]:
    """Format to so many significant digits, exponents from a million on."""

    def show(value: Any) -> str:
        if value is None or not math.isfinite(value):
            return "-"
        if value and not 1e-3 <= abs(value) < 1e6:
            return f"{value:.{digits - 1}e}"
        places = max(digits - 1 - math.floor(math.log10(abs(value))), 0) if value else 0
        return f"{value:.{places}f}"

    return show


def duration(value: Any) -> str:
    """Seconds as `42s`, `3m07s`, `2h05m` or `3d04h`."""
    if value is None or not math.isfinite(value):
        return "-"
    seconds = round(max(value, 0.0))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"


def clock(value: Any) -> str:
    """A POSIX timestamp as local date and time."""
    return "-" if value is None else datetime.fromtimestamp(value).strftime("%Y-%m-%d %H:%M:%S")


@dataclass(frozen=True, slots=True)
class Column:
    """How one value of a row is shown."""

    key: str
    title: str
    show: Callable[[Any], str] = plain
    right: bool = False
    rank: int = 0
    """0 is always shown; the highest rank leaves first when the terminal is narrow."""
    flexible: bool = False
    """May be cut short with an ellipsis (a sentence) before any column is left out."""
    least: int = 12
    """Width down to which a flexible column may be cut."""
    style: Callable[[Any], str] | None = None


def fit(rows: Sequence[Row], columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit into `width` characters, in their order."""
    kept = list(columns)
    while sum(_need(c, rows) + 2 for c in kept) - 2 > width and any(c.rank for c in kept):
        kept.remove(max(kept, key=lambda c: c.rank))
    return kept


def _need(column: Column, rows: Sequence[Row]) -> int:
    """Return a column's least width: of its widest value, unless cut."""
    widest = max([len(column.title), *(cell_len(column.show(row.get(column.key))) for row in rows)])
    return min(widest, max(column.least, len(column.title))) if column.flexible else widest


def table(rows: Sequence[Row], columns: Sequence[Column], width: int, title: str | None = None) -> Table:
    """A rich table of the columns that fit; cells never wrap."""
    made = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    kept = fit(rows, columns, width)
    for column in kept:
        # Where a table is too wide, rich narrows the columns that may wrap; no cell of theirs does.
        made.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=not column.flexible,
            header_style="bold",
            min_width=_need(column, rows),
        )
    for row in rows:
        made.add_row(
            *(
                Text(
                    c.show(row.get(c.key)),
                    style=c.style(row.get(c.key)) if c.style else "",
                    no_wrap=True,
                    overflow="ellipsis",
                )
                for c in kept
            )
        )
    return made


def jsonable(value: Any) -> Any:
    """Return a value that JSON can carry: NaN and infinity become null, times POSIX seconds."""
    return to_jsonable_python(value, inf_nan_mode="null", temporal_mode="seconds", serialize_unknown=True)


def emit_json(value: Any) -> None:
    print(json.dumps(jsonable(value), indent=1, allow_nan=False))


def emit(
    rows: Sequence[Row],
    columns: Sequence[Column],
    *,
    as_json: bool,
    console: Console,
    empty: str = "nothing to show",
) -> None:
    """Print rows as a JSON list, or as a table that fits the terminal."""
    if as_json:
        emit_json([{c.key: row.get(c.key) for c in columns} for row in rows])
    elif rows:
        console.print(table(rows, columns, console.width))
    else:
        console.print(empty)


def newest(rows: Sequence[Row], columns: Sequence[Column], console: Console) -> RenderableType:
    """The last rows that fit on the terminal."""
    return table(rows[-max(console.height - 2, 1) :], columns, console.width) if rows else Text("none yet")


def redraw(
    draw: Callable[[], RenderableType],
    console: Console,
    every_s: float = 2.0,
    press: Callable[[str], None] = lambda key: None,
) -> None:
    """Redraw until `q` or Ctrl-C, and seldom where drawing takes long. `press` gets every other key, then all is drawn.

    Where the database or the server stops answering, the last view stays, and the last line says so.
    """
    shown: RenderableType = Text("reading ...", style="dim")
    with (
        contextlib.suppress(KeyboardInterrupt),  # how one leaves it
        _keys() as key_within,
        Live(shown, console=console, auto_refresh=False, screen=True) as live,
    ):
        while True:
            began = time.monotonic()
            try:
                shown = draw()
                live.update(shown, refresh=True)
            except PolluxError as error:
                live.update(Group(shown, Text(str(error), style="red")), refresh=True)
            key = key_within(max(every_s, 10 * (time.monotonic() - began)))
            if key == "q":
                return
            if key:
                press(key)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield what waits up to so many seconds for a key and returns it; without a terminal there are none."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def key_within(seconds: float) -> str:
        if not select.select([terminal], [], [], seconds)[0]:
            return ""
        return os.read(terminal, 1).decode(errors="replace") or "q"  # nothing to read: the terminal has gone

    tty.setcbreak(terminal)
    try:
        yield key_within
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""
