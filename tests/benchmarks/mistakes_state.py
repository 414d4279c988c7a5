"""Slips with state, data and units, which a restart or another number of ranks shows. See `mistakes_scripts.py`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import Dataset, IterableDataset, Subset

import pollux
from tests.benchmarks.mistakes_scripts import EXAMPLES, M0, Attempt, Result, Script, Slip, data

STOP = 5
"""Steps of a first attempt."""


def sharded(average: str) -> Callable[[Attempt], Result]:
    """A training under fully_shard with a moving average of its parameters, as DTensors or as this rank's rows."""

    def run(attempt: Attempt) -> Result:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
        plain = model  # what mypy takes for an FSDPModule has no methods of a module
        fully_shard(model)

        def now() -> dict[str, Any]:
            found = {name: p.detach() for name, p in plain.named_parameters()}
            return {name: p.to_local() if average == "rows" else p for name, p in found.items()}  # type: ignore[operator, attr-defined]

        state = {"ema": {name: p.clone() for name, p in now().items()}}
        optimizer = torch.optim.SGD(plain.parameters(), 0.05, momentum=0.9)
        job = pollux.attach(plain, optimizer, adaptive=False, checkpoint_dir=attempt.folder, state=state)
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


# -- a model that changes --------------------------------------------------------------------------------------------


def changing(change: Callable[[Any], object]) -> Callable[[Attempt], Result]:
    """Change the model after epoch 0, as each start does; stop in epoch 1."""

    def run(attempt: Attempt) -> Result:
        script = Script(checkpoint_dir=attempt.folder)
        script.begin = lambda epoch: change(script.model) if epoch == 1 else None  # type: ignore[method-assign]
        return script.train(most=0 if attempt.number else 18)

    return run


def widen(model: Any) -> None:
    model[2] = nn.Linear(16, 2)


def low_rank(model: Any) -> None:
    model[0].register_parameter("lora", nn.Parameter(torch.zeros(2, 6)))


# -- data -------------------------------------------------------------------------------------------------------------


class Ahead:
    """Asks for a batch before it gives the last one, as prefetchers of CUDA streams do."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        held = next(batches, None)
        while held is not None:
            following = next(batches, None)
            yield held
            held = following


def read_ahead(passes: int) -> Callable[[Attempt], Result]:
    def run(_: Attempt) -> Result:
        script = Script()
        script.load(M0 // passes // script.job.world.size)
        script.loader = Ahead(script.loader)
        return script.train()

    return run


class OwnPasses(IterableDataset[tuple[Tensor, Tensor]]):
    """Shuffles by the number of passes in its process."""

    passes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = random.Random(self.passes).sample(range(EXAMPLES), EXAMPLES)
        self.passes += 1
        x, y = data().tensors
        return iter([(x[i], y[i]) for i in order])


def stream_by_process(attempt: Attempt) -> Result:
    script = Script(checkpoint_dir=attempt.folder)
    script.loader = script.job.loader(OwnPasses(), M0, length=EXAMPLES)
    return script.train(most=0 if attempt.number else 18)


def unseeded_split(attempt: Attempt) -> Result:
    """A split whose order is another one in each start."""
    script = Script(checkpoint_dir=attempt.folder)
    order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(attempt.number)).tolist()
    script.loader = script.job.loader(Subset(data(), order), M0)
    return script.train(most=0 if attempt.number else STOP)


def split_by_rank(attempt: Attempt) -> Result:
    """A split whose order is another one on each rank."""
    script = Script()
    order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(attempt.rank)).tolist()
    script.loader = script.job.loader(Subset(data(), order), M0)
    return script.train()


class Staged(Dataset[tuple[Tensor, Tensor]]):
    """Gives other rows in the epoch that the script sets."""

    epoch = 0

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = data()[i]
        return x + self.epoch, y


def staged(workers: int) -> Callable[[Attempt], Result]:
    def run(_: Attempt) -> Result:
        script, rows = Script(), Staged()
        script.loader = script.job.loader(rows, M0, num_workers=workers)
        script.begin = lambda epoch: setattr(rows, "epoch", epoch)  # type: ignore[method-assign]
        return script.train()

    return run


ROWS, SHARDS = uninterrupted("rows"), uninterrupted("shards")

STATE_SLIPS = (
    Slip("a moving average of DTensors", sharded("shards"), 2, SHARDS, attempts=2),
    Slip("a moving average of this rank's rows", sharded("rows"), 2, ROWS, attempts=2),
    Slip("state of each rank's own", own_numbers, 2, good=lambda facts: facts["own"], attempts=2),
    Slip(
        "pruned in mid-training", changing(lambda m: prune.l1_unstructured(m[0], "weight", 0.5)), attempts=2
    ),
    Slip("weight norm in mid-training", changing(lambda m: weight_norm(m[0])), attempts=2),
    Slip("another head in mid-training", changing(widen), attempts=2),
    Slip("LoRA in mid-training", changing(low_rank), attempts=2),
    Slip("a prefetcher, two passes a step", read_ahead(2)),
    Slip("a prefetcher, one pass a step", read_ahead(1), 2),
    Slip("a stream shuffled by its process's passes", stream_by_process, attempts=2),
    Slip("a split of another order in each start", unseeded_split, attempts=2),
    Slip("a split of another order on each rank", split_by_rank, 2),
    Slip("a dataset that changes per epoch, in workers", staged(1), like=staged(0)),
)
