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

from pollux.checkpoint.checkpoint_store import adopt
from pollux.checkpoint.exploit import copy_newest
from pollux.errors import LEFT_STATUS, RETRY_STATUS, RankLost, SearchError
from pollux.loop.notices import notice
from pollux.ranks.node_memory import node_memory
from pollux.search.tasks import NAME_VARIABLE, OF_RUN, TASK_VARIABLE
from pollux.slurm_job.allocation import task_of
from pollux.slurm_job.slurm_commands import tasks_in_queue
from pollux.slurm_job.trainings import RUN
from pollux.training.script_record import ScriptRecord

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from pollux.loop.job import Job
    from pollux.search.study import Search

logger = logging.getLogger("pollux")

Value = TypeVar("Value")

VALUES_WAIT = 600.0
"""Seconds that a rank waits for a value of rank 0, which may wait half a minute for the lock of a killed task."""
_LOOK = 0.2
_BEHIND = 0.2
"""Part of a training by which a checkpoint may be behind whoever goes on from it."""
_GOOD = 0.75
"""Trials of this rank have a checkpoint written after each evaluation, with population-based training."""


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
        self._gpu_before = 0.0
        """GPU seconds that the training has in its checkpoint from other trials."""
        ScriptRecord.script_counts = "parent" in attributes
        if found.state.is_finished():
            self._leave(attributes.get("given_up") or attributes.get("why") or "it has ended")
        if main:
            self._live = self._search.live(found)
            if copied := attributes.get("adopts"):
                adopt(Path(copied).name, Path(copied).parent)  # killed before it was
            notice(f"search {self._search.name}: trial {found.number}")
            # The last value of a training counts, and a script may report after its loop.
            atexit.register(self.complete)

    def judge_by(self, job: Job) -> None:
        super().judge_by(job)
        if self._main:
            job.coordinator.search_rank = self._search.claim(self._live)  # of an earlier attempt
            attributes = self._search.frozen(self._live).user_attrs
            if "gpu_before" not in attributes:
                self._live.set_user_attr("gpu_before", job.progress.gpu_seconds)
                self._live.set_user_attr("directory", str(job.coordinator.attempt.directory or ""))
            self._gpu_before = attributes.get("gpu_before", job.progress.gpu_seconds)
            if self._search.settings.pruner == "pbt" and not self._exploits(job):
                notice("no trial goes on from another one: that needs checkpoints, and `pollux run`")

    @property
    def number(self) -> int | None:
        return self._number

    def report(self, value: float) -> None:
        job = self.job
        if job is None:
            raise SearchError(
                "expected trial.report after pollux.attach: progress is counted in the training"
            )
        why = other = ""
        if self._main:
            self._last = float(value)
            try:
                used = job.progress.gpu_seconds - self._gpu_before
                why = self._search.report(
                    self._live, _step(job.progress.examples, _length(job)), self._last, used, job.world.size
                )
                job.coordinator.search_rank = self._search.claim(self._live)
                job.coordinator.line.wake()
                other = "" if why else self._exploit(job)
            except (OSError, RuntimeError, ValueError) as error:
                logger.warning("the journal of the search cannot be used, the training goes on: %s", error)
        why, other = job.coordinator.exchange.gather((why, other))[0]
        if other:
            job.coordinator.checkpointer.leave_to(other, job.coordinator.exchange)
        if why or other:
            job.coordinator.resizer.close()
            job.coordinator.close()
        if other:
            raise SystemExit(LEFT_STATUS if "POLLUX_COMPANION" in os.environ else RETRY_STATUS)
        if why:
            self._leave(why)

    @staticmethod
    def _exploits(job: Job) -> bool:
        return job.coordinator.attempt.directory is not None and node_memory() is not None

    def _exploit(self, job: Job) -> str:
        """On rank 0: have a better trial's checkpoint beside this one's, under the name that is returned.

        Empty: the trial goes on as it is, and has a checkpoint written soon if others may go on from it.
        """
        search, directory, length = self._search, job.coordinator.attempt.directory, _length(job)
        if search.settings.pruner != "pbt" or directory is None or not self._exploits(job):
            return ""
        for other in search.better(self._live):
            copied = directory / f".trial-{other.number}-for-{self.number}"
            source = Path(other.user_attrs.get("directory") or directory)
            least = job.progress.examples - _BEHIND * length
            made = None if source == directory else copy_newest(source, copied, least=least, below=length)
            if made is not None:
                heir = search.go_on_from(self._live, other, str(copied), _step(made, length))
                notice(f"search {search.name}: trial {heir.number} goes on from trial {other.number}")
                return copied.name
        if (search.rank(self._live) or 0.0) >= _GOOD:
            job.coordinator.checkpointer.hasten()
        return ""

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


def _begin(maximize: bool, environ: MutableMapping[str, str]) -> Trial:
    name, task, companion = environ.get(NAME_VARIABLE), task_of(environ), environ.get("POLLUX_COMPANION")
    if not name:
        return Trial()
    if not task:
        notice(f"search {name}: there are trials in Slurm jobs only; the defaults apply")
        return Trial()
    if importlib.util.find_spec("optuna") is None:
        raise SearchError(
            f"search {name} needs Optuna in the training's environment: pip install 'pollux-agent[tune]'"
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
