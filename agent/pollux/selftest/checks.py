"""Check on this machine that trainings under Pollux work.

No polluxd and no Slurm take part. It uses the GPUs that this process may use (CUDA_VISIBLE_DEVICES), at most eight; in
a batch script, those of its first node. Without a GPU it runs on the CPU, over gloo. It takes a few minutes.

Exit status: 0 all checks passed, 1 a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pollux.errors import PolluxAgentError
from pollux.private_folder import require_named, temporary_folder, write_named
from pollux.version import __version__

Figures = dict[str, float | int | str]
PATIENCE_S = 180.0  # for one launch, from its start to its end
MOST_RANKS = 8
COMPANION = """\
cat > {folder}/companion.sh
SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1 SLURM_NODEID=0 SLURMD_NODENAME=c0 \\
CUDA_VISIBLE_DEVICES={gpus} sh {folder}/companion.sh >> {folder}/output 2>&1 &
echo $! > {folder}/companion.pid
echo 4711
"""
"""In the place of sbatch: start the companion job at once."""


class CheckFailed(PolluxAgentError):
    """A check found a fault."""


class CheckLeftOut(PolluxAgentError):
    """This machine cannot run the check."""


class Machine(NamedTuple):
    """Where the checks run: GPUs as CUDA_VISIBLE_DEVICES names them; those of checks of several ranks, else the CPU."""

    name: str
    gpus: tuple[str, ...] = ()
    shared_gpus: tuple[str, ...] = ()
    ranks: int = 2
    note: str = "No GPU is used: all ranks run on the CPU, over gloo. Nothing here tests CUDA or NCCL."


def of_gpus(name: str, gpus: tuple[str, ...], nccl: tuple[int, ...]) -> Machine:
    """Return the machine that has these GPUs and this release of NCCL."""
    title = f"{len(gpus)} x {name}"
    if len(gpus) > 1:
        ranks = min(len(gpus), MOST_RANKS) // 2 * 2
        return Machine(title, gpus, gpus[:ranks], ranks, "")
    if nccl[:2] >= (2, 30):  # lets several ranks use one GPU
        return Machine(title, gpus, gpus, 2, "One GPU: two ranks share it.")
    return Machine(
        title, gpus, (), 2, "One GPU, which NCCL before 2.30 does not share: several ranks run on the CPU."
    )


def this_machine(*, cpu: bool) -> Machine:
    """Look at the GPUs that this process may use."""
    import torch  # noqa: PLC0415 - `--help` needs none of it

    count = torch.cuda.device_count() if not cpu and torch.cuda.is_available() else 0
    if not count:
        return Machine(f"CPU, {os.cpu_count()} cores")
    listed = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    gpus = tuple(part.strip() for part in listed.split(","))[:count]
    return of_gpus(torch.cuda.get_device_name(0), gpus, tuple(torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def launch(
    machine: Machine, folder: Path, gpus: Sequence[str], words: Sequence[str], **step: str
) -> subprocess.Popen[bytes]:
    """Start `pollux run` on these GPUs, without the environment of a surrounding job."""
    dropped = ("SLURM", "SBATCH", "POLLUX", "TORCHELASTIC", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if len(machine.gpus) == 1 else {}
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pollux.launcher.launch", "run", *words],
            env=plain | shared | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} | step,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def finish(launchers: Sequence[subprocess.Popen[bytes]], folder: Path) -> Figures:
    """Wait for the launchers' end; return rank 0's figures. Raises CheckFailed."""
    deadline = time.monotonic() + PATIENCE_S
    try:
        for launcher in launchers:
            launcher.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        raise CheckFailed(f"the ranks had not ended after {PATIENCE_S:.0f} s: {last_lines(folder)}") from None
    finally:
        for launcher in launchers:
            launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(20)
            launcher.kill()
    if failed := [launcher.returncode for launcher in launchers if launcher.returncode]:
        raise CheckFailed(f"`pollux run` ended with status {failed[0]}: {last_lines(folder)}")
    if not (folder / "figures.json").exists():
        raise CheckFailed(f"rank 0 wrote no figures: {last_lines(folder)}")
    return dict(json.loads((folder / "figures.json").read_text()))


def last_lines(folder: Path) -> str:
    """Return the end of the ranks' output, as one line."""
    lines = (folder / "output").read_text(errors="replace").split("\n")
    kept = [line.strip() for line in lines if line.strip()]
    return " | ".join(kept[-4:])[-600:] or "they printed nothing"


def run(
    machine: Machine, check: str, folder: Path, ranks: int, *arguments: str, options: Sequence[str] = ()
) -> Figures:
    """Run a check of `ranks` on so many ranks. A single rank uses the GPU also where several cannot share it."""
    gpus = machine.gpus if ranks == 1 else machine.shared_gpus
    words = ["--nproc", str(ranks), *options, "-m", "pollux.selftest.on_ranks", check, str(folder)]
    return finish([launch(machine, folder, gpus, [*words, *arguments])], folder)


