"""Hugging Face Trainer under the agent, on one rank and on two.

The Trainer is real. Its model is a small BERT that this file builds.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from pollux.errors import PolluxAgentError  # noqa: E402
from pollux.goodput import BatchChoice  # noqa: E402
from pollux.integrations.huggingface import ElasticTrainer  # noqa: E402
from pollux.integrations.trainer_state import TrainerState  # noqa: E402
from tests.integration.integrations.inputs import BASE, Numbers, model  # noqa: E402
from tests.integration.integrations.orders import EXAMPLES, SLURM, Orders, Stop  # noqa: E402
from tests.unit.agent.launched_step import step  # noqa: E402


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
    output: str,
    checkpoints: str | None,
    *,
    epochs: float = 3,
    choices: dict[int, BatchChoice] | None = None,
    drain_at: int | None = None,
    killed: bool = False,
    adaptive: bool = False,
    **options: Any,
) -> dict[str, Any]:
    os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"  # the ranks agree after every step, however fast it was
    script = Script(Orders(choices or {}, drain_at, killed))
    args = transformers.TrainingArguments(
        output,
        use_cpu=True,
        per_device_train_batch_size=16,
        num_train_epochs=epochs,
        learning_rate=1e-3,
        warmup_steps=2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        eval_strategy="epoch",
        disable_tqdm=True,
        seed=5,
        **options,
    )
    trainer = Recording(
        model=model(),
        args=args,
        train_dataset=Numbers(),
        eval_dataset=Numbers(),
        callbacks=[script],
        max_batch_size=64,
        per_gpu=(1, 32),
        attach={"checkpoint_dir": checkpoints, "adaptive": adaptive, "measure_every": 1},
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
        "committed": job.progress.samples,
        "sizes": trainer.sizes,
        "steps": trainer.state.global_step,
        "weights": [p.detach().clone().numpy() for p in trainer.model.parameters()],
        "logs": trainer.state.log_history,
        "epoch": job.progress.epoch,
        "schedule": trainer.lr_scheduler.last_epoch,
        "evaluations": trainer.evaluations,
        "noise": job.noise_scale,
        "factors": script.factors,
        "finished": job.progress.finished,
    }


def test_a_training_moves_between_world_sizes_and_uses_each_example_once_per_pass(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    def first() -> Any:
        sizes = {1: BatchChoice(4, 1), 3: BatchChoice(8, 1)}
        return train(str(tmp_path / "out"), str(tmp_path / "checkpoints"), choices=sizes, drain_at=6)

    def second() -> Any:
        return train(str(tmp_path / "out"), str(tmp_path / "checkpoints"), choices={9: BatchChoice(5, 2)})

    def third() -> Any:
        return train(str(tmp_path / "out"), str(tmp_path / "checkpoints"))

    env = {"POLLUX_DRAIN_WAIT": "0", **SLURM}
    moved = ranks(2, first, env=env)
    assert all(part["stopped"] for part in moved), "drained: checkpoint, acknowledgement, exit"
    assert {(4, 1), (8, 1)} <= set(moved[0]["sizes"])
    [rest] = ranks(1, second, env=env)
    assert not rest["stopped"]
    assert (5, 2) in rest["sizes"]
    used = Counter(moved[0]["used"] + moved[1]["used"] + rest["used"])
    assert used == dict.fromkeys(range(EXAMPLES), 3)
    assert rest["steps"] > moved[0]["steps"], "Trainer's own counts go on"
    assert [entry["step"] for entry in rest["logs"] if "loss" in entry] == list(range(1, rest["steps"] + 1))
    assert rest["finished"]
    assert moved[0]["evaluations"] + rest["evaluations"] == 3, "one evaluation per epoch"
    logged = [entry for entry in rest["logs"] if "loss" in entry]
    assert {entry["pollux/batch_size"] for entry in logged} >= {16.0, 32.0, 15.0}
    assert all("pollux/goodput" in entry for entry in logged)
    [again] = ranks(1, third, env=env)
    assert (again["used"], again["finished"]) == ([], True), "a finished training trains no more"


def test_a_drain_after_an_epochs_last_step_leaves_its_evaluation_due(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    def body(drain_at: int | None) -> Any:
        # Asked for at the fifth step, obeyed after the sixth, with which the first epoch ends.
        return train(str(tmp_path / "out"), str(tmp_path / "c"), epochs=2, drain_at=drain_at, killed=True)

    [part], [rest] = ranks(1, body, 4), ranks(1, body, None)
    assert (part["stopped"], part["steps"], part["evaluations"]) == (True, 6, 0)
    assert (rest["steps"], rest["evaluations"], rest["finished"]) == (12, 2, True)
    assert Counter(part["used"] + rest["used"]) == dict.fromkeys(range(EXAMPLES), 2)


def test_an_evaluation_s_loss_does_not_depend_on_the_number_of_ranks(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    def body() -> float:
        args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
        loss: float = ElasticTrainer(model=model(), args=args).evaluate(Numbers())["eval_loss"]
        return loss

    [alone], others = ranks(1, body), ranks(2, body)
    assert others == pytest.approx([alone] * 2, rel=1e-3)


def test_callbacks_with_a_state_go_on_from_it(tmp_path: Path) -> None:
    def patient() -> Any:
        args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
        return ElasticTrainer(
            model=model(), args=args, callbacks=[transformers.EarlyStoppingCallback(n) for n in (3, 5)]
        )

    def impatience(trainer: Any) -> list[int]:
        found = trainer.callback_handler.callbacks
        return [
            c.early_stopping_patience_counter
            for c in found
            if isinstance(c, transformers.EarlyStoppingCallback)
        ]

    before, after = patient(), patient()
    for counter, callback in enumerate(before.callback_handler.callbacks):
        if isinstance(callback, transformers.EarlyStoppingCallback):
            callback.early_stopping_patience_counter = counter
    TrainerState(after).load_state_dict(TrainerState(before).state_dict())
    assert impatience(after) == impatience(before) != [0, 0]


def test_two_ranks_that_accumulate_train_as_one_that_does_not(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    def body(local: int, passes: int) -> Any:
        sizes = {0: BatchChoice(local, passes - 1)}
        # Not Adam: it would make as much of rounding, where a gradient is zero by nature, as of a gradient.
        return train(str(tmp_path), None, epochs=1, choices=sizes, optim="sgd")

    alone, two = ranks(1, body, 16, 1)[0], ranks(2, body, 4, 2)[0]
    assert (4, 1) in two["sizes"]
    assert alone["steps"] == two["steps"] == -(-EXAMPLES // 16)
    for one, other in zip(alone["weights"], two["weights"], strict=True):
        assert one == pytest.approx(other, abs=2e-5)
    assert alone["logs"][-1].get("train_loss") is not None


def test_noise_learning_rate_and_schedule_follow_a_larger_batch(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    def body() -> Any:
        return train(str(tmp_path), None, epochs=12, choices={20: BatchChoice(32, 1)}, adaptive=True)

    [result] = ranks(1, body)
    assert result["noise"] is not None
    assert (32, 1) in result["sizes"]
    assert max(result["factors"], default=1.0) > 1.0
    planned = 12 * -(-EXAMPLES // 16)
    assert result["steps"] < planned, "larger steps, so fewer"
    # Examples by M0 at least; and the short step at a pass's end counts whole where no larger one makes up for it.
    assert 12 * EXAMPLES // 16 - 1 <= result["schedule"] <= planned + 2


def test_what_cannot_work_is_refused(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    def make(**options: Any) -> ElasticTrainer:
        args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **options)
        return ElasticTrainer(model=model(), args=args, train_dataset=Numbers())

    def body() -> None:
        with pytest.raises(PolluxAgentError, match="auto_find_batch_size"):
            make(auto_find_batch_size=True)
        with pytest.raises(PolluxAgentError, match="agent's own checkpoints"):
            make().train(resume_from_checkpoint=True)
        with pytest.raises(PolluxAgentError, match="training to have begun"):
            make().job  # noqa: B018

    ranks(1, body)  # not here: Accelerate keeps its state for the life of a process


def test_memory_that_runs_out_becomes_smaller_passes(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    def body() -> Any:
        plain = Recording.compute_loss

        def fails(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if model.training and len(inputs["labels"]) > 10:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return plain(self, model, inputs, *args, **kwargs)

        Recording.compute_loss = fails  # type: ignore[method-assign]  # in this process only
        return train(str(tmp_path), None, epochs=1)

    [result] = ranks(1, body)
    assert Counter(result["used"]) == dict.fromkeys(range(EXAMPLES), 1)
    assert set(result["sizes"]) == {(8, 1)}
    assert result["steps"] == -(-EXAMPLES // 16)


PARTS = """
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
            self.trouble()
            place = job.training.data
            mine = [(place.pass_index, each) for each in numbers] if place.local_samples else []
            note("used", who=os.getpid(), step=job.progress.optimizer_steps, samples=mine)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def trouble(self): ...

    def evaluate(self, *args, **kwargs):
        self.seen = []
        return super().evaluate(*args, **kwargs)

