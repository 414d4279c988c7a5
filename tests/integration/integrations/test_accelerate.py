"""What Accelerate alone needs beside `test_contract`: mixed precision, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate")

from pollux.errors import PolluxAgentError  # noqa: E402
from pollux.integrations.accelerate import attach  # noqa: E402
from tests.integration.integrations.by_accelerate import train  # noqa: E402
from tests.integration.integrations.orders import Orders  # noqa: E402


def test_its_mixed_precision_stays(ranks: Callable[..., list[Any]]) -> None:
    def body() -> Any:
        return train(Path(), None, Orders(), precision="bf16", epochs=12)

    [result] = ranks(1, body)
    assert result["kinds"] == {torch.bfloat16}
    assert result["noise"] is not None


def test_what_cannot_work_is_refused(ranks: Callable[..., list[Any]]) -> None:
    def body() -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
        with pytest.raises(PolluxAgentError, match="gradient_accumulation_steps=1"):
            attach(accelerator, model, optimizer)
        hooked = accelerate.DistributedDataParallelKwargs(
            comm_hook=accelerate.utils.DDPCommunicationHookType.BF16
        )
        accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=[hooked])
        with pytest.raises(PolluxAgentError, match="comm_hook"):
            attach(accelerator, model, optimizer)
        accelerator = accelerate.Accelerator(cpu=True)
        with pytest.raises(PolluxAgentError, match="scheduler that was not passed"):
            attach(accelerator, model, optimizer, accelerator.prepare(scheduler))

    ranks(1, body)
