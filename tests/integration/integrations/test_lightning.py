"""What Lightning alone needs beside `test_contract`: refusals, and memory that runs out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning.pytorch")

from pollux.errors import PolluxAgentError  # noqa: E402
from pollux.integrations.lightning import ElasticStrategy  # noqa: E402
from tests.integration.integrations.by_lightning import Module, train  # noqa: E402
from tests.integration.integrations.inputs import QUIET, data  # noqa: E402
from tests.integration.integrations.orders import EXAMPLES, Orders  # noqa: E402


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    def fit(module: Any, **options: Any) -> None:
        trainer = lightning.Trainer(strategy=ElasticStrategy(), max_epochs=1, **QUIET, **options)
        trainer.fit(module, DataLoader(data(), batch_size=16))

    manual = Module()
    manual.automatic_optimization = False
    with pytest.raises(PolluxAgentError, match="manual optimization"):
        fit(manual)
    with pytest.raises(PolluxAgentError, match="limit_train_batches"):
        fit(Module(), limit_train_batches=2)
    with pytest.raises(PolluxAgentError, match="training to have begun"):
        ElasticStrategy().job  # noqa: B018


def test_one_rank_validates_after_its_training(ranks: Callable[..., list[Any]]) -> None:
    def body() -> int:
        trainer, module = lightning.Trainer(strategy=ElasticStrategy(), max_epochs=1, **QUIET), Module()
        trainer.fit(module, DataLoader(data(), batch_size=16))
        return len(trainer.validate(module, DataLoader(data(), batch_size=16), verbose=False))

    assert ranks(1, body) == [1]


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
        return train(tmp_path, None, Orders(), epochs=1)

    [result] = ranks(1, body)
    used = Counter(result["used"])
    assert set(used) == set(range(EXAMPLES))
    # A backward pass that fails has used its examples once in vain.
    assert sum(used.values()) == EXAMPLES + (16 if where == "backward" else 0)
    assert result["sizes"][-1] == (8, 1)
    assert result["steps"] == -(-EXAMPLES // 16)


def test_the_average_of_a_callback_follows_the_batch_size() -> None:
    """Lightning's own callback, whose decay is made for steps of M0 examples."""
    from lightning.pytorch.callbacks import EMAWeightAveraging

    seen: list[tuple[float, float]] = []

    class Watched(EMAWeightAveraging):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            job = trainer.strategy.job
            job.training.step.gain = 4.0  # as a step of a larger batch
            mean, now = (
                torch.cat([p.detach().flatten() for p in module.parameters()]).double()
                for module in (self._average_model.module, trainer.lightning_module)
            )
            first = not int(self._average_model.n_averaged)
            super().on_train_batch_end(trainer, *args)
            after = torch.cat(
                [p.detach().flatten() for p in self._average_model.module.parameters()]
            ).double()
            if not first:
                for kept in (0.9, 0.9**4):
                    seen.append((kept, float((after - (kept * mean + (1 - kept) * now)).norm())))

    trainer = lightning.Trainer(
        strategy=ElasticStrategy(max_batch_size=64), max_epochs=1, callbacks=[Watched(decay=0.9)], **QUIET
    )
    trainer.fit(Module(), DataLoader(data(), batch_size=16))
    assert max(off for kept, off in seen if kept < 0.8) < 1e-5
    assert max(off for kept, off in seen if kept == 0.9) > 1e-4
