"""AdaScale against linear scaling at batches 8 and 32 times as large

    python -m contrib.experiments.adascale [--seeds 10] [--page contrib/experiments/adascale.md]

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
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.benchmarks.results import mean_with_error, parser_of
from tests.unit.agent.learning_rate.digits_at_scale import Trace, predicted, train

SCALES = (8, 32)
TARGETS = (1.0, 0.5, 0.3, 0.2)
"""The training losses at which examples are compared."""


def linear(scale: float, noise: object) -> float:
    return scale


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
        add("linear, as many examples", scale, [train(seed, scale, linear, passes=True) for seed in seeds])
        add("linear, as much progress", scale, [train(seed, scale, linear) for seed in seeds])
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
            f"# {title}\n\n`contrib.experiments.adascale`, {options.seeds} seeds: means, standard errors.\n\n{rest}\n\n"
            + "\n".join(lines)
            + "\n"
        )


if __name__ == "__main__":
    main()
