"""A training by Lightning's Trainer under the agent, as `test_contract` wants it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning.pytorch")

from pollux.integrations.lightning import ElasticStrategy  # noqa: E402
from tests.integration.integrations.inputs import QUIET, data  # noqa: E402
from tests.integration.integrations.orders import Orders, Stop  # noqa: E402


class Module(lightning.LightningModule):  # type: ignore[misc]
    """Notes which examples were used, and at which sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.used: list[int] = []
        self.sizes: list[tuple[int, int]] = []
        self.factors: set[float] = set()
        self.validations = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, ids = batch
        job = self.trainer.strategy.job
        if job.training.data.local_samples:
            self.used += ids.tolist()
        self.sizes.append((job.local_batch, job.accumulation))
        self.factors.update(job.lr_factors)
        loss = mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validations += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(1 - n / (2 * total), 0.1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Script(lightning.Callback):  # type: ignore[misc]
    """Gives the orders."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.orders.give(trainer.strategy.job, trainer.global_step)


def train(
    directory: Path,
    checkpoints: Path | None,
    orders: Orders,
    *,
    epochs: int = 3,
    adaptive: bool = False,
    exact: bool = False,
) -> dict[str, Any]:
    os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"  # the ranks agree after every step, however fast it was
    strategy = ElasticStrategy(
        max_batch_size=64,
        per_gpu=(1, 32),
        attach={"checkpoint_dir": checkpoints, "adaptive": adaptive, "measuring": {"every": 1}},
    )
    trainer = lightning.Trainer(
        strategy=strategy,
        max_epochs=epochs,
        log_every_n_steps=1,
        gradient_clip_val=10.0,
        use_distributed_sampler=False,
        callbacks=[Script(orders)],
        **{**QUIET, "logger": lightning.loggers.CSVLogger(str(directory))},
    )
    module, stopped = Module(), False
    try:
        trainer.fit(
            module, DataLoader(data(), batch_size=16, shuffle=True), DataLoader(data(), batch_size=40)
        )
    except Stop:
        stopped = True
    job = strategy.job
    return {
        "stopped": stopped,
        "used": module.used,
        "sizes": module.sizes,
        "factors": module.factors,
        "evaluations": module.validations,
        "steps": trainer.global_step,
        "weights": [p.detach().clone().numpy() for p in module.parameters()],
        "metrics": {name: float(value) for name, value in trainer.logged_metrics.items()},
        "schedule": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        "noise": job.noise_scale,
        "finished": job.progress.finished,
    }


def assert_logged(rest: dict[str, Any]) -> None:
    """Assert what Lightning logs of a training whose last batch size is 15."""
    assert rest["metrics"]["pollux/batch_size"] == 15.0
    assert "val_loss" in rest["metrics"]


LAUNCHED = """
import lightning.pytorch as lightning
import torch
from torch.nn.functional import mse_loss
from pollux.integrations.lightning import ElasticStrategy

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(101, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True), torch.arange(101))

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(6, 1)

    def training_step(self, batch, _):
        job = self.trainer.strategy.job
        trouble(job)
        place = job.training.data
        mine = [(place.pass_index, each) for each in batch[2].tolist()] if place.local_samples else []
        note("used", who=os.getpid(), step=job.progress.optimizer_steps, samples=mine)
        return mse_loss(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self):
        self.trainer.should_stop |= enough(self.trainer.strategy.job)

    def on_validation_epoch_start(self):
        self.seen = []

    def validation_step(self, batch, _):
        self.seen += batch[2].tolist()
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

trainer = lightning.Trainer(
    accelerator="cpu",
    strategy=ElasticStrategy(attach={"adaptive": False, "checkpoint_dir": here / "checkpoints"}),
    max_epochs=EPOCHS,
    logger=False,
    default_root_dir=here / "best",
    callbacks=[lightning.callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=2)],
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)
module, Loader = Module(), torch.utils.data.DataLoader
trainer.fit(module, Loader(data, batch_size=8, shuffle=True), Loader(data, batch_size=16))
weights = [float(p.detach().double().sum()) for p in module.parameters()]
job, state = trainer.strategy.job, trainer.fit_loop.state_dict()
counted = trainer.global_step, trainer.current_epoch, job.progress.optimizer_steps, job.progress.epoch
main = trainer.is_global_zero, trainer.is_global_zero, lightning.utilities.rank_zero_only.rank == 0
note("over", weights=weights, seen=module.seen, main=main, size=trainer.world_size, counted=counted, state=state)
"""
