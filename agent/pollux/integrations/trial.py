"""`pollux.trial`: the values that a search tries in this job, and the end of a trial that is not worth its GPUs.

trial = pollux.trial()
lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True, default=0.01)
job = pollux.attach(model, SGD(model.parameters(), lr))
for epoch in job.epochs(90):
    ...
    trial.report(accuracy)
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pollux.errors import RankLost, SearchError
from pollux.loop.notices import notice
from pollux.search.tasks import NAME_VARIABLE, OF_RUN, TASK_VARIABLE
from pollux.slurm_job.allocation import task_of
from pollux.slurm_job.slurm_commands import tasks_in_queue
from pollux.slurm_job.trainings import RUN, observers

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from pollux.loop.job import Job
    from pollux.search.study import Search

logger = logging.getLogger("pollux")

Value = TypeVar("Value")

VALUES_WAIT = 600.0
"""Seconds that a rank waits for a value of rank 0, which may wait half a minute for the lock of a killed task."""
_LOOK = 0.2


class Trial:
    """One choice of values, which this job trains with. Made by `pollux.trial`.

    Outside of a search the defaults apply, and nothing is ever stopped.
    """

    current: ClassVar[Trial | None] = None
    """That of this process."""

    def __init__(self) -> None:
        self.job: Job | None = None
        """The training whose progress counts."""

    def judge_by(self, job: Job) -> None:
        """Count progress by this training's."""
        self.job = job

    @property
    def number(self) -> int | None:
        """The trial's number in its search; None without a search."""
        return None

    def suggest_float(
        self,
        name: str,
        low: float,
        high: float,
        *,
        step: float | None = None,
        log: bool = False,
        default: float | None = None,
    ) -> float:
        """Return a number from `low` to `high`, as Optuna's method. Without a search: the default, or the middle."""
        if default is None:
            default = math.sqrt(low * high) if log else (low + high) / 2
            default = default if step is None else low + step * round((default - low) / step)
        return self._value(
            "float", name, float(_within(name, default, low, high)), low, high, step=step, log=log
        )

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False, default: int | None = None
    ) -> int:
        """Return a whole number from `low` to `high`, as Optuna's method. See `suggest_float`."""
        if default is None:
            middle = math.sqrt(low * high) if log else (low + high) / 2
            default = low + step * round((middle - low) / step)
        return self._value("int", name, _within(name, default, low, high), low, high, step=step, log=log)

    def suggest_categorical(
        self, name: str, choices: Sequence[Value], *, default: Value | None = None
    ) -> Value:
        """Return one of `choices`, as Optuna's method. Without a search: the default, or the first."""
        chosen = choices[0] if default is None else default
        if chosen not in choices:
            raise SearchError(f"expected the default of {name!r} to be one of {choices!r}, got {chosen!r}")
        return self._value("categorical", name, chosen, choices)

    def report(self, value: float) -> None:
        """Note the value of an evaluation; every rank calls it, and rank 0's value counts.

        Where the trial is stopped, all ranks end here by SystemExit: the job ends, and its GPUs are free.
        """

    def report_metric(self, metrics: Mapping[str, Any], name: str) -> None:
        """Report one of a library's metrics. Raises SearchError if it is not there."""
        if name not in metrics:
            raise SearchError(
                f"expected a metric {name!r} of this evaluation, got {', '.join(metrics) or 'none'}"
            )
        self.report(float(metrics[name]))

    def _value(self, kind: str, name: str, default: Value, *bounds: Any, **options: Any) -> Value:
        return default


