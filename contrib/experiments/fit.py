"""Measure the cost of a fit and how well it predicts unseen step times.

    python -m contrib.experiments.fit [--data DIR] [--json FILE] [--markdown FILE]

It writes contrib/experiments/fit.md. Three kinds of rows are held out in turn:

- configurations (nodes, GPUs, examples per GPU), in five parts
- whole placements (nodes, GPUs), so that the fit saw no batch size of them
- all but twenty configurations, as a job knows them after some minutes

Errors are relative and absolute: |predicted / measured - 1|. Seconds are CPU seconds of one thread.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is loaded

import numpy as np

from pollux.fit import fit
from pollux.goodput import ThroughputParams, accumulation_time, step_time
from tests.benchmarks.results import ROOT, parser_of, save
from tests.sim.held_out import Floats, by_turns, errors, measurements

FEW = 20
FEW_DRAWS = 20
CONFIGURATIONS = 100
FITS = 30


@dataclass(frozen=True)
class Result:
    """The errors, as fractions."""

    application: str
    measurements: int
    configurations: int
    held_out: float
    held_out_p90: float
    unseen_placements: float
    from_twenty: float
    spread: float
    """Error of each configuration's own median: no model of (nodes, GPUs, examples) does better."""


def from_few(rows: Floats) -> float:
    """Return the mean error of fits to twenty configurations.

    The error is over all other configurations, and the mean is over several draws of the twenty.
    """
    keys = [tuple(row[:3]) for row in rows.tolist()]
    names = sorted(set(keys))
    found = []
    for seed in range(FEW_DRAWS):
        drawn = np.random.default_rng(seed).choice(len(names), FEW, replace=False)
        known = {names[i] for i in drawn}
        found.append(float(errors(rows, np.array([key not in known for key in keys])).mean()))
    return sum(found) / len(found)


def spread(rows: Floats) -> float:
    times: dict[tuple[float, ...], list[float]] = {}
    for *key, step, _ in rows.tolist():
        times.setdefault(tuple(key), []).append(step)
    off = [np.abs(np.median(found) / np.array(found) - 1.0) for found in times.values()]
    return float(np.concatenate(off).mean())


def evaluate(directory: Path) -> Result:
    rows = measurements(directory)
    held = by_turns(rows, lambda row: tuple(row[:3]))
    return Result(
        application=directory.name,
        measurements=len(rows),
        configurations=len({tuple(row[:3]) for row in rows.tolist()}),
        held_out=float(held.mean()),
        held_out_p90=float(np.quantile(held, 0.9)),
        unseen_placements=float(by_turns(rows, lambda row: tuple(row[:2])).mean()),
        from_twenty=from_few(rows),
        spread=spread(rows),
    )


def planted(seed: int) -> tuple[Floats, ...]:
    """Make 100 configurations of a random job, measured with 3 % noise."""
    rng = np.random.default_rng(seed)
    theta = ThroughputParams(
        *(rng.uniform(low, high) for low, high in ((0.005, 0.5), (1e-4, 1e-2), (0.005, 0.3))),
        *(rng.uniform(low, high) for low, high in ((0.001, 0.05), (0.05, 0.5), (0.001, 0.05), (1.0, 4.0))),
    )
    places: set[tuple[int, int, int]] = set()
    while len(places) < CONFIGURATIONS:
        nodes = int(rng.integers(1, 5))
        places.add((nodes, nodes * int(rng.integers(1, 5)), int(rng.integers(8, 512))))
    nodes, gpus, m = np.array(sorted(places), dtype=np.float64).T
    accum, optim = accumulation_time(theta, m), step_time(theta, nodes, gpus, m)
    noise = np.exp(0.03 * rng.standard_normal((2, CONFIGURATIONS)))
    return nodes, gpus, m, accum * noise[0], optim * noise[1]


def seconds() -> list[float]:
    """Return the CPU seconds of fits to a hundred configurations each.

    Each figure is the better of two, as the machine may be busy.
    """
    fit(*planted(0))
    found = []
    for seed in range(FITS):
        columns, tries = planted(seed), []
        for _ in range(2):
            start = time.thread_time()
            fit(*columns)
            tries.append(time.thread_time() - start)
        found.append(min(tries))
    return found


def page(fits: Sequence[Result], cpu: Sequence[float]) -> str:
    machine = f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    text = [
        "# How well the throughput model predicts",
        "",
        f"Regenerate with `contrib.experiments.fit` ({machine}).",
        "Mean absolute error of the predicted step time on the OSDI 2021 artifact's measurements, one fit per",
        "application. Held out: a fifth of the configurations (nodes, GPUs, examples per GPU) at a time; unseen",
        f"placements: a fifth of the (nodes, GPUs) with all their batch sizes; from {FEW}: all but {FEW} of them,",
        f"mean of {FEW_DRAWS} draws. Spread: what the median of each configuration is off itself, as one of them is",
        "several placements here (1 + 3 GPUs and 2 + 2 GPUs are two nodes and four GPUs).",
        "",
        f"| application | configurations | held out | its p90 | unseen placements | from {FEW} | spread |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in fits:
        values = (r.held_out, r.held_out_p90, r.unseen_placements, r.from_twenty, r.spread)
        cells = " | ".join(f"{100 * v:.1f} %" for v in values)
        text.append(f"| {r.application} | {r.configurations} | {cells} |")
    text += [
        "",
        f"A fit to {CONFIGURATIONS} distinct configurations takes {1e3 * median(cpu):.0f} ms of CPU, at most "
        f"{1e3 * max(cpu):.0f} ms ({FITS} random jobs, one thread).",
        "",
    ]
    return "\n".join(text)


def main() -> None:
    parser = parser_of(__doc__)
    default = ROOT / os.environ.get("POLLUX_OSDI21", "../shared/data/osdi21")
    parser.add_argument("--data", type=Path, default=default, help="folder that holds profiles/")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-out" / "fit.json")
    parser.add_argument("--markdown", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    found = sorted((options.data / "profiles").glob("*/placements.csv"))
    if not found:
        parser.error(
            f"no profiles/APPLICATION/placements.csv in {options.data}: give the artifact's data by --data"
        )
    fits, cpu = [evaluate(path.parent) for path in found], seconds()
    document = {
        "applications": [asdict(r) for r in fits],
        "fit_cpu_s": {"configurations": CONFIGURATIONS, "median": median(cpu), "max": max(cpu)},
    }
    save(options.json, document)
    options.markdown.write_text(page(fits, cpu))
    print(options.markdown.read_text())


if __name__ == "__main__":
    main()
