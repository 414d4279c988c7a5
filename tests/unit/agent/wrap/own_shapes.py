"""Loops in the shape of nanoGPT, torchtitan and DeepSpeed: their lines, their checkpoints, and what they refuse."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

shape, out = sys.argv[1], Path(sys.argv[2])
STEPS, EVERY = 40, 20
ranks = int(os.environ.get("POLLUX_GPUS", "1"))
out.mkdir(exist_ok=True)
step, digest = 0, ""


def newest() -> Path | None:
    if shape == "nanogpt":
        return out / "ckpt.pt" if (out / "ckpt.pt").exists() else None
    if shape == "torchtitan":
        found = [folder for folder in out.glob("step-*") if (folder / ".metadata").exists()]
        return max(found, key=lambda folder: int(folder.name[5:]), default=None)
    return out / (out / "latest").read_text() if (out / "latest").exists() else None


def save() -> None:
    text = json.dumps({"step": step, "digest": digest, "ranks": ranks})
    if shape == "nanogpt":  # in place, without a rename
        (out / "ckpt.pt").write_text(text)
        return
    folder = out / (f"step-{step}" if shape == "torchtitan" else f"global_step{step}")
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        (folder / f"shard-{rank}").write_text(text)
    if shape == "torchtitan":
        (folder / ".metadata").write_text(str(ranks))
    else:
        (out / "latest").write_text(folder.name)


if shape == "deepspeed":
    print("[INFO] [logging.py:123:log_dist] [Rank 0] step=0, skipped=0, lr=[0.001]", flush=True)
if saved := newest():
    kept = json.loads((saved if shape == "nanogpt" else saved / "shard-0").read_text())
    if shape == "torchtitan" and kept["ranks"] != ranks:
        sys.exit("RuntimeError: cannot resume after changing the effective data-parallel degree")
    if shape == "deepspeed" and kept["ranks"] != ranks:
        sys.exit(f"checkpoint used a DP world size of {kept['ranks']} but the current is {ranks}")
    step, digest = kept["step"], kept["digest"]
    print(f"resumes from {saved} on {ranks}", flush=True)
while step < STEPS:
    time.sleep(0.02)
    digest = hashlib.sha256(f"{digest} {step}".encode()).hexdigest()
    step += 1
    if shape == "nanogpt":
        print(f"iter {step}: loss {1 / step:.4f}, time 20.11ms, mfu 12.34%", flush=True)
    elif shape == "torchtitan":
        line = (
            f"\x1b[31mstep: {step:2}  \x1b[32mloss: {1 / step:7.4f}  \x1b[33mmemory:  1.10GiB(1.40%)\x1b[39m"
        )
        print(f"[rank0]:[titan] INFO - {line}", file=sys.stderr, flush=True)
    else:
        print(f"[INFO] [logging.py:123:log_dist] [Rank 0] step={step}, skipped=0, lr=[0.001]", flush=True)
    if step % EVERY == 0:
        if shape == "nanogpt":
            print(f"step {step}: train loss {1 / step:.4f}, val loss {1 / step:.4f}", flush=True)
        save()
        if os.environ.get("HOLD_AT") == str(step):
            time.sleep(600)  # until the job is ended, so that a slow machine misses no move
print("finished", digest, flush=True)
