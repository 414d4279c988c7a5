"""Measure the agent's cost per step against DistributedDataParallel.

    python tests/benchmarks/agent_overhead.py [--ranks 4] [--minutes 30] [--device cpu|cuda]
        [--json bench-out/agent.json] [--markdown tests/benchmarks/agent_overhead.md]

Paired and interleaved: all variants train in the same processes, one step of each in turn and in random order, so that
other work on the machine slows all of them. A step is timed from barrier to barrier, by its slowest rank. The logarithm
of its time is compared with the mean of the logarithms of the two plain variants' steps beside it. Twenty steps make a
round; at the default sampling of 1/20, the agent measures one of them. The first to twentieth steps of all rounds are
averaged separately, without the fifth farthest off at either side (another process at work). The overhead is the mean
of these twenty averages. The null pair compares the two plain variants with each other and shows how much of an
overhead is noise. The ranks' CPU time is given too: it does not contain waiting for others. On CPUs each rank is bound
to one core, because the kernel now and then puts three of four ranks on one of two cores.

Plain: DDP, torch's DataLoader with a DistributedSampler. Pollux: `attach`, its loader, hook, timing, control exchange
and refitting thread, at a fixed batch size. AdaptDL is measured too where it can be imported. The first 60 steps of
each variant are left out: in them kernels, connections and Adam's second moments warm up. The import of SciPy by the
refitting thread is left out too: it takes about a second of one core, once per start.

On GPUs it runs by `--device cuda`; no figure of a GPU is committed so far.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import random
import socket
import sys
import time
import warnings
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
import pollux.fit  # noqa: E402 - SciPy's import, once per start and in a thread, is no part of a step
from pollux.training.growing_model import GrowingModel  # noqa: E402

SEED = 1
STEPS = 20
"""Optimizer steps of each variant in a round."""
WARM_ROUNDS = 3
LEAST_ROUNDS = 12
"""Minimum of rounds, for a machine so slow that the time is up before."""
SAMPLINGS = {"every step": 1, "1/20": 20}
PLAIN = ("plain", "null pair")


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


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
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
    """Make one optimizer step under Pollux per `next`."""
    torch.manual_seed(SEED)
    model, data, local = MODELS[model_name]()
    model.to(device)
    optimizer = _optimizer(optimizer_name, model)
    # On one rank a lone pass is measured in two halves, as it would be in training; the batch size stays.
    job = pollux.attach(model, optimizer, adaptive=size == 1, measure_every=sampling)
    loader = job.loader(data, local * size, max_batch_size=local * size, drop_last=True)
    for _ in job.epochs(1e9):
        for x, y in loader:
            with job.micro_batch():
                job.backward(cross_entropy(job.model(x.to(device)), y.to(device)))
            if job.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
                yield


def _adaptdl(model_name: str, optimizer_name: str, size: int, device: torch.device) -> Iterator[None]:
    """Make one optimizer step under AdaptDL per `next`; all are measured."""
    import adaptdl.torch  # type: ignore[import-not-found]

    torch.manual_seed(SEED)
    model, data, local = MODELS[model_name]()
    model.to(device)
    optimizer = _optimizer(optimizer_name, model)
    loader = adaptdl.torch.AdaptiveDataLoader(data, batch_size=local * size, shuffle=True, drop_last=True)
    parallel = adaptdl.torch.AdaptiveDataParallel(model, optimizer)
    for _ in adaptdl.torch.remaining_epochs_until(10**9):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(parallel(x.to(device)), y.to(device)).backward()
            optimizer.step()
            yield


def _join(rank: int, options: argparse.Namespace, port: int) -> Any:
    """Join the other ranks; return the group whose barriers divide the steps."""
    size = options.ranks
    os.environ.update(LOCAL_WORLD_SIZE=str(size), GLOO_SOCKET_IFNAME="lo")
    backend = "nccl" if options.device == "cuda" else "gloo"
    if options.adaptdl:
        import adaptdl.torch

        adaptdl.torch.init_process_group(backend, f"tcp://127.0.0.1:{port}", size, rank)
        os.environ.update(
            ADAPTDL_REPLICA_RANK=str(rank), ADAPTDL_NUM_REPLICAS=str(size), ADAPTDL_NUM_NODES="1"
        )
    if size == 1 and not options.adaptdl:
        return None
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(backend)
    return torch.distributed.new_group(backend="gloo")


def _worker(rank: int, options: argparse.Namespace, model: str, optimizer: str, port: int, pipe: Any) -> None:
    """Run one rank: train all variants and send the seconds of each step.

    The seconds are of wall-clock time and of CPU time.
    """
    warnings.filterwarnings("ignore")
    if options.device == "cpu" and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    size = options.ranks
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    group = _join(rank, options, port)

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
    if options.adaptdl:
        variants["AdaptDL"] = _adaptdl(model, optimizer, size, device)
    order = random.Random(SEED)
    rounds: list[dict[str, list[tuple[float, float]]]] = []
    least = min(LEAST_ROUNDS, options.rounds)
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
        late = time.monotonic() - begun > options.seconds
        going = _agreed(len(rounds) < WARM_ROUNDS + (least if late else options.rounds), group)
    pipe.send(rounds[WARM_ROUNDS:])
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


def measure(options: argparse.Namespace, model: str, optimizer: str) -> dict[str, np.ndarray]:
    """Return the seconds per step of each variant.

    The arrays are [rounds, steps, ranks, (wall, CPU)].

    Raises:
        SystemExit: a rank failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn" if options.device == "cuda" else "fork")
    running = []
    for rank in range(options.ranks):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_worker, args=(rank, options, model, optimizer, port, there))
        process.start()
        there.close()
        running.append((process, here))
    try:
        ranks = [pipe.recv() for _, pipe in running]
    except EOFError:
        raise SystemExit("a rank failed; its trace is above") from None
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
    """Return the overhead and its 95 % bootstrap interval.

    `logs` holds logarithmic ratios [rounds, steps].
    """

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
    options: argparse.Namespace, model: str, optimizer: str, times: dict[str, np.ndarray]
) -> list[dict[str, Any]]:
    """Return one row per variant, except the first plain one.

    A row has the step times, and the overheads with their intervals.
    """
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
                "device": options.device,
                "ranks": options.ranks,
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


