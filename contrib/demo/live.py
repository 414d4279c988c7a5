"""Show the progress of the demo.

On a terminal a table and the newest moves with their reasons are redrawn in place. Elsewhere a line is printed for each
move, and when something else has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from polluxd.cli.output import table
from polluxd.cli.table_rows import JOB_COLUMNS

from .measure import Track
from .run import Run

LINE_S = 5.0
"""Least time between two plain progress lines [s]."""

NEWEST = 6
"""Moves below the table."""

Details = Mapping[int, Mapping[str, Any]]
Reasons = Sequence[tuple[int, str]]
"""Job id and reason of each move so far."""

_SHORT = {
    "COMPLETED": "done",
    "PENDING": "waits",
    "CONFIGURING": "starts",
    "COMPLETING": "stops",
    "RUNNING": "runs",
}


def rows(run: Run, details: Details) -> list[dict[str, Any]]:
    """Return a row per submitted job, from squeue and polluxd's database."""
    return [dict(details.get(t.job_id, {})) | _seen(t) for t in run.recording.tracks.values()]


def _seen(track: Track) -> dict[str, Any]:
    seen: dict[str, Any] = {
        "job_id": track.job_id,
        "name": track.name,
        "state": track.state,
        "gpus": track.gpus[-1][1] if track.gpus else 0,
        "nodes": track.nodes,
        "age_s": (track.ended_at or time.time()) - track.submitted_at,
    }
    if track.ended:  # polluxd's last view of it is out of date
        seen |= dict.fromkeys(("batch_size", "mode", "goodput", "speedup"), None) | {"reason": ""}
    return seen


class LiveView:
    """`with LiveView(...) as show: run(show, check)`."""

    def __init__(
        self,
        console: Console,
        title: str,
        capacity: int,
        details: Callable[[], Details] = dict,
        reasons: Callable[[], Reasons] = tuple,
    ) -> None:
        self._console = console
        self._title = title
        self._details = details
        self._capacity = capacity
        self._next_line = 0.0
        self._last_line = ""
        self._reasons = reasons
        self._printed = 0
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, run: Run) -> None:
        lines = rows(run, self._details())
        if self._live is not None:
            self._live.update(self._screen(run, lines), refresh=True)
            return
        moves = self._moves(run)
        for move in moves[self._printed :]:
            self._console.print(f"[{run.elapsed_s:4.0f} s] {move}", soft_wrap=True, highlight=False)
        self._printed = len(moves)
        if time.monotonic() >= self._next_line:
            line = self._line(lines)
            if line != self._last_line:
                self._last_line, self._next_line = line, time.monotonic() + LINE_S
                self._console.print(f"[{run.elapsed_s:4.0f} s] {line}", soft_wrap=True, highlight=False)

    def _screen(self, run: Run, lines: Sequence[Mapping[str, Any]]) -> RenderableType:
        used = sum(line["gpus"] for line in lines)
        head = Text.assemble(
            (self._title, "bold"),
            f"   {run.elapsed_s:4.0f} s   {used} of {self._capacity} GPUs in use",
        )
        coming = len(run.work.trainings) - len(lines)
        parts: list[RenderableType] = [head, Text(), table(lines, JOB_COLUMNS, self._console.width)]
        if coming:
            parts.append(Text(f"{coming} more to come", style="dim"))
        parts += [
            Text(move, style="dim", overflow="ellipsis", no_wrap=True) for move in self._moves(run)[-NEWEST:]
        ]
        return Group(*parts)

    def _moves(self, run: Run) -> list[str]:
        names = {t.job_id: t.name for t in run.recording.tracks.values()}
        return [f"{names[job]} {reason}" for job, reason in self._reasons() if job in names]

    def _line(self, lines: Sequence[Mapping[str, Any]]) -> str:
        words = []
        for line in lines:
            word = f"{line['name']} {_SHORT.get(line['state'], line['state'].lower())}"
            if line["gpus"]:
                word += f" on {line['gpus']} GPUs"
                if line.get("batch_size"):
                    word += f", batch {line['batch_size']}"
            words.append(word)
        return " | ".join(words)
