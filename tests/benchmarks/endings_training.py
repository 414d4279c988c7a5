"""Train a small model; the ranks write down what each step took.

    pollux run --nproc 2 tests/benchmarks/endings_training.py KIND FOLDER

Each rank appends to a file of its own: "begin STEP TIME", "pass STEP PASS START STOP" for its part of each micro-batch,
"again STEP" where the step in hand is taken again among fewer ranks, and "done STEP TIME RANKS" when a step is
complete. Places are positions in the order of a pass.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, IterableDataset

import pollux
from pollux.loop.coordinator import Coordinator
from pollux.loop.stepper import Stepper
from pollux.resize import resizer
from pollux.resize.capability import obstacle_in_place
from pollux.resize.resizer import ResizePhase
from pollux.training.training import Training

EXAMPLES, BATCH, PASSES = 240, 12, 3
PAUSE = 0.08 if os.environ.get("SLURM_RESTART_COUNT") else float(os.environ.get("ENDINGS_PAUSE", "0.08"))
"""Seconds that a pass takes at least, before the ending."""


class Data(Dataset[Any]):
    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((4,), index / EXAMPLES)
        return x, x.sum().reshape(1)


class Named(Data):
    """As Hugging Face's Trainer takes it."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (Data()[index] for index in range(EXAMPLES))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        time.sleep(PAUSE)
        y = self.layers(x)
        return y if labels is None else {"loss": mse_loss(y, labels), "logits": y}


def write_down(folder: Path) -> None:
    """Have this rank's stepper write what it takes."""
    begin, commit = Stepper.begin_pass, Stepper.commit_in_hand
    file: Any = None
    begun: tuple[int, int] = (-1, 0)  # step, ranks

    def begin_pass(self: Stepper) -> None:
        nonlocal file, begun
        begin(self)
        training, micro = self.training, self.training.data._current
        step, rank = training.progress.optimizer_steps, training.world.rank
        if file is None:
            file = (folder / f"{time.time_ns()}-{os.getpid()}-{rank}.txt").open("w", buffering=1)
            print("begin", step, time.time(), file=file)
        if step == begun[0] and training.world.size < begun[1]:
            print("again", step, file=file)
        begun = step, training.world.size
        if micro is not None:
            place = training.data.pass_index, micro.local_start, micro.local_stop
            print("pass", step, *place, file=file)

    def committed(self: Stepper) -> None:
        in_hand = self.training.step.in_hand
        commit(self)
        if in_hand:
            step = self.training.progress.optimizer_steps - 1
            print("done", step, time.time(), self.training.world.size, file=file)

    Stepper.begin_pass, Stepper.commit_in_hand = begin_pass, committed  # type: ignore[method-assign]


def grow(nodes: list[str]) -> None:
    """Have a companion's ranks join after some steps, as polluxd orders it."""
    after_step = Coordinator.after_step

    def resizes_in_place(training: Training, *_: Any) -> bool:
        return obstacle_in_place(training) is None

    def stepped(self: Coordinator) -> None:
        after_step(self)
        if self.training.world.rank == 0 and self.training.progress.optimizer_steps == 3:
            per_node = self.training.world.per_node
            order = {"id": 1, "path": "resize", "kind": "grow", "nodes": nodes, "gpus_per_node": per_node}
            self.order_resize(order | {"nonce": "5eed"})
            while self.resizer.phase is ResizePhase.RECRUITING:
                time.sleep(0.05)

    resizer.resizes_in_place = resizes_in_place  # type: ignore[attr-defined]
    Coordinator.after_step = stepped  # type: ignore[method-assign]


def plain(kind: str, folder: Path) -> None:
    net = Net()
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        torch.distributed.init_process_group("gloo")
        fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    job = pollux.attach(net, optimizer)
    data: Any = Stream() if kind == "stream" else Data()
    loader = job.loader(data, BATCH, **({"length": EXAMPLES} if kind == "stream" else {}))
    for _ in job.epochs(PASSES):
        for x, y in loader:
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
    job.close()


def with_trainer(folder: Path) -> None:
    from transformers import TrainingArguments

    from pollux.integrations.huggingface import ElasticTrainer

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=BATCH,
        num_train_epochs=PASSES,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    ElasticTrainer(model=Net(), args=arguments, train_dataset=Named()).train()


def with_lightning(folder: Path) -> None:
    import lightning

    from pollux.integrations.lightning import ElasticStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> Any:
            return mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    trainer = lightning.Trainer(
        strategy=ElasticStrategy(),
        accelerator="cpu",
        max_epochs=PASSES,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(Module(), DataLoader(Data(), batch_size=BATCH, shuffle=True))


if __name__ == "__main__":
    kind, folder = sys.argv[1], Path(sys.argv[2])
    torch.manual_seed(0)
    write_down(folder)
    if "ENDINGS_GROW" in os.environ:
        grow(os.environ["ENDINGS_GROW"].split())
    if kind == "trainer":
        with_trainer(folder)
    elif kind == "lightning":
        with_lightning(folder)
    else:
        plain(kind, folder)
    print("trained to its end", flush=True)
