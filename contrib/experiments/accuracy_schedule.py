"""Train a residual network by the batch sizes that Shockwave reports of Pollux, and by milder ones.

    python -m contrib.experiments.accuracy_schedule [--seeds 10] [--page PAGE] [--cifar10 FOLDER]

Shockwave (NSDI 2023, section 2, figure 3) reports that Pollux trained ResNet-18 on CIFAR-10 from M0 = 32 by 64 examples
from epoch 1 on, 314 from epoch 2, 690 from epoch 30 and 1,682 from epoch 70, and lost 2 to 3 % of accuracy. Both sizes
of this benchmark have the same ratios to M0 at the same shares of their length, 1, 2, 30 and 70 %, and train by SGD
with momentum, weight decay and two drops of the learning rate. The small one is a network of three residual blocks with
batch norm on 30 % of scikit-learn's digits, from M0 = 8; the other 70 % are held out. The full one (`--cifar10`) is
ResNet-18 on CIFAR-10 from M0 = 32, 100 epochs with shifted and mirrored images, on a GPU where there is one.

Shockwave's sizes are forced on the agent. The agent's own sizes are those that it chooses for 4 emulated GPUs, on which
the fixed time of a pass is that of 16 M0 examples, so that time is a reason for large batches only. "Against M0" is
the mean over the seeds of the difference to the first row's accuracy at the same seed.
"""

from __future__ import annotations

import logging
import os
import pickle
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Steps take a millisecond here: ranks agree on the noise scale by steps, as for usual ones, and not by seconds.
os.environ |= {"POLLUX_EXCHANGE_INTERVAL": "0", "POLLUX_EXCHANGES_PER_READING": "0"}

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, relu
from torch.utils.data import TensorDataset

import pollux
from contrib.commit import COMMIT
from contrib.examples.emulated import digits
from pollux.goodput import BatchChoice, BatchLimits, ThroughputParams
from pollux.tuning.batch_choice import choose
from tests.benchmarks.results import mean_with_error, parser_of

TRAINED = 0.3
"""Share of the digits that is trained on."""
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
GPUS = 4
PACE = 20
"""Optimizer steps between two choices of the agent."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    """A residual block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        kept = stride == 1 and inputs == outputs
        short = () if kept else (nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.short = nn.Sequential(*short)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[1](self.second(relu(self.norms[0](self.first(x)))))
        return relu(inner + self.short(x))


def network(channels: int, widths: list[tuple[int, int]]) -> nn.Module:
    """Return a residual network of one block per (channels, stride) of `widths`."""
    stem = [nn.Conv2d(channels, widths[0][0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0][0]), nn.ReLU()]
    before = [widths[0][0], *(width for width, _ in widths)]
    blocks = [Block(inputs, *width) for inputs, width in zip(before, widths, strict=False)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before[-1], 10))


@dataclass(frozen=True)
class Size:
    """One training: data, network, batch sizes and length."""

    train: tuple[Tensor, Tensor]
    """Images [n, channels, height, width], as floats or bytes, and labels [n]."""
    held: tuple[Tensor, Tensor]
    prepared: Callable[[Tensor, bool], Tensor]
    """Images as the network reads them; the second argument says whether to shift and mirror them."""
    widths: list[tuple[int, int]]
    m0: int
    most: int
    """The largest batch."""
    epochs: int
    rate: float

    @property
    def step_times(self) -> ThroughputParams:
        """Times of the emulated GPUs [s]."""
        return ThroughputParams(1e-3, 1e-3 / (16 * self.m0), 0.0, 0.0, 0.0, 0.0, 1.0)


def small() -> Size:
    data = digits()
    x, y = (torch.cat(pair) for pair in zip(data.train.tensors, data.test.tensors, strict=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    trained, held = order[: int(TRAINED * len(y))], order[int(TRAINED * len(y)) :]
    widths = [(8, 1), (16, 2), (32, 2)]
    return Size((x[trained], y[trained]), (x[held], y[held]), lambda x, _: x, widths, 8, 512, 20, 0.02)


def full(folder: Path) -> Size:
    """Return ResNet-18 on CIFAR-10, whose "python version" lies in `folder`."""

    def read(*names: str) -> tuple[Tensor, Tensor]:
        parts = [pickle.loads((folder / name).read_bytes(), encoding="latin1") for name in names]
        images = torch.cat([torch.as_tensor(part["data"]) for part in parts]).view(-1, 3, 32, 32)
        return images, torch.cat([torch.as_tensor(part["labels"]) for part in parts])

    mean = torch.tensor([0.4914, 0.4822, 0.4465], device=DEVICE)[:, None, None]
    deviation = torch.tensor([0.2470, 0.2435, 0.2616], device=DEVICE)[:, None, None]

    def prepared(images: Tensor, trained: bool) -> Tensor:
        x = (images / 255 - mean) / deviation
        if not trained:
            return x
        # Each image is shifted by up to 4 pixels, and half of the images are mirrored.
        rows, columns = (
            torch.randint(9, (len(x), 1), device=x.device) + torch.arange(32, device=x.device) for _ in "xy"
        )
        columns = torch.where(torch.rand(len(x), 1, device=x.device) < 0.5, columns, columns.flip(1))
        which = torch.arange(len(x), device=x.device)[:, None, None]
        return (
            pad(x, (4, 4, 4, 4))
            .permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None]]
            .permute(0, 3, 1, 2)
        )

    train = read(*(f"data_batch_{part}" for part in range(1, 6)))
    widths = [(64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)]
    return Size(train, read("test_batch"), prepared, widths, 32, 2048, 100, 0.05)


