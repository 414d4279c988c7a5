"""The searches of this folder: their journals, and their trials as tables show them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pollux.errors import SearchError
from pollux.search.tasks import FOLDER, tasks_in_queue
from polluxd.cli.output import Column, number, plain
from polluxd.errors import ConfigError

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from pollux.search.study import Search, SearchSettings


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
        "parent": attributes.get("parent"),
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
    return sorted(path.stem for path in (Path.cwd() / FOLDER).glob("*.journal"))


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


def path_of(name: str) -> Path:
    """Return the journal of a search of this folder. Raises ConfigError."""
    try:
        from pollux.search.journal import journal_path  # noqa: PLC0415 - brings Optuna in

        return journal_path(name, Path.cwd())
    except ImportError:
        raise ConfigError("`polluxctl tune` needs Optuna: pip install 'polluxd[tune]'") from None
    except SearchError as error:
        raise ConfigError(str(error)) from error
