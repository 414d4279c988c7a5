"""Change batch sizes and drain the job at steps that a test chooses.

A library's own training loop receives these orders from outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pollux.goodput import BatchChoice

EXAMPLES = 83
"""Of the data sets here; prime to every batch size: uneven tails."""

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NAME": "t",
}
"""What one launcher per node leaves its workers with: not their ranks."""


class Stop(Exception):
    """The scheduler kills the job after its drain."""


def stop() -> None:
    raise Stop


def run(
    job: Any, loader: Any, orders: Orders, epochs: int, step: Callable[[Any, Any], object]
) -> dict[str, Any]:
    """Train by a loop of a script's own, a pass by `step`; return what `test_contract` asks for."""
    used: list[int] = []
    sizes, factors, stopped = [], set[float](), False
    try:
        for _ in job.epochs(epochs, statistical=True):
            for x, y, ids in loader:
                orders.give(job, job.progress.optimizer_steps)
                used += ids.tolist() if job.training.data.local_samples else []
                sizes.append((job.local_batch, job.accumulation))
                factors.update(job.lr_factors)
                step(x, y)
        job.close()
    except Stop:
        stopped = True
    steps, finished = job.progress.optimizer_steps, job.progress.finished
    found = {"stopped": stopped, "used": used, "sizes": sizes, "factors": factors}
    return found | {"steps": steps, "finished": finished, "noise": job.noise_scale}


@dataclass(frozen=True)
class Orders:
    """Orders by optimizer step: batch sizes and a drain.

    Batch sizes come as from the advisor, the drain as from the scheduler.
    """

    choices: dict[int, BatchChoice] = field(default_factory=dict)
    drain_at: int | None = None
    killed: bool = False
    """The scheduler's kill comes while the drained job waits for it, not at the next step."""

    def give(self, job: Any, step: int) -> None:
        """To be called before each step. Raises Stop once the job has drained."""
        if job.coordinator.drains.followed:
            raise Stop
        if not job.is_main:
            return
        job.training.advisor.close()  # its thread: here the test is the advisor
        if step in self.choices:
            job.training.advisor.proposal = self.choices[step]
        if step == self.drain_at:
            job.coordinator.drains.order(7)
            if self.killed:
                job.coordinator.drains.wait_for_end = stop


KILLED = """
EPOCHS = 2

def trouble(job, where="pass"):
    at = where == "evaluation" or job.progress.optimizer_steps == 5
    if where == WHERE and at and rank == 0 and start == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def enough(job):
    return False
"""
"""Beginning of a script whose rank 0 is killed in a pass or in an evaluation."""

RESIZED = """
EPOCHS = 1000
from pollux.loop import job as loop
from pollux.resize import resizer
from pollux.resize.capability import obstacle_in_place

def resizes_in_place(training, *_):
    obstacle = obstacle_in_place(training)
    if obstacle:
        note("obstacle", why=obstacle)
    return not obstacle

resizer.resizes_in_place = resizes_in_place
loop.may_grow = lambda world, _: not world.distributed
os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"
first = {"id": 1, "kind": "grow", "nodes": [*OWN, "c0"], "nonce": "5eed"}
ORDERS = {1: first, 2: {"id": 2, "kind": "shrink", "nodes": STAY}}
asked = since = 0

def trouble(job, where="pass"):
    global asked, since
    time.sleep(0.02)
    if where == "pass" and job.is_main and job.coordinator.groups.generation == asked < 2:
        since += 1
        if since == 20:
            since, asked = 0, asked + 1
            job.coordinator.order_resize({"path": "resize", "gpus_per_node": 1, **ORDERS[asked]})

def enough(job):
    return job.coordinator.groups.generation == 2
"""
"""Beginning of a script that grows by node c0, and then shrinks."""


def each_once(notes: Sequence[Mapping[str, Any]], passes: int | None, *, by: str) -> None:
    """Assert that each of 101 samples is part of one step in each whole pass.

    Args:
        notes: of each step and rank. Steps after the newest copy in memory are taken twice: the later one counts.
        passes: as many as there are whole ones, if None.
        by: the key that tells ranks apart.
    """
    last = {(note[by], note["step"]): note["samples"] for note in notes}
    counts = Counter(tuple(sample) for samples in last.values() for sample in samples)
    passes = max(number for number, _ in counts) if passes is None else passes
    assert passes >= 2
    assert max(counts.values()) == 1
    assert all(counts[(number, index)] == 1 for number in range(passes) for index in range(101))