def make(kind, epochs, *callbacks):
    arguments = TrainingArguments(
        output_dir=str(here / "out"),
        per_device_train_batch_size=8,
        num_train_epochs=epochs,
        use_cpu=True,
        save_strategy="no",
        eval_strategy="epoch",
        report_to=[],
    )
    attach = {"adaptive": False, "checkpoint_dir": here / "checkpoints"}
    data = {"train_dataset": Data(), "eval_dataset": Data()}
    return kind(model=Net(), args=arguments, attach=attach, callbacks=list(callbacks), **data)

def over(trainer):
    logged = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    weights = [float(p.detach().double().sum()) for p in trainer.model.parameters()]
    main = trainer.state.is_world_process_zero, trainer.args.should_log, trainer.accelerator.is_local_main_process
    note("over", weights=weights, seen=trainer.seen, main=main, size=trainer.args.world_size, logged=logged)
"""

KILLED = """
class Killed(Recording):
    def trouble(self):
        if WHERE == "pass" and self.job.progress.optimizer_steps == 5 and rank == 0 and start == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def prediction_step(self, *args, **kwargs):
        if WHERE == "evaluation" and rank == 0 and start == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prediction_step(*args, **kwargs)

trainer = make(Killed, 2)
trainer.train()
over(trainer)
"""

RESIZED = """
from pollux.loop import job as loop
from pollux.resize import resizer
from pollux.resize.capability import ResizeCapability, obstacle_in_place
from pollux.scheduler.orders import ResizeOrder

