"""`polluxctl tune`: a search over hyper-parameters as one array of jobs."""

from __future__ import annotations

import os
import subprocess
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from pollux.errors import SearchError
from polluxd.cli import access
from polluxd.cli.access import JsonOption
from polluxd.cli.output import Column, emit, emit_json, number, plain
from polluxd.errors import ConfigError, PolluxError, SlurmRefused

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from pollux.search.study import Search, SearchSettings


class Sampler(StrEnum):
    """Who chooses the values of a trial; all are Optuna's."""

    TPE = "tpe"
    RANDOM = "random"
    GRID = "grid"
    CMA = "cma"


class Pruner(StrEnum):
    """Who stops trials: Optuna's, or population-based training, in which bad trials go on from good ones."""

    ASHA = "asha"
    HYPERBAND = "hyperband"
    MEDIAN = "median"
    NONE = "none"
    PBT = "pbt"


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
    Column("gpu_hours", "GPU HOURS", number(3), right=True, rank=3),
    Column("params", "PARAMETERS", _parameters, flexible=True),
    Column("why", "WHY", plain, flexible=True, rank=2),
)


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
    parallel: Annotated[
        int | None, typer.Option("--parallel", min=1, help="most trials at a time [16; with pbt all]")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="the search's name [the script's]")] = None,
) -> None:
    """Submit a search: `polluxctl tune BATCH_SCRIPT --trials 64 --metric accuracy --max`."""
    chosen = name or batch.stem
    if _path(chosen).exists():
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
    search = _open(chosen, settings)
    search.study.set_user_attr("command", [str(batch.absolute()), *(words or [])])
    search.study.set_user_attr("parallel", parallel or (trials if pruner is Pruner.PBT else 16))
    try:
        _submit(search, trials)
    except PolluxError:
        search.path.unlink()
        raise


@app.command()
def status(name: NameArgument, as_json: JsonOption = False) -> None:
    """Show the trials of a search, and what it gave up."""
    search = _open(name)
    rows = [_row(search, trial) for trial in search.trials()]
    best, given_up = search.best(), search.given_up()
    if as_json:
        emit_json(
            {
                "name": name,
                "arrays": search.study.user_attrs.get("arrays", []),
                "metric": search.settings.metric,
                "gpu_hours": search.gpu_hours(),
                "over": search.over(),
                "given_up": given_up,
                "best": None if best is None else best.number,
                "trials": rows,
            }
        )
        return
    emit(rows, TRIAL_COLUMNS, as_json=False, console=access.console(), empty="no trial has begun")
    ended = sum(trial.state.is_finished() for trial in search.newest())
    planned = f" of {search.settings.trials}" if search.settings.trials else ""
    print(f"{ended}{planned} trials have ended, in {search.gpu_hours():.3g} GPU hours")
    if best is not None:
        print(f"best: trial {best.number}, {search.settings.metric} {best.value:.6g}")
    for why, count in given_up.items():
        print(f"given up: {count} trials: {why}")


@app.command()
def best(name: NameArgument) -> None:
    """Print the best complete trial as JSON."""
    search = _open(name)
    found = search.best()
    if found is None:
        raise PolluxError(f"no trial of search {name} is complete yet")
    emit_json(_row(search, found))


@app.command()
def stop(name: NameArgument) -> None:
    """End a search: its trials stop, and no further ones begin."""
    search = _open(name)
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
    search = _open(name)
    search.resume(gpu_hours=gpu_hours, until=None if until is None else _next(until))
    if search.over():
        raise ConfigError(f"{search.over()}: give another --gpu-hours or --until")
    planned = search.settings.trials or 0
    left = trials or planned - search.count()
    if left < 1:
        raise ConfigError(f"all {planned} trials of search {name} have begun: say how many more by --trials")
    _submit(search, left)


def _open(name: str, settings: SearchSettings | None = None) -> Search:
    """Open a search of this folder. Raises ConfigError."""
    path = _path(name)
    if settings is None and not path.exists():
        raise ConfigError(f"there is no search {name} in this folder: {path} does not exist")
    from pollux.search.study import Search  # noqa: PLC0415 - brings Optuna in

    try:
        return Search(path, name, settings)
    except KeyError:
        raise ConfigError(f"{path} holds no search {name}") from None
    except SearchError as error:
        raise ConfigError(str(error)) from error


def _path(name: str) -> Path:
    try:
        from pollux.search.journal import journal_path  # noqa: PLC0415 - brings Optuna in

        return journal_path(name, Path.cwd())
    except ImportError:
        raise ConfigError("`polluxctl tune` needs Optuna: pip install 'polluxd[tune]'") from None
    except SearchError as error:
        raise ConfigError(str(error)) from error


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


def _row(search: Search, trial: FrozenTrial) -> dict[str, Any]:
    from pollux.search.study import STEPS  # noqa: PLC0415 - brings Optuna in

    last, attributes = trial.last_step, trial.user_attrs
    return {
        "number": trial.number,
        "task": attributes.get("task"),
        "state": {"PRUNED": "stopped", "FAIL": "failed"}.get(trial.state.name, trial.state.name.lower()),
        "value": trial.values[0] if trial.values else trial.intermediate_values.get(last),
        "done": (last or 0) / STEPS,
        "gpu_hours": attributes.get("gpu_seconds", 0.0) / 3600,
        "params": trial.params,
        "parent": attributes.get("parent"),
        "why": attributes.get("why"),
    }


def _next(clock: str) -> float:
    """Return when a clock shows HH:MM next [POSIX s]. Raises ConfigError."""
    try:
        at = datetime.strptime(clock, "%H:%M")
    except ValueError:
        raise ConfigError(f"expected --until HH:MM, such as 08:00, got {clock!r}") from None
    now = datetime.now()
    end = now.replace(hour=at.hour, minute=at.minute, second=0, microsecond=0)
    return (end if end > now else end + timedelta(days=1)).timestamp()