def wrapper_cost(calls: int = 2000, rounds: int = 101) -> tuple[float, float, float]:
    """Return the cost [us] of a one-rank job's wrapper per pass.

    The median of paired, interleaved rounds, and their quartiles. A small model: the cost does not depend on it.
    """
    torch.manual_seed(SEED)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    variants = {"alone": model, "wrapped": GrowingModel(model)}
    found: list[float] = []
    with torch.no_grad():
        for _ in range(rounds):
            spent = dict.fromkeys(variants, 0.0)
            for _ in range(10):
                for name, variant in variants.items():
                    start = time.perf_counter()
                    for _ in range(calls // 10):
                        variant(x)
                    spent[name] += time.perf_counter() - start
            found.append(1e6 * (spent["wrapped"] - spent["alone"]) / calls)
    low, middle, high = np.quantile(found, (0.25, 0.5, 0.75))
    return float(middle), float(low), float(high)


HEAD = (
    "| model | optimizer | measured | plain step [ms] | step [ms] | overhead | 95 % interval "
    "| CPU per step, plain, all ranks | overhead of it | 95 % interval |\n|---|---|---|---|---|---|---|---|---|---|"
)


def line_of(row: dict[str, Any]) -> str:
    return (
        f"| {row['model']} | {row['optimizer']} | {row['variant']} | {1e3 * row['plain_step_s']:.2f} "
        f"| {1e3 * row['pollux_step_s']:.2f} | {100 * row['overhead']:+.2f} % "
        f"| {100 * row['overhead_ci_low']:+.2f} to {100 * row['overhead_ci_high']:+.2f} % "
        f"| {1e3 * sum(row['plain_cpu_s_by_rank']):.2f} ms | {100 * row['cpu_overhead']:+.2f} % "
        f"| {100 * row['cpu_overhead_ci_low']:+.2f} to {100 * row['cpu_overhead_ci_high']:+.2f} % |"
    )


def wrapper_line() -> str:
    """Return what the page says of a job of one rank."""
    middle, low, high = wrapper_cost()
    return (
        f"The wrapper of a model that begins on one rank costs {middle:.1f} us a pass "
        f"(quartiles {low:.1f} to {high:.1f} us; `wrapper_cost`)."
    )


def page_of(options: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    """Return the text of the committed page."""
    about = (__doc__ or "").split("\n\n", 2)[2].strip()
    models = "\n".join(f"- {name}: {MODELS[name].__doc__ or ''}" for name in options.models)
    rounds = [row["rounds"] for row in rows]
    return (
        f"# The agent's overhead per optimizer step\n\n`make bench-agent`: {options.ranks} ranks on {options.device}, "
        f"torch {torch.__version__}, {os.cpu_count()} cores, {min(rounds)} to {max(rounds)} rounds.\n\n{HEAD}\n"
        + "\n".join(map(line_of, rows))
        + "\n\nGoals for the intervals' upper ends: 3 % (SGD) and 6 % (Adam) at every step, 1.5 % at 1/20.\n\n"
        + f"{wrapper_line()}\n\n"
        + f"{about}\n\n{models}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="4 on CPU, as many as there are on GPUs")
    parser.add_argument("--rounds", type=int, default=400, help="at most, for each model and optimizer")
    parser.add_argument("--minutes", type=float, default=30.0, help="for all of them together, about")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--optimizers", nargs="+", choices=["sgd", "adam"], default=["sgd", "adam"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the table there, as a page")
    options = parser.parse_args()
    if options.ranks is None:
        options.ranks = 4 if options.device == "cpu" else max(torch.cuda.device_count(), 1)
    options.adaptdl = importlib.util.find_spec("adaptdl") is not None
    options.seconds = 60.0 * options.minutes / (len(options.models) * len(options.optimizers))
    rows: list[dict[str, Any]] = []
    print(wrapper_line(), flush=True)
    print(HEAD, flush=True)
    for model in options.models:
        for optimizer in options.optimizers:
            new = rows_of(options, model, optimizer, measure(options, model, optimizer))
            print("\n".join(line_of(row) for row in new), flush=True)
            rows += new
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=2))
    if options.markdown is not None:
        options.markdown.write_text(page_of(options, rows))


if __name__ == "__main__":
    main()
