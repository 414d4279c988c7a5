"""`polluxctl explain JOB`: why a job has what it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from polluxd.printable import printable

from . import access, answers, job_story
from .access import ConfigOption, JsonOption, WatchOption
from .columns import MOVE_COLUMNS
from .output import emit_json, table
from .pinning import JobArgument
from .top import redraw


def explain(
    job: JobArgument, watch: WatchOption = False, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Say why a job has what it has, and what more would do."""
    source, console = answers.source(config), access.console()
    if watch and console.is_terminal:
        redraw(lambda: Group(*_parts(source.explain(job), console)), console)
        return
    answer = source.explain(job)
    if as_json:
        emit_json({key: answer[key] for key in ("job", "decision", "sizes", "moves", "settings")})
        return
    for part in _parts(answer, console):
        console.print(part, soft_wrap=isinstance(part, Text) and not console.is_terminal)


def _parts(answer: Mapping[str, Any], console: Console) -> Iterator[RenderableType]:
    yield from map(Text, answer["story"])
    if answer["sizes"]:
        yield Text()
        title = "What other sizes would bring" + (
            f", on GPUs of type {answer['sizes_of']}" if answer["sizes_of"] else ""
        )
        yield table(answer["sizes"], job_story.SIZE_COLUMNS, console.width, printable(title))
    if answer["moves"]:
        yield Text()
        columns = [c for c in MOVE_COLUMNS if c.key not in ("id", "job_id")]
        yield table(answer["moves"][-8:], columns, console.width, "Its latest moves")
