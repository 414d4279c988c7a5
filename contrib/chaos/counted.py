"""Train a job that writes down which samples each optimizer step took.

The files allow the lineage of the training to be counted afterwards. Each rank appends lines to its own file, which
ledger.py reads: where the rank began and in which process; each micro-batch, before it is computed; each optimizer
step, after it, with the time and the number of ranks; each step that fewer ranks repeat after a loss. The files also
keep the steps that a crash undid.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import TensorDataset

import pollux

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from emulated import digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--passes", type=int, required=True, help="passes through the data, at most")
parser.add_argument(
    "--until", type=Path, help="file whose appearance ends the training with the pass under way"
)
parser.add_argument("--step-s", type=float, default=0.05, help="seconds that a micro-batch takes at least")
parser.add_argument("--sharded", action="store_true", help="train under fully_shard (FSDP2)")
parser.add_argument("--ledger", type=Path, required=True, help="folder of the files")
args = parser.parse_args()


def to_end() -> bool:
    """Return whether any rank has seen the `--until` file; all ranks agree."""
    seen = torch.tensor([int(args.until is not None and args.until.exists())])
    if distributed.is_initialized():
        distributed.all_reduce(seen)
    return bool(seen)


data = digits().train
x, y = data.tensors
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
if args.sharded:
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo")
    for layer in (model[1], model[3]):
        fully_shard(layer)
    fully_shard(model)
optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
job = pollux.attach(model, optimizer, seed=1)
loader = job.loader(TensorDataset(x, y, torch.arange(len(y))), 32, max_batch_size=128, per_gpu=(1, 32))

launch = torch.tensor([time.time_ns()])
if distributed.is_initialized():
    distributed.broadcast(launch, 0)
# A rank of a companion comes into a training that goes on; any other goes back to the checkpoint that it begins from.
began = "joined" if os.environ.get("POLLUX_COMPANION") else "from"
attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
name = args.ledger / f"{launch.item()}-{attempt}-{job.rank}.txt"
with name.open("x", buffering=1) as ledger:
    first, begun, ranks = True, -1, job.world.size
    for _ in job.epochs(args.passes):
        for images, labels, indices in loader:
            step = job.progress.optimizer_steps
            if first:
                print(f"{began} {step} of {len(y)} in {os.getpid()}", file=ledger)
                first = False
            if step == begun and job.world.size < ranks:
                print("again", step, file=ledger)
            ranks, begun = job.world.size, step
            # A rank without samples at the end of a pass loads stand-ins of weight 0: it trains on none of them.
            used = indices.tolist() if loader.data.local_samples else []
            print(step, *used, file=ledger)
            with job.micro_batch():
                time.sleep(args.step_s)
                job.backward(cross_entropy(job.model(images), labels))
            if job.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
                print("done", step, time.time(), job.world.size, file=ledger)
        if to_end():
            break
if job.is_main:
    print(f"trained {job.progress.epoch} passes in {job.progress.optimizer_steps} steps")
job.close()
