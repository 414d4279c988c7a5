"""Measure the agent's cost per step against DistributedDataParallel.

    python -m tests.benchmarks.agent_overhead [--ranks 4] [--minutes 30] [--device cpu|cuda]
        [--json bench-out/agent.json] [--markdown tests/benchmarks/agent_overhead.md]

`overhead` says how. AdaptDL is measured too where it can be imported.

On GPUs it runs by `--device cuda`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from contrib.commit import COMMIT
from pollux.training.growing_model import GrowingModel
from tests.benchmarks import overhead
from tests.benchmarks.overhead import MODELS, SEED, OverheadPlan, optimizer_by_name
from tests.benchmarks.results import parser_of, save


class AdaptDLJoin:
    """Form AdaptDL's process group of so many ranks."""

    def __init__(self, ranks: int, device: str) -> None:
        self.ranks, self.backend = ranks, "nccl" if device == "cuda" else "gloo"

    def __call__(self, rank: int, port: int) -> None:
        import adaptdl.torch

        adaptdl.torch.init_process_group(self.backend, f"tcp://127.0.0.1:{port}", self.ranks, rank)
        os.environ.update(
            ADAPTDL_REPLICA_RANK=str(rank), ADAPTDL_NUM_REPLICAS=str(self.ranks), ADAPTDL_NUM_NODES="1"
        )


def _adaptdl(model_name: str, optimizer_name: str, size: int, device: torch.device) -> Iterator[None]:
    """Make one optimizer step under AdaptDL per `next`; all are measured."""
    import adaptdl.torch  # type: ignore[import-not-found]

    torch.manual_seed(SEED)
    model, data, local = MODELS[model_name]()
    model.to(device)
    optimizer = optimizer_by_name(optimizer_name, model)
    loader = adaptdl.torch.AdaptiveDataLoader(data, batch_size=local * size, shuffle=True, drop_last=True)
    parallel = adaptdl.torch.AdaptiveDataParallel(model, optimizer)
    for _ in adaptdl.torch.remaining_epochs_until(10**9):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(parallel(x.to(device)), y.to(device)).backward()
            optimizer.step()
            yield


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
    about = (overhead.__doc__ or "").split("\n\n", 1)[1].strip()
    models = "\n".join(f"- {name}: {MODELS[name].__doc__ or ''}" for name in options.models)
    rounds = [row["rounds"] for row in rows]
    return (
        f"# The agent's overhead per optimizer step\n\n`make bench-agent`: {options.ranks} ranks on {options.device}, "
        f"torch {torch.__version__}, {os.cpu_count()} cores, {min(rounds)} to {max(rounds)} rounds, "
        f"commit {COMMIT}.\n\n{HEAD}\n"
        + "\n".join(map(line_of, rows))
        + "\n\nGoals for the intervals' upper ends: 3 % (SGD) and 6 % (Adam) at every step, 1.5 % at 1/20.\n\n"
        + f"{wrapper_line()}\n\n"
        + f"{about}\n\n{models}\n"
    )


def main() -> None:
    parser = parser_of(__doc__)
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
    adaptdl = importlib.util.find_spec("adaptdl") is not None
    plan = OverheadPlan(
        options.ranks,
        options.device,
        60.0 * options.minutes / (len(options.models) * len(options.optimizers)),
        options.rounds,
        join=AdaptDLJoin(options.ranks, options.device) if adaptdl else None,
        rivals={"AdaptDL": _adaptdl} if adaptdl else {},
    )
    rows: list[dict[str, Any]] = []
    print(wrapper_line(), flush=True)
    print(HEAD, flush=True)
    for model in options.models:
        for optimizer in options.optimizers:
            new = overhead.rows_of(plan, model, optimizer, overhead.measure(plan, model, optimizer))
            print("\n".join(line_of(row) for row in new), flush=True)
            rows += new
    if options.json is not None:
        save(options.json, rows)
    if options.markdown is not None:
        options.markdown.write_text(page_of(options, rows))


if __name__ == "__main__":
    main()
