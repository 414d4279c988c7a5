"""The agent's cost per step against DistributedDataParallel.

Paired and interleaved: all variants train in the same processes, one step of each in turn and in random order, so that
other work on the machine slows all of them. A step is timed from barrier to barrier, by its slowest rank. The logarithm
of its time is compared with the mean of the logarithms of the two plain variants' steps beside it. Twenty steps make a
round; at the default sampling of 1/20, the agent measures one of them. The first to twentieth steps of all rounds are
averaged separately, without the fifth farthest off at either side (another process at work). The overhead is the mean
of these twenty averages. The null pair compares the two plain variants with each other and shows how much of an
overhead is noise. The ranks' CPU time is given too: it does not contain waiting for others. On CPUs each rank is bound
to one core, because the kernel now and then puts three of four ranks on one of two cores.

Plain: DDP, torch's DataLoader with a DistributedSampler. Pollux: `attach`, its loader, hook, timing, control exchange
and refitting thread, at a fixed batch size. The first rounds of each variant are left out: in them kernels, connections
and Adam's second moments warm up.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import pollux
from pollux.errors import PolluxAgentError

SEED = 1
STEPS = 20
"""Optimizer steps of each variant in a round."""
SAMPLINGS = {"every step": 1, "1/20": 20}
PLAIN = ("plain", "null pair")

Variant = Callable[[str, str, int, torch.device], Iterator[None]]
"""Of (model, optimizer, ranks, device): makes one optimizer step per `next`."""


@dataclass(frozen=True)
class OverheadPlan:
    """What is measured, and how long."""

    ranks: int
    device: str
    seconds: float
    """Of one model and optimizer, about."""
    rounds: int
    """At most."""
    warm_rounds: int = 3
    warm_steps: int = STEPS
    """Of a round that only warms up."""
    least_rounds: int = 12
    """Minimum of rounds, for a machine so slow that the time is up before."""
    join: Callable[[int, int], None] | None = None
    """Forms the process group of (rank, port) in the place of torch's function."""
    rivals: Mapping[str, Variant] = field(default_factory=dict)
    """Variants beside the agent's."""


def conv_net() -> tuple[nn.Module, TensorDataset, int]:
    """A convolutional network, 0.3 M parameters; 16 images of 3x32x32 per rank"""
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2048, 96), nn.ReLU(), nn.Linear(96, 10)),
    )
    return model, TensorDataset(torch.randn(4096, 3, 32, 32), torch.randint(10, (4096,))), 16


