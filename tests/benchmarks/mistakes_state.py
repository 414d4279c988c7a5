"""Slips with state, data and units, which a restart or another number of ranks shows. See `mistakes_scripts.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import pollux
from tests.benchmarks.mistakes_scripts import M0, Attempt, Result, Script, Slip, data

STOP = 5
"""Steps of a first attempt."""


def sharded(average: str) -> Callable[[Attempt], Result]:
    """A training under fully_shard with a moving average of its parameters, as DTensors or as this rank's rows."""

    def run(attempt: Attempt) -> Result:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
        fully_shard(model)

        def now() -> dict[str, Any]:
            found = {name: p.detach() for name, p in model.named_parameters()}
            return {name: p.to_local() if average == "rows" else p for name, p in found.items()}  # type: ignore[operator, attr-defined]

        state = {"ema": {name: p.clone() for name, p in now().items()}}
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        job = pollux.attach(model, optimizer, adaptive=False, checkpoint_dir=attempt.folder, state=state)
        loader = job.loader(data(), M0)
        for _ in job.epochs(1):
            for x, y in loader:
                job.step(lambda x=x, y=y: mse_loss(job.model(x).mean(1, keepdim=True), y))  # type: ignore[misc]
                for name, p in now().items():
                    state["ema"][name].lerp_(p, 0.1)
                if not attempt.number and job.progress.optimizer_steps == STOP:
                    break
            else:
                continue
            break
        job.close()
        parts = [[t.detach().clone() for t in state["ema"].values()]]
        if average == "rows":
            every: list[Any] = [None] * job.world.size
            dist.all_gather_object(every, parts[0])
            parts = [[torch.cat(each) for each in zip(*every, strict=True)]]
        whole = [t if average == "rows" else t.full_tensor() for t in parts[0]]  # type: ignore[operator, attr-defined]
        return torch.cat([t.flatten() for t in whole]).tolist(), {"steps": job.progress.optimizer_steps}

    return run


def uninterrupted(average: str) -> Callable[[Attempt], Result]:
    """The same in one attempt, without checkpoints."""
    script = sharded(average)
    return lambda attempt: script(Attempt(1, attempt.rank, attempt.folder / "other"))


def own_numbers(attempt: Attempt) -> Result:
    """A list of each rank's own in `state`."""
    state: dict[str, Any] = {"seen": []}
    script = Script(checkpoint_dir=attempt.folder, state=state)

    def body(k: int, x: torch.Tensor, y: torch.Tensor) -> None:
        script.pass_(k, x, y)
        state["seen"] = [*state["seen"], script.job.rank]

    found, facts = script.train(body, most=0 if attempt.number else STOP)
    return found, facts | {"own": set(state["seen"]) == {script.job.rank}}


ROWS, SHARDS = uninterrupted("rows"), uninterrupted("shards")

STATE_SLIPS = (
    Slip("a moving average of DTensors", sharded("shards"), 2, SHARDS, attempts=2),
    Slip("a moving average of this rank's rows", sharded("rows"), 2, ROWS, attempts=2),
    Slip("state of each rank's own", own_numbers, 2, good=lambda facts: facts["own"], attempts=2),
)
