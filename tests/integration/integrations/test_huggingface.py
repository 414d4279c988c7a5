"""What Hugging Face's Trainer alone needs beside `test_contract`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from pollux.errors import PolluxAgentError  # noqa: E402
from pollux.integrations.huggingface import ElasticTrainer  # noqa: E402
from pollux.integrations.trainer_state import TrainerState  # noqa: E402
from tests.integration.integrations.by_trainer import KILLED, PARTS, Recording, train  # noqa: E402
from tests.integration.integrations.inputs import Numbers, model  # noqa: E402
from tests.integration.integrations.orders import EXAMPLES, Orders, each_once  # noqa: E402
from tests.unit.agent.launched_step import step  # noqa: E402


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
        return train(tmp_path, None, Orders(), epochs=1)

    [result] = ranks(1, body)
    assert Counter(result["used"]) == dict.fromkeys(range(EXAMPLES), 1)
    assert set(result["sizes"]) == {(8, 1)}
    assert result["steps"] == -(-EXAMPLES // 16)


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


def test_new_ranks_go_on_where_rank_0_is_killed_in_an_evaluation(tmp_path: Path) -> None:
    body = PARTS + KILLED.replace("WHERE", repr("evaluation"))
    with step(tmp_path, 1, body, workers=3, POLLUX_EXCHANGE_INTERVAL="0") as launched:
        assert launched.statuses() == [0], launched.output()
    over = launched.log("over")
    assert over[0]["logged"] == over[1]["logged"]
    assert {index for note in over for index in note["seen"]} == set(range(101)), "evaluated on all of it"
    each_once(launched.log("used"), 2, by="rank")


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
    each_once(base.log("used"), None, by="who")
    over = {note["node"]: note for note in base.log("over")}
    assert (over["n0"]["size"], over["n0"]["main"]) == (1, [True] * 3)
    assert over["c0"]["main"][0] is False
    assert len(base.log("started")) == 2, "rank 0 lives on"
    assert sorted(over["n0"]["seen"]) == list(range(101)), "evaluated on all of it"
