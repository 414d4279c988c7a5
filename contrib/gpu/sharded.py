"""Train under FSDP2, all examples a step, and compare the weights with those of plain torch in one process.

The batch is fixed, so the right weights do not depend on the ranks, on moves, or on the rank that is killed once. Where
the torch is too old for FSDP2, or a GPU has no NCCL, the training is one of DistributedDataParallel.
"""

import json
import os
import signal
import time
from pathlib import Path

import torch

import pollux
from contrib.examples.emulated import Accelerator, arguments
from pollux.private_folder import write_named
from pollux.selftest.on_ranks import EXAMPLES, error_of, train

args = arguments(__doc__, epochs=300, batch_size=EXAMPLES, max_batch_size=EXAMPLES, lr=0.05)
steps = int(args.epochs)
sharded = torch.__version__ >= "2.13" and "POLLUX_BACKEND" not in os.environ
killed, resumed = (Path(f"{args.result}.{mark}") for mark in ("killed", "resumed"))


def paced(job: pollux.Job) -> bool:
    """Sleep as long as the emulated accelerator computes. Kill the last rank once, after a third of the steps."""
    Accelerator(args, job).compute(EXAMPLES // job.world.size)
    done, last = job.progress.optimizer_steps, job.rank == job.world.size - 1
    if done > steps // 3 and job.world.size > 1 and last and not killed.exists():
        write_named(killed, str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    if job.is_main and killed.exists() and not resumed.exists():
        write_named(resumed, str(time.time()))
    return False


job = train(steps, sharded=sharded, over=paced)
error = error_of(job.module, job.progress.optimizer_steps, job.device)
if job.is_main:
    result = {
        "name": "sharded",
        "fsdp2": sharded,
        "accuracy": 1.0 - error,
        "difference": error,
        "optimizer_steps": job.progress.optimizer_steps,
        "wanted_steps": steps,
        "kill_pause_s": float(resumed.read_text()) - float(killed.read_text()) if resumed.exists() else None,
    }
    print(json.dumps(result), flush=True)
    write_named(args.result, json.dumps(result, indent=2))
