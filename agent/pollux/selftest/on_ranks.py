"""What a rank of a check does.

    pollux run --nproc N -m pollux.selftest.on_ranks CHECK FOLDER [ARGUMENT]

Most checks make a training whose weights are known, however its batch is divided: the batch is the whole data set, so
plain torch in one process gives the right weights. A rank that finds a fault raises; rank 0 writes its figures to
FOLDER/figures.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import pollux
from pollux.ranks.world import backend_for
from pollux.resize.capability import obstacle_in_place
from pollux.resize.resizer import ResizePhase

STEPS = 24
"""Of most checks' trainings."""
EXAMPLES = 840
"""A multiple of 1 to 8 ranks."""
TOLERANCE = 1e-3
"""Largest difference of the weights from the right ones, relative to their norm: sums in another order differ by 1e-6,
a lost or repeated step by 1e-2."""
QUIET_STEPS = 6
"""Between two moves, and after the last."""


def network() -> nn.Module:
    """Return a perceptron with one hidden layer, the same at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))


def examples() -> TensorDataset:
    """Return inputs [EXAMPLES, 16] and targets [EXAMPLES, 1]."""
    x = torch.randn(EXAMPLES, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))


optimizer_of = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def weights_of(model: nn.Module) -> Tensor:
    """Return all parameters as one vector on the host; of shards, on all ranks alike."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).double().cpu()