def own_size(job: pollux.Job, size: Size) -> int:
    """Return the size that the agent would choose next on the emulated GPUs."""
    if job.noise_scale is None:
        return job.batch_size
    now = BatchChoice(max(job.batch_size // GPUS, 1), 0)
    # The agent allows M0 alone until `grow_after`.
    limits = BatchLimits(size.m0, job.training.limits.maximum, 1, size.most // GPUS)
    found = choose(size.step_times, job.noise_scale, limits, 1, GPUS, now)
    return job.batch_size if found is None else found.size(GPUS)


def train(size: Size, seed: int, arm: str) -> tuple[float, float, int, int]:
    """Return held-out accuracy, held-out loss, optimizer steps, and the largest batch."""
    whose, statistical, kept = ARMS[arm]
    examples = len(size.train[1])
    torch.manual_seed(seed)
    model = network(size.train[0].shape[1], size.widths).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=size.rate, momentum=0.9, weight_decay=5e-4)
    steps = size.epochs * examples // size.m0
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps // 2, 3 * steps // 4], 0.1)
    grows = whose != "M0"
    job = pollux.attach(model, optimizer, scheduler, seed=seed, adaptive=grows, measuring={"every": 4})
    after = round(kept * size.epochs) if whose == "own" else 0
    bounds = {"max_batch_size": size.most, "per_gpu": (1, size.most), "grow_after": after} if grows else {}
    loader = job.loader(TensorDataset(*size.train), size.m0, **bounds)  # type: ignore[arg-type]
    if job.training.advisor is not None:
        job.training.advisor.close()
    largest = size.m0
    for _ in job.epochs(size.epochs, statistical=statistical):
        for images, labels in loader:
            progress = job.progress.examples if statistical else job.progress.samples
            share = progress / (size.epochs * examples)
            batch = job.batch_size
            if whose == "Shockwave":
                ratio = max([1.0, *(ratio for start, ratio in RATIOS if share >= max(start, kept))])
                batch = min(int(ratio * size.m0), size.most)
            elif whose == "own" and job.progress.optimizer_steps % PACE == 0:
                batch = own_size(job, size)
            if job.batch_size != batch:
                # One rank measures the noise scale by comparing two passes.
                job.training.choice = (
                    BatchChoice(batch, 0) if whose == "Shockwave" else BatchChoice(batch // 2, 1)
                )
                job.training.widen()
            largest = max(largest, job.batch_size)
            x, y = size.prepared(images.to(DEVICE), True), labels.to(DEVICE)
            job.step(lambda x=x, y=y: cross_entropy(job.model(x), y))  # type: ignore[misc]
    job.close()
    model.eval()
    out = []
    with torch.no_grad():
        for images in torch.split(size.held[0], 1024):
            out.append(model(size.prepared(images.to(DEVICE), False)).cpu())
    right = float((torch.cat(out).argmax(1) == size.held[1]).float().mean())
    return right, float(cross_entropy(torch.cat(out), size.held[1])), job.progress.optimizer_steps, largest


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), metavar="ARM")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--cifar10", type=Path, metavar="FOLDER", help="the full size, hours on a GPU")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    size = small() if options.cifar10 is None else full(options.cifar10)
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"{os.cpu_count()} cores"
    lines = [
        "| batch sizes | accuracy | against M0 | loss | optimizer steps | largest batch |",
        "|" + "---|" * 6,
    ]
    at_m0: list[float] = []
    for arm in options.arms:
        found = [train(size, seed, arm) for seed in range(options.seeds)]
        right, loss, steps, largest = (list(column) for column in zip(*found, strict=True))
        at_m0 = at_m0 or right
        difference = [mine - plain for mine, plain in zip(right, at_m0, strict=True)]
        means = " | ".join(map(mean_with_error, (right, difference, loss)))
        lines.append(f"| {arm} | {means} | {statistics.mean(steps):.0f} | {statistics.mean(largest):.0f} |")
        print(lines[-1], flush=True)
    if options.page is not None:
        told = (__doc__ or "").split("\n\n", 2)[2].strip()
        options.page.write_text(
            f"# The batch sizes that Shockwave reports of Pollux\n\n{told}\n\n{options.seeds} seeds, torch "
            f"{torch.__version__}, load {os.getloadavg()[0]:.0f} on {device}, commit {COMMIT}.\n\n"
            + "\n".join(lines)
            + "\n"
        )


if __name__ == "__main__":
    main()
