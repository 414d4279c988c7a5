"""What Hugging Face's Trainer alone needs beside `test_contract`."""

from __future__ import annotations

import functools
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
from tests.integration.integrations.by_trainer import LAUNCHED, Recording, train  # noqa: E402
from tests.integration.integrations.inputs import Numbers, arguments, model  # noqa: E402
from tests.integration.integrations.orders import EXAMPLES, KILLED, Orders, each_once  # noqa: E402
from tests.unit.agent.launched_step import step  # noqa: E402


def test_an_evaluation_s_loss_does_not_depend_on_the_number_of_ranks(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    def body() -> float:
        trainer = ElasticTrainer(model=model(), args=arguments(tmp_path))
        loss: float = trainer.evaluate(Numbers())["eval_loss"]
        return loss

    [alone], others = ranks(1, body), ranks(2, body)
    assert others == pytest.approx([alone] * 2, rel=1e-3)


def test_callbacks_with_a_state_go_on_from_it(tmp_path: Path) -> None:
    def patient() -> Any:
        stopping = [transformers.EarlyStoppingCallback(n) for n in (3, 5)]
        return ElasticTrainer(model=model(), args=arguments(tmp_path), callbacks=stopping)

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
        return ElasticTrainer(model=model(), args=arguments(tmp_path, **options), train_dataset=Numbers())

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


def test_new_ranks_go_on_where_rank_0_is_killed_in_an_evaluation(tmp_path: Path) -> None:
    body = KILLED.replace("WHERE", repr("evaluation")) + LAUNCHED
    with step(tmp_path, 1, body, workers=3, POLLUX_EXCHANGE_INTERVAL="0") as launched:
        assert launched.statuses() == [0], launched.output()
    over = launched.log("over")
    assert over[0]["logged"] == over[1]["logged"]
    assert {index for note in over for index in note["seen"]} == set(range(101)), "evaluated on all of it"
    each_once(launched.log("used"), 2, by="rank")


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sixteen sequences. In each, another number of tokens has a label."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + 12) % 32
        return {"input_ids": tokens, "labels": torch.where(torch.arange(12) < 2 + index // 2, tokens, -100)}


def by_language_model(
    folder: Path, kind: type, ranks: int, *, lora: bool = False, sharded: bool = False
) -> Any:
    """Return the weights after three steps over all sentences, and the evaluation's loss."""
    elastic = kind is ElasticTrainer
    args = arguments(
        folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1 if elastic else 4,
        num_train_epochs=3,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.3,
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model: Any = transformers.LlamaForCausalLM(config)
    if lora:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4))
    if sharded:
        from torch.distributed.fsdp import fully_shard

        assert args.device.type == "cpu"  # forms the process group
        fully_shard(model.model.layers[0])
        fully_shard(model)
    more = {"batch_size": 16, "per_gpu": (1, 5 - ranks), "attach": {"adaptive": False}} if elastic else {}
    trainer = kind(model=model, args=args, train_dataset=Sentences(), **more)
    trainer.train()
    loss = trainer.evaluate(Sentences())["eval_loss"]
    if sharded:
        trainer.save_model(str(folder / "saved"))
        torch.distributed.barrier()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "saved")
    return [p.detach().clone() for p in model.parameters()], loss


@pytest.mark.parametrize("variant", ["whole", "lora", "sharded"])
def test_a_language_model_s_loss_is_the_mean_over_all_tokens(
    ranks: Callable[..., list[Any]], tmp_path: Path, variant: str
) -> None:
    options = {variant: True} if variant != "whole" else {}
    if options.get("lora"):
        pytest.importorskip("peft")
    if options.get("sharded") and torch.__version__ < "2.13":
        pytest.skip("fully_shard is supported from torch 2.13 on")

    def body(kind: type, size: int, **more: bool) -> Any:
        return by_language_model(tmp_path, kind, size, **more)

    [(wanted, loss)] = ranks(1, functools.partial(body, lora=variant == "lora"), transformers.Trainer, 1)
    for size in (2,) if variant == "sharded" else (1, 2):
        for weights, found in ranks(size, functools.partial(body, **options), ElasticTrainer, size):
            assert found == pytest.approx(loss, rel=1e-5)
            for a, b in zip(weights, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
