"""Share an emulated accelerator, data and options between the examples.

The examples also share how they print their results.

The demo runs up to 16 ranks on two CPU cores, where a model's real computing time says nothing about GPUs. So each
forward and backward pass sleeps `alpha + beta * m` seconds for its m examples, and each synchronisation of gradients
sleeps a further stated time: none on one rank, LOCAL between ranks of one node, NODE between nodes (the terms of
the throughput model, Pollux, OSDI 2021, section 3.2). Only time is emulated: gradients, noise scale,
all-reduce and checkpoints are real. `--alpha 0 --beta 0 --sync 0 0`, the default, sleeps nowhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

import pollux
from pollux.private_folder import require_named, write_named

HELD_OUT = 0.2
"""Share of each data set that is never trained on."""


@dataclass(frozen=True)
class Data:
    """A data set, split the same way at every seed of the training."""

    train: TensorDataset
    test: TensorDataset


def _split(x: np.ndarray, y: np.ndarray) -> Data:
    order = np.random.default_rng(0).permutation(len(y))
    held = int(HELD_OUT * len(y))
    tensors = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.int64)
    test, train = torch.from_numpy(order[:held]), torch.from_numpy(order[held:])
    return Data(*(TensorDataset(*(t[rows] for t in tensors)) for rows in (train, test)))


def _table(name: str) -> np.ndarray:
    """Read a table that scikit-learn carries, without importing the library.

    The import would cost each worker more than a second of CPU time.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the examples train on data that scikit-learn carries: pip install scikit-learn")
    path = Path(found.submodule_search_locations[0]) / "datasets" / "data" / name
    return np.loadtxt(path, delimiter=",", skiprows=0 if name.startswith("digits") else 1)


def digits() -> Data:
    """Return scikit-learn's digits: 1,797 images in ten classes.

    Images have the shape [1, 8, 8] and values in 0..1.
    """
    table = _table("digits.csv.gz")
    return _split((table[:, :-1] / 16.0).reshape(-1, 1, 8, 8), table[:, -1])


def tumours() -> Data:
    """Return scikit-learn's breast cancer data: 569 tumours, two classes.

    Each tumour has 30 standardised measurements.
    """
    table = _table("breast_cancer.csv")
    x = table[:, :-1]
    return _split((x - x.mean(0)) / x.std(0), table[:, -1])


def arguments(
    description: str, *, epochs: float, batch_size: int, max_batch_size: int, lr: float
) -> argparse.Namespace:
    """Parse the command line that all examples share."""
    parser = argparse.ArgumentParser(description=description, epilog=__doc__, formatter_class=_Formatter)
    parser.add_argument("--epochs", type=float, default=epochs, help="statistical epochs to train")
    parser.add_argument(
        "--batch-size", type=int, default=batch_size, help="M0: total batch size to begin with"
    )
    parser.add_argument("--max-batch-size", type=int, default=max_batch_size, help="largest total batch size")
    parser.add_argument(
        "--per-gpu",
        type=int,
        nargs=2,
        default=None,
        metavar=("LOW", "HIGH"),
        help="examples per GPU and pass",
    )
    parser.add_argument("--lr", type=float, default=lr, help="learning rate at M0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alpha", type=float, default=0.0, help="emulated seconds per pass")
    parser.add_argument("--beta", type=float, default=0.0, help="emulated seconds per example of a pass")
    parser.add_argument(
        "--sync",
        type=float,
        nargs=2,
        default=(0.0, 0.0),
        metavar=("LOCAL", "NODE"),
        help="emulated seconds per synchronisation of gradients, within a node and between nodes",
    )
    parser.add_argument("--result", type=Path, help="write the held-out accuracy there, as JSON")
    args = parser.parse_args()
    if args.result is not None:
        require_named(args.result)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    return args


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


class Accelerator:
    """Sleep as long as the emulated accelerator would compute."""

    def __init__(self, args: argparse.Namespace, job: pollux.Job) -> None:
        self._alpha, self._beta = args.alpha, args.beta
        self._local, self._node = args.sync
        self._job = job

    def compute(self, examples: int) -> None:
        """Sleep for a forward and backward pass over `examples` examples."""
        _sleep(self._alpha + self._beta * examples)

    def synchronise(self) -> None:
        """Sleep for the all-reduce in a pass that synchronises."""
        world = self._job.world  # of this moment: a job may be resized in place
        if self._job.sync_gradients and world.size > 1:
            _sleep(self._local if world.nodes < 2 else self._node)


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


@torch.no_grad()
def accuracy(model: torch.nn.Module, test: TensorDataset) -> float:
    """Return the share of held-out examples that are classified correctly."""
    model.eval()
    x, y = test.tensors
    right = (model(x).argmax(1) == y).float().mean()
    model.train()
    return float(right)


def finish(name: str, args: argparse.Namespace, job: pollux.Job, test: TensorDataset, **more: object) -> None:
    """Print the result, with `more`, and write it where `--result` says, on rank 0."""
    if not job.is_main:
        return
    result = {
        "name": name,
        "accuracy": accuracy(job.module, test),
        "held_out": len(test),
        "epochs": args.epochs,
        "seed": args.seed,
        "optimizer_steps": job.progress.optimizer_steps,
        "progress": job.progress.steps,
        "samples": job.progress.samples,
        "batch_size": job.batch_size,
        "gpus": job.world.size,
        **more,
    }
    print(json.dumps(result), flush=True)
    if args.result is not None:
        write_named(args.result, json.dumps(result, indent=2))
