"""An Accelerate script under the agent.

The script runs on one rank and on two, resumes on another number of ranks, and trains in bfloat16.
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
from torch.utils.data import TensorDataset

accelerate = pytest.importorskip("accelerate")

from pollux.errors import PolluxAgentError  # noqa: E402
from pollux.goodput import BatchChoice  # noqa: E402
from pollux.integrations.accelerate import attach  # noqa: E402
from pollux.scheduler.orders import DrainOrder  # noqa: E402
from tests.integration.integrations.orders import EXAMPLES  # noqa: E402
from tests.unit.agent.launched_step import step  # noqa: E402


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(EXAMPLES, 6, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True), torch.arange(EXAMPLES))


def train(
    checkpoints: Path | None,
    choices: dict[int, BatchChoice],
    drain_at: int | None,
    *,
    precision: str = "no",
    epochs: int = 3,
) -> dict[str, Any]:
    os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"  # the ranks agree after every step, however fast it was
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.99**n)
    optimizer = accelerator.prepare(optimizer)
    job = attach(
        accelerator, model, optimizer, scheduler, checkpoint_dir=checkpoints, adaptive=False, measure_every=1
    )
    loader = job.loader(data(), 16, max_batch_size=64, per_gpu=(1, 32))
    used: list[int] = []
    sizes, kinds = [], set()
    for _ in job.epochs(epochs):
        for x, y, ids in loader:
            step = job.progress.optimizer_steps
            if job.coordinator.drains.followed:
                return {"used": used, "sizes": sizes, "steps": step}
            if job.is_main and step in choices:
                job.training.advisor.proposal = choices[step]
            if job.is_main and step == drain_at:
                job.coordinator.inbox.put(DrainOrder(7))
            with job.micro_batch():
                out = job.model(x)
                with accelerator.autocast():
                    kinds.add(model[0](x).dtype)
                job.backward(mse_loss(out.float(), y))
            used += ids.tolist() if job.training.data.local_samples else []
            sizes.append((job.local_batch, job.accumulation))
            if job.sync_gradients:
                accelerator.clip_grad_norm_(job.model.parameters(), 10.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    job.close()
    return {
        "used": used,
        "sizes": sizes,
        "steps": job.progress.optimizer_steps,
        "finished": job.progress.finished,
        "noise": job.noise_scale,
        "kinds": kinds,
        "weights": [p.detach().clone().numpy() for p in model.parameters()],
    }


def test_a_training_moves_between_world_sizes_and_uses_each_example_once_per_pass(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    env = {"POLLUX_DRAIN_WAIT": "0"}
    moved = ranks(2, train, tmp_path, {1: BatchChoice(4, 1), 3: BatchChoice(8, 1)}, 6, env=env)
    assert {(4, 1), (8, 1)} <= set(moved[0]["sizes"])
    assert "finished" not in moved[0], "drained: checkpoint, acknowledgement, exit"
    [rest] = ranks(1, train, tmp_path, {9: BatchChoice(5, 2)}, None, env=env)
    assert (5, 2) in rest["sizes"]
    assert Counter(moved[0]["used"] + moved[1]["used"] + rest["used"]) == dict.fromkeys(range(EXAMPLES), 3)
    assert rest["finished"]


def test_two_ranks_that_accumulate_train_as_one_that_does_not(ranks: Callable[..., list[Any]]) -> None:
    alone = ranks(1, train, None, {}, None)[0]
    two = ranks(2, train, None, {0: BatchChoice(4, 1)}, None)[0]
    assert (4, 1) in two["sizes"]
    for one, other in zip(alone["weights"], two["weights"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_its_mixed_precision_stays(ranks: Callable[..., list[Any]]) -> None:
    def body() -> Any:
        return train(None, {}, None, precision="bf16", epochs=12)

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


LAUNCHED = """
import accelerate
import torch
from pollux.integrations.accelerate import attach

torch.set_num_threads(1)
torch.manual_seed(0)
accelerator = accelerate.Accelerator(cpu=True)
network = torch.nn.Linear(6, 1)
optimizer = accelerator.prepare(torch.optim.SGD(network.parameters(), lr=0.01))
x = torch.randn(101, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True), torch.arange(101))
held_out = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=8))
job = attach(accelerator, network, optimizer, adaptive=False, checkpoint_dir=here / "checkpoints")
loader = job.loader(data, 8)
for epoch in job.epochs(2):
    for a, b, ids in loader:
        if job.progress.optimizer_steps == 5 and rank == 0 and start == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        job.step(lambda: torch.nn.functional.mse_loss(job.model(a), b))
    seen = [accelerator.gather_for_metrics(ids) for _, _, ids in held_out]
accelerator.wait_for_everyone()
main = accelerator.is_main_process, accelerator.is_local_main_process, accelerator.process_index == 0
note("over", seen=torch.cat(seen).tolist(), main=main, size=accelerator.num_processes)
"""


@pytest.mark.slow
def test_new_ranks_go_on_where_rank_0_is_killed(tmp_path: Path) -> None:
    with step(tmp_path, 1, LAUNCHED, workers=3, POLLUX_EXCHANGE_INTERVAL="0") as launched:
        assert launched.statuses() == [0], launched.output()
    over = launched.log("over")
    assert [note["size"] for note in over] == [3, 3, 3]
    assert "restored the copy in memory" in launched.output()
    for note in over:
        assert sorted(note["seen"]) == list(range(101)), "each once, gathered of all ranks"
    assert len(launched.log("started")) == 6