class SearchTrial(Trial):
    """A trial of a search. Rank 0 asks Optuna; the other ranks, and those of companion jobs, read its journal."""

    def __init__(self, search: Callable[[], Search], task: str, *, main: bool) -> None:
        """Begin the trial of a task, or go on with it.

        Ends the process where no trial is to begin. `search` opens the search.
        """
        super().__init__()
        self._task, self._main = task, main
        self._last: float | None = None
        if main:
            self._search = search()
            found = self._search.begin(task, tasks_in_queue)
        else:
            self._search = self._awaited(lambda: _opened(search), f"search of task {task}")
            found = self._awaited(self._of_task, f"trial of task {task}")
        self._number: int = found.number
        attributes = found.user_attrs
        if found.state.is_finished():
            self._leave(attributes.get("given_up") or attributes.get("why") or "it has ended")
        if main:
            self._live = self._search.live(found)
            notice(f"search {self._search.name}: trial {found.number}")
            # The last value of a training counts, and a script may report after its loop.
            atexit.register(self.complete)

    def judge_by(self, job: Job) -> None:
        super().judge_by(job)
        if self._main:
            job.coordinator.told["search_rank"] = self._search.rank(self._live)  # of an earlier attempt

    @property
    def number(self) -> int | None:
        return self._number

    def report(self, value: float) -> None:
        job = self.job
        if job is None:
            raise SearchError(
                "expected trial.report after pollux.attach: progress is counted in the training"
            )
        why = ""
        if self._main:
            self._last = float(value)
            try:
                step, used = _step(job.progress.examples, _length(job)), job.progress.gpu_seconds
                why = self._search.report(self._live, step, self._last, used, job.world.size)
                job.coordinator.told["search_rank"] = self._search.rank(self._live)
                job.coordinator.line.wake()
            except (OSError, RuntimeError, ValueError) as error:
                logger.warning("the journal of the search cannot be used, the training goes on: %s", error)
        why = job.coordinator.exchange.gather(why)[0]
        if why:
            job.coordinator.resizer.close()
            job.coordinator.close()
            self._leave(why)

    def _value(self, kind: str, name: str, default: Value, *bounds: Any, **options: Any) -> Value:
        if self._main:
            try:
                found: Value = getattr(self._live, f"suggest_{kind}")(name, *bounds, **options)
            except ValueError as error:
                raise SearchError(f"the search cannot suggest {name!r}: {error}") from error
            return found

        def noted() -> dict[str, Any] | None:
            trial = self._search.trial_of(self._task)
            return trial.params if trial is not None and name in trial.params else None

        value: Value = self._awaited(noted, f"value of {name!r}")[name]
        return value

    def _of_task(self) -> FrozenTrial | None:
        """Return the task's trial; None before rank 0 has begun it again after a failure."""
        found = self._search.trial_of(self._task)
        return None if found is None or found.state.name == "FAIL" else found

    def _awaited(self, look: Callable[[], Any], what: str) -> Any:
        """On other ranks than the first: wait for what it writes."""
        end = time.monotonic() + VALUES_WAIT
        while (found := look()) is None:
            if time.monotonic() > end:
                raise RankLost(f"rank 0 wrote no {what} into the search's journal within {VALUES_WAIT:.0f} s")
            time.sleep(_LOOK)
        return found

    def complete(self) -> None:
        """At the end of rank 0's process: the trial is complete if its training is."""
        job = self.job
        if job is not None and (job.progress.finished or job.coordinator.closed):
            self._search.complete(self._live, self._last)

    def _leave(self, why: str) -> None:
        if self._main:
            notice(f"search {self._search.name}: the trial ends: {why}")
        raise SystemExit(0)


def trial(*, maximize: bool = False, environ: MutableMapping[str, str] = os.environ) -> Trial:
    """Return this job's trial of its search, always the same.

    Call it on every rank, before `attach`. The job belongs to a search by `polluxctl tune` or by the directive
    `search=NAME`. `maximize`: whether larger values are better, where the search does not exist yet; `polluxctl tune`
    says it otherwise. Raises SearchError.
    """
    if Trial.current is None:
        Trial.current = _begin(maximize, environ)
    return Trial.current


def _judge_by(job: Job) -> None:
    if Trial.current is not None:
        Trial.current.judge_by(job)


observers.append(_judge_by)


def _begin(maximize: bool, environ: MutableMapping[str, str]) -> Trial:
    name, task, companion = environ.get(NAME_VARIABLE), task_of(environ), environ.get("POLLUX_COMPANION")
    if not name:
        return Trial()
    if not task:
        notice(f"search {name}: there are trials in Slurm jobs only; the defaults apply")
        return Trial()
    if importlib.util.find_spec("optuna") is None:
        raise SearchError(
            f"search {name} needs Optuna in the training's environment: pip install 'optuna>=5,<6' cmaes"
        )
    from pollux.search.journal import journal_path  # noqa: PLC0415 - brings Optuna in
    from pollux.search.study import Search, SearchSettings  # noqa: PLC0415

    path = journal_path(name, environ.get("SLURM_SUBMIT_DIR") or ".", make=True)
    if run := environ.get(RUN):
        task = f"{task}{OF_RUN}{run}"
    if companion:
        task, _, own = environ[TASK_VARIABLE].partition(":")
        path = Path(own)
    main = not companion and environ.get("RANK", "0") == "0"
    if main:
        environ[TASK_VARIABLE] = f"{task}:{path}"
    settings = SearchSettings(maximize=maximize) if main else None
    return SearchTrial(lambda: Search(path, name, settings), task, main=main)


def _opened(search: Callable[[], Search]) -> Search | None:
    """Return the search; None before rank 0 has created it."""
    try:
        return search()
    except KeyError:
        return None


def _within(name: str, default: Value, low: Any, high: Any) -> Value:
    if not low <= default <= high:
        raise SearchError(f"expected the default of {name!r} from {low} to {high}, got {default!r}")
    return default


def _step(examples: float, length: float) -> int:
    """Return how many of the STEPS of its length a training has made, by statistical progress."""
    from pollux.search.study import STEPS  # noqa: PLC0415

    return min(int(STEPS * examples / length + 1e-6), STEPS)


def _length(job: Job) -> float:
    """Return the progress that the training is to make [examples]."""
    return job.progress.target or (job.progress.passes or 1.0) * job.dataset_length