def capability(training, *_):
    return ResizeCapability.REQUEUE if obstacle_in_place(training) else ResizeCapability.IN_PLACE

resizer.capability_of = capability
loop.may_grow = lambda world, _: not world.distributed
os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"
ORDERS = {
    1: {"id": 1, "path": "resize", "kind": "grow", "nodes": ["n0", "c0"], "gpus_per_node": 1, "nonce": "5eed"},
    2: {"id": 2, "path": "resize", "kind": "shrink", "nodes": ["n0"], "gpus_per_node": 1},
}

class Orders(TrainerCallback):
    asked = since = 0

    def on_step_begin(self, args, state, control, **_):
        job = trainer.job
        time.sleep(0.02)
        generation = job.coordinator.groups.generation
        if job.is_main and generation == self.asked < 2:
            self.since += 1
            if self.since == 20:
                self.since, self.asked = 0, self.asked + 1
                job.coordinator.inbox.put(ResizeOrder(ORDERS[self.asked]))

    def on_epoch_end(self, args, state, control, **_):
        if trainer.job.coordinator.groups.generation == 2:
            control.should_training_stop = True

trainer = make(Recording, 1000, Orders())
try:
    trainer.train()
finally:
    over(trainer)
"""

SBATCH = """#!/bin/sh
cat > {folder}/submitted
echo "$@" > {folder}/options
echo 4711
"""


def each_once(launched: Any, *, passes: int | None = None, by: str = "who") -> None:
    """Assert that each sample is part of one step in each whole pass."""
    # Steps after the newest copy are taken twice.
    last = {(note[by], note["step"]): note["samples"] for note in launched.log("used")}
    counts = Counter(tuple(sample) for samples in last.values() for sample in samples)
    passes = max(number for number, _ in counts) if passes is None else passes
    assert passes >= 2
    assert max(counts.values()) == 1
    assert all(counts[(number, index)] == 1 for number in range(passes) for index in range(101))


@pytest.mark.parametrize("where", ["pass", "evaluation"])
def test_new_ranks_go_on_where_rank_0_is_killed(where: str, tmp_path: Path) -> None:
    body = PARTS + KILLED.replace("WHERE", repr(where))
    with step(tmp_path, 1, body, workers=3, POLLUX_EXCHANGE_INTERVAL="0") as launched:
        assert launched.statuses() == [0], launched.output()
        output = launched.output()
    over = launched.log("over")
    assert [note["size"] for note in over] == [3, 3, 3], output
    assert over[0]["weights"] == over[1]["weights"] == over[2]["weights"]
    assert over[0]["logged"] == over[1]["logged"]
    assert {index for note in over for index in note["seen"]} == set(range(101)), "evaluated on all of it"
    assert len(launched.log("started")) == 6
    each_once(launched, passes=2, by="rank")
    assert "restored the copy in memory" in output


@pytest.mark.slow
def test_a_trainer_on_one_rank_grows_and_shrinks_in_place(tmp_path: Path) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(SBATCH.format(folder=tmp_path))
    sbatch.chmod(0o755)
    with step(tmp_path, 1, PARTS + RESIZED, workers=1) as base:
        base.until((tmp_path / "options").exists)
        file, elsewhere = tmp_path / "checkpoints" / "companion-1.json", tmp_path / "companion"
        elsewhere.mkdir()
        with step(
            elsewhere, 1, "", "--companion", str(file), settings="sibling=60", SLURMD_NODENAME="c0"
        ) as companion:
            assert base.statuses() == [0], base.output() + companion.output()
            assert companion.statuses() == [0], companion.output()
            output = base.output() + companion.output()
    assert output.count("resized in place") == 2, output
    each_once(base)
    over = {note["node"]: note for note in base.log("over")}
    assert (over["n0"]["size"], over["n0"]["main"]) == (1, [True] * 3)
    assert over["c0"]["main"][0] is False
    assert len(base.log("started")) == 2, "rank 0 lives on"
    assert sorted(over["n0"]["seen"]) == list(range(101)), "evaluated on all of it"
