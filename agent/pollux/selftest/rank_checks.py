"""What a rank of a check does.

    pollux run --nproc N -m pollux.selftest.rank_checks CHECK FOLDER [ARGUMENT]

Each rank that lives to the end writes what it found to FOLDER/found-<pid>.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pollux
from pollux.resize.capability import obstacle_in_place
from pollux.resize.resizer import ResizePhase
from pollux.selftest import images, known_noise, known_training
from pollux.selftest.known_training import error_of
from pollux.selftest.launching import STEPS

Found = dict[str, Any]
QUIET_STEPS = 6
"""Between two moves, and after the last."""
FLOATS = 16 << 20
"""Of the all-reduce that is timed: 64 MiB."""
MIB_PER_EXAMPLE = 1
MEMORY_MIB = 600
"""Too little for the batch, enough for its half."""


def device() -> torch.device:
    """This rank's device: the launcher shows it one GPU, or none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def of(job: pollux.Job, **more: Any) -> Found:
    """Return what every training shows; on sharded models all ranks call it."""
    steps = job.progress.optimizer_steps
    return {
        "rank": job.rank,
        "ranks": job.world.size,
        "steps": steps,
        "error": error_of(job.module, int(more.pop("made", steps)), job.device),
        **more,
    }


def groups(folder: Path) -> Found:
    """Train on all ranks, and time an all-reduce of 64 MiB."""
    job = known_training.train(STEPS, device(), folder=folder / "checkpoints")
    tensor = torch.ones(FLOATS, device=job.device)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if job.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if float(tensor[0]) != job.world.size:
            raise RuntimeError(f"an all-reduce of ones over {job.world.size} ranks gave {float(tensor[0])}")
        tensor.fill_(1.0)
    # Bus bandwidth as nccl-tests defines it.
    gib = 2 * (job.world.size - 1) / job.world.size * 4 * FLOATS / min(seconds) / 2**30
    return of(job, all_reduce_gib_s=gib)


def checkpoint(folder: Path, steps: str, *, sharded: bool = False) -> Found:
    """Train on from the newest checkpoint until optimizer step `steps`."""
    begun: list[int] = []

    def note(job: pollux.Job) -> bool:
        begun.append(job.progress.optimizer_steps)
        return False

    job = known_training.train(
        int(steps), device(), sharded=sharded, folder=folder / "checkpoints", after_step=note
    )
    return of(job, begun=begun[0])


def fsdp2(folder: Path, steps: str) -> Found:
    """As `checkpoint`, under fully_shard."""
    return checkpoint(folder, steps, sharded=True)


def restart(folder: Path) -> Found:
    """Have the last rank be killed once, in the middle of the training."""
    mark = folder / "killed"
    times = (folder / f"times-{os.getpid()}").open("w", buffering=1)

    def kill_once(job: pollux.Job) -> bool:
        print(time.time(), file=times)
        if (
            job.rank == job.world.size - 1
            and job.progress.optimizer_steps == STEPS // 2
            and not mark.exists()
        ):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    return of(known_training.train(STEPS, device(), folder=folder / "checkpoints", after_step=kill_once))


def resize(folder: Path) -> Found:
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
    return of(known_training.train(100_000, device(), folder=where, after_step=move), pauses=pauses)


def amp(folder: Path) -> Found:
    """Let one step's gradients overflow on the last rank."""
    scaler = torch.amp.GradScaler(device().type, init_scale=1024.0)
    overflowed = False

    def factor(job: pollux.Job) -> float:
        nonlocal overflowed
        now = job.progress.optimizer_steps == STEPS // 2 and not overflowed
        overflowed = overflowed or now
        return float("inf") if now and job.rank == job.world.size - 1 else 1.0

    passes = 0

    def count(job: pollux.Job) -> bool:
        nonlocal passes
        passes += 1
        return passes == STEPS

    job = known_training.train(10 * STEPS, device(), scaler=scaler, loss_factor=factor, after_step=count)
    return of(job, made=STEPS - 1, scale=scaler.get_scale())


class Hungry(known_training.Network):
    """`Network`, whose forward pass takes 1 MiB per example beside."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda":
            ballast = torch.empty(len(x) * (MIB_PER_EXAMPLE << 20), dtype=torch.uint8, device=x.device)
            del ballast
        elif len(x) * MIB_PER_EXAMPLE > MEMORY_MIB:
            raise torch.OutOfMemoryError(f"no room for {len(x)} examples (a CPU only pretends)")
        return super().forward(x)


def memory(folder: Path) -> Found:
    """Let the batch not fit into the device's memory."""
    where = device()
    if where.type == "cuda":
        # cuBLAS takes its workspaces first: in the gap that the ballast leaves, they would split it.
        error_of(known_training.Network().to(where), 1, where)
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(MEMORY_MIB * 2**20 / whole, 1.0))
    job = known_training.train(STEPS, where, model=Hungry())
    return of(job, passes=job.accumulation + 1, local_batch=job.local_batch)


def noise(folder: Path) -> Found:
    """Compare the noise scale with one from the gradients of all single examples."""
    return known_noise.compare(device())


def accuracy(folder: Path, batch: str) -> Found:
    """Train a convolutional network with a `fixed` or an `adapted` batch."""
    return images.train(device(), adaptive=batch == "adapted")


CHECKS: dict[str, Callable[..., Found]] = {
    body.__name__: body for body in (groups, checkpoint, fsdp2, restart, resize, amp, memory, noise, accuracy)
}


def main(check: str, folder: Path, *arguments: str) -> None:
    torch.set_num_threads(1)
    found = CHECKS[check](folder, *arguments)
    (folder / f"found-{os.getpid()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
