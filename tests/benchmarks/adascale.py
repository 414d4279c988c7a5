"""AdaScale against linear scaling at batches 8 and 32 times as large

    python -m tests.benchmarks.adascale [--seeds 10] [--page tests/benchmarks/adascale.md]

The training is a perceptron on scikit-learn's digits, by SGD at M0 = 16 examples per step for 12 epochs. At scale S
gradients are accumulated, so that only the batch size differs. AdaScale trains for 12 statistical epochs. Linear
scaling trains for 12 passes through the data, because it promises the same result after as many examples. The page also
shows linear scaling for 12 statistical epochs. That is no equal comparison: it uses more examples than AdaScale and
trains further than the run at M0.

Examples: AdaScale's gain predicts that a run reaches a loss after as much scale-invariant progress as the run at M0.
The second table takes losses along the way. "Used" is the number of examples that the run used until it reached the
loss. "Predicted" is the number that it had used when its progress was that of the run at M0 at this loss. The loss is
that of the whole training set, after every step.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pollux
from contrib.examples.emulated import accuracy, digits
from pollux.goodput import BatchChoice
from tests.benchmarks.results import mean_with_error, parser_of

M0 = 16
EPOCHS = 12
RATE = 0.05
SCALES = (8, 32)
TARGETS = (1.0, 0.5, 0.3, 0.2)
"""The training losses at which examples are compared."""


class Trace(NamedTuple):
    """The trace of one training, an entry per step, and its final quality."""

    samples: np.ndarray
    progress: np.ndarray
    loss: np.ndarray
    accuracy: float


def train(seed: int, scale: int, rule: str, *, passes: bool = False, epochs: int = EPOCHS) -> Trace:
    """Train once on one rank, at a fixed scale."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    data = digits()
    x, y = data.train.tensors
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    job = pollux.attach(model, optimizer, seed=seed, adaptive=True, scaling=rule, measuring={"every": 1})
    loader = job.loader(data.train, M0, max_batch_size=M0 * scale, per_gpu=(M0, M0))
    assert job.training.advisor is not None
    job.training.advisor.close()  # keep the batch size fixed
    job.training.choice = BatchChoice(M0, scale - 1)
    rows: list[tuple[float, float, float]] = []
    for _ in job.epochs(epochs, statistical=not passes):
        for a, b in loader:
            with job.micro_batch():
                job.backward(cross_entropy(job.model(a), b))
            if job.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    loss = float(cross_entropy(model(x), y))
                # The step just made counts as soon as the next batch is asked for.
                rows.append((job.progress.samples, job.progress.steps, loss))
    trace = Trace(*np.array(rows).T, accuracy(model, data.test))
    job.close()
    return trace


def first_below(trace: Trace, target: float) -> int | None:
    """Return the first step whose smoothed loss is below the target, or None.

    The loss is smoothed over about a hundredth of the steps.
    """
    width = max(len(trace.loss) // 100, 1)
    padded = np.pad(trace.loss, (width // 2, width - 1 - width // 2), mode="edge")
    smooth = np.convolve(padded, np.ones(width) / width, "valid")
    found = np.flatnonzero(smooth < target)
    return int(found[0]) if found.size else None


def predicted(base: Trace, trace: Trace, target: float) -> tuple[float, float] | None:
    """Return the examples used and predicted until the target loss.

    None: one of the two runs never reached the loss.
    """
    here, there = first_below(trace, target), first_below(base, target)
    if here is None or there is None or base.progress[there] > trace.progress[-1]:
        return None
    return float(trace.samples[here]), float(np.interp(base.progress[there], trace.progress, trace.samples))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--page", type=Path, help="write the tables there too")
    options = parser.parse_args()
    seeds = range(options.seeds)
    lines = [
        "| rule | scale | training loss at the end | held-out accuracy | steps | examples, of those at M0 |",
        "|---|---|---|---|---|---|",
    ]
    base = [train(seed, 1, "adascale") for seed in seeds]

    def add(label: str, scale: int, runs: list[Trace]) -> None:
        loss = mean_with_error([float(r.loss[-1]) for r in runs])
        right = mean_with_error([r.accuracy for r in runs])
        share = statistics.mean(r.samples[-1] / b.samples[-1] for r, b in zip(runs, base, strict=True))
        lines.append(
            f"| {label} | {scale} | {loss} | {right} "
            f"| {statistics.mean(len(r.loss) for r in runs):.0f} | {share:.2f} |"
        )
        print(lines[-1], flush=True)

    print("\n".join(lines))
    add("M0", 1, base)
    adapted: dict[int, list[Trace]] = {}
    for scale in SCALES:
        adapted[scale] = [train(seed, scale, "adascale") for seed in seeds]
        add("AdaScale", scale, adapted[scale])
        add("linear, as many examples", scale, [train(seed, scale, "linear", passes=True) for seed in seeds])
        add("linear, as much progress", scale, [train(seed, scale, "linear") for seed in seeds])
    lines += ["", "| scale | loss | examples used | predicted by the gain | ratio |", "|---|---|---|---|---|"]
    print("\n".join(lines[-3:]))
    for scale, runs in adapted.items():
        for target in TARGETS:
            pairs: list[Any] = [predicted(b, r, target) for b, r in zip(base, runs, strict=True)]
            if None in pairs:
                lines.append(f"| {scale} | {target} | never on some seed | | |")
            else:
                used, wanted = (statistics.mean(p[i] for p in pairs) for i in (0, 1))
                lines.append(f"| {scale} | {target} | {used:.0f} | {wanted:.0f} | {used / wanted:.3f} |")
            print(lines[-1], flush=True)
    if options.page is not None:
        text = (__doc__ or "").strip().split("\n")
        title, rest = text[0], "\n".join(line for line in text[1:] if "python " not in line).strip()
        options.page.write_text(
            f"# {title}\n\n`make bench-adascale`, {options.seeds} seeds, means and their standard errors.\n\n{rest}\n\n"
            + "\n".join(lines)
            + "\n"
        )


if __name__ == "__main__":
    main()
