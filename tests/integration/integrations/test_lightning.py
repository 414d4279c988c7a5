"""Lightning under the agent, on one rank and on two.

Trainer and LightningModule are the real ones.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning.pytorch")

from pollux.errors import PolluxAgentError  # noqa: E402
from pollux.goodput import BatchChoice  # noqa: E402
from pollux.integrations.lightning import ElasticStrategy  # noqa: E402
from tests.integration.integrations.inputs import data  # noqa: E402
from tests.integration.integrations.orders import EXAMPLES, SLURM, Orders, Stop  # noqa: E402
from tests.unit.agent.launched_step import step  # noqa: E402


class Module(lightning.LightningModule):  # type: ignore[misc]
    """Notes which examples were used, and at which sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.used: list[int] = []
        self.sizes: list[tuple[int, int]] = []
        self.factors: set[float] = set()
        self.validations: list[int] = []

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
            self.validations.append(self.trainer.current_epoch)

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
    *,
    epochs: int = 3,
    choices: dict[int, BatchChoice] | None = None,
    drain_at: int | None = None,
    killed: bool = False,
    adaptive: bool = False,
) -> dict[str, Any]:
    os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"  # the ranks agree after every step, however fast it was
    strategy = ElasticStrategy(
        max_batch_size=64,
        per_gpu=(1, 32),
        attach={"checkpoint_dir": checkpoints, "adaptive": adaptive, "measure_every": 1},
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=epochs,
        logger=lightning.loggers.CSVLogger(str(directory)),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=10.0,
        use_distributed_sampler=False,
        callbacks=[Script(Orders(choices or {}, drain_at, killed))],
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
        "validations": module.validations,
        "steps": trainer.global_step,
        "weights": [p.detach().clone().numpy() for p in module.parameters()],
        "metrics": {name: float(value) for name, value in trainer.logged_metrics.items()},
        "schedule": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        "noise": job.noise_scale,
        "finished": job.progress.finished,
        "epoch": trainer.current_epoch,
    }


