"""The checks of the selftest: what each runs, what it finds, and what to do where it fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pollux.errors import PolluxAgentError
from pollux.selftest.launching import (
    STEPS,
    TOLERANCE,
    CheckFailed,
    CheckLeftOut,
    last_lines,
    run,
    run_resized,
)
from pollux.selftest.machine import Machine

Found = list[dict[str, Any]]
Figures = dict[str, float | int | str]

ACCURACY_MARGIN = 0.03
"""How much worse the adapted batch may be: twice the standard error of the difference on 2,048 held-out images."""

GOALS = {
    ("sgd", "every step"): 0.03,
    ("adam", "every step"): 0.06,
    ("sgd", "1/20"): 0.015,
    ("adam", "1/20"): 0.015,
}
"""Overheads that a page of figures is compared with; a slower machine fails nothing."""


SHARDS_FROM = "2.13"
"""torch's first release whose fully_shard the agent takes."""

OVERHEAD_S = 10.0
"""Of one optimizer; longer where two rounds take longer."""


@dataclass(frozen=True)
class Check:
    """One check: its body returns figures, or raises."""

    name: str
    body: Callable[[Machine, Path], Figures]
    remedy: str


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    check: str
    outcome: str
    """passed, failed or left out."""
    seconds: float
    figures: Figures = field(default_factory=dict)
    trouble: str = ""
    remedy: str = ""


def carry_out(check: Check, machine: Machine, folder: Path) -> Result:
    """Run a check in a folder of its own."""
    folder.mkdir()
    start = time.monotonic()
    try:
        figures = check.body(machine, folder)
    except CheckLeftOut as reason:
        return Result(check.name, "left out", time.monotonic() - start, {"reason": str(reason)})
    except (PolluxAgentError, OSError) as error:
        return Result(check.name, "failed", time.monotonic() - start, {}, str(error), check.remedy)
    return Result(check.name, "passed", time.monotonic() - start, figures)


def require(true: bool, trouble: str, folder: Path) -> None:
    """Raise CheckFailed with the ranks' last lines."""
    if not true:
        raise CheckFailed(f"{trouble}. The ranks' last lines: {last_lines(folder)}")


def as_plain(found: Found, steps: int, folder: Path, *, ranks: int | None = None) -> Figures:
    """Compare with plain torch the weights of every rank that lived to the end."""
    main = found[0]
    require(
        all(each["steps"] == steps for each in found),
        f"expected {steps} optimizer steps, got {[each['steps'] for each in found]}",
        folder,
    )
    worst = max(each["error"] for each in found)
    require(worst < TOLERANCE, f"the weights differ from plain torch's by {worst:.1e} of their norm", folder)
    if ranks is not None:
        require(main["ranks"] == ranks, f"expected {ranks} ranks at the end, got {main['ranks']}", folder)
    return {"difference from plain torch": f"{worst:.0e}"}


def groups(machine: Machine, folder: Path) -> Figures:
    found = run(machine, "groups", folder, machine.ranks)
    figures = as_plain(found, STEPS, folder, ranks=machine.ranks)
    return {"ranks": machine.ranks, "all-reduce [GiB/s]": round(found[0]["all_reduce_gib_s"], 2), **figures}


def resize(machine: Machine, folder: Path) -> Figures:
    found = run_resized(machine, folder)
    figures = as_plain(found, found[0]["steps"], folder, ranks=machine.ranks)
    lived = [each["pauses"] for each in found if len(each["pauses"]) == 2]
    require(bool(lived), "expected a rank that lived through both moves", folder)
    (pauses, *_) = lived
    return {f"pause, {move} [s]": round(seconds, 2) for move, seconds in pauses.items()} | figures


def restart(machine: Machine, folder: Path) -> Figures:
    found = run(machine, "restart", folder, machine.ranks, options=["--max-restarts", "1"])
    figures = as_plain(found, STEPS, folder)
    require((folder / "killed").exists(), "no rank was killed", folder)
    times = [float(line) for path in folder.glob("times-*") for line in path.read_text().split()]
    times.sort()
    pause = max(later - earlier for earlier, later in pairwise(times))
    return {"pause [s]": round(pause, 1), "ranks after it": found[0]["ranks"], **figures}


def checkpoints(machine: Machine, folder: Path, *, check: str = "checkpoint") -> Figures:
    """Train a third of the steps on all ranks, on one, and on all again."""
    figures: Figures = {}
    counts = (machine.ranks, 1, machine.ranks)
    for number, ranks in enumerate(counts):
        for old in folder.glob("found-*.json"):
            old.unlink()
        steps = (number + 1) * STEPS // 3
        # A checkpoint of GPUs is read on the same GPUs: where these cannot be shared, all is on the CPU.
        there = machine if machine.shared_gpus else Machine(machine.name, (), (), machine.ranks)
        found = run(there, check, folder, ranks, str(steps))
        figures = as_plain(found, steps, folder, ranks=ranks)
        begun = number * STEPS // 3 + 1
        require(
            found[0]["begun"] == begun,
            f"expected to go on with step {begun}, got {found[0]['begun']}",
            folder,
        )
    return {"ranks": ", ".join(map(str, counts)), **figures}


