"""The rules by which trials of a search begin and end."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
from optuna.trial import TrialState

from pollux.errors import SearchError
from pollux.search.journal import journal_path
from pollux.search.study import LIMITED, STEPS, Search, SearchSettings


def search(folder: Path, **settings: object) -> Search:
    return Search(
        journal_path("s", folder), "s", SearchSettings(**{"maximize": True, "pruner": "none", **settings})
    )  # type: ignore[arg-type]


def everybody(*tasks: str) -> frozenset[str]:
    return frozenset({"1_0", "1_1", "1_2", "1_3", *tasks})


def test_an_attempt_of_a_task_goes_on_with_its_trial(tmp_path: Path) -> None:
    first = search(tmp_path)
    trial = first.live(first.begin("1_0", everybody))
    value = trial.suggest_float("lr", 1e-4, 1.0, log=True)
    first.report(trial, 3, 0.5, 10.0)
    again = search(tmp_path)
    same = again.live(again.begin("1_0", everybody))
    assert same.number == trial.number
    assert same.suggest_float("lr", 1e-4, 1.0, log=True) == value
    again.report(same, 2, 0.1, 8.0)  # of steps before: they were made twice
    again.report(same, 4, 0.6, 12.0)
    assert again.frozen(same).intermediate_values == {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.6}
    again.complete(same, 0.6)
    assert [t.state for t in search(tmp_path).trials()] == [TrialState.COMPLETE]
    assert search(tmp_path).begin("1_0", everybody).state is TrialState.COMPLETE


def test_a_trial_whose_task_is_gone_has_failed_and_no_other(tmp_path: Path) -> None:
    begun = search(tmp_path)
    for task in ("1_0", "1_1", "1_2"):
        begun.begin(task, everybody)
    begun.begin("1_3", lambda: frozenset({"1_1", "1_3"}))
    states = {t.user_attrs["task"]: t.state for t in begun.trials()}
    gone = TrialState.FAIL
    assert states == {"1_0": gone, "1_1": TrialState.RUNNING, "1_2": gone, "1_3": TrialState.RUNNING}


@pytest.mark.parametrize("answer", [None, frozenset(), frozenset({"9_9"})])
def test_an_answer_that_slurm_does_not_give_fails_nobody(
    answer: frozenset[str] | None, tmp_path: Path
) -> None:
    begun = search(tmp_path)
    begun.begin("1_0", everybody)
    begun.begin("1_1", lambda: answer)  # not even this task is in it
    assert [t.state for t in begun.trials()] == [TrialState.RUNNING] * 2


def test_a_task_that_comes_back_after_its_failure_trains_with_the_same_values(tmp_path: Path) -> None:
    begun = search(tmp_path)
    lost = begun.live(begun.begin("1_0", everybody))
    value = lost.suggest_float("lr", 0.0, 1.0)
    begun.begin("1_1", lambda: frozenset({"1_1"}))
    back = begun.live(begun.begin("1_0", everybody))
    assert back.number != lost.number
    assert back.suggest_float("lr", 0.0, 1.0) == value


@pytest.mark.parametrize("maximize", [True, False])
def test_a_rank_is_among_trials_of_the_same_progress(maximize: bool, tmp_path: Path) -> None:
    begun = search(tmp_path, maximize=maximize)
    found = [begun.live(begun.begin(f"1_{number}", everybody)) for number in range(4)]
    assert begun.rank(found[0]) is None
    for trial, (step, value) in zip(found, [(4, 0.4), (4, 0.6), (2, 0.5), (1, 0.9)], strict=True):
        begun.report(trial, step, value, 1.0)
    ranks = [begun.rank(trial) for trial in found]
    assert ranks == [0.5, 1.0, 2 / 3, 1.0] if maximize else [1.0, 0.5, 2 / 3, 0.25]


def test_asha_stops_by_progress(tmp_path: Path) -> None:
    begun = search(tmp_path, pruner="asha")
    good, bad = (begun.live(begun.begin(task, everybody)) for task in ("1_0", "1_1"))
    assert begun.report(good, 1, 0.9, 1.0) == ""
    assert "rank after 5 %" in begun.report(bad, 1, 0.1, 1.0)
    assert begun.frozen(bad).state is TrialState.PRUNED
    assert begun.frozen(bad).value == 0.1
    assert "rank" in begun.report(bad, 2, 0.9, 1.0), "who is stopped stays so"
    assert begun.report(good, STEPS, 0.9, 9.0) == ""


def test_a_trial_is_not_compared_before_it_has_made_the_progress(tmp_path: Path) -> None:
    begun = search(tmp_path, pruner="asha")
    good, slow = (begun.live(begun.begin(task, everybody)) for task in ("1_0", "1_1"))
    assert begun.report(good, 1, 0.9, 1.0) == ""
    assert begun.report(slow, 0, 0.1, 1.0) == ""
    assert begun.frozen(slow).state is TrialState.RUNNING


def test_the_median_of_trials_that_report_at_other_steps(tmp_path: Path) -> None:
    begun = search(tmp_path, pruner="median")
    for number in range(5):
        each = begun.live(begun.begin(f"1_{number}", everybody))
        begun.report(each, 6 + number, 0.8, 1.0)
        begun.complete(each, 0.8)
    worse = begun.live(begun.begin("2_0", everybody))
    assert "rank after 25 %" in begun.report(worse, 5, 0.1, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_no_number_ends_the_trial(value: float, tmp_path: Path) -> None:
    begun = search(tmp_path)
    trial = begun.live(begun.begin("1_0", everybody))
    assert str(value) in begun.report(trial, 1, value, 1.0)
    assert begun.frozen(trial).state is TrialState.PRUNED


def test_spent_gpu_hours_end_the_lower_half_and_begin_nothing(tmp_path: Path) -> None:
    begun = search(tmp_path, gpu_hours=1.0)
    tasks = [begun.live(begun.begin(f"1_{number}", everybody)) for number in range(4)]
    for number, trial in enumerate(tasks):
        assert begun.report(trial, 1, number / 10, 800.0) == ""
    assert begun.report(tasks[3], 2, 0.3, 3600.0) == "", "the best goes on"
    assert begun.report(tasks[0], 2, 0.0, 3600.0) == "the search has used its 1 GPU hours"
    late = begun.begin("1_9", everybody)
    assert late.state is TrialState.PRUNED
    assert begun.given_up() == {"the search has used its 1 GPU hours": 2}, "one ended, and one never began"
    assert len(begun.trials()) == 4
    assert begun.begin("1_3", everybody).state is TrialState.RUNNING, "an attempt is no beginning"


def test_gpu_hours_are_planned_for_the_best(tmp_path: Path) -> None:
    begun = search(tmp_path, gpu_hours=1.0)
    tasks = [begun.live(begun.begin(f"1_{number}", everybody)) for number in range(4)]
    # A whole training takes 1,600 GPU seconds of the 3,600: two trials can end.
    whys = [begun.report(trial, 5, 0.9 - number / 10, 400.0) for number, trial in enumerate(tasks)]
    assert whys == ["", "", LIMITED, LIMITED]
    assert begun.given_up() == {LIMITED: 2}
    assert begun.begin("1_4", everybody).state is TrialState.RUNNING
    assert begun.report(tasks[0], 10, 0.9, 1800.0) == ""
    assert begun.begin("1_5", everybody).state is TrialState.PRUNED, "the best one needs the rest"
    assert begun.report(tasks[1], 15, 0.8, 500.0) == LIMITED
    assert begun.report(tasks[0], 15, 0.9, 9999.0) == "", "a search without a result is a waste"


def test_until_is_planned_on_the_gpus_that_the_trials_have(tmp_path: Path) -> None:
    begun = search(tmp_path, until=time.time() + 1000)
    good, bad = (begun.live(begun.begin(task, everybody)) for task in ("1_0", "1_1"))
    # 1,000 s on 3 GPUs; the two have 950 and 2,850 GPU seconds to go.
    assert begun.report(good, 1, 0.9, 50.0, 1) == ""
    assert begun.report(bad, 1, 0.5, 150.0, 2) == LIMITED


def test_until_gives_up_what_begins_too_late(tmp_path: Path) -> None:
    begun = search(tmp_path, until=time.time() - 1)
    assert begun.begin("1_0", everybody).state is TrialState.PRUNED
    assert sum(begun.given_up().values()) == 1
    begun.resume(gpu_hours=None, until=None, queue=None)
    assert begun.begin("1_1", everybody).state is TrialState.RUNNING


def test_a_search_stops_and_goes_on(tmp_path: Path) -> None:
    begun, other = search(tmp_path, trials=3), search(tmp_path)
    trial = begun.live(begun.begin("1_0", everybody))
    done = begun.live(begun.begin("1_1", everybody))
    begun.complete(done, 0.7)
    other.stop()
    assert begun.report(trial, 1, 0.9, 1.0) == "the search was stopped"
    assert begun.begin("1_2", everybody).state is TrialState.PRUNED
    other.resume(gpu_hours=None, until=None, queue=None)
    assert other.settings.trials - other.count() == 2  # type: ignore[operator]
    assert other.begin("2_0", everybody).state is TrialState.RUNNING
    other.resume(gpu_hours=None, until=None, queue=None)
    assert other.trials()[-1].state is TrialState.RUNNING, "Slurm did not answer"
    other.resume(gpu_hours=None, until=None, queue=frozenset({"2_9"}))
    assert other.trials()[-1].state is TrialState.FAIL


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid", "cma"])
def test_every_sampler_chooses_within_bounds(sampler: str, tmp_path: Path) -> None:
    begun = search(tmp_path, sampler=sampler)
    seen = set()
    for number in range(6):
        trial = begun.live(begun.begin(f"1_{number}", everybody))
        seen.add((trial.suggest_float("x", 0.0, 1.0, step=0.5), trial.suggest_int("n", 1, 2)))
        begun.complete(trial, float(number))
    assert seen <= {(x, n) for x in (0.0, 0.5, 1.0) for n in (1, 2)}
    assert len(seen) == 6 or sampler != "grid"
    best = begun.best()
    assert best is not None
    assert best.value == 5.0


@pytest.mark.parametrize("pruner", ["asha", "hyperband", "median", "none"])
def test_every_pruner_stops_the_worst_or_nobody(pruner: str, tmp_path: Path) -> None:
    begun = search(tmp_path, pruner=pruner, sampler="random")
    why = {}
    for number in range(12):
        trial = begun.live(begun.begin(f"1_{number}", everybody))
        trial.suggest_float("x", 0.0, 1.0)
        value = (number * 5 % 12) / 12
        why[number] = next(
            (w for step in range(1, STEPS + 1) if (w := begun.report(trial, step, value, 1.0))), ""
        )
        if not why[number]:
            begun.complete(trial, value)
    best = begun.best()
    assert best is not None
    assert best.value == 11 / 12
    assert any(why.values()) is (pruner != "none")


def test_a_training_without_a_value_has_failed(tmp_path: Path) -> None:
    begun = search(tmp_path)
    trial = begun.live(begun.begin("1_0", everybody))
    begun.complete(trial, None)
    assert begun.trials()[0].state is TrialState.FAIL


def test_what_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SearchError, match="sampler of a search to be one of tpe, random, grid, cma, got 'best'"
    ):
        search(tmp_path, sampler="best")
