"""What the agent costs per optimizer step, against plain DistributedDataParallel.

    python tests/benchmarks/agent_overhead.py [--ranks 4] [--rounds 40] [--device cpu] [--json bench-out/agent.json]

Paired and interleaved: in each round every variant trains a block of steps, in random order, all in the same processes;
a variant's overhead is the mean over rounds of (its block time / the plain block time of the same round - 1). A second
plain variant, the null pair, shows how much of that is noise. CPU time is given beside: other
processes move it less. Plain: DDP, torch's DataLoader with a DistributedSampler. Pollux: `attach`, its loader, hook,
timing, control exchange and refitting thread, fixed batch size.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[2] / "agent")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

import pollux  # noqa: E402

SAMPLINGS = (1, 20)
SEED = 1


def conv_net() -> tuple[nn.Module, TensorDataset, int]:
    """A convolutional network on 3 x 32 x 32 images: 0.3 million parameters; 16 images per rank."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2048, 96), nn.ReLU(), nn.Linear(96, 10)),
    )
    return model, TensorDataset(torch.randn(4096, 3, 32, 32), torch.randint(10, (4096,))), 16


class Transformer(nn.Module):
    """Two encoder layers over sequences of 32 symbols, 128 wide: 0.4 million parameters."""

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
    return Transformer(), TensorDataset(torch.randint(256, (4096, 32)), torch.randint(10, (4096,))), 8


MODELS: dict[str, Callable[[], tuple[nn.Module, TensorDataset, int]]] = {
    "conv": conv_net,
    "transformer": transformer,
}


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=1e-4)


def _plain(
    model_name: str, optimizer_name: str, rank: int, size: int, device: torch.device
) -> Iterator[None]:
    """One optimizer step of plain DDP per `next`."""
    torch.manual_seed(SEED)
    inner, data, local = MODELS[model_name]()
    inner.to(device)
    model: nn.Module = DistributedDataParallel(inner) if size > 1 else inner
    optimizer = _optimizer(optimizer_name, inner)
    sampler: DistributedSampler[Any] = DistributedSampler(data, size, rank, drop_last=True)
    loader = DataLoader(data, local, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for x, y in loader:
            cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield
        epoch += 1


def _pollux(
    model_name: str, optimizer_name: str, size: int, device: torch.device, sampling: int
) -> Iterator[None]:
    """One optimizer step under Pollux per `next`."""
    torch.manual_seed(SEED)
    model, data, local = MODELS[model_name]()
    model.to(device)
    optimizer = _optimizer(optimizer_name, model)
    job = pollux.attach(model, optimizer, adaptive=False, sampling=sampling)
    loader = job.loader(data, local * size, drop_last=True)
    for _ in job.epochs(1e9):
        for x, y in loader:
            with job.micro_batch():
                job.backward(cross_entropy(job.model(x.to(device)), y.to(device)))
            if job.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
            yield


def _block(steps: Iterator[None], count: int, device: torch.device, group: Any) -> tuple[float, float]:
    """Seconds per step of `count` steps: on the wall's clock, and of this process's CPU time."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier(group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        next(steps)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / count, (time.process_time() - cpu) / count


def _worker(rank: int, options: argparse.Namespace, port: int, pipe: Any) -> None:
    size = options.ranks
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    group = None
    os.environ.update(LOCAL_WORLD_SIZE=str(size), GLOO_SOCKET_IFNAME="lo")
    if size > 1:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        group = torch.distributed.new_group(backend="gloo")
    results = []
    for model in options.models:
        for optimizer in options.optimizers:
            variants: dict[Any, Iterator[None]] = {
                "plain": _plain(model, optimizer, rank, size, device),
                "null": _plain(model, optimizer, rank, size, device),
            }
            for sampling in SAMPLINGS:
                variants[sampling] = _pollux(model, optimizer, size, device, sampling)
            for steps in variants.values():
                _block(steps, 40, device, group)
            order = random.Random(SEED)
            times: dict[Any, list[tuple[float, float]]] = {name: [] for name in variants}
            for _ in range(options.rounds):
                names = list(variants)
                order.shuffle(names)
                for name in names:
                    times[name].append(_block(variants[name], options.steps, device, group))
            for steps in variants.values():
                steps.close()  # type: ignore[attr-defined]
            results.append((model, optimizer, times))
    if rank == 0:
        pipe.send(results)
    pipe.close()


def _interval(ratios: np.ndarray) -> tuple[float, float, float]:
    """Mean of the middle 80 % of rounds (other processes hit some), and its 95 % bootstrap interval."""

    def trimmed(values: np.ndarray) -> Any:
        cut = values.shape[-1] // 10
        return np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut].mean(-1)

    draws = np.random.default_rng(0).choice(ratios, (4000, ratios.size))
    low, high = np.quantile(trimmed(draws), (0.025, 0.975))
    return float(trimmed(ratios)), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--steps", type=int, default=20, help="optimizer steps per block; sampling 1/20 measures one"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--optimizers", nargs="+", choices=["sgd", "adam"], default=["sgd", "adam"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn" if options.device == "cuda" else "fork")
    here, there = context.Pipe(duplex=False)
    processes = [
        context.Process(target=_worker, args=(r, options, port, there)) for r in range(options.ranks)
    ]
    for process in processes:
        process.start()
    there.close()
    try:
        results = here.recv()
    except EOFError:
        raise SystemExit("a rank failed; its trace is above") from None
    for process in processes:
        process.join()
    rows = []
    print(
        "| model | optimizer | sampling | plain step [ms] | Pollux step [ms] "
        "| overhead | 95 % interval | of CPU time | 95 % interval |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for model, optimizer, times in results:
        plain = np.array(times["plain"])
        for name in ["null", *SAMPLINGS]:
            ratios = np.array(times[name]) / plain - 1.0
            (mean, low, high), (cpu, cpu_low, cpu_high) = _interval(ratios[:, 0]), _interval(ratios[:, 1])
            label = "null pair" if name == "null" else "every step" if name == 1 else f"1/{name}"
            plain_s, ours_s = float(np.median(plain[:, 0])), float(np.median(np.array(times[name])[:, 0]))
            print(
                f"| {model} | {optimizer} | {label} | {1e3 * plain_s:.2f} | {1e3 * ours_s:.2f} | {100 * mean:+.2f} % "
                f"| {100 * low:+.2f} to {100 * high:+.2f} % | {100 * cpu:+.2f} % "
                f"| {100 * cpu_low:+.2f} to {100 * cpu_high:+.2f} % |"
            )
            rows.append(
                {
                    "model": model,
                    "device": options.device,
                    "ranks": options.ranks,
                    "optimizer": optimizer,
                    "sampling": 0.0 if name == "null" else 1.0 / float(name),
                    "plain_step_s": plain_s,
                    "pollux_step_s": ours_s,
                    "overhead": mean,
                    "overhead_ci_high": high,
                    "cpu_overhead": cpu,
                    "cpu_overhead_ci_high": cpu_high,
                }
            )
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
