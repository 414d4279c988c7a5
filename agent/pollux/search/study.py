"""One search: the study that all its tasks share, and the rules by which trials begin and end."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, BruteForceSampler, CmaEsSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from pollux.errors import SearchError
from pollux.search.journal import open_journal
from pollux.search.tasks import slurms_name

RUNNING, PRUNED = TrialState.RUNNING, TrialState.PRUNED
STOPPED = "the search was stopped"
LOST = "its task left Slurm's queue"
LIMITED = "better trials need the remaining GPU hours, or the remaining time"
STEPS = 20
"""Parts of a training, by statistical progress. A trial may be stopped at the end of each."""
_REDUCTION = 3
"""One trial of so many passes a rung: 2 to 4 (Li et al., A System for Massively Parallel Hyperparameter Tuning)."""

_SAMPLERS: dict[str, Callable[..., BaseSampler]] = {
    # Of trials that run at the same time, each avoids the values of the others.
    "tpe": partial(TPESampler, constant_liar=True),
    "random": RandomSampler,
    "grid": BruteForceSampler,
    "cma": CmaEsSampler,
}
_PRUNERS: dict[str, Callable[..., BasePruner]] = {
    "asha": partial(SuccessiveHalvingPruner, min_resource=1, reduction_factor=_REDUCTION),
    "hyperband": partial(HyperbandPruner, min_resource=1, max_resource=STEPS, reduction_factor=_REDUCTION),
    "median": MedianPruner,
    "none": NopPruner,
}
SAMPLERS, PRUNERS = tuple(_SAMPLERS), tuple(_PRUNERS)


@dataclass(frozen=True)
class SearchSettings:
    """What the user asked of a search."""

    maximize: bool = False
    trials: int | None = None
    """None: as many as there are tasks."""
    metric: str = "value"
    sampler: str = "tpe"
    pruner: str = "asha"
    gpu_hours: float | None = None
    until: float | None = None
    """POSIX seconds."""


class Search:
    """A study of Optuna in a journal. Raises SearchError where the journal cannot be read or written."""

    def __init__(
        self,
        path: Path,
        name: str,
        settings: SearchSettings | None = None,
        *,
        storage: BaseStorage | None = None,
        seed: int | None = None,
    ) -> None:
        """Open the search; create it with `settings`, which count for nothing if it exists.

        Without `settings`, raises KeyError if the search does not exist yet. `storage`: in place of the journal;
        `seed`: of the sampler. Both are for simulations.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.path, self.name = path, name
        storage = storage or open_journal(path)
        try:
            study = optuna.load_study(study_name=name, storage=storage)
        except KeyError:
            if settings is None:
                raise
            direction = "maximize" if settings.maximize else "minimize"
            study = optuna.create_study(
                study_name=name, storage=storage, direction=direction, load_if_exists=True
            )
            study.set_user_attr("settings", asdict(settings))
        self.study = study
        self.settings = SearchSettings(**study.user_attrs.get("settings", {"maximize": self._maximizes}))
        study.sampler = _made("sampler", _SAMPLERS, self.settings.sampler, seed=seed)
        study.pruner = _made("pruner", _PRUNERS, self.settings.pruner)

    @property
    def _maximizes(self) -> bool:
        return bool(self.study.direction == optuna.study.StudyDirection.MAXIMIZE)

    def trials(self) -> list[FrozenTrial]:
        """Return all trials that began, in order."""
        return [
            trial for trial in self.study.get_trials(deepcopy=False) if "given_up" not in trial.user_attrs
        ]

    def trial_of(self, task: str) -> FrozenTrial | None:
        """Return the newest trial of a task."""
        found = [t for t in self.study.get_trials(deepcopy=False) if t.user_attrs.get("task") == task]
        return found[-1] if found else None

    def newest(self) -> list[FrozenTrial]:
        """Return each task's newest trial: one that failed has a successor."""
        return list({trial.user_attrs["task"]: trial for trial in self.trials()}.values())

    # -- what a task does -------------------------------------------------------------------------------------

    def begin(self, task: str, queue: Callable[[], frozenset[str] | None]) -> FrozenTrial:
        """Return the trial of a task: that of its earlier attempts, or a new one.

        A trial that comes back finished is not to be trained: it was stopped, or given up before its start. `queue`
        asks Slurm for its jobs, None where it does not answer: the trials of tasks that are gone have failed.
        """
        running = self._running()
        # Slurm is asked after the journal was read: a task that begins in between is in neither.
        here = queue() if any(trial.user_attrs.get("task") != task for trial in running) else None
        for trial in lost(running, here if here and slurms_name(task) in here else None):
            self.end(trial, TrialState.FAIL, why=LOST)
        found = self.trial_of(task)
        if found is None or found.state is TrialState.FAIL:
            over = self.over() or self._reserved()
            attributes = {"given_up": over} if over else {}
            # The task's checkpoint was trained with these values.
            self._add(task, found, PRUNED if over else RUNNING, attributes)
            found = self.trial_of(task)
        assert found is not None
        return found

    def _add(self, task: str, like: FrozenTrial | None, state: Any, attributes: Mapping[str, Any]) -> None:
        """Add a trial with the values of another one.

        One line of the journal: whoever is killed leaves a trial with its task behind, or none.
        """
        self.study.add_trial(
            create_trial(
                state=state,
                params=like.params if like else {},
                distributions=like.distributions if like else {},
                user_attrs={"task": task, **attributes},
            )
        )

    def live(self, trial: FrozenTrial) -> optuna.trial.Trial:
        """Return a running trial as Optuna's own, which suggests values."""
        return optuna.trial.Trial(self.study, trial._trial_id)

    def report(
        self, trial: optuna.trial.Trial, step: int, value: float, gpu_seconds: float, gpus: int = 1
    ) -> str:
        """Note the value of a trial after a step (0 to STEPS). Returns why the trial is to stop; empty: it goes on.

        A step that an evaluation skipped has the value of the next one, so that trials can be compared at each step.
        `gpu_seconds`: that the trial has used; it has `gpus` now.
        """
        before = self.frozen(trial)
        if before.state.is_finished():
            return str(before.user_attrs.get("why", "it was ended"))
        last = before.last_step or 0
        for each in range(last + 1, step + 1):
            trial.report(value, each)
        # A requeue may have lost steps: their GPU seconds are used all the same.
        trial.set_user_attr("gpu_seconds", max(gpu_seconds, before.user_attrs.get("gpu_seconds", 0.0)))
        if before.user_attrs.get("gpus") != gpus:
            trial.set_user_attr("gpus", gpus)
        if not math.isfinite(value):
            why = f"its value is {value}"
        elif self.stopped:
            why = STOPPED
        elif step < STEPS and not self._affordable(self.frozen(trial)):
            why = self.over() or LIMITED
            trial.set_user_attr("limited", True)
        elif step > last and trial.should_prune() and step < STEPS:
            why = f"its rank after {100 * step // STEPS} % of the training"
        else:
            return ""
        self.end(self.frozen(trial), PRUNED, why=why)
        return why

    def rank(self, trial: optuna.trial.Trial) -> float | None:
        """Return the part of the trials, 0 to 1, that are not better after the same step; None before the first."""
        return self._rank(self.frozen(trial))

    def _rank(self, own: FrozenTrial) -> float | None:
        step = own.last_step
        if step is None:
            return None
        gains = [self._gain(trial, step) for trial in self.trials() if step in trial.intermediate_values]
        return sum(gain <= self._gain(own, step) for gain in gains) / len(gains)

    def _gain(self, trial: FrozenTrial, step: int) -> float:
        """Return a trial's value after a step, the larger the better."""
        return float(trial.intermediate_values[step]) * (1.0 if self._maximizes else -1.0)

    # -- the end of a trial -----------------------------------------------------------------------------------

    def complete(self, trial: optuna.trial.Trial, value: float | None) -> None:
        """Note that a training ended. `value`: the last one; None: as the journal has it."""
        frozen = self.frozen(trial)
        if value is None and frozen.last_step is not None:
            value = frozen.intermediate_values[frozen.last_step]
        if value is None or math.isnan(value):
            self.end(frozen, TrialState.FAIL, why="it ended without a value")
        else:
            self.end(frozen, TrialState.COMPLETE, value)

    def frozen(self, trial: optuna.trial.Trial) -> FrozenTrial:
        """Return the present state of a trial."""
        return self.study.get_trials(deepcopy=False)[trial.number]

    def end(self, trial: FrozenTrial, state: Any, value: float | None = None, *, why: str = "") -> None:
        """End a trial, unless it has ended."""
        if trial.state.is_finished():
            return
        # BruteForceSampler stops Optuna's own loop at its last value: here is none. Another task may have been quicker.
        with suppress(RuntimeError):
            if why:
                self.live(trial).set_user_attr("why", why)
            self.study.tell(trial.number, value, state=state, skip_if_finished=True)

    # -- the search as a whole --------------------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        """`polluxctl tune stop` ended the search."""
        return bool(self.study.user_attrs.get("stopped"))

    def gpu_hours(self) -> float:
        """Return the GPU hours that all trials reported."""
        return float(sum(trial.user_attrs.get("gpu_seconds", 0.0) for trial in self.trials())) / 3600

    def over(self) -> str:
        """Return why no further trial begins; empty while trials may begin."""
        settings = self.settings
        if self.stopped:
            return STOPPED
        if settings.gpu_hours is not None and self.gpu_hours() >= settings.gpu_hours:
            return f"the search has used its {settings.gpu_hours:g} GPU hours"
        if settings.until is not None and time.time() >= settings.until:
            return f"the search ended at {time.strftime('%Y-%m-%d %H:%M', time.localtime(settings.until))}"
        return ""

    def _left(self) -> float:
        """Return the GPU seconds that the limits leave, on the GPUs that the trials have now."""
        hours, until = self.settings.gpu_hours, self.settings.until
        left = math.inf if hours is None else 3600.0 * (hours - self.gpu_hours())
        if until is None:
            return left
        gpus = sum(int(t.user_attrs.get("gpus", 1)) for t in self._running())
        return min(left, (until - time.time()) * gpus)

    def _running(self) -> list[FrozenTrial]:
        return list(self.study.get_trials(deepcopy=False, states=(RUNNING,)))

    def _affordable(self, own: FrozenTrial) -> bool:
        """Whether the limits let a trial end after all running ones that are better.

        The best one goes on while no trial is complete, whatever the limits: a search without a result is a waste.
        """
        left = self._left()
        if left == math.inf:
            return True
        place = self._place(own)
        ahead = [t for t in self._running() if t.number == own.number or self._place(t) > place]
        if len(ahead) == 1 and self.best() is None:
            return True
        return sum(map(_to_come, ahead)) <= left

    def _place(self, trial: FrozenTrial) -> tuple[float, int]:
        """Return what is greater for a better trial: of equal ones, the first."""
        return self._rank(trial) or 0.0, -trial.number

    def _reserved(self) -> str:
        """Return why no trial begins although the limits leave something: the best one that runs needs it."""
        left = self._left()
        best = None if left == math.inf else max(self._running(), key=self._place, default=None)
        return LIMITED if best is not None and _to_come(best) >= left else ""

    def given_up(self) -> Counter[str]:
        """Count the tasks that began no trial, and the trials that a limit has stopped, by the reason."""
        found = (
            t.user_attrs.get("given_up") or (t.user_attrs.get("why") if _was_limited(t) else None)
            for t in self.study.get_trials(deepcopy=False)
        )
        return Counter(why for why in found if why)

    def ended(self) -> int:
        """Count the tasks whose trial has ended."""
        return sum(trial.state.is_finished() for trial in self.newest())

    def count(self) -> int:
        """Count the trials that need not be tried again."""
        return sum(t.state is not TrialState.FAIL and not _was_limited(t) for t in self.newest())

    def stop(self) -> None:
        """End the search and its trials by hand."""
        self.study.set_user_attr("stopped", True)
        for trial in self._running():
            self.end(trial, PRUNED, why=STOPPED)

    def resume(self, *, gpu_hours: float | None, until: float | None, queue: frozenset[str] | None) -> None:
        """Let trials begin again, under new limits where they are given. An end that has passed is none."""
        for trial in lost(self._running(), queue):
            self.end(trial, TrialState.FAIL, why=LOST)
        before = self.settings
        late = before.until is not None and before.until <= time.time()
        self.settings = replace(
            before,
            gpu_hours=before.gpu_hours if gpu_hours is None else gpu_hours,
            until=until or (None if late else before.until),
        )
        self.study.set_user_attr("settings", asdict(self.settings))
        self.study.set_user_attr("stopped", False)

    def best(self) -> FrozenTrial | None:
        """Return the best complete trial; None while there is none."""
        try:
            return self.study.best_trial
        except ValueError:
            return None


def lost(trials: Sequence[FrozenTrial], queue: frozenset[str] | None) -> list[FrozenTrial]:
    """Return the running trials whose task is not in Slurm's queue; none where Slurm does not answer (None)."""
    if queue is None:
        return []
    return [
        t
        for t in trials
        if not t.state.is_finished() and slurms_name(t.user_attrs.get("task") or "") not in queue
    ]


def _was_limited(trial: FrozenTrial) -> bool:
    return bool(trial.user_attrs.get("limited")) or trial.user_attrs.get("why") == STOPPED


def _to_come(trial: FrozenTrial) -> float:
    """Return the GPU seconds that a running trial is still to use; 0 before its first evaluation."""
    if trial.last_step is None:
        return 0.0
    last = int(trial.last_step)
    return float(trial.user_attrs.get("gpu_seconds", 0.0)) * (STEPS - last) / max(last, 1)


def _made(what: str, known: Mapping[str, Callable[..., Any]], name: str, **options: Any) -> Any:
    """Make one of the known samplers or pruners. Raises SearchError."""
    if name not in known:
        raise SearchError(f"expected the {what} of a search to be one of {', '.join(known)}, got {name!r}")
    return known[name](**options)