def test_a_training_moves_between_world_sizes_and_uses_each_example_once_per_pass(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    def first() -> Any:
        sizes = {1: BatchChoice(4, 1), 3: BatchChoice(8, 1)}
        return train(tmp_path, tmp_path / "checkpoints", choices=sizes, drain_at=6)

    def second() -> Any:
        return train(tmp_path, tmp_path / "checkpoints", choices={9: BatchChoice(5, 2)})

    def third() -> Any:
        return train(tmp_path, tmp_path / "checkpoints")

    env = {"POLLUX_DRAIN_WAIT": "0", **SLURM}
    moved = ranks(2, first, env=env)
    assert all(part["stopped"] for part in moved), "drained: checkpoint, acknowledgement, exit"
    assert {(4, 1), (8, 1)} <= set(moved[0]["sizes"])
    [rest] = ranks(1, second, env=env)
    assert not rest["stopped"]
    assert (5, 2) in rest["sizes"]
    used = Counter(moved[0]["used"] + moved[1]["used"] + rest["used"])
    assert used == dict.fromkeys(range(EXAMPLES), 3)
    assert rest["steps"] > moved[0]["steps"], "Lightning's own counts go on"
    assert moved[0]["validations"] + rest["validations"] == [0, 1, 2], "validated once after each epoch"
    assert (rest["finished"], rest["epoch"]) == (True, 3)
    assert rest["metrics"]["pollux/batch_size"] == 15.0
    assert "val_loss" in rest["metrics"]
    [again] = ranks(1, third, env=env)
    assert (again["used"], again["finished"]) == ([], True), "a finished training trains no more"


@pytest.mark.parametrize("drain_at", [4, 10])
def test_a_drain_after_an_epochs_last_step(
    ranks: Callable[..., list[Any]], tmp_path: Path, drain_at: int
) -> None:
    def body(drain_at: int | None) -> Any:
        # Obeyed after the step after the next, with which the first epoch ends, or the second and last.
        return train(tmp_path, tmp_path / "checkpoints", epochs=2, drain_at=drain_at, killed=True)

    [part], [rest] = ranks(1, body, drain_at), ranks(1, body, None)
    assert (part["stopped"], part["steps"]) == (True, drain_at + 2)
    assert (rest["steps"], rest["epoch"]) == (12, 2)
    assert part["validations"] + rest["validations"] == [0, 1], "validated once after each epoch"
    assert Counter(part["used"] + rest["used"]) == dict.fromkeys(range(EXAMPLES), 2)


def test_two_ranks_that_accumulate_train_as_one_that_does_not(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    def body(local: int, passes: int) -> Any:
        return train(tmp_path, None, choices={0: BatchChoice(local, passes - 1)})

    alone, two = ranks(1, body, 16, 1)[0], ranks(2, body, 4, 2)[0]
    assert (4, 1) in two["sizes"]
    assert alone["steps"] == two["steps"] == 3 * -(-EXAMPLES // 16)
    for one, other in zip(alone["weights"], two["weights"], strict=True):
        assert one == pytest.approx(other, abs=2e-5)
    assert alone["metrics"]["val_loss"] == pytest.approx(two["metrics"]["val_loss"], rel=1e-3)


def test_noise_learning_rate_and_schedule_follow_a_larger_batch(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    def body() -> Any:
        return train(tmp_path, None, epochs=12, choices={20: BatchChoice(32, 1)}, adaptive=True)

    [result] = ranks(1, body)
    assert result["noise"] is not None
    assert (32, 1) in result["sizes"]
    assert max(result["factors"], default=1.0) > 1.0
    planned = 12 * -(-EXAMPLES // 16)
    assert result["steps"] < planned, "larger steps, so fewer"
    # Examples by M0 at least; and the short step at a pass's end counts whole where no larger one makes up for it.
    assert 12 * EXAMPLES // 16 - 1 <= result["schedule"] <= planned + 2
    assert result["validations"] == list(range(12))


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    def fit(module: Any, **options: Any) -> None:
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy=ElasticStrategy(),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(module, DataLoader(data(), batch_size=16))

    manual = Module()
    manual.automatic_optimization = False
    with pytest.raises(PolluxAgentError, match="manual optimization"):
        fit(manual)
    with pytest.raises(PolluxAgentError, match="limit_train_batches"):
        fit(Module(), limit_train_batches=2)
    with pytest.raises(PolluxAgentError, match="training to have begun"):
        ElasticStrategy().job  # noqa: B018


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_memory_that_runs_out_becomes_smaller_passes(
    ranks: Callable[..., list[Any]], tmp_path: Path, where: str
) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if where == "forward" and len(x) > 10:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if len(gradient) > 10:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return gradient

    def body() -> Any:
        plain = Module.training_step

        def step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
            hook = self.net[0].register_forward_hook(lambda *a: Fails.apply(a[-1]))  # type: ignore[no-untyped-call]
            try:
                before = len(self.used)
                return plain(self, batch, batch_idx)
            except torch.OutOfMemoryError:
                del self.used[before:]
                raise
            finally:
                hook.remove()

        Module.training_step = step  # type: ignore[method-assign]  # in this process only
        return train(tmp_path, None, epochs=1)

    [result] = ranks(1, body)
    used = Counter(result["used"])
    assert set(used) == set(range(EXAMPLES))
    # A backward pass that fails has used its examples once in vain.
    assert sum(used.values()) == EXAMPLES + (16 if where == "backward" else 0)
    assert result["sizes"][-1] == (8, 1)
    assert result["steps"] == -(-EXAMPLES // 16)


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
        if job.progress.optimizer_steps == 5 and rank == 0 and start == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        mine = batch[2].tolist() if job.training.data.local_samples else []
        note("used", who=os.getpid(), step=job.progress.optimizer_steps, samples=mine)
        return mse_loss(self.net(batch[0]), batch[1])

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
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)
module, Loader = Module(), torch.utils.data.DataLoader
trainer.fit(module, Loader(data, batch_size=8, shuffle=True), Loader(data, batch_size=16))
weights = [float(p.detach().double().sum()) for p in module.parameters()]
note("over", weights=weights, seen=module.seen, main=trainer.is_global_zero, size=trainer.world_size)
"""


def test_new_ranks_go_on_where_rank_0_is_killed(tmp_path: Path) -> None:
    with step(tmp_path, 1, LAUNCHED, workers=3, POLLUX_EXCHANGE_INTERVAL="0") as launched:
        assert launched.statuses() == [0], launched.output()
        output = launched.output()
    over = launched.log("over")
    assert [note["size"] for note in over] == [3, 3, 3], output
    assert over[0]["weights"] == over[1]["weights"] == over[2]["weights"]
    assert {index for note in over for index in note["seen"]} == set(range(101)), "validated on all of it"
    assert len(launched.log("started")) == 6
    # Steps after the newest copy are taken twice.
    last = {(note["rank"], note["step"]): note["samples"] for note in launched.log("used")}
    counts = Counter(index for samples in last.values() for index in samples)
    assert counts == dict.fromkeys(range(101), 2)
    assert "restored the copy in memory" in output
