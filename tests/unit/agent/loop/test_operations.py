"""What the agent costs, in operations that torch dispatches and in calls of its own functions: exact on any CPU.

On a GPU both are the host's time. The oracle of the operations is the same training in plain torch. The mean counts
over whole cycles of measuring, after the noise scale is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pollux import attach
from tests.unit.agent.loop.operations import Counted, OwnCalls

BATCH = 8
BEGIN = 60
"""Steps until the noise scale is known."""
CYCLES = 82
"""Steps that count: two cycles or more."""
MOST = 0.03
SHAPES = {"many": (4, 30), "large": (96, 4)}
"""Width and number of the hidden layers."""


def network(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU())]
    return nn.Sequential(nn.Linear(6, width), *hidden, nn.Linear(width, 4))


def data(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(length, 6, generator=generator)
    return TensorDataset(x, x.argmax(1) % 4)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, foreach=True)


def sharded(model: nn.Sequential) -> nn.Sequential:
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    for part in (model[0], model[1], model[-1]):
        fully_shard(part)
    fully_shard(model)
    return model


def plain_steps(kind: str, shape: str, passes: int, fsdp: bool, size: int) -> Iterator[None]:
    model: Any = network(*SHAPES[shape])
    if fsdp:
        sharded(model)
    elif size > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = optimizer_of(kind, model)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "amp")
    dataset = data(BATCH * 200)
    sampler: Any = DistributedSampler(dataset) if size > 1 else None
    while True:
        for n, (x, y) in enumerate(DataLoader(dataset, BATCH // size // passes, sampler=sampler)):
            last = n % passes == passes - 1
            if fsdp:
                model.set_requires_gradient_sync(last)
            elif size > 1:
                model.require_backward_grad_sync = last
            loss = cross_entropy(model(x), y)
            scaler.scale(loss / passes if passes > 1 else loss).backward()
            if last:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                yield


def agent_steps(
    kind: str,
    shape: str,
    passes: int,
    fsdp: bool,
    size: int,
    adaptive: bool,
    every: int = 0,
    interval: str = "",
) -> Iterator[None]:
    os.environ["POLLUX_EXCHANGE_INTERVAL"] = interval  # it may be another test's rank
    model: Any = network(*SHAPES[shape])
    if fsdp:
        sharded(model)
    optimizer = optimizer_of(kind, model)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "amp")
    measuring: Any = {"every": every} if every else None
    used = scaler if kind == "amp" else None
    job = attach(model, optimizer, scaler=used, adaptive=adaptive, measuring=measuring)
    most = BATCH // size // passes
    loader = job.loader(data(BATCH * 200), BATCH, max_batch_size=BATCH, per_gpu=(1, most))
    for _ in job.epochs(1e9):
        for x, y in loader:
            job.step(lambda x=x, y=y: cross_entropy(job.model(x), y), clip=1.0)
            if job.sync_gradients:
                yield


def mean_calls(steps: Iterator[None], begin: int = BEGIN, count: int = CYCLES) -> float:
    for _ in range(begin):
        next(steps)
    with Counted() as counted:
        for _ in range(count):
            next(steps)
    return counted.calls / count


def both(cases: list[tuple[str, str, int, bool, bool]], size: int) -> list[tuple[float, float]]:
    return [
        (
            mean_calls(plain_steps(kind, shape, passes, fsdp, size), 5, 10),  # all alike from the third on
            mean_calls(agent_steps(kind, shape, passes, fsdp, size, adaptive)),
        )
        for kind, shape, passes, fsdp, adaptive in cases
    ]


ONE = [
    ("sgd", "many", 1, False, False),
    ("sgd", "many", 1, False, True),
    ("adamw", "large", 1, False, True),
    ("amp", "many", 2, False, True),
]
TWO = [("sgd", "many", 1, False, True), ("adamw", "large", 2, False, False), ("sgd", "large", 1, True, True)]


@pytest.mark.parametrize("case", ONE)
def test_one_rank(ranks: Callable[..., list[Any]], case: tuple[str, str, int, bool, bool]) -> None:
    ((plain, agent),) = ranks(1, both, [case], 1)[0]
    assert agent <= (1 + MOST) * plain


@pytest.mark.parametrize("case", TWO)
def test_two_ranks(ranks: Callable[..., list[Any]], case: tuple[str, str, int, bool, bool]) -> None:
    if case[3] and torch.__version__ < "2.13":
        pytest.skip("fully_shard is supported from torch 2.13 on")
    for ((plain, agent),) in ranks(2, both, [case], 2):
        assert agent <= (1 + MOST) * plain


def extra(kind: str, layers: int, fsdp: bool, size: int) -> float:
    """Return the operations that a measured step takes more than a plain one, where every step is measured."""
    SHAPES["some"] = (4, layers)
    found = []
    for every in (1, 10**6):
        steps = agent_steps(kind, "some", 1, fsdp, size, False, every)
        found.append(mean_calls(steps, 40, 20))
    return found[0] - found[1]


@pytest.mark.parametrize(
    ("size", "fsdp", "kind"), [(1, False, "sgd"), (2, False, "adamw"), (2, True, "adamw")]
)
def test_a_measured_step_takes_as_many_operations_however_many_parameters_there_are(
    ranks: Callable[..., list[Any]], size: int, fsdp: bool, kind: str
) -> None:
    if fsdp and torch.__version__ < "2.13":
        pytest.skip("fully_shard is supported from torch 2.13 on")
    few, many = (ranks(size, extra, kind, layers, fsdp, size)[0] for layers in (2, 10))
    # The clock decides how many samples are read together: a few operations.
    assert many == pytest.approx(few, abs=6)
    assert many < 200, "of four units, the most"


MOST_CALLS = {
    # (ranks, under fully_shard, passes of a step, adaptive): calls in a step that is neither measured nor timed
    (1, False, 1, False): 30,
    (1, False, 1, True): 31,
    (1, False, 2, False): 97,
    (2, False, 1, False): 46,
    (2, True, 1, False): 59,
}


def own_calls(passes: int, fsdp: bool, size: int, adaptive: bool) -> tuple[int, dict[str, int]]:
    """Return how many functions of the agent a plain step calls, and which.

    Of several steps it is one of those with the fewest calls: on a slow machine more of them are timed.
    """
    # An exchange every 50 steps, however slow the machine is.
    steps = agent_steps("sgd", "many", passes, fsdp, size, adaptive, interval="1e9")
    for _ in range(BEGIN):
        next(steps)
    found = []
    for _ in range(CYCLES // 2):
        with OwnCalls() as calls:
            next(steps)
        found.append((calls.names.total(), dict(calls.names)))
    return sorted(found, key=lambda one: one[0])[len(found) // 4]


@pytest.mark.parametrize("case", MOST_CALLS)
def test_a_plain_step_calls_few_functions_of_the_agent(
    ranks: Callable[..., list[Any]], case: tuple[int, bool, int, bool]
) -> None:
    """Each costs 0.1 to 0.5 us, at every step of every training. Whoever adds one takes another one away."""
    size, fsdp, passes, adaptive = case
    if fsdp and torch.__version__ < "2.13":
        pytest.skip("fully_shard is supported from torch 2.13 on")
    for count, names in ranks(size, own_calls, passes, fsdp, size, adaptive):
        assert count <= MOST_CALLS[case], "; ".join(f"{name} {n}" for name, n in sorted(names.items()))
