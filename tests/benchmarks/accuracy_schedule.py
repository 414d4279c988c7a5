"""Train a residual network by the batch sizes that Shockwave reports of Pollux, and by milder ones.

    python tests/benchmarks/accuracy_schedule.py [--seeds 10] [--page tests/benchmarks/accuracy_schedule.md]

Shockwave (NSDI 2023, section 2, figure 3) reports that Pollux trained ResNet-18 on CIFAR-10 from M0 = 32 by 64 examples
from epoch 1 on, 314 from epoch 2, 690 from epoch 30 and 1,682 from epoch 70, and lost 2 to 3 % of accuracy. This
training has the same ratios to M0 at the same shares of its length, 1, 2, 30 and 70 %. It is a network of three
residual blocks with batch norm on 30 % of scikit-learn's digits, by SGD with momentum, weight decay and two drops of
the learning rate, from M0 = 8. The other 70 % are held out.

Shockwave's sizes are forced on the agent. The agent's own sizes are those that it chooses for 4 emulated GPUs, on which
the fixed time of a pass is that of 128 examples, so that time is a reason for large batches only.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Steps take a millisecond here: ranks agree on the noise scale by steps, as for usual ones, and not by seconds.
os.environ |= {"POLLUX_EXCHANGE_INTERVAL": "0", "POLLUX_EXCHANGES_PER_READING": "0"}
sys.path[:0] = [str(Path(__file__).parents[2] / part) for part in ("contrib/examples", "agent", ".")]

import torch  # noqa: E402
from emulated import digits  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import cross_entropy, relu  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import pollux  # noqa: E402
from contrib.commit import COMMIT  # noqa: E402
from pollux.goodput import BatchChoice, BatchLimits, ThroughputParams  # noqa: E402
from pollux.tuning.batch_choice import choose  # noqa: E402

M0, MOST, EPOCHS, RATE, TRAINED = 8, 512, 20, 0.02, 0.3
RATIOS = ((0.01, 2.0), (0.02, 314 / 32), (0.3, 690 / 32), (0.7, 1682 / 32))
"""(share of the training, batch size over M0 from there on)."""
ARMS = {
    "M0": ("M0", False, 0.0),
    "Shockwave's sizes, as many passes": ("Shockwave", False, 0.0),
    "Shockwave's sizes, as much progress": ("Shockwave", True, 0.0),
    "M0 in the first tenth, then Shockwave's, as many passes": ("Shockwave", False, 0.1),
    "M0 in the first tenth, then Shockwave's, as much progress": ("Shockwave", True, 0.1),
    "the agent's own sizes, as many passes": ("own", False, 0.0),
    "the agent's own sizes, as much progress": ("own", True, 0.0),
    "M0 in the first tenth, then its own, as many passes": ("own", False, 0.1),
    "M0 in the first tenth, then its own, as much progress": ("own", True, 0.1),
}
"""Whose sizes; whether epochs are statistical; the share of the training that M0 is kept for."""
GPUS, STEP_TIMES = 4, ThroughputParams(1e-3, 1e-3 / 128, 0.0, 0.0, 0.0, 0.0, 1.0)
PACE = 20
"""Optimizer steps between two choices of the agent."""


class Block(nn.Module):
    """A residual block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.short = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[1](self.second(relu(self.norms[0](self.first(x)))))
        return relu(inner + self.short(x))


def network() -> nn.Module:
    stem = nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    blocks = Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def own_size(job: pollux.Job) -> int:
    """Return the size that the agent would choose next on the emulated GPUs."""
    if job.noise_scale is None:
        return job.batch_size
    now = BatchChoice(max(job.batch_size // GPUS, 1), 0)
    limits = BatchLimits(M0, job.training.limits.maximum, 1, MOST // GPUS)  # M0 alone until `grow_after`
    found = choose(STEP_TIMES, job.noise_scale, limits, 1, GPUS, now)
    return job.batch_size if found is None else found.size(GPUS)


def train(seed: int, arm: str) -> tuple[float, float, int, int]:
    """Return held-out accuracy, held-out loss, optimizer steps, and the largest batch."""
    whose, statistical, kept = ARMS[arm]
    data = digits()
    x, y = (torch.cat(pair) for pair in zip(data.train.tensors, data.test.tensors, strict=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    trained, held = order[: int(TRAINED * len(y))], order[int(TRAINED * len(y)) :]
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    steps = EPOCHS * len(trained) // M0
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps // 2, 3 * steps // 4], 0.1)
    grows = whose != "M0"
    job = pollux.attach(model, optimizer, scheduler, seed=seed, adaptive=grows, measuring={"every": 4})
    after = round(kept * EPOCHS) if whose == "own" else 0
    bounds = {"max_batch_size": MOST, "per_gpu": (1, MOST), "grow_after": after} if grows else {}
    loader = job.loader(TensorDataset(x[trained], y[trained]), M0, **bounds)  # type: ignore[arg-type]
    if job.training.advisor is not None:
        job.training.advisor.close()
    largest = M0
    for _ in job.epochs(EPOCHS, statistical=statistical):
        for images, labels in loader:
            progress = job.progress.examples if statistical else job.progress.samples
            share = progress / (EPOCHS * len(trained))
            size = job.batch_size
            if whose == "Shockwave":
                ratio = max([1.0, *(ratio for start, ratio in RATIOS if share >= max(start, kept))])
                size = min(int(ratio * M0), MOST)
            elif whose == "own" and job.progress.optimizer_steps % PACE == 0:
                size = own_size(job)
            if job.batch_size != size:
                # One rank measures the noise scale by comparing two passes.
                job.training.choice = (
                    BatchChoice(size, 0) if whose == "Shockwave" else BatchChoice(size // 2, 1)
                )
                job.training.widen()
            largest = max(largest, job.batch_size)
            job.step(lambda images=images, labels=labels: cross_entropy(job.model(images), labels))  # type: ignore[misc]
    job.close()
    model.eval()
    with torch.no_grad():
        out = model(x[held])
    right = float((out.argmax(1) == y[held]).float().mean())
    return right, float(cross_entropy(out, y[held])), job.progress.optimizer_steps, largest


def _mean(values: list[float]) -> str:
    """Return the mean with its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.4f} +- {error:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), metavar="ARM")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    lines = ["| batch sizes | accuracy | loss | optimizer steps | largest batch |", "|" + "---|" * 5]
    for arm in options.arms:
        found = [train(seed, arm) for seed in range(options.seeds)]
        right, loss, steps, largest = (list(column) for column in zip(*found, strict=True))
        lines.append(
            f"| {arm} | {_mean(right)} | {_mean(loss)} | {statistics.mean(steps):.0f} | "
            f"{statistics.mean(largest):.0f} |"
        )
        print(lines[-1], flush=True)
    if options.page is not None:
        told = (__doc__ or "").split("\n\n", 2)[2].strip()
        options.page.write_text(
            f"# The batch sizes that Shockwave reports of Pollux\n\n{told}\n\n{options.seeds} seeds, torch "
            f"{torch.__version__}, load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores, commit {COMMIT}.\n\n"
            + "\n".join(lines)
            + "\n"
        )


if __name__ == "__main__":
    main()