class Transformer(nn.Module):
    """Encode sequences of symbols and sort their mean into ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(self.embed(x)).mean(1))
        return found


def transformer() -> tuple[nn.Module, TensorDataset, int]:
    """Two 128-wide encoder layers, 0.3 M parameters; 16x32 symbols per rank"""
    return Transformer(), TensorDataset(torch.randint(256, (4096, 32)), torch.randint(10, (4096,))), 16


MODELS: dict[str, Callable[[], tuple[nn.Module, TensorDataset, int]]] = {
    "conv": conv_net,
    "transformer": transformer,
}


def optimizer_by_name(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=1e-4)


def _plain(
    model_name: str, optimizer_name: str, rank: int, size: int, device: torch.device
) -> Iterator[None]:
    """Make one optimizer step of plain DDP per `next`."""
    torch.manual_seed(SEED)
    inner, data, local = MODELS[model_name]()
    inner.to(device)
    model: nn.Module = DistributedDataParallel(inner) if size > 1 else inner
    optimizer = optimizer_by_name(optimizer_name, inner)
    sampler: DistributedSampler[Any] = DistributedSampler(data, size, rank, drop_last=True)
    loader = DataLoader(data, local, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss: Tensor = cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            yield
        epoch += 1


def _pollux(
    model_name: str, optimizer_name: str, size: int, device: torch.device, sampling: int
) -> Iterator[None]:
    """Make one optimizer step under Pollux per `next`."""
    torch.manual_seed(SEED)
    model, data, local = MODELS[model_name]()
    model.to(device)
    optimizer = optimizer_by_name(optimizer_name, model)
    # On one rank a lone pass is measured in two halves, as it would be in training; the batch size stays.
    job = pollux.attach(model, optimizer, adaptive=size == 1, measuring={"every": sampling})
    loader = job.loader(data, local * size, max_batch_size=local * size, drop_last=True)
    for _ in job.epochs(1e9, statistical=True):
        for x, y in loader:
            with job.micro_batch():
                job.backward(cross_entropy(job.model(x.to(device)), y.to(device)))
            if job.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
                yield


def _join(rank: int, plan: OverheadPlan, port: int) -> Any:
    """Join the other ranks; return the group whose barriers divide the steps."""
    os.environ.update(LOCAL_WORLD_SIZE=str(plan.ranks), GLOO_SOCKET_IFNAME="lo")
    if plan.join is not None:
        plan.join(rank, port)
    if plan.ranks == 1 and plan.join is None:
        return None
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(plan.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if plan.device == "cuda" else "gloo")
    return torch.distributed.new_group(backend="gloo")


def _worker(rank: int, plan: OverheadPlan, model: str, optimizer: str, port: int, pipe: Any) -> None:
    """Run one rank: train all variants and send each step's seconds, of wall-clock time and of CPU time."""
    warnings.filterwarnings("ignore")
    if plan.device == "cpu" and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    size = plan.ranks
    device = torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    group = _join(rank, plan, port)

    def meet() -> float:
        if group is not None:
            torch.distributed.barrier(group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    variants: dict[str, Iterator[None]] = {
        name: _plain(model, optimizer, rank, size, device) for name in PLAIN
    }
    for name, sampling in SAMPLINGS.items():
        variants[name] = _pollux(model, optimizer, size, device, sampling)
    for name, rival in plan.rivals.items():
        variants[name] = rival(model, optimizer, size, device)
    order = random.Random(SEED)
    rounds: list[dict[str, list[tuple[float, float]]]] = []
    least = min(plan.least_rounds, plan.rounds)
    begun = time.monotonic()
    going = True
    while going:
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
        for _ in range(plan.warm_steps if len(rounds) < plan.warm_rounds else STEPS):
            for name in order.sample(list(variants), len(variants)):
                start = meet()
                cpu = time.process_time()
                next(variants[name])
                used = time.process_time() - cpu
                spent[name].append((meet() - start, used))
        rounds.append(spent)
        late = time.monotonic() - begun > plan.seconds
        going = _agreed(len(rounds) < plan.warm_rounds + (least if late else plan.rounds), group)
    pipe.send(rounds[plan.warm_rounds :])
    pipe.close()
    meet()
    os._exit(0)  # each variant holds a group and threads, which need no orderly end


def _agreed(mine: bool, group: Any) -> bool:
    """Return rank 0's answer on all ranks."""
    if group is None:
        return mine
    vector = torch.tensor([mine])
    torch.distributed.broadcast(vector, src=0, group=group)
    return bool(vector)


def measure(plan: OverheadPlan, model: str, optimizer: str) -> dict[str, np.ndarray]:
    """Return the seconds per step of each variant, [rounds, steps, ranks, (wall, CPU)]. Raises PolluxAgentError."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context: Any = multiprocessing.get_context("spawn" if plan.device == "cuda" else "fork")
    running = []
    for rank in range(plan.ranks):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_worker, args=(rank, plan, model, optimizer, port, there))
        process.start()
        there.close()
        running.append((process, here))
    try:
        ranks = [pipe.recv() for _, pipe in running]
    except EOFError:
        raise PolluxAgentError("a rank failed; its trace is above") from None
    finally:
        for process, _ in running:
            process.join(10)
            process.kill()
    names = ranks[0][0]
    return {
        name: np.moveaxis(np.array([[one[name] for one in rounds] for rounds in ranks]), 0, 2)
        for name in names
    }


def interval(logs: np.ndarray) -> tuple[float, float, float]:
    """Return the overhead and its 95 % bootstrap interval. `logs` holds logarithmic ratios [rounds, steps]."""

    def middle(values: np.ndarray) -> Any:
        cut = values.shape[-2] // 5
        return np.sort(values, axis=-2)[..., cut : values.shape[-2] - cut, :].mean((-2, -1))

    rounds, steps = logs.shape
    random = np.random.default_rng(0)
    # Resample one at a time: all resamples at once would take gigabytes.
    again = [middle(logs[random.integers(rounds, size=logs.shape), np.arange(steps)]) for _ in range(4000)]
    low, high = np.quantile(again, (0.025, 0.975))
    found: tuple[float, float, float] = tuple(float(np.expm1(x)) for x in (middle(logs), low, high))  # type: ignore[assignment]
    return found


def rows_of(
    plan: OverheadPlan, model: str, optimizer: str, times: dict[str, np.ndarray]
) -> list[dict[str, Any]]:
    """Return a row per variant, except the first plain one: step times, and overheads with their intervals."""
    wall = {name: t[..., 0].max(2) for name, t in times.items()}
    cpu = {name: t[..., 1].sum(2) for name, t in times.items()}
    rows = []
    for name in times:
        if name == PLAIN[0]:
            continue
        rivals = PLAIN[:1] if name in PLAIN else PLAIN
        found = [
            interval(np.log(clock[name]) - np.mean([np.log(clock[rival]) for rival in rivals], axis=0))
            for clock in (wall, cpu)
        ]
        rows.append(
            {
                "model": model,
                "device": plan.device,
                "ranks": plan.ranks,
                "optimizer": optimizer,
                "variant": name,
                "sampling": 1.0 / SAMPLINGS[name] if name in SAMPLINGS else None,
                "plain_step_s": float(np.median(wall[PLAIN[0]])),
                "pollux_step_s": float(np.median(wall[name])),
                "overhead": found[0][0],
                "overhead_ci_low": found[0][1],
                "overhead_ci_high": found[0][2],
                "plain_cpu_s_by_rank": np.median(times[PLAIN[0]][..., 1], axis=(0, 1)).tolist(),
                "pollux_cpu_s_by_rank": np.median(times[name][..., 1], axis=(0, 1)).tolist(),
                "cpu_overhead": found[1][0],
                "cpu_overhead_ci_low": found[1][1],
                "cpu_overhead_ci_high": found[1][2],
                "rounds": len(wall[name]),
            }
        )
    return rows