def fsdp2(machine: Machine, folder: Path) -> Figures:
    import torch  # noqa: PLC0415 - `--help` needs none of it

    if torch.__version__ < SHARDS_FROM:
        raise CheckLeftOut(f"the agent takes models under fully_shard from torch {SHARDS_FROM} on")
    return checkpoints(machine, folder, check="fsdp2")


def amp(machine: Machine, folder: Path) -> Figures:
    found = run(machine, "amp", folder, machine.ranks)
    figures = as_plain(found, STEPS - 1, folder)
    scales = {each["scale"] for each in found}
    require(scales == {512.0}, f"expected a loss scale of 512 on all ranks, got {scales}", folder)
    return {"steps left out": 1, **figures}


def memory(machine: Machine, folder: Path) -> Figures:
    found = run(machine, "memory", folder, 1)
    figures = as_plain(found, STEPS, folder)
    require(found[0]["passes"] == 2, f"expected passes of half a batch, got {found[0]}", folder)
    return {"passes per step": 2, **figures}


def noise(machine: Machine, folder: Path) -> Figures:
    (found, *_) = run(machine, "noise", folder, machine.ranks)
    ratio, error = found["phi"] / found["direct"], found["standard_error"]
    require(
        abs(ratio - 1.0) < 4 * error,
        f"expected a noise scale of {found['direct']:.1f} examples, within 4 times {100 * error:.1f} %; "
        f"got {found['phi']:.1f}",
        folder,
    )
    return {"noise scale": round(found["phi"], 1), "direct": round(found["direct"], 1)}


def accuracy(machine: Machine, folder: Path) -> Figures:
    found = {}
    for batch in ("fixed", "adapted"):
        (folder / batch).mkdir()
        (found[batch], *_) = run(machine, "accuracy", folder / batch, machine.ranks, batch)
    fixed, adapted = found["fixed"], found["adapted"]
    where = folder / "adapted"
    require(adapted["largest_batch"] > fixed["largest_batch"], "the batch size never grew", where)
    require(
        adapted["accuracy"] > fixed["accuracy"] - ACCURACY_MARGIN,
        f"expected an accuracy of {fixed['accuracy']:.3f}, got {adapted['accuracy']:.3f} with an adapted batch",
        where,
    )
    return {
        "accuracy, fixed": round(fixed["accuracy"], 3),
        "adapted": round(adapted["accuracy"], 3),
        "steps": f"{fixed['steps']}, {adapted['steps']}",
        "largest batch": adapted["largest_batch"],
    }


def costs(optimizer: str) -> Callable[[Machine, Path], Figures]:
    """Return the check of the agent's overhead with this optimizer."""

    def body(machine: Machine, folder: Path) -> Figures:
        from pollux.selftest import overhead  # noqa: PLC0415 - `--help` needs none of torch

        os.environ.update(machine.environment)
        # On CPUs the network whose steps are shorter: a busy machine still makes enough of them.
        model = "conv" if machine.shared_gpus else "transformer"
        plan = overhead.OverheadPlan(
            machine.ranks, machine.shared_device, OVERHEAD_S, 100, warm_rounds=1, warm_steps=3, least_rounds=2
        )
        rows = overhead.rows_of(plan, model, optimizer, overhead.measure(plan, model, optimizer))
        figures: Figures = {"plain step [ms]": round(1e3 * rows[0]["plain_step_s"], 2)}
        for row in rows:
            low, high = row["overhead_ci_low"], row["overhead_ci_high"]
            goal = GOALS.get((optimizer, row["variant"]))
            above = f", above the goal of {100 * goal:g} %" if goal is not None and low > goal else ""
            figures[row["variant"]] = (
                f"{100 * row['overhead']:+.1f} % ({100 * low:+.1f} to {100 * high:+.1f}{above})"
            )
        return figures

    return body


NETWORK = (
    "set NCCL_DEBUG=INFO and look at `nvidia-smi topo -m`; over gloo, set GLOO_SOCKET_IFNAME to an interface with an "
    "address, and allow connections between the ranks"
)
QUEUE = "until it is mended, write `#POLLUX resize=requeue`: the job then moves through the queue"
REPORT = "keep the JSON file and report it with the versions of torch, NCCL and the driver"

CHECKS = (
    Check("process groups", groups, NETWORK),
    Check("resize in place", resize, QUEUE),
    Check("rank killed", restart, f"jobs restart from their checkpoints by a requeue; {REPORT}"),
    Check(
        "checkpoints", checkpoints, f"look at the free space in {os.environ.get('TMPDIR', '/tmp')}; {REPORT}"
    ),
    Check("FSDP2", fsdp2, f"train under DistributedDataParallel; {REPORT}"),
    Check("AMP overflow", amp, f"train in bfloat16, which needs no GradScaler; {REPORT}"),
    Check("out of memory", memory, "bound a GPU's examples by per_gpu=(least, most) so that they fit"),
    Check("noise scale", noise, f"keep the batch size by `#POLLUX adaptive=no`; {REPORT}"),
    Check("adapted batch", accuracy, f"keep the batch size by `#POLLUX adaptive=no`; {REPORT}"),
    Check("overhead, SGD", costs("sgd"), REPORT),
    Check("overhead, Adam", costs("adam"), REPORT),
)
