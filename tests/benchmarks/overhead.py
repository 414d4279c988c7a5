"""The agent's cost per step against plain PyTorch.

Paired and interleaved: all variants train in the same processes, one step of each in turn and in random order, so that
other work on the machine slows all of them. A step is timed from barrier to barrier, by its slowest rank. A round has
82 steps of each variant: two cycles of measuring. The logarithm of a variant's time in a round is compared with the
mean of the logarithms of the two plain variants' times. The overhead is the mean over the rounds, without the fifth
farthest off at either side (another process at work). The null pair compares the two plain variants with each other and
shows how much of an overhead is noise. The ranks' CPU time is given too: it contains neither waiting for others nor
other work on the machine. On CPUs each rank is bound to one core, because the kernel now and then puts three of four
ranks on one of two cores.

Plain: torch's DataLoader, on several ranks with a DistributedSampler and DDP or fully_shard (FSDP2). Fixed and
adaptive: `attach` with its defaults, its loader, measuring, timing, control exchange and refitting thread; the batch
size stays (`adaptive`: since max_batch_size is M0). The first rounds of each variant are left out: in them kernels,
connections and Adam's second moments warm up, and the noise scale becomes known. A batch has at least four
examples, and as many as bring a plain step to about 3, 15 or 50 ms on one rank (of CPU time, on a CPU).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import pollux
from pollux.errors import PolluxAgentError
from pollux.ranks.world import backend_for

SEED = 1
STEPS = 82
"""Optimizer steps of each variant in a round."""
ADAPTIVE = {"fixed": False, "adaptive": True}
PLAIN = ("plain", "null pair")
EXAMPLES = 8192


class Case(NamedTuple):
    """One training."""

    model: str
    optimizer: str
    ranks: int
    step_s: float
    """About, of a plain step."""
    width: int
    local: int = 0
    """Examples of a rank in a step; 0: not calibrated yet."""
    sharded: bool = False
    """The model is under fully_shard, and not under DDP."""


Variant = Callable[[Case, torch.device], Iterator[None]]
"""Makes one optimizer step per `next`."""


@dataclass(frozen=True)
class OverheadPlan:
    """How long is measured."""

    device: str
    seconds: float
    """Of one case, about."""
    rounds: int
    """At most."""
    warm_rounds: int = 2
    least_rounds: int = 6
    """Minimum of rounds, for a machine so slow that the time is up before."""


def images(width: int) -> tuple[nn.Module, TensorDataset]:
    """A residual network of 12 convolutions with batch norm; images of 3x32x32"""
    return Residual(width), TensorDataset(torch.randn(EXAMPLES, 3, 32, 32), torch.randint(10, (EXAMPLES,)))


class Residual(nn.Module):
    """Sort images of 3 channels into ten classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(11)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        found: Tensor = self.head(x.mean((2, 3)))
        return found