def error_of(model: nn.Module, steps: int, device: torch.device) -> float:
    """Return the relative distance of the weights from those of plain torch after `steps` steps."""
    right = network().to(device)
    optimizer = optimizer_of(right.parameters())
    x, y = (tensor.to(device) for tensor in examples().tensors)
    for _ in range(steps):
        mse_loss(right(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    expected = weights_of(right)
    return float((weights_of(model) - expected).norm() / expected.norm())


# The launcher shows a rank one GPU, or none.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(
    steps: int,
    *,
    sharded: bool = False,
    folder: Path | None = None,
    scaler: torch.amp.GradScaler | None = None,
    loss_factor: Callable[[pollux.Job], float] = lambda _job: 1.0,
    over: Callable[[pollux.Job], bool] = lambda _job: False,
) -> pollux.Job:
    """Train by `pollux.attach` until optimizer step `steps`, or until `over` is true after a step.

    `sharded`: under fully_shard. `folder`: of the checkpoints. `loss_factor`: on the loss of the pass at hand.
    """
    model = network().to(DEVICE)
    if sharded:
        dist.init_process_group(backend_for(DEVICE))
        fully_shard(model)
    job = pollux.attach(
        model, optimizer_of(model.parameters()), scaler=scaler, adaptive=False, checkpoint_dir=folder
    )
    loader = job.loader(examples(), EXAMPLES)
    for _ in job.epochs(steps):
        for x, y in loader:
            factor = loss_factor(job)
            job.step(lambda x=x, y=y, f=factor: f * mse_loss(job.model(x.to(DEVICE)), y.to(DEVICE)))  # type: ignore[misc]
            if over(job):
                job.close()
                return job
    job.close()
    return job


def judged(job: pollux.Job, steps: int, folder: Path, figures: Mapping[str, float] = {}) -> None:
    """Compare steps and weights with plain torch's."""
    done = job.progress.optimizer_steps
    if done != steps:
        raise RuntimeError(f"expected {steps} optimizer steps, got {done}")
    error = error_of(job.module, steps, job.device)
    if error > TOLERANCE:
        raise RuntimeError(f"the weights differ from plain torch's by {error:.1e} of their norm")
    if job.rank == 0:
        found = {"ranks": job.world.size, "difference from plain torch": f"{error:.0e}", **figures}
        (folder / "figures.json").write_text(json.dumps(found))


def groups(folder: Path) -> None:
    judged(train(STEPS, folder=folder / "checkpoints"), STEPS, folder)


def checkpoint(folder: Path, third: str, sharded: str = "") -> None:
    """Train the first, second or last third of the steps, from the newest checkpoint on."""
    begun: list[int] = []

    def note(job: pollux.Job) -> bool:
        begun.append(job.progress.optimizer_steps)
        return False

    steps = int(third) * STEPS // 3
    job = train(steps, sharded=bool(sharded), folder=folder / "checkpoints", over=note)
    if begun[0] != (first := steps - STEPS // 3 + 1):
        raise RuntimeError(f"expected to go on with step {first}, got {begun[0]}")
    judged(job, steps, folder)


def restart(folder: Path) -> None:
    """Have the last rank be killed once, in the middle of the training."""
    mark = folder / "killed"

    def kill_once(job: pollux.Job) -> bool:
        half = job.progress.optimizer_steps == STEPS // 2
        if job.rank == job.world.size - 1 and half and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    job = train(STEPS, folder=folder / "checkpoints", over=kill_once)
    if not mark.exists():
        raise RuntimeError("no rank was killed")
    judged(job, STEPS, folder)


def resize(folder: Path) -> None:
    """Shrink to the first node, grow by a companion job; polluxd's orders are made up."""
    orders = [
        {"id": 1, "path": "resize", "kind": "shrink", "nodes": ["n0"]},
        {"id": 2, "path": "resize", "kind": "grow", "nodes": ["n0", "c0"], "nonce": "5eed"},
    ]
    pauses: dict[str, float] = {}
    last, size, quiet, moved_at = 0.0, 0, 0, -1

    def move(job: pollux.Job) -> bool:
        nonlocal last, size, quiet, moved_at
        time.sleep(0.1)  # a joiner needs seconds to come: few steps, since they would slow it down
        resizer, now = job.coordinator.resizer, time.time()
        if size and job.world.size != size:
            pauses[f"{size} to {job.world.size} ranks"] = now - last
        last, size = now, job.world.size
        quiet = quiet + 1 if resizer.phase is ResizePhase.IDLE else 0
        if job.is_main and resizer.refused:
            raise RuntimeError(f"the resize was refused: {resizer.refused['why']}")
        if job.is_main and orders and quiet > QUIET_STEPS:
            # polluxd, which is not here, would ask only a Pollux job.
            why = obstacle_in_place(job.training)
            if why is not None:
                raise RuntimeError(f"this training cannot be resized in place: {why}")
            resizer.in_place, quiet = True, 0
            job.coordinator.order_resize(orders.pop(0) | {"gpus_per_node": job.world.per_node})
        if job.coordinator.groups.generation == 2 and moved_at < 0:
            moved_at = job.progress.optimizer_steps
        return moved_at >= 0 and job.progress.optimizer_steps >= moved_at + QUIET_STEPS

    where = None if os.environ.get("POLLUX_COMPANION") else folder / "checkpoints"
    job = train(100_000, folder=where, over=move)
    if job.is_main and len(pauses) != 2:
        raise RuntimeError(f"expected to live through two moves, got {pauses}")
    seconds = {f"pause, {which} [s]": round(found, 2) for which, found in pauses.items()}
    judged(job, job.progress.optimizer_steps, folder, figures=seconds)


def amp(folder: Path) -> None:
    """Let one step's gradients overflow on the last rank."""
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
    overflowed, passes = False, 0

    def factor(job: pollux.Job) -> float:
        nonlocal overflowed
        now = job.progress.optimizer_steps == STEPS // 2 and not overflowed
        overflowed = overflowed or now
        return float("inf") if now and job.rank == job.world.size - 1 else 1.0

    def count(job: pollux.Job) -> bool:
        nonlocal passes
        passes += 1
        return passes == STEPS

    job = train(10 * STEPS, scaler=scaler, loss_factor=factor, over=count)
    if scaler.get_scale() != 512.0:
        raise RuntimeError(f"expected a loss scale of 512, got {scaler.get_scale()}")
    judged(job, STEPS - 1, folder)


CHECKS: dict[str, Callable[..., None]] = {
    body.__name__: body for body in (groups, checkpoint, restart, resize, amp)
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, where, *arguments = sys.argv[1:]
    CHECKS[name](Path(where), *arguments)
