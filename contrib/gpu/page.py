"""Write the page of `make gpu-loop`: tests/benchmarks/gpu_loop.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from contrib.gpu.loop import kind

CPU = """\
**No GPU was used**: the machine has none. All ranks ran on its CPU, over gloo, and nothing here tests CUDA or NCCL.
What was found on GPUs before is on [the page of the selftest](gpu.md).
"""
GPU = """\
All ranks share the one GPU, over {over}: their step times say nothing of several GPUs.
"""
TEXT = """\
# The whole on one machine

`make gpu-loop`: {device}, {cores} cores, torch {torch}{nccl}, Python {python}, load {load} at the start, {at}, at
commit {commit}; {took_s} s in all. The program writes this page.

{where}
## Three trainings under polluxd

Real Slurm, Postgres and polluxd, up after {up} s. Four nodes offer the device as two GPUs each. Each pass also sleeps,
as in `make demo`, so that more GPUs pay. `sharded` is a training under {sharding}; its last rank is killed once.

| training | GPUs over time | batch sizes | took [s] | accuracy |
|---|---|---|---:|---:|
{jobs}

| move | times | median pause [s] | longest [s] |
|---|---:|---:|---:|
{moves}

In place a pause is the time without a training step. Through the queue it goes from the order to drain to the next
step.

Weights of `sharded` after its moves and the kill, {steps} steps of a fixed batch of all examples: they differ from
those of plain torch in one process by {difference:.0e} of their norm.

## Without Slurm

**Time to the same accuracy** ({level:.3f} on held-out images, 98 % of what both reach; residual network, one
rank{paced}): {fixed_s:.0f} s with the batch fixed at {batch}, {adapted_s:.0f} s adapted.

**Noise scale**, as measured and from the gradients of all single examples (two ranks, three networks): {noise}.

**What the agent costs** against plain DDP (residual network, SGD, two ranks; `make bench-agent` says how, and measures
more):

| plain step [ms] | variant | overhead | 95 % interval | rounds |
|---:|---|---:|---:|---:|
{cost}
"""


def over_time(series: Sequence[Sequence[float]]) -> str:
    """Return successive values, at most eight: the first, and the last ones."""
    words = [f"{value:g}" for _, value in series]
    return ", ".join(words if len(words) <= 8 else [words[0], "..", *words[-6:]])


def reached(arm: Mapping[str, Any], level: float) -> float:
    """Return the seconds of training after which an arm first had this accuracy."""
    return float(next(seconds for seconds, accuracy in arm["curve"] if accuracy >= level))


def page(figures: Mapping[str, Any]) -> str:
    """Return the page of a run's figures."""
    machine, loop, arms = figures["machine"], figures["loop"], figures["accuracy"]
    gpu, sharded = bool(machine["nccl"]), loop["results"]["sharded"]
    level = 0.98 * min(max(accuracy for _, accuracy in arm["curve"]) for arm in arms.values())
    pauses: dict[str, list[float]] = {}
    for move in loop["moves"]:
        pauses.setdefault(kind(move), []).append(move["total_s"])
    pauses["a rank killed"] = [sharded["kill_pause_s"]]
    return TEXT.format(
        **machine | {"nccl": f", NCCL {machine['nccl']}" if gpu else ""},
        took_s=figures["took_s"],
        where=GPU.format(over=machine["over"]) if gpu else CPU,
        up=loop["cluster_up_s"],
        sharding="FSDP2"
        if sharded["fsdp2"]
        else "DistributedDataParallel: FSDP2 needs torch 2.13, and NCCL on a GPU",
        jobs="\n".join(
            f"| {job['name']} | {over_time(job['gpus'])} | {over_time(job['batch_size'])} | {job['jct_s']:.0f} "
            f"| {'-' if job['name'] == 'sharded' else format(job['accuracy'], '.3f')} |"
            for job in loop["jobs"]
        ),
        moves="\n".join(
            f"| {name} | {len(found)} | {median(found):.1f} | {max(found):.1f} |"
            for name, found in sorted(pauses.items())
        ),
        steps=sharded["optimizer_steps"],
        difference=sharded["difference"],
        level=level,
        paced="" if gpu else ", whose passes sleep as a GPU would compute",
        fixed_s=reached(arms["fixed"], level),
        adapted_s=reached(arms["adapted"], level),
        batch=arms["fixed"]["batch_size"],
        noise="; ".join(
            f"{row['measured']:.1f} for {row['direct']:.1f} (standard error {100 * row['standard_error']:.0f} %)"
            for row in figures["noise"]
        ),
        cost="\n".join(
            f"| {1e3 * row['plain_step_s']:.1f} | {row['variant']} | {100 * row['overhead']:+.1f} % "
            f"| {100 * row['overhead_ci_low']:+.1f} to {100 * row['overhead_ci_high']:+.1f} % | {row['rounds']} |"
            for row in figures["cost"]
        ),
    )
