"""Slurm, Postgres, polluxd and three trainings on the machine's one GPU; without a GPU, on the CPU.

    python -m contrib.gpu [--json bench-out/gpu_loop.json] [--page tests/benchmarks/gpu_loop.md]

The private cluster offers the device as several. Then, without Slurm: the time to the same accuracy, the noise scale,
and the agent's cost per step. It takes at most 8 minutes, and needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console

from contrib.commit import COMMIT
from contrib.demo.run import RunFailedError, tail
from contrib.devcluster import DevClusterError
from contrib.devcluster.interrupts import Interrupted, interruptible
from contrib.devcluster.processes import Daemon, wait_until
from contrib.gpu import loop
from contrib.gpu.page import page
from polluxd.errors import PolluxError
from tests.benchmarks import overhead
from tests.benchmarks.results import ROOT, save

CUDA = torch.cuda.is_available()
ALONE = ("--epochs", "60") if CUDA else ("--epochs", "10", "--alpha", "0.03", "--beta", "0.0002")
"""A GPU takes little longer for larger batches. Without one, a pass sleeps as if it did."""
BATCH = 128 if CUDA else 32


NCCL: tuple[int, ...] = torch.cuda.nccl.version() if CUDA else ()  # type: ignore[no-untyped-call]
"""Its release; empty without a GPU."""


def sharing(nccl: tuple[int, ...]) -> dict[str, str]:
    """Return the variables that let several ranks use one GPU."""
    if not nccl:
        return {}
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if nccl >= (2, 30) else {"POLLUX_BACKEND": "gloo"}


def machine() -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(0) if CUDA else "CPU",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "nccl": ".".join(map(str, NCCL)),
        "over": "NCCL" if "NCCL_MULTI_RANK_GPU_ENABLE" in sharing(NCCL) else "gloo",
        "load": round(os.getloadavg()[0], 1),
        "commit": COMMIT,
        "at": time.strftime("%Y-%m-%d"),
    }


def alone(scratch: Path, name: str, *words: str) -> Any:
    """Run `pollux run` outside Slurm; return what the training wrote. Raises RunFailedError."""
    result = scratch / f"{name}.json"
    argv = [str(Path(sys.executable).parent / "pollux"), "run", *words, "--result", str(result)]
    launcher = Daemon(
        name, argv, scratch / f"{name}.log", env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/agent"}
    )
    launcher.start()
    try:
        wait_until(lambda: not launcher.running, 180, name, every_s=0.2)
    finally:
        status = launcher.stop(grace_s=20)
    if status or not result.exists():
        raise RunFailedError(f"{name} ended with status {status}:\n{tail(launcher.log, 20)}")
    return json.loads(result.read_text())


def to_accuracy(scratch: Path) -> dict[str, Any]:
    """Train the images with a fixed and with an adapted batch, on one rank."""
    script, sizes = str(ROOT / "contrib" / "gpu" / "images.py"), {"fixed": BATCH, "adapted": 16 * BATCH}
    return {
        arm: alone(
            scratch,
            arm,
            *("--nproc", "1", script, *ALONE),
            *("--batch-size", str(BATCH), "--max-batch-size", str(most), "--per-gpu", "8", str(most)),
        )
        for arm, most in sizes.items()
    }


def cost() -> list[dict[str, Any]]:
    """Measure the agent against plain DDP on two ranks, at steps of three lengths."""
    device = "cuda" if CUDA else "cpu"
    rows = []
    for step_s, width in overhead.WIDTHS[device].items():
        plan = overhead.OverheadPlan(device, 20.0, 20, warm_rounds=1, least_rounds=2)
        rows += overhead.rows_of(
            plan, *overhead.measure(plan, overhead.Case("images", "sgd", 2, step_s, width))
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=ROOT / "bench-out" / "gpu_loop.json")
    parser.add_argument("--page", type=Path, help="write the figures there, as a page")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    scratch = Path(tempfile.mkdtemp(prefix="pollux-gpu-"))
    scratch.chmod(0o755)  # Postgres and the jobs run as other users than root
    begun = time.monotonic()
    os.environ |= sharing(NCCL)  # of the ranks outside Slurm
    figures: dict[str, Any] = {"machine": machine()}
    parts = {
        "loop": lambda: loop.run(scratch, console, sharing(NCCL)),
        "accuracy": lambda: to_accuracy(scratch),
        "noise": lambda: alone(scratch, "noise", "--nproc", "2", "-m", "contrib.gpu.noise"),
        "cost": cost,
    }
    try:
        with interruptible():
            for name, part in parts.items():
                started = time.monotonic()
                figures[name] = part()
                console.print(f"{name}: {time.monotonic() - started:.0f} s", highlight=False)
    except (RunFailedError, DevClusterError, PolluxError, OSError) as error:
        console.print(f"gpu-loop failed: {error}", markup=False, soft_wrap=True, highlight=False)
        return 1
    except Interrupted as stop:
        console.print(f"{stop.signal}: everything stopped")
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    figures["took_s"] = round(time.monotonic() - begun)
    save(options.json, figures)
    text = page(figures)
    if options.page is not None:
        options.page.write_text(text)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
