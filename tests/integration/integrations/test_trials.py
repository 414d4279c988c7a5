"""Trials of a search in the loops of other libraries."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from pollux.errors import SearchError
from pollux.integrations.trial import Trial, trial
from pollux.search.journal import journal_path
from pollux.search.study import Search
from tests.integration.integrations.inputs import QUIET, Numbers, arguments, data, model


@pytest.fixture(autouse=True)
def own_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "current", None)


def by_trainer(folder: Path, found: Trial, metric: str) -> None:
    pytest.importorskip("transformers")
    from pollux.integrations.huggingface import ElasticTrainer, TrialCallback

    args = arguments(folder, num_train_epochs=2, per_device_train_batch_size=16, eval_strategy="epoch")
    trainer = ElasticTrainer(
        model=model(),
        args=args,
        train_dataset=Numbers(),
        eval_dataset=Numbers(),
        callbacks=[TrialCallback(found, "eval_loss" if metric == "loss" else metric)],
    )
    trainer.train()


def by_lightning(folder: Path, found: Trial, metric: str) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from pollux.integrations.lightning import ElasticStrategy, TrialMonitor
    from tests.integration.integrations.by_lightning import Module

    loader = DataLoader(data(), batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=2,
        devices=1,
        strategy=ElasticStrategy(),
        callbacks=[TrialMonitor(found, "val_loss" if metric == "loss" else metric)],
        default_root_dir=folder,
        **QUIET,
    )
    trainer.fit(Module(), loader, DataLoader(data(), batch_size=16))


@pytest.mark.parametrize("train", [by_trainer, by_lightning])
def test_each_evaluation_is_reported(train: Callable[[Path, Trial, str], None], tmp_path: Path) -> None:
    task = {"SLURM_JOB_ID": "7", "POLLUX_SEARCH": "s", "SLURM_SUBMIT_DIR": str(tmp_path)}
    found = trial(environ={**os.environ, **task})
    torch.manual_seed(0)
    train(tmp_path, found, "loss")
    found.complete()  # type: ignore[attr-defined]  # as at the end of the process
    (done,) = Search(journal_path("s", tmp_path), "s").trials()
    assert done.state.name == "COMPLETE"
    assert sorted(done.intermediate_values) == list(range(1, 21))
    assert len(set(done.intermediate_values.values())) == 2, "one value per epoch"
    assert done.value == done.intermediate_values[20]


@pytest.mark.parametrize("train", [by_trainer, by_lightning])
def test_a_metric_that_is_not_there_is_named(
    train: Callable[[Path, Trial, str], None], tmp_path: Path
) -> None:
    with pytest.raises(SearchError, match=r"expected a metric 'accuracy' of this evaluation, got .*loss"):
        train(tmp_path, trial(environ={}), "accuracy")
