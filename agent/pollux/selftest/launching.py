"""Run the ranks of a check by `pollux run`, on this machine alone.

Each launcher is a fork of this process, which has imported torch. Otherwise the checks would import it sixteen times,
which costs more than the checks themselves.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from pollux.errors import PolluxAgentError
from pollux.selftest.machine import Machine

RANKS = "pollux.selftest.rank_checks"
STEPS = 24
"""Of most checks' trainings."""
TOLERANCE = 1e-3
"""Largest difference of the weights from the right ones, relative to their norm: sums in another order differ by 1e-6,
a lost or repeated step by 1e-2."""
PATIENCE_S = 180.0
"""For one launch, from its start to its end."""

COMPANION = """#!/bin/sh
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


def environment(machine: Machine, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment of ranks on these GPUs, without that of a surrounding job."""
    dropped = ("SLURM", "SBATCH", "POLLUX", "TORCHELASTIC")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        plain.pop(name, None)
    return plain | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} | dict(machine.environment)


def run(
    machine: Machine, check: str, folder: Path, ranks: int, *arguments: str, options: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Run a check of `rank_checks` on so many ranks; return what they found, rank 0 first.

    A single rank uses the GPU also where several cannot share it. Raises CheckFailed.
    """
    gpus = machine.gpus if ranks == 1 else machine.shared_gpus
    command = ["--nproc", str(ranks), *options, "-m", RANKS, check, str(folder), *arguments]
    with launched([(command, environment(machine, gpus))], folder) as launchers:
        return finish(launchers, folder)


def run_resized(machine: Machine, folder: Path) -> list[dict[str, Any]]:
    """Run the check `resize`: two launchers as of two nodes, and a companion job in the place of the second.

    Returns and raises as `run`.
    """
    half = machine.ranks // 2
    parts = machine.shared_gpus[:half], machine.shared_gpus[-half:]
    programs = folder / "bin"
    programs.mkdir()
    texts = {
        "scontrol": "#!/bin/sh\necho NodeAddr=127.0.0.1\n",
        "sbatch": COMPANION.format(folder=folder, gpus=",".join(parts[1])),
        "scancel": "#!/bin/sh\n",
    }
    for name, text in texts.items():
        (programs / name).write_text(text)
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
    command = ["--nproc", str(half), "-m", RANKS, "resize", str(folder)]
    commands = [
        (
            command,
            environment(machine, gpus) | step | {"SLURM_NODEID": str(node), "SLURMD_NODENAME": f"n{node}"},
        )
        for node, gpus in enumerate(parts)
    ]
    try:
        with launched(commands, folder) as launchers:
            return finish(launchers, folder)
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((folder / "companion.pid").read_text()), signal.SIGTERM)


def import_once() -> None:
    """Import what launchers and ranks need, before the first fork."""
    from pollux.launcher.node import PRELOAD  # noqa: PLC0415 - `--help` needs none of it

    parts = (f"pollux.selftest.{part}" for part in ("images", "known_noise", "known_training"))
    for name in (*PRELOAD, "pollux.launcher.launch", "pollux.launcher.supervisor", *parts):
        importlib.import_module(name)


def _launch(arguments: Sequence[str], environ: Mapping[str, str], output: Path) -> None:
    """Be `pollux run` in this fork."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.clear()
    os.environ.update(environ)
    from pollux.launcher import launch  # noqa: PLC0415 - `--help` needs none of it

    launch.main(["run", *arguments])


@contextlib.contextmanager
def launched(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], folder: Path
) -> Iterator[list[ForkProcess]]:
    """Start a launcher per (arguments, environment); end those that are left."""
    import_once()
    fork = multiprocessing.get_context("fork").Process
    launchers = [
        fork(target=_launch, args=(arguments, environ, folder / "output")) for arguments, environ in commands
    ]
    try:
        for launcher in launchers:
            launcher.start()
        yield launchers
    finally:
        started = [launcher for launcher in launchers if launcher.pid is not None]
        for launcher in started:
            launcher.terminate()
        for launcher in started:
            launcher.join(20)
            launcher.kill()


def finish(launchers: Sequence[ForkProcess], folder: Path) -> list[dict[str, Any]]:
    """Wait for the launchers' end; return what their ranks found. Raises CheckFailed."""
    deadline = time.monotonic() + PATIENCE_S
    for launcher in launchers:
        launcher.join(max(deadline - time.monotonic(), 0.1))
    statuses = [launcher.exitcode for launcher in launchers]
    if None in statuses:
        raise CheckFailed(f"the ranks had not ended after {PATIENCE_S:.0f} s: {last_lines(folder)}")
    if failed := [status for status in statuses if status]:
        raise CheckFailed(f"`pollux run` ended with status {failed[0]}: {last_lines(folder)}")
    found = [json.loads(path.read_text()) for path in folder.glob("found-*.json")]
    if not found:
        raise CheckFailed(f"no rank wrote what it found: {last_lines(folder)}")
    return sorted(found, key=lambda facts: (int(facts["rank"]), -int(facts["steps"])))


def last_lines(folder: Path) -> str:
    """Return the end of the ranks' output, as one line."""
    lines = (folder / "output").read_text(errors="replace").split("\n")
    kept = [line.strip() for line in lines if line.strip()]
    return " | ".join(kept[-4:])[-600:] or "they printed nothing"
