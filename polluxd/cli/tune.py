"""`polluxctl tune`: a search over hyper-parameters as one array of jobs, from the searches of this folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text
from typer.core import TyperGroup

from pollux.errors import SearchError
from pollux.private_folder import Folder, is_own, places_of_this_user, remove
from pollux.search.tasks import FOLDER
from pollux.slurm_job.slurm_commands import tasks_in_queue
from polluxd.errors import ConfigError, PolluxError, SlurmRefused

from . import access
from .access import JsonOption, WatchOption
from .output import Column, emit_json, number, plain, redraw, table

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from pollux.search.study import Search, SearchSettings


Sampler = StrEnum("Sampler", ["TPE", "RANDOM", "GRID", "CMA"])
"""Who chooses the values of a trial; all are Optuna's."""
Pruner = StrEnum("Pruner", ["ASHA", "HYPERBAND", "MEDIAN", "NONE"])
"""Who stops trials; all are Optuna's."""


class BatchScriptFirst(TyperGroup):
    """A group whose first word is a batch script, unless it is one of the commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = ["start", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=BatchScriptFirst, no_args_is_help=True, help="Search over hyper-parameters with one array of jobs."
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="the search, of this folder")]


@app.command()
def start(
    batch: Annotated[
        Path, typer.Argument(metavar="BATCH_SCRIPT", exists=True, dir_okay=False, help="as for sbatch")
    ],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="of the batch script")
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="tasks of the array")] = 16,
    metric: Annotated[
        str, typer.Option("--metric", help="name of the value that the script reports")
    ] = "value",
    maximize: Annotated[bool, typer.Option("--max/--min", help="whether larger values are better")] = False,
    sampler: Annotated[Sampler, typer.Option("--sampler", help="who chooses the values")] = Sampler.TPE,
    pruner: Annotated[Pruner, typer.Option("--pruner", help="who stops trials")] = Pruner.ASHA,
    gpu_hours: Annotated[
        float | None, typer.Option("--gpu-hours", min=0.0, help="GPU hours of all trials")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="HH:MM", help="the search's end")] = None,
    parallel: Annotated[int, typer.Option("--parallel", min=1, help="most trials at a time")] = 16,
    name: Annotated[str | None, typer.Option("--name", help="the search's name [the script's]")] = None,
) -> None:
    """Submit a search: `polluxctl tune BATCH_SCRIPT --trials 64 --metric accuracy --max`.

    Its journal is pollux-searches/NAME.journal in this folder, where the other commands read it. Needs Optuna.
    """
    chosen = name or batch.stem
    if path_of(chosen, make=True).exists():
        raise ConfigError(
            f"there is a search {chosen} in this folder: give another --name, or go on with it by "
            f"`polluxctl tune resume {chosen}`"
        )
    from pollux.search.study import SearchSettings  # noqa: PLC0415 - brings Optuna in, which may be missing

    settings = SearchSettings(
        maximize=maximize,
        trials=trials,
        metric=metric,
        sampler=sampler.value,
        pruner=pruner.value,
        gpu_hours=gpu_hours,
        until=None if until is None else _next(until),
    )
    search = open_search(chosen, settings)
    search.study.set_user_attr("command", [str(batch.absolute()), *(words or [])])
    search.study.set_user_attr("parallel", parallel)
    try:
        _submit(search, trials)
    except PolluxError:
        remove(search.path)
        raise


@app.command()
def status(name: NameArgument, watch: WatchOption = False, as_json: JsonOption = False) -> None:
    """Show the trials of a search, and what it gave up."""
    search, console = open_search(name), access.console()
    if watch and console.is_terminal:
        redraw(lambda: Group(*status_parts(search, console)), console)
    elif not as_json:
        console.print(*status_parts(search, console), sep="\n")
    else:
        best = search.best()
        emit_json(
            {
                "name": name,
                "arrays": search.study.user_attrs.get("arrays", []),
                "metric": search.settings.metric,
                "gpu_hours": search.gpu_hours(),
                "over": search.over(),
                "given_up": search.given_up(),
                "best": None if best is None else best.number,
                "trials": trial_rows(search),
            }
        )


def status_parts(search: Search, console: Console) -> Iterator[RenderableType]:
    """Yield what `status` shows, from top to bottom: the newest trials that fit, and the search as a whole."""
    rows = trial_rows(search)
    room = max(console.height - 6, 1) if console.is_terminal else len(rows)
    yield table(rows[-room:], TRIAL_COLUMNS, console.width) if rows else Text("no trial has begun")
    planned = search.settings.trials
    if planned and console.is_terminal:
        yield ProgressBar(total=planned, completed=search.ended(), width=min(console.width, 60))
    yield Text("\n".join(summary(search)))


@app.command()
def plot(name: NameArgument) -> None:
    """Draw the curves of all trials, and their values as parallel coordinates: a page beside the journal."""
    from .report.templates import write_charts  # noqa: PLC0415 - Jinja takes a moment to import
    from .web.charts import of_search  # noqa: PLC0415

    search = open_search(name)
    write_charts(search.path.with_suffix(".html"), f"Search {name}", of_search(search))


@app.command()
def best(name: NameArgument) -> None:
    """Print the best complete trial as JSON."""
    search = open_search(name)
    found = search.best()
    if found is None:
        raise PolluxError(f"no trial of search {name} is complete yet")
    emit_json(trial_row(search, found))


@app.command()
def stop(name: NameArgument) -> None:
    """End a search: its trials stop, and no further ones begin."""
    search = open_search(name)
    search.stop()
    tasks = search.study.user_attrs.get("arrays", [])
    if tasks:
        _slurm(["scancel", *tasks])
    print(f"search {name} is stopped; `polluxctl tune resume {name}` tries the trials that are left")


@app.command()
def resume(
    name: NameArgument,
    trials: Annotated[
        int | None, typer.Option("--trials", min=1, help="as many [those that are left]")
    ] = None,
    gpu_hours: Annotated[
        float | None, typer.Option("--gpu-hours", min=0.0, help="a new limit in all")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="HH:MM", help="a new end")] = None,
) -> None:
    """Go on with a search in a further array: for trials that were given up, failed or stopped by hand."""
    search = open_search(name)
    search.resume(
        gpu_hours=gpu_hours,
        until=None if until is None else _next(until),
        queue=tasks_in_queue(search.path.stat().st_uid),
    )
    if search.over():
        raise ConfigError(f"{search.over()}: give another --gpu-hours or --until")
    planned = search.settings.trials or 0
    left = trials or planned - search.count()
    if left < 1:
        raise ConfigError(f"all {planned} trials of search {name} have begun: say how many more by --trials")
    _submit(search, left)


def _submit(search: Search, tasks: int) -> None:
    """Submit the array, from this folder: the journal is beside it. Raises SlurmRefused."""
    attributes = search.study.user_attrs
    command, most = attributes["command"], min(attributes["parallel"], tasks)
    directives = f"{os.environ.get('SBATCH_POLLUX', '')} search={search.name}".strip()
    environment = {"POLLUX_SEARCH": search.name, "SBATCH_POLLUX": directives}
    if directives.split()[0] == "no":
        environment["SBATCH_POLLUX"] = "no"
    answer = _slurm(["sbatch", "--parsable", f"--array=0-{tasks - 1}%{most}", *command], environment)
    array = answer.split(";")[0].strip()
    search.study.set_user_attr("arrays", [*attributes.get("arrays", []), array])
    print(f"search {search.name}: array {array} of {tasks} trials, {most} at a time; journal {search.path}")


def _slurm(command: list[str], environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise SlurmRefused(f"{command[0]} cannot be run here: {error}") from error
    if done.returncode:
        raise SlurmRefused(f"{command[0]}: {' '.join(done.stderr.split())}")
    return done.stdout


def _next(clock: str) -> float:
    """Return when a clock shows HH:MM next [POSIX s]. Raises ConfigError."""
    try:
        at = datetime.strptime(clock, "%H:%M")
    except ValueError:
        raise ConfigError(f"expected --until HH:MM, such as 08:00, got {clock!r}") from None
    now = datetime.now()
    end = now.replace(hour=at.hour, minute=at.minute, second=0, microsecond=0)
    return (end if end > now else end + timedelta(days=1)).timestamp()


def _parameters(values: dict[str, Any]) -> str:
    return (
        " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={plain(v)}" for k, v in values.items())
        or "-"
    )


TRIAL_COLUMNS = (
    Column("number", "TRIAL", right=True),
    Column("task", "TASK", rank=4),
    Column("state", "STATE"),
    Column("value", "VALUE", number(4), right=True),
    Column("done", "DONE", lambda v: "-" if v is None else f"{100 * v:.0f}%", right=True, rank=1),
    Column("gpus", "GPUS", right=True, rank=3),
    Column("gpu_hours", "GPU HOURS", number(3), right=True, rank=3),
    Column("params", "PARAMETERS", _parameters, flexible=True),
    Column("why", "WHY", plain, flexible=True, rank=2),
)


def trial_row(search: Search, trial: FrozenTrial) -> dict[str, Any]:
    """Return what is shown of a trial."""
    from pollux.search.study import STEPS  # noqa: PLC0415 - brings Optuna in

    last, attributes = trial.last_step, trial.user_attrs
    return {
        "number": trial.number,
        "task": attributes.get("task"),
        "state": {"PRUNED": "stopped", "FAIL": "failed"}.get(trial.state.name, trial.state.name.lower()),
        "value": trial.values[0] if trial.values else trial.intermediate_values.get(last),
        "done": (last or 0) / STEPS,
        "gpus": None if trial.state.is_finished() else attributes.get("gpus"),
        "gpu_hours": attributes.get("gpu_seconds", 0.0) / 3600,
        "params": trial.params,
        "why": attributes.get("why"),
    }


def trial_rows(search: Search) -> list[dict[str, Any]]:
    """Return what is shown of all trials. Slurm says which ones are lost; the next task fails them in the journal."""
    from pollux.search.study import LOST, lost  # noqa: PLC0415 - brings Optuna in

    trials = search.trials()
    rows = [trial_row(search, trial) for trial in trials]
    if any(row["state"] == "running" for row in rows):
        gone = {trial.number for trial in lost(trials, tasks_in_queue(search.path.stat().st_uid))}
        rows = [row | {"state": "lost", "why": LOST} if row["number"] in gone else row for row in rows]
    return rows


def summary(search: Search) -> Iterator[str]:
    """Yield how far a search is, its best trial, and what it gave up."""
    planned = search.settings.trials
    of = f" of {planned}" if planned else ""
    yield f"{search.ended()}{of} trials have ended, in {search.gpu_hours():.3g} GPU hours"
    if (best := search.best()) is not None:
        yield f"best: trial {best.number}, {search.settings.metric} {best.value:.6g}"
    for why, count in search.given_up().items():
        yield f"given up: {count} trials: {why}"


def here() -> list[str]:
    """Return the names of the searches of this folder."""
    found = set()
    for place in filter(is_own, places_of_this_user(Path.cwd() / FOLDER)):
        with Folder(place) as folder:
            found |= {name.removesuffix(".journal") for name in folder.names() if name.endswith(".journal")}
    return sorted(found)


def open_search(name: str, settings: SearchSettings | None = None) -> Search:
    """Open a search of this folder. Raises ConfigError."""
    path = path_of(name)
    if settings is None and not path.exists():
        raise ConfigError(f"there is no search {name} in this folder: {path} does not exist")
    from pollux.search.study import Search  # noqa: PLC0415 - brings Optuna in

    try:
        return Search(path, name, settings)
    except KeyError:
        raise ConfigError(f"{path} holds no search {name}") from None
    except SearchError as error:
        raise ConfigError(str(error)) from error


def path_of(name: str, *, make: bool = False) -> Path:
    """Return the journal of a search of this folder. Raises ConfigError."""
    try:
        from pollux.search.journal import journal_path  # noqa: PLC0415 - brings Optuna in

        return journal_path(name, Path.cwd(), make=make)
    except ImportError:
        raise ConfigError("`polluxctl tune` needs Optuna: pip install 'optuna>=5,<6' cmaes") from None
    except SearchError as error:
        raise ConfigError(str(error)) from error
