"""Trainer's and Lightning's logs show the learning rate in use."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from pollux.goodput import BatchChoice
from tests.integration.integrations.inputs import QUIET, Numbers, arguments, data, model

ATTACH = {"scaling": lambda scale, noise: scale, "adaptive": True}


def watch(job: Any, seen: list[float]) -> None:
    """Double the batch size, and note what the optimizer sees."""
    job.training.choice = BatchChoice(job.training.limits.initial, 1)
    job.optimizer.register_step_pre_hook(lambda *_: seen.append(job.optimizer.param_groups[0]["lr"]))


def by_lightning(folder: str) -> tuple[list[float], list[list[float]]]:
    """Return what the optimizer saw, and what each column has."""
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger

    from pollux.integrations.lightning import ElasticStrategy

    seen: list[float] = []

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(6, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return mse_loss(self.net(batch[0]), batch[1])

        def on_train_epoch_start(self) -> None:
            watch(self.trainer.strategy.job, seen)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    trainer = lightning.Trainer(
        strategy=ElasticStrategy(max_batch_size=64, per_gpu=(1, 16), attach=ATTACH),
        max_epochs=1,
        log_every_n_steps=1,
        callbacks=[LearningRateMonitor(logging_interval="step")],
        **{**QUIET, "logger": CSVLogger(folder)},
    )
    trainer.fit(Module(), DataLoader(data(), 16))
    with open(next(Path(folder).rglob("metrics.csv"))) as file:
        rows = list(csv.DictReader(file))
    columns = ("lr-SGD", "pollux/lr/0")
    return seen, [[float(row[column]) for row in rows if row.get(column)] for column in columns]


def test_lightnings_monitor_logs_the_rate_in_use(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    ((seen, columns),) = ranks(1, by_lightning, str(tmp_path))
    for logged in columns:
        assert logged == pytest.approx(seen[: len(logged)])
        assert logged[0] == pytest.approx(0.1)
        assert len(logged) >= len(seen) - 1


def by_trainer(folder: str) -> tuple[list[float], list[float]]:
    """Return what the optimizer saw, and what the log has."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    from pollux.integrations.huggingface import ElasticTrainer

    seen: list[float] = []

    class Start(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        trainer: Any

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watch(self.trainer.job, seen)

    start = Start()
    trainer = ElasticTrainer(
        model=model(),
        args=arguments(
            folder, per_device_train_batch_size=16, num_train_epochs=1, learning_rate=0.01, logging_steps=1
        ),
        train_dataset=Numbers(),
        max_batch_size=64,
        attach=ATTACH,
        callbacks=[start],
    )
    start.trainer = trainer
    trainer.train()
    return seen, [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]


def test_trainer_logs_the_rate_in_use(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ((seen, logged),) = ranks(1, by_trainer, str(tmp_path))
    assert logged == pytest.approx(seen)
    assert logged[0] == pytest.approx(0.02)
