"""A training by Hugging Face's Trainer under the agent, as `test_contract` wants it.

The Trainer is real. Its model is a small BERT.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from pollux.integrations.huggingface import ElasticTrainer  # noqa: E402
from tests.integration.integrations.inputs import BASE, Numbers, arguments, model  # noqa: E402
from tests.integration.integrations.orders import Orders, Stop  # noqa: E402


class Script(transformers.TrainerCallback):  # type: ignore[misc]
    """Gives the orders, and notes the learning rate's factors."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.trainer: Any = None
        self.factors: set[float] = set()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.orders.give(self.trainer.job, state.global_step)
        self.factors.update(self.trainer.job.lr_factors)


class Recording(ElasticTrainer):
    """Notes which examples each step used, and at which sizes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.used: list[int] = []
        self.sizes: list[tuple[int, int]] = []
        self.evaluations = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_in_train and model.training and self.job.training.data.local_samples:
            ids = inputs["input_ids"]
            self.used += ((ids[:, 0] - 1) * BASE + ids[:, 1] - 1).tolist()
        if model.training:
            self.sizes.append((self.job.local_batch, self.job.accumulation))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.evaluations += 1
        return super().evaluate(*args, **kwargs)


def train(
    output: Path,
    checkpoints: Path | None,
    orders: Orders,
    *,
    epochs: int = 3,
    adaptive: bool = False,
    exact: bool = False,
) -> dict[str, Any]:
    os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"  # the ranks agree after every step, however fast it was
    script = Script(orders)
    args = arguments(
        output,
        per_device_train_batch_size=16,
        num_train_epochs=epochs,
        learning_rate=1e-3,
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="epoch",
        seed=5,
        # Adam makes as much of rounding, where a gradient is zero by nature, as of a gradient.
        optim="sgd" if exact else "adamw_torch",
    )
    trainer = Recording(
        model=model(),
        args=args,
        train_dataset=Numbers(),
        eval_dataset=Numbers(),
        callbacks=[script],
        max_batch_size=64,
        per_gpu=(1, 32),
        attach={"checkpoint_dir": checkpoints, "adaptive": adaptive, "measuring": {"every": 1}},
    )
    script.trainer = trainer
    stopped = False
    try:
        trainer.train()
    except Stop:
        stopped = True
    job = trainer.job
    return {
        "stopped": stopped,
        "used": trainer.used,
        "sizes": trainer.sizes,
        "steps": trainer.state.global_step,
        "weights": [p.detach().clone().numpy() for p in trainer.model.parameters()],
        "logs": trainer.state.log_history,
        "schedule": trainer.lr_scheduler.last_epoch,
        "evaluations": trainer.evaluations,
        "noise": job.noise_scale,
        "factors": script.factors,
        "finished": job.progress.finished,
    }


def assert_logged(rest: dict[str, Any]) -> None:
    """Assert what Trainer logs of a training whose last batch size is 15."""
    logged = [entry for entry in rest["logs"] if "loss" in entry]
    assert [entry["step"] for entry in logged] == list(range(1, rest["steps"] + 1))
    assert {entry["pollux/batch_size"] for entry in logged} >= {16.0, 32.0, 15.0}
    assert all("pollux/goodput" in entry for entry in logged)


LAUNCHED = """
import torch
from transformers import TrainerCallback, TrainingArguments
from pollux.integrations.huggingface import ElasticTrainer

torch.set_num_threads(1)
torch.manual_seed(0)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 101

    def __getitem__(self, index):
        x = torch.full((4,), index / 101)
        return {"x": x, "labels": x.sum().reshape(1), "number": index}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels, number):
        y = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}

class Recording(ElasticTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        job, numbers = self.job, inputs["number"].tolist()
        if not model.training:
            self.seen += numbers
        else:
            trouble(job)
            place = job.training.data
            mine = [(place.pass_index, each) for each in numbers] if place.local_samples else []
            note("used", who=os.getpid(), step=job.progress.optimizer_steps, samples=mine)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def prediction_step(self, *args, **kwargs):
        trouble(self.job, "evaluation")
        return super().prediction_step(*args, **kwargs)

    def evaluate(self, *args, **kwargs):
        self.seen = []
        return super().evaluate(*args, **kwargs)

class Enough(TrainerCallback):
    def on_epoch_end(self, args, state, control, **_):
        control.should_training_stop |= enough(trainer.job)

arguments = TrainingArguments(
    output_dir=str(here / "out"),
    per_device_train_batch_size=8,
    num_train_epochs=EPOCHS,
    use_cpu=True,
    save_strategy="no",
    eval_strategy="epoch",
    report_to=[],
)
attach = {"adaptive": False, "checkpoint_dir": here / "checkpoints"}
data = {"train_dataset": Data(), "eval_dataset": Data()}
trainer = Recording(model=Net(), args=arguments, attach=attach, callbacks=[Enough()], **data)
trainer.train()
logged = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
weights = [float(p.detach().double().sum()) for p in trainer.model.parameters()]
main = trainer.state.is_world_process_zero, trainer.args.should_log, trainer.accelerator.is_local_main_process
note("over", weights=weights, seen=trainer.seen, main=main, size=trainer.args.world_size, logged=logged)
"""
