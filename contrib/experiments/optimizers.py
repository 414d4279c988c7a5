"""Compare accuracy at M0 with larger batches for every optimizer.

    python -m contrib.experiments.optimizers [--seeds 10] [--only Adam,Lion] [--json F] [--markdown F]

A perceptron without biases on scikit-learn's digits trains for 10 statistical epochs on one rank. It trains at M0 = 16
examples per step, and at 4 and 8 times M0 in two passes per step. The learning rate is scaled by the rule of the
optimizer's family, which the agent chooses and the page shows. The batch size is held at each scale, so that the rule
alone is on trial. The learning rate of each optimizer is fixed in this file and was chosen at M0. An optimizer whose
package is not installed is reported as missing.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"  # so that a choice takes effect at the next step

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import pollux
from contrib.commit import COMMIT
from contrib.examples.emulated import Data, digits
from pollux.goodput import BatchChoice, BatchLimits, ThroughputParams
from pollux.learning_rate.scaling import square_root_adascale
from pollux.tuning.batch_choice import choose
from tests.benchmarks.results import at_most, parser_of, save

M0 = 16
EPOCHS = 10
SCALES = (0, 4, 8)
"""Times M0; 0: as the agent chooses."""
LARGEST = 8
"""Times M0: the largest batch that the agent may choose."""
STEP_TIMES = ThroughputParams(1e-3, 1e-3 / 128, 0.0, 0.0, 0.0, 0.0, 1.0)
"""Of an emulated GPU, on which the fixed time of a pass is that of 128 examples."""
GPUS = 4
"""For which the agent chooses; the batch of all GPUs then trains on one rank."""
ALONE = "root alone"
"""The rule `sqrt-adascale` as a script's own function: the agent does not correct it for the lag of v."""
PACE = 50
"""Optimizer steps between two choices."""


