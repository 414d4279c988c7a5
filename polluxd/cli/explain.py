"""`polluxctl explain JOB`: why a job has what it has."""

from __future__ import annotations

from polluxd.printable import printable

from . import access, answers, job_story
from .access import ConfigOption, JsonOption
from .move_columns import MOVE_COLUMNS
from .output import emit_json, table
from .pinning import JobArgument


def explain(job: JobArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Say why a job has what it has, and what more would do."""
    answer = answers.source(config).explain(job)
    if as_json:
        emit_json({key: answer[key] for key in ("job", "decision", "sizes", "moves", "settings")})
        return
    console = access.console()
    for line in answer["story"]:
        console.print(line, soft_wrap=not console.is_terminal, markup=False)
    if answer["sizes"]:
        console.print()
        title = "What other sizes would bring" + (
            f", on GPUs of type {answer['sizes_of']}" if answer["sizes_of"] else ""
        )
        console.print(table(answer["sizes"], job_story.SIZE_COLUMNS, console.width, printable(title)))
    if answer["moves"]:
        console.print()
        columns = [c for c in MOVE_COLUMNS if c.key not in ("id", "job_id")]
        console.print(table(answer["moves"][-8:], columns, console.width, "Its latest moves"))
