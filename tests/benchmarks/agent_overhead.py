"""Measure the agent's cost per step against plain PyTorch, at steps of 3, 15 and 50 ms.

    python -m tests.benchmarks.agent_overhead [--kinds one ddp fsdp2] [--minutes 30] [--device cpu|cuda]
        [--json bench-out/agent.json] [--markdown tests/benchmarks/agent_overhead.md]

`overhead` says how. On GPUs it runs by `--device cuda`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import nn

from contrib.commit import COMMIT
from pollux.training.growing_model import GrowingModel
from tests.benchmarks import overhead
from tests.benchmarks.overhead import MODELS, PLAIN, SEED, WIDTHS, Case, OverheadPlan
from tests.benchmarks.results import parser_of, save


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
    "| model | ranks | examples | variant | plain step [ms] | overhead | 95 % interval | CPU per step, all ranks [ms] "
    "| overhead of it | 95 % interval |\n|---|---|---|---|---|---|---|---|---|---|"
)

OPTIMIZERS = {"images": "sgd", "tokens": "adamw"}
GOAL = 0.01


KINDS = {"one": (1, False), "ddp": (2, False), "fsdp2": (2, True)}
"""Ranks, and whether the model is under fully_shard."""


def line_of(row: dict[str, Any]) -> str:
    ranks = {1: "1"}.get(row["ranks"], f"{row['ranks']}, {'FSDP2' if row['sharded'] else 'DDP'}")
    return (
        f"| {row['model']}, {row['optimizer']} | {ranks} | {row['local']} a rank | {row['variant']} "
        f"| {1e3 * row['plain_step_s']:.1f} | {100 * row['overhead']:+.2f} % "
        f"| {100 * row['overhead_ci_low']:+.2f} to {100 * row['overhead_ci_high']:+.2f} % "
        f"| {1e3 * row['plain_cpu_s']:.1f} | {100 * row['cpu_overhead']:+.2f} % "
        f"| {100 * row['cpu_overhead_ci_low']:+.2f} to {100 * row['cpu_overhead_ci_high']:+.2f} % |"
    )


def wrapper_line() -> str:
    """Return what the page says of a job of one rank."""
    middle, low, high = wrapper_cost()
    return (
        f"The wrapper of a model that begins on one rank costs {middle:.1f} us a pass "
        f"(quartiles {low:.1f} to {high:.1f} us; `wrapper_cost`)."
    )


def page_of(options: argparse.Namespace, rows: list[dict[str, Any]], cases: int) -> str:
    """Return the text of the committed page."""
    about = (overhead.__doc__ or "").split("\n\n", 1)[1].strip()
    models = "\n".join(f"- {name}: {MODELS[name].__doc__ or ''}" for name in options.models)
    rounds = [row["rounds"] for row in rows]
    found = [row for row in rows if row["variant"] != PLAIN[1]]
    clock, cpu = (sum(row[name] <= GOAL for row in found) for name in ("overhead", "cpu_overhead"))
    verdict = f"{clock} of {len(found)} rows keep it by the clock, and {cpu} by CPU time"
    done = len({tuple(row[name] for name in ("model", "ranks", "step_s", "sharded")) for row in rows})
    load = f"load {os.getloadavg()[0]:.0f}"
    return (
        f"# The agent's overhead per optimizer step\n\n`make bench-agent`: {options.device}, "
        f"torch {torch.__version__}, {os.cpu_count()} cores, {load}, {min(rounds)} to {max(rounds)} rounds, "
        f"commit {COMMIT}. {done} of {cases} cases ran.\n\n{HEAD}\n"
        + "\n".join(map(line_of, rows))
        + f"\n\nGoal: at most 1 % of the step, by the agent's defaults; {verdict}.\n\n"
        + f"{wrapper_line()}\n\n"
        + f"{about}\n\n{models}\n"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=60, help="at most, for each case")
    parser.add_argument("--minutes", type=float, default=30.0, help="for all of them together, about")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--step-ms", nargs="+", type=int, choices=[3, 15, 50], default=[3, 15, 50])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the table there, as a page")
    options = parser.parse_args()
    cases = [
        Case(model, OPTIMIZERS[model], ranks, ms / 1000, WIDTHS[options.device][ms / 1000], 0, sharded)
        for ms in options.step_ms
        for ranks, sharded in (KINDS[kind] for kind in options.kinds)
        for model in options.models
    ]
    plan = OverheadPlan(options.device, 60.0 * options.minutes / len(cases), options.rounds)
    rows: list[dict[str, Any]] = []
    print(wrapper_line(), flush=True)
    print(HEAD, flush=True)
    for case in cases:
        new = overhead.rows_of(plan, *overhead.measure(plan, case))
        print("\n".join(line_of(row) for row in new), flush=True)
        rows += new
        # After each case: a run that is cut short leaves a page of what it has measured.
        if options.json is not None:
            save(options.json, rows)
        if options.markdown is not None:
            options.markdown.write_text(page_of(options, rows, len(cases)))


if __name__ == "__main__":
    main()