def chosen(job: pollux.Job, most: int) -> BatchChoice | None:
    """Return the next batch size that the agent would choose on GPUS GPUs."""
    if job.noise_scale is None:
        return None
    limits = BatchLimits(M0, most, 1, most // GPUS)
    found = choose(
        STEP_TIMES, job.noise_scale, limits, 1, GPUS, BatchChoice(max(job.batch_size // GPUS, 1), 0)
    )
    return None if found is None else BatchChoice(found.size(GPUS) // 2, 1)


MARGIN = 0.01
"""With 95 % confidence, accuracy at a larger batch is worse by less than this."""


@dataclass(frozen=True)
class Entry:
    """One optimizer of the table."""

    label: str
    package: str
    name: str
    options: dict[str, Any]
    scaling: str = "auto"


def entries() -> list[Entry]:
    return [
        Entry("SGD", "torch.optim", "SGD", {"lr": 0.1}),
        Entry("SGD, Nesterov", "torch.optim", "SGD", {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
        Entry("averaged SGD", "torch.optim", "ASGD", {"lr": 0.1}),
        Entry("Adam", "torch.optim", "Adam", {"lr": 1e-3}),
        Entry("Adam, root alone", "torch.optim", "Adam", {"lr": 1e-3}, ALONE),
        Entry("Adam, beta2 = 0.99", "torch.optim", "Adam", {"lr": 1e-3, "betas": (0.9, 0.99)}),
        Entry("AdamW, fused", "torch.optim", "AdamW", {"lr": 1e-3, "fused": True}),
        Entry("AMSGrad", "torch.optim", "AdamW", {"lr": 1e-3, "amsgrad": True}),
        Entry("NAdam", "torch.optim", "NAdam", {"lr": 1e-3}),
        Entry("Adamax", "torch.optim", "Adamax", {"lr": 2e-3}),
        Entry("Adamax, root alone", "torch.optim", "Adamax", {"lr": 2e-3}, ALONE),
        Entry("RMSprop", "torch.optim", "RMSprop", {"lr": 5e-4}),
        Entry("RMSprop, root alone", "torch.optim", "RMSprop", {"lr": 5e-4}, ALONE),
        Entry("RMSprop, centered", "torch.optim", "RMSprop", {"lr": 5e-4, "centered": True}),
        Entry("Adagrad", "torch.optim", "Adagrad", {"lr": 0.02}),
        Entry("Adadelta", "torch.optim", "Adadelta", {"lr": 1.0}),
        Entry("Adafactor", "torch.optim", "Adafactor", {"lr": 0.02}),
        Entry("Adafactor, root alone", "torch.optim", "Adafactor", {"lr": 0.02}, ALONE),
        Entry("Muon", "torch.optim", "Muon", {"lr": 0.005}),
        Entry("Muon, root alone", "torch.optim", "Muon", {"lr": 0.005}, ALONE),
        Entry("Muon, lr = 0.002", "torch.optim", "Muon", {"lr": 0.002}),
        Entry("Muon, lr = 0.002, root alone", "torch.optim", "Muon", {"lr": 0.002}, ALONE),
        Entry("Rprop", "torch.optim", "Rprop", {"lr": 1e-4}),
        Entry("Adam, 8-bit", "bitsandbytes.optim", "AdamW8bit", {"lr": 1e-3}),
        Entry("Adam, 8-bit, paged", "bitsandbytes.optim", "PagedAdamW8bit", {"lr": 1e-3}),
        Entry("Adam, 8-bit", "torchao.optim", "AdamW8bit", {"lr": 1e-3}),
        Entry("Adam, 4-bit", "torchao.optim", "AdamW4bit", {"lr": 1e-3}),
        Entry("SGD, schedule-free", "schedulefree", "SGDScheduleFree", {"lr": 0.3}),
        Entry("AdamW, schedule-free", "schedulefree", "AdamWScheduleFree", {"lr": 2e-3}),
    ]


class Networks(nn.Module):
    """One perceptron per seed, side by side.

    Each weight is a parameter of its own: optimizers that treat a tensor as a whole treat each network by itself.
    """

    def __init__(self, seeds: int) -> None:
        super().__init__()
        self.first, self.second = nn.ParameterList(), nn.ParameterList()
        for seed in range(seeds):
            torch.manual_seed(seed)
            self.first.append(nn.Linear(64, 64, bias=False).weight)
            self.second.append(nn.Linear(64, 10, bias=False).weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seeds, 64] to [seeds, batch, 10]."""
        first, second = (torch.stack(list(part)).mT for part in (self.first, self.second))
        return torch.bmm(torch.relu(torch.bmm(x.transpose(0, 1), first)), second)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Sum the networks' mean losses.

        Each gradient is that of a network alone.
        """
        seeds = y.shape[1]
        return seeds * cross_entropy(self(x).flatten(0, 1), y.T.flatten())


class Orders(Dataset[tuple[Tensor, Tensor]]):
    """The training data in an order of its own for each seed."""

    def __init__(self, data: TensorDataset, seeds: int) -> None:
        x, y = data.tensors
        orders = [torch.randperm(len(y), generator=torch.Generator().manual_seed(i)) for i in range(seeds)]
        order = torch.stack(orders, 1)
        self.x, self.y = x.flatten(1)[order], y[order]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.x[indices], self.y[indices]


def whole(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Collate nothing: `Orders` gives whole batches."""
    return batch


@dataclass
class Run:
    accuracy: list[float]
    """Of each seed."""
    steps: int
    factor: float
    batch_size: int
    """The largest."""
    noise_scale: float | None
    family: Any


def train(
    entry: Entry, make: Callable[..., torch.optim.Optimizer], data: Data, seeds: int, scale: int
) -> Run:
    """Train at `scale` times M0; 0: the agent chooses the batch size."""
    model = Networks(seeds)
    optimizer = make(model.parameters(), **entry.options)
    mode = getattr(optimizer, "train", lambda: None), getattr(optimizer, "eval", lambda: None)
    mode[0]()
    scaling: Any = partial(square_root_adascale) if entry.scaling == ALONE else entry.scaling
    job = pollux.attach(model, optimizer, adaptive=True, scaling=scaling, measuring={"every": 4})
    most = M0 * (scale or LARGEST)
    per_gpu = (M0 // 2, most) if scale == 0 else (min(most // 2, M0), max(most // 2, M0))
    loader = job.loader(Orders(data.train, seeds), M0, max_batch_size=most, per_gpu=per_gpu, collate_fn=whole)
    training = job.training
    assert training.advisor is not None
    training.advisor.close()  # it measures this machine; `choose` gets the same step times in every run
    if scale > 1:
        training.choice = BatchChoice(most // 2, 1)
    factors, sizes = [], []
    for _ in job.epochs(EPOCHS, statistical=True):
        for x, y in loader:
            with job.micro_batch():
                job.backward(model.loss(x, y))
            if job.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
                factors.append(job.lr_factors[0] if job.lr_factors else 1.0)
                sizes.append(job.batch_size)
                if scale == 0 and len(factors) % PACE == 0:
                    training.advisor.proposal = chosen(job, most)
    mode[1]()
    noise = job.noise_scale
    job.close()
    x, y = data.test.tensors
    with torch.no_grad():
        right = model(x.flatten(1)[:, None].expand(-1, seeds, -1)).argmax(-1) == y
    return Run(
        right.float().mean(1).tolist(),
        job.progress.optimizer_steps,
        statistics.median(factors),
        max(sizes),
        None if noise is None or noise.sqr <= 0 else M0 * noise.var / noise.sqr,
        training.models[0].norms.families[0],
    )


def measure(entry: Entry, data: Data, seeds: int) -> dict[str, Any]:
    """Return one row of the table."""
    row: dict[str, Any] = {"optimizer": entry.label, "package": entry.package, "options": entry.options}
    try:
        make = getattr(importlib.import_module(entry.package), entry.name)
    except (ImportError, AttributeError) as error:
        return row | {"missing": str(error)}
    base = train(entry, make, data, seeds, 1)
    family = base.family
    row |= {
        "family": family.name,
        "preconditioner": family.preconditioner,
        "rule": family.rule if entry.scaling == "auto" else entry.scaling,
        "source": family.source,
        "accuracy": statistics.mean(base.accuracy),
        "accuracies": base.accuracy,
        "steps": base.steps,
    }
    scales: dict[str, Any] = {}
    for scale in SCALES if family.understood else ():
        run = train(entry, make, data, seeds, scale)
        worse = [b - r for b, r in zip(base.accuracy, run.accuracy, strict=True)]
        scales[str(scale)] = {
            "accuracy": statistics.mean(run.accuracy),
            "accuracies": run.accuracy,
            "worse_by_at_most": at_most(worse),
            "steps": run.steps,
            "factor": run.factor,
            "batch_size": run.batch_size,
            "noise_scale": run.noise_scale,
        }
    return row | {"scales": scales}


def line(row: dict[str, Any]) -> str:
    if "missing" in row:
        return f"| {row['optimizer']} | {row['package']} | not installed | | | | | | |"
    cells = [row["optimizer"], row["package"], row["family"], row["rule"], f"{row['accuracy']:.4f}"]
    for scale in SCALES:
        found = row["scales"].get(str(scale))
        if found is None:
            cells.append("batch size stays")
            continue
        kept = "" if found["worse_by_at_most"] < MARGIN else " **not kept**"
        size = f"to {found['batch_size']}, " if scale == 0 else ""
        cells.append(
            f"{found['accuracy']:.4f} ({size}x{found['factor']:.2f}, {found['steps']} steps, "
            f"{found['worse_by_at_most']:.4f}{kept})"
        )
    phi = row["scales"].get("4", {}).get("noise_scale")
    cells.append("-" if phi is None else f"{phi:.0f}")
    return "| " + " | ".join(cells) + " |"


def page(rows: list[dict[str, Any]], seeds: int) -> str:
    families = {row["family"]: row for row in rows if row.get("family") and row["rule"] != ALONE}
    steps = next((row["steps"] for row in rows if "steps" in row), 0)
    table = [
        f"| {name} | {row['preconditioner']} | {row['rule']} | {row['source'] or '-'} |"
        for name, row in families.items()
    ]
    adapting = [row for row in rows if row.get("scales") and row["rule"] != ALONE]
    counts = {
        where: sum(row["scales"][scale]["worse_by_at_most"] < MARGIN for row in adapting)
        for scale, where in (("0", "adapted"), ("4", "at 4 M0"), ("8", "at 8 M0"))
    }
    kept = ", ".join(f"{count} {where}" for where, count in counts.items())
    kept = f"Of {len(adapting)} optimizers that adapt, these keep it: {kept}."
    table, body, version = "\n".join(table), "\n".join(map(line, rows)), torch.__version__
    return f"""# Optimizers

`contrib.experiments.optimizers` writes this page and `bench-out/optimizers.json` (14 minutes of one core). A perceptron
without biases trains on scikit-learn's digits for {EPOCHS} statistical epochs on one rank, from M0 = {M0}: {steps}
steps.
{seeds} seeds, torch {version}, commit {COMMIT}. There are 359 held-out digits: one digit is 0.0028 of accuracy. The
networks of all seeds train side by side in one job: each has its own weights and its own order of the data. They share
the learning-rate factor.

Three trainings are compared with the one at M0. *Adapted*: the batch size begins at M0, and every {PACE} steps the
agent chooses for {GPUS} emulated GPUs, on which the fixed time of a pass is that of 128 examples, up to {LARGEST} M0.
The other two hold the batch size at 4 and at 8 times M0 from the first step on. Steps above M0 have two passes.

## Families

The agent recognises a family by the optimizer's state after its first step. The noise scale is the noise scale of P g.

| family | P | learning-rate rule | source |
|---|---|---|---|
{table}

An approximate P has one value per tensor. It weighs tensors as the optimizer's steps do, and elements of one tensor
alike.

## Accuracy

The margin: with 95 % confidence accuracy is worse by less than {MARGIN} than at M0. {kept}
In brackets: the largest batch where the agent chose it, the median factor on the learning rate, the optimizer steps,
and the bound. phi is the noise scale in examples, measured at 4 times M0.

Held batches train longer than the noise scale asks for: until it is known, in some 30 steps, a step of any size counts
as one of M0. Adapted trainings show the rule itself: they make as much progress as the training at M0, in a third of
its steps.

In adapted trainings the second moment v of Adam, RMSprop, Adamax and Adafactor lags behind the batch size. With
beta2 = 0.999 it averages a thousand steps, more than the training has. It then holds the larger squares of smaller
batches, and with the square root of the gain alone the steps are too short: the rows *root alone*. The agent multiplies
the root by what v is too large, which follows from the batch sizes in v (`pollux.learning_rate.moment_lag`). An
experiment aside, at commit 7b64405, scaled v itself at each change of the batch size instead. It brought the same
accuracy back: Adam lost 0.84 % before and 0.00 % with it, NAdam 0.78 and 0.00 %, Adamax 1.03 and 0.11 %, RMSprop 0.92
and 0.06 %, all in as many steps as before. So the cause is neither the number of steps, nor the measured noise scale,
nor the length of the training.

Lion and Muon step along their momentum, whatever its size, and the momentum holds little noise. Their factor lies
between the square root and AdaScale's gain (`pollux.learning_rate.averaged_direction`). The rows *root alone* are
without this correction. LAMB is not corrected: adapted, it lost 0.5 % with the same correction, and nothing without it.

| optimizer | package | family | rule | at M0 | adapted | at 4 M0 | at 8 M0 | phi |
|---|---|---|---|---|---|---|---|---|
{body}
"""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", help="labels, separated by commas")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", action="store_true", help="measure only the rows that the JSON file lacks")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("pollux").setLevel(logging.ERROR)
    torch.compiler.set_stance("force_eager")  # torchao compiles its steps: minutes on a CPU
    data = digits()
    known: dict[tuple[str, str], dict[str, Any]] = {}
    if options.keep and options.json is not None and options.json.exists():
        known = {
            (row["optimizer"], row["package"]): row for row in json.loads(options.json.read_text())["rows"]
        }
    rows: list[dict[str, Any]] = []
    for entry in entries():
        if options.only and entry.label not in options.only.split(","):
            continue
        found = known.get((entry.label, entry.package))
        rows.append(found or measure(entry, data, options.seeds))
        print(line(rows[-1]), flush=True)
        if options.json is not None:
            save(options.json, {"seeds": options.seeds, "m0": M0, "rows": rows})
    if options.markdown is not None:
        options.markdown.write_text(page(rows, options.seeds))


if __name__ == "__main__":
    main()