def run_resized(machine: Machine, folder: Path) -> Figures:
    """Run the check `resize`: two launchers as of two nodes, and a companion job in the place of the second."""
    half = machine.ranks // 2
    parts = machine.shared_gpus[:half], machine.shared_gpus[-half:]
    programs = folder / "bin"
    programs.mkdir()
    companion = COMPANION.format(folder=folder, gpus=",".join(parts[1]))
    texts = {"scontrol": "echo NodeAddr=127.0.0.1\n", "sbatch": companion, "scancel": ""}
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}")
        (programs / name).chmod(0o755)
    step = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(1 + time.time_ns() % (1 << 30)),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "n0",
        "POLLUX_LAUNCH_KEY": secrets.token_hex(16),
        "POLLUX_EXCHANGE_INTERVAL": "0",
    }
    words = ["--nproc", str(half), "-m", "pollux.selftest.on_ranks", "resize", str(folder)]
    try:
        nodes = [
            launch(machine, folder, gpus, words, **step, SLURM_NODEID=str(node), SLURMD_NODENAME=f"n{node}")
            for node, gpus in enumerate(parts)
        ]
        return finish(nodes, folder)
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((folder / "companion.pid").read_text()), signal.SIGTERM)


def on_all(check: str, *options: str) -> Callable[[Machine, Path], Figures]:
    """Return a check that runs once, on all ranks."""
    return lambda machine, folder: run(machine, check, folder, machine.ranks, options=options)


def checkpoints(machine: Machine, folder: Path, sharded: str = "") -> Figures:
    """Train a third of the steps on all ranks, on one, and on all again."""
    # A checkpoint of GPUs is read on the same GPUs: where these cannot be shared, all is on the CPU.
    there = machine if machine.shared_gpus else Machine(machine.name)
    figures: Figures = {}
    for third, ranks in enumerate((machine.ranks, 1, machine.ranks), 1):
        figures = run(there, "checkpoint", folder, ranks, str(third), sharded)
    return figures


def fsdp2(machine: Machine, folder: Path) -> Figures:
    import torch  # noqa: PLC0415 - `--help` needs none of it

    if torch.__version__ < "2.13":
        raise CheckLeftOut("the agent takes models under fully_shard from torch 2.13 on")
    return checkpoints(machine, folder, "sharded")


class Check(NamedTuple):
    """One check: its body returns figures, or raises."""

    name: str
    body: Callable[[Machine, Path], Figures]
    remedy: str


NETWORK = "look at `nvidia-smi topo -m`, set NCCL_DEBUG=INFO; over gloo, set GLOO_SOCKET_IFNAME"
CHECKS = (
    Check("process groups", on_all("groups"), NETWORK),
    Check("resize in place", run_resized, "until it is mended, write `#POLLUX resize=requeue`"),
    Check("rank killed", on_all("restart", "--max-restarts", "1"), "jobs go on by a requeue"),
    Check("checkpoints", checkpoints, f"look at the free space in {os.environ.get('TMPDIR', '/tmp')}"),
    Check("FSDP2", fsdp2, "train under DistributedDataParallel"),
    Check("AMP overflow", on_all("amp"), "train in bfloat16, which needs no GradScaler"),
)


def carry_out(check: Check, machine: Machine, folder: Path) -> dict[str, Any]:
    """Run a check in a folder of its own; return its line of the table. `outcome`: passed, failed or left out."""
    folder.mkdir()
    start = time.monotonic()
    line: dict[str, Any] = {"check": check.name, "outcome": "passed", "figures": {}}
    try:
        line["figures"] = check.body(machine, folder)
    except CheckLeftOut as reason:
        line |= {"outcome": "left out", "figures": {"reason": str(reason)}}
    except (PolluxAgentError, OSError) as error:
        line |= {"outcome": "failed", "trouble": str(error), "remedy": check.remedy}
    return line | {"seconds": round(time.monotonic() - start, 1)}


def main(argv: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    """Run the command; tests give other checks. Return its exit status."""
    parser = argparse.ArgumentParser(
        prog="pollux selftest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [check.name for check in CHECKS]
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("--only", nargs="+", choices=names, metavar="CHECK", help="these checks alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args(argv)
    if options.json is not None:
        try:
            require_named(options.json)
        except OSError as error:
            parser.error(f"--json: {error}")
    import torch  # noqa: PLC0415 - `--help` needs none of it

    machine = this_machine(cpu=options.cpu)
    backend = "nccl" if machine.shared_gpus else "gloo"
    print(f"{machine.name}; torch {torch.__version__}; {machine.ranks} ranks over {backend}\n{machine.note}")
    lines: list[dict[str, Any]] = []
    with temporary_folder("pollux-selftest-") as folder:
        for check in checks:
            if options.only is None or check.name in options.only:
                line = carry_out(check, machine, folder / str(len(lines)))
                lines.append(line)
                figures = "; ".join(f"{name} {value}" for name, value in line["figures"].items())
                print(
                    f"{check.name:<16} {line['outcome']:<8} {line['seconds']:5.1f} s  {figures}", flush=True
                )
    failed = [line for line in lines if line["outcome"] == "failed"]
    for line in failed:
        print(f"\n{line['check']} failed: {line['trouble']}\n  remedy: {line['remedy']}")
    if options.json is not None:
        versions = {"pollux": __version__, "torch": torch.__version__, "cuda": torch.version.cuda}
        document = machine._asdict() | {"backend": backend} | versions | {"checks": lines}
        write_named(options.json, json.dumps(document, indent=2) + "\n")
    passed = sum(line["outcome"] == "passed" for line in lines)
    print(f"\n{passed} of {len(lines)} checks passed")
    return int(bool(failed))