class Transformer(nn.Module):
    """Encode sequences of symbols and sort their mean into ten classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(self.embed(x)).mean(1))
        return found


def tokens(width: int) -> tuple[nn.Module, TensorDataset]:
    """Three encoder layers; sequences of 32 symbols"""
    return Transformer(width), TensorDataset(
        torch.randint(256, (EXAMPLES, 32)), torch.randint(10, (EXAMPLES,))
    )


MODELS: dict[str, Callable[[int], tuple[nn.Module, TensorDataset]]] = {"images": images, "tokens": tokens}
WIDTHS = {"cpu": {0.003: 8, 0.015: 16, 0.05: 32}, "cuda": {0.003: 64, 0.015: 256, 0.05: 512}}
"""Of the models, by the seconds of a step."""


def calibrated(case: Case, device: torch.device) -> Case:
    """Return the case with as many examples as make a plain step about as long as wanted."""
    alone, local = case._replace(ranks=1, sharded=False), 4
    while True:
        steps = _plain(alone._replace(local=local), 0, device)
        times = []
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        for _ in range(9):
            start = clock()
            next(steps)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(clock() - start)
        seconds = float(np.median(times[3:]))
        if seconds >= 0.8 * case.step_s or local >= EXAMPLES // 16:
            return case._replace(local=local)
        local = min(max(local + 1, int(local * min(case.step_s / seconds, 4.0))), EXAMPLES // 16)


def optimizer_by_name(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _made(case: Case, device: torch.device) -> tuple[nn.Module, TensorDataset]:
    model, data = MODELS[case.model](case.width)
    model.to(device)
    if case.sharded:
        from torch.distributed.fsdp import fully_shard

        for unit in (m for m in model.modules() if isinstance(m, nn.Sequential | nn.TransformerEncoderLayer)):
            fully_shard(unit)
        fully_shard(model)
    return model, data


def _plain(case: Case, rank: int, device: torch.device) -> Iterator[None]:
    """Make one optimizer step of plain PyTorch per `next`."""
    torch.manual_seed(SEED)
    inner, data = _made(case, device)
    model: nn.Module = DistributedDataParallel(inner) if case.ranks > 1 and not case.sharded else inner
    optimizer = optimizer_by_name(case.optimizer, inner)
    sampler: DistributedSampler[Any] = DistributedSampler(data, case.ranks, rank, drop_last=True)
    loader = DataLoader(data, case.local, sampler=sampler, drop_last=True)
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


def _pollux(case: Case, device: torch.device, adaptive: bool) -> Iterator[None]:
    """Make one optimizer step under Pollux per `next`."""
    torch.manual_seed(SEED)
    model, data = _made(case, device)
    optimizer = optimizer_by_name(case.optimizer, model)
    job = pollux.attach(model, optimizer, adaptive=adaptive)
    whole = case.local * case.ranks
    loader = job.loader(data, whole, max_batch_size=whole, drop_last=True)
    for _ in job.epochs(1e9, statistical=True):
        for x, y in loader:
            with job.micro_batch():
                job.backward(cross_entropy(job.model(x.to(device)), y.to(device)))
            if job.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
                yield


def _join(rank: int, case: Case, device: str, port: int) -> Any:
    """Join the other ranks; return the group whose barriers divide the steps."""
    os.environ.update(LOCAL_WORLD_SIZE=str(case.ranks), GLOO_SOCKET_IFNAME="lo")
    if case.ranks == 1:
        return None
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(case.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.distributed.init_process_group(backend_for(torch.device(device)))
    return torch.distributed.new_group(backend="gloo")


def _worker(rank: int, plan: OverheadPlan, case: Case, port: int, pipe: Any) -> None:
    """Run one rank: train all variants and send each step's seconds, of wall-clock time and of CPU time."""
    warnings.filterwarnings("ignore")
    if plan.device == "cpu" and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    device = torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    group = _join(rank, case, plan.device, port)
    if not case.local:
        local = torch.tensor([calibrated(case, device).local])
        if group is not None:
            torch.distributed.broadcast(local, src=0, group=group)
        case = case._replace(local=int(local))

    def meet() -> float:
        if group is not None:
            torch.distributed.barrier(group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    variants: dict[str, Iterator[None]] = {name: _plain(case, rank, device) for name in PLAIN}
    variants |= {name: _pollux(case, device, adaptive) for name, adaptive in ADAPTIVE.items()}
    order = random.Random(SEED)
    rounds: list[dict[str, list[tuple[float, float]]]] = []
    least = min(plan.least_rounds, plan.rounds)
    begun = time.monotonic()
    going = True
    while going:
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
        for _ in range(STEPS):
            for name in order.sample(list(variants), len(variants)):
                start = meet()
                cpu = time.process_time()
                next(variants[name])
                used = time.process_time() - cpu
                spent[name].append((meet() - start, used))
        rounds.append(spent)
        late = time.monotonic() - begun > plan.seconds
        going = _agreed(len(rounds) < plan.warm_rounds + (least if late else plan.rounds), group)
    pipe.send((case.local, rounds[plan.warm_rounds :]))
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


def measure(plan: OverheadPlan, case: Case) -> tuple[Case, dict[str, np.ndarray]]:
    """Return the case, calibrated, and the seconds per step of each variant, [rounds, steps, ranks, (wall, CPU)].

    Raises PolluxAgentError.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context: Any = multiprocessing.get_context("spawn" if plan.device == "cuda" else "fork")
    running = []
    for rank in range(case.ranks):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_worker, args=(rank, plan, case, port, there))
        process.start()
        there.close()
        running.append((process, here))
    try:
        found = [pipe.recv() for _, pipe in running]
    except EOFError:
        raise PolluxAgentError("a rank failed; its trace is above") from None
    finally:
        for process, _ in running:
            process.join(10)
            process.kill()
    ranks = [rounds for _, rounds in found]
    times = {
        name: np.moveaxis(np.array([[one[name] for one in rounds] for rounds in ranks]), 0, 2)
        for name in ranks[0][0]
    }
    return case._replace(local=found[0][0]), times


def interval(logs: np.ndarray) -> tuple[float, float, float]:
    """Return the overhead and its 95 % bootstrap interval. `logs` holds logarithmic ratios [rounds]."""

    def middle(values: np.ndarray) -> Any:
        cut = values.shape[-1] // 5
        return np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut].mean(-1)

    random = np.random.default_rng(0)
    again = middle(logs[random.integers(len(logs), size=(4000, len(logs)))])
    low, high = np.quantile(again, (0.025, 0.975))
    found: tuple[float, float, float] = tuple(float(np.expm1(x)) for x in (middle(logs), low, high))  # type: ignore[assignment]
    return found


def rows_of(plan: OverheadPlan, case: Case, times: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return a row per variant, except the first plain one: step times, and overheads with their intervals."""
    wall = {name: np.log(t[..., 0].max(2).sum(1)) for name, t in times.items()}
    cpu = {name: np.log(t[..., 1].sum((1, 2))) for name, t in times.items()}
    rows = []
    for name in times:
        if name == PLAIN[0]:
            continue
        rivals = PLAIN[:1] if name in PLAIN else PLAIN
        found = [
            interval(clock[name] - np.mean([clock[rival] for rival in rivals], axis=0))
            for clock in (wall, cpu)
        ]
        rows.append(
            {
                **case._asdict(),
                "device": plan.device,
                "variant": name,
                "plain_step_s": float(np.median(times[PLAIN[0]][..., 0].max(2))),
                "pollux_step_s": float(np.median(times[name][..., 0].max(2))),
                "overhead": found[0][0],
                "overhead_ci_low": found[0][1],
                "overhead_ci_high": found[0][2],
                "plain_cpu_s": float(np.median(times[PLAIN[0]][..., 1].sum(2))),
                "cpu_overhead": found[1][0],
                "cpu_overhead_ci_low": found[1][1],
                "cpu_overhead_ci_high": found[1][2],
                "rounds": len(wall[name]),
            }
        )
    return rows
