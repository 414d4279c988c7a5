"""`pollux.trial`: the same values on all ranks, and one end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.trial import TrialState
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import pollux
from pollux.errors import SearchError
from pollux.integrations import trial as trials
from pollux.search.journal import journal_path
from pollux.search.study import Search, SearchSettings


@pytest.fixture(autouse=True)
def own_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process of its own."""
    monkeypatch.setattr(trials.Trial, "current", None)


def task(folder: Path | str, number: int = 0, **more: str) -> dict[str, str]:
    own = {"SLURM_JOB_ID": f"7{number}", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(number)}
    return {**os.environ, "POLLUX_SEARCH": "s", "SLURM_SUBMIT_DIR": str(folder), **own, **more}


def search(folder: Path | str, **settings: Any) -> Search:
    return Search(journal_path("s", folder), "s", SearchSettings(**settings))


def train(folder: str, number: int, values: list[float]) -> tuple[int, float, str, bool]:
    """One task on one of several ranks, which reports a value after each epoch."""
    found = trials.trial(environ=task(folder, number))
    rate, width = found.suggest_float("rate", 0.001, 0.1, log=True), found.suggest_int("width", 2, 6)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))
    kind = found.suggest_categorical("kind", ["plain", "momentum"])
    job = pollux.attach(
        model, torch.optim.SGD(model.parameters(), rate), adaptive=False, checkpoint_dir=f"{folder}/{number}"
    )
    x = torch.randn(32, 4)
    loader = job.loader(TensorDataset(x, x.sum(1, keepdim=True)), 8, per_gpu=(1, 8))
    left = False
    try:
        for epoch in job.epochs(len(values)):
            for a, b in loader:
                job.step(lambda a=a, b=b: mse_loss(job.model(a), b))
            found.report(values[epoch] if job.is_main else -1.0)
    except SystemExit as end:
        left = end.code == 0
    if job.is_main:
        found.complete()  # type: ignore[attr-defined]  # the rank of this test ends without atexit
    return found.number or 0, rate, f"{width} {kind}", left


def test_without_a_search_the_defaults_train(tmp_path: Path) -> None:
    found = pollux.trial(environ={})
    assert found is pollux.trial()
    assert found.suggest_float("a", 1e-4, 1e-2, log=True) == pytest.approx(1e-3)
    assert found.suggest_float("b", 0.0, 1.0, step=0.25) == 0.5
    assert found.suggest_float("c", 0, 4, default=1) == 1.0
    assert found.suggest_int("d", 1, 9) == 5
    assert found.suggest_categorical("e", ["x", "y"]) == "x"
    assert found.suggest_categorical("f", ["x", "y"], default="y") == "y"
    found.report(0.5)
    assert found.number is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("suggest", "message"),
    [
        (lambda t: t.suggest_float("a", 0, 1, default=2), "expected the default of 'a' from 0 to 1, got 2"),
        (
            lambda t: t.suggest_categorical("a", ["x"], default="y"),
            "expected the default of 'a' to be one of",
        ),
    ],
)
def test_a_default_out_of_bounds_is_named(suggest: Callable[[trials.Trial], Any], message: str) -> None:
    with pytest.raises(SearchError, match=message):
        suggest(pollux.trial(environ={}))


def test_ranks_train_with_the_same_values_and_the_trial_is_complete(
    tmp_path: Path, ranks: Callable[..., list[Any]]
) -> None:
    first, second = ranks(2, train, str(tmp_path), 0, [0.1, 0.2, 0.3])
    assert first == second
    (done,) = search(tmp_path).trials()
    assert (done.state, done.value) == (TrialState.COMPLETE, 0.3)
    assert done.params["rate"] == first[1]
    assert sorted(done.intermediate_values) == list(range(1, 21))
    assert done.user_attrs["gpu_seconds"] > 0


def test_a_stopped_trial_ends_all_ranks(tmp_path: Path, ranks: Callable[..., list[Any]]) -> None:
    begun = search(tmp_path, maximize=True)
    good = begun.live(begun.begin("1_0", lambda: None))
    begun.report(good, 20, 0.9, 1.0)
    found = ranks(2, train, str(tmp_path), 1, [0.1] * 4)
    assert [left for *_, left in found] == [True, True]
    stopped = begun.trials()[1]
    assert stopped.state is TrialState.PRUNED
    assert stopped.value == 0.1, "rank 0's value counts"
    with pytest.raises(SystemExit) as end:  # a requeue that was under way
        trials.trial(environ=task(tmp_path, 1))
    assert not end.value.code
    assert len(begun.trials()) == 2


def test_a_trial_s_rank_reaches_the_scheduler_in_each_attempt(tmp_path: Path) -> None:
    begun = search(tmp_path, pruner="none")
    other = begun.live(begun.begin("1_0", lambda: None))
    begun.report(other, 20, 0.1, 1.0)
    train(str(tmp_path), 0, [0.3, 0.2])
    job = trials.trial().job
    assert job is not None
    assert job.coordinator.report()["search_rank"] == 0.5
    del job.coordinator.told["search_rank"]
    trials.trial().judge_by(job)
    assert job.coordinator.report()["search_rank"] == 0.5


def test_a_rank_of_a_companion_job_reads_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = task(tmp_path)
    rate = trials.trial(environ=environ).suggest_float("rate", 0.0, 1.0)
    monkeypatch.setattr(trials.Trial, "current", None)
    companion = {name: environ[name] for name in ("POLLUX_SEARCH", "POLLUX_SEARCH_TASK")}
    joiner = trials.trial(environ={**companion, "POLLUX_COMPANION": "x", "SLURM_JOB_ID": "99", "RANK": "0"})
    assert joiner.suggest_float("rate", 0.0, 1.0) == rate
    later: list[int] = []
    waits = threading.Thread(target=lambda: later.append(joiner.suggest_int("width", 1, 9)))
    waits.start()
    begun = search(tmp_path)
    time.sleep(0.3)
    width = begun.live(begun.trials()[0]).suggest_int("width", 1, 9)
    waits.join(10)
    assert later == [width]
    assert len(begun.trials()) == 1


def test_a_search_that_is_over_begins_no_training(tmp_path: Path) -> None:
    search(tmp_path, until=1.0)
    for environ in (task(tmp_path), task(tmp_path, RANK="1")):
        with pytest.raises(SystemExit) as end:
            trials.trial(environ=environ)
        assert not end.value.code
    assert search(tmp_path).trials() == []


def test_a_journal_that_fails_in_the_training_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Search, "report", full)
    assert train(str(tmp_path), 0, [0.1, 0.2])[3] is False
    assert "the journal of the search cannot be used, the training goes on" in caplog.text


def test_what_a_search_cannot_do_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trials.trial(environ=task(tmp_path))
    with pytest.raises(SearchError, match=r"trial\.report after pollux\.attach"):
        found.report(1.0)
    with pytest.raises(SearchError, match="the search cannot suggest 'x'"):
        found.suggest_float("x", 0.0, 1.0, log=True, default=0.5)
    monkeypatch.setattr(trials.Trial, "current", None)
    monkeypatch.setattr(trials.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SearchError, match="pip install 'optuna>=5,<6' cmaes"):
        trials.trial(environ=task(tmp_path))
