"""A training has one run of its tracker over restarts. The oracle is the trackers' documented variables."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pollux.training import tracked_run
from pollux.training.tracked_run import present, take_up


@pytest.fixture(autouse=True)
def no_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracked_run, "set_here", {})
    for name in ("wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def tracker(monkeypatch: pytest.MonkeyPatch, name: str, **parts: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(parts)
    monkeypatch.setitem(sys.modules, name, module)


def test_the_ids_of_both_trackers_are_saved_and_given_to_the_next_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker(monkeypatch, "wandb", run=SimpleNamespace(id="abc", sweep_id=None))
    tracker(monkeypatch, "mlflow", active_run=lambda: SimpleNamespace(info=SimpleNamespace(run_id="0f")))
    saved = present()
    assert saved == {"wandb": "abc", "mlflow": "0f"}
    for name in saved:
        monkeypatch.delitem(sys.modules, name)
    environ: dict[str, str] = {}
    assert not take_up(saved, environ)
    assert environ == {"WANDB_RUN_ID": "abc", "WANDB_RESUME": "allow", "MLFLOW_RUN_ID": "0f"}
    assert not take_up({}, environ)
    assert not environ, "the next training of the script has a run of its own"


def test_the_users_variables_stay() -> None:
    environ = {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}
    take_up({"wandb": "abc"}, environ)
    take_up({}, environ)
    assert environ == {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}


def test_a_sweeps_run_is_not_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker(monkeypatch, "wandb", run=SimpleNamespace(id="abc", sweep_id="s"))
    assert present() == {}


def test_a_run_that_was_begun_before_attach_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker(monkeypatch, "wandb", run=SimpleNamespace(id="new", sweep_id=None))
    environ: dict[str, str] = {}
    (told,) = take_up({"wandb": "abc"}, environ)
    assert "was abc" in told
    assert "after attach" in told
    assert not environ
