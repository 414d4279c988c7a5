"""A trainer with a loop of its own, which knows nothing of Pollux: a fixed batch, its own checkpoints, a line a step.

A step of K GPUs takes as long as a K-th of the work. Its result depends on all samples in their order: a sample that is
lost or trained on twice changes the digest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--save-every", type=int, default=20)
parser.add_argument("--work", type=float, default=0.2, help="seconds of a step on one GPU")
parser.add_argument("--saves-on-term", action="store_true")
parser.add_argument("--deaf", action="store_true", help="not to notice TERM")
parser.add_argument("--unsaved", action="store_true", help="end at TERM without saving")
parser.add_argument("--requeues", action="store_true", help="requeue its own job once it has saved at TERM")
parser.add_argument("--rigid", action="store_true", help="refuse to go on at another size")
parser.add_argument("--in-place", action="store_true", help="one checkpoint, which is written in two halves")
parser.add_argument("--mute", action="store_true", help="name no step")
parser.add_argument("--evaluates", action="store_true", help="count evaluations by lines of the same form")
options = parser.parse_args()

gpus = int(os.environ.get("POLLUX_GPUS", "1"))
options.out.mkdir(exist_ok=True)
step, digest = 0, ""
rank = int(os.environ.get("SLURM_PROCID", "0"))
if rank:  # of several tasks of srun, the first one trains
    mark = options.out / f"term-{os.environ.get('SLURM_RESTART_COUNT', '0')}-{rank}"
    signal.signal(signal.SIGTERM, lambda *_: (mark.touch(), sys.exit(0)))
    while not (options.out / "finished").exists():
        time.sleep(0.1)
    sys.exit()
saved = sorted(options.out.glob("step-*.json"))
if saved:
    found = json.loads(saved[-1].read_text())
    step, digest = found["step"], found["digest"]
    if options.rigid and found["gpus"] != gpus:
        sys.exit("cannot resume at another data-parallel degree")
print(f"resumed at {step} on {gpus} GPUs", flush=True)
told: list[int] = []
if options.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if options.unsaved:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if options.saves_on_term:
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))


def save() -> None:
    text = json.dumps({"step": step, "digest": digest, "gpus": gpus})
    if options.in_place:
        with (options.out / "step-newest.json").open("w") as file:
            for half in (text[:9], text[9:]):
                file.write(half)
                file.flush()
                time.sleep(1.5)
        return
    temporary = options.out / "tmp"
    temporary.write_text(text)
    temporary.rename(options.out / f"step-{step:06d}.json")


with (options.out / "made.txt").open("a") as made:
    while step < options.steps:
        time.sleep(0.01 + options.work / gpus)
        digest = hashlib.sha256(f"{digest} {step}".encode()).hexdigest()
        step += 1
        made.write(f"{step} {gpus} {time.time():.3f}\n")
        made.flush()
        if not options.mute:
            print(f"step {step}: loss {1 / step:.5f}", flush=True)
        if options.evaluates and step % 10 == 0:
            print("\n".join(f"step {n}: evaluation" for n in range(1, 30)), flush=True)
        if step % options.save_every == 0 or told:
            save()
        if told and options.requeues:
            os.execvp("scontrol", ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])
        if told:
            print(f"saved at step {step}, ends", flush=True)
            sys.exit(0)
save()
(options.out / "finished").touch()
print("finished", digest, flush=True)
