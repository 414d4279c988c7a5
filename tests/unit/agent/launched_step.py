"""Real launchers on one machine, as if each had a node of its own.

Their scripts' ranks note how they fare.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pollux.launcher import launch
from pollux.launcher.machine import Graces
from pollux.launcher.node import PRELOAD

PATIENCE_S = 200.0

# Forks launchers from a process of its own that has imported what the ranks need: each import takes seconds.
PRELOADED = ["pollux.launcher.launch", *PRELOAD]
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(PRELOADED)

PRELUDE = '''
import json, os, signal, sys, time
from pathlib import Path

here = Path(sys.argv[1])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
node = os.environ["SLURMD_NODENAME"]

def note(kind, **more):
    """One line of the log, written at once."""
    more |= {"kind": kind, "rank": rank, "world": world, "node": node}
    line = os.open(here / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(line, json.dumps(more).encode() + b"\\\\n")
    os.close(line)

def mark(name):
    (here / name).touch()

def wait_for(name):
    deadline = time.monotonic() + 100
    while not (here / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.01)

def line():
    from pollux.launcher.rank_channel import LauncherLine
    return LauncherLine.from_environment()

def kill(pid):
    os.kill(pid, signal.SIGKILL)
    time.sleep(100)

def stuck():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(100)

start = 0
while True:  # how often this rank was started before
    try:
        os.close(os.open(here / f"start-{start}-{node}-{os.environ['LOCAL_RANK']}", os.O_CREAT | os.O_EXCL))
        break
    except FileExistsError:
        start += 1
NAMES = ("GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT", "POLLUX_RESIZED", "POLLUX_LEFT", "POLLUX_RESTARTS")
note("started", start=start, line=line() is not None, **{name: os.environ.get(name) for name in NAMES})
mark(f"noted-{start}-{rank}")
for other in range(world):  # none is ended before it has said that it was there
    wait_for(f"noted-{start}-{other}")
'''.replace("\\\\n", "\\n")


def _launch(words: list[str], graces: Graces, environment: dict[str, str], out: Path) -> None:
    """Be the launcher of one node; in a process of its own."""
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    launch.main(words, graces=graces)


class Step:
    """Launchers of the nodes n0, n1, ..., each with `workers` ranks.

    The ranks run `body` after the prelude.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        body: str,
        *options: str,
        workers: int = 2,
        settings: str = "",
        **env: str,
    ) -> None:
        self.folder = folder
        script = folder / "train.py"
        script.write_text(PRELUDE + body)
        scontrol = folder / "scontrol"
        scontrol.write_text("#!/bin/sh\necho NodeAddr=127.0.0.1\n")
        scontrol.chmod(0o755)
        plain = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "POLLUX"))
        }
        agent = Path(__file__).parents[3] / "agent"
        plain |= {"PYTHONPATH": str(agent), "PATH": f"{folder}:{plain['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
        plain |= {
            "SLURM_JOB_ID": str(random.randrange(1, 1 << 30)),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_STEP_NUM_TASKS": str(nodes),
            "SLURM_STEP_NODELIST": "n0",
            "POLLUX_LAUNCH_KEY": "as the batch script's `pollux run` would have made it",
        }
        self.launchers: list[BaseProcess] = []
        graces = Graces(
            **{name: float(value) for name, _, value in (each.partition("=") for each in settings.split())}
        )
        for number in range(nodes):
            own = {"SLURM_NODEID": str(number), "SLURMD_NODENAME": f"n{number}"}
            words = ["run", *options]
            if "--companion" not in options:
                words = ["run", "--nproc", str(workers), *options, str(script), str(folder)]
            launcher = PROCESSES.Process(
                target=_launch, args=(words, graces, plain | own | env, folder / f"out-{number}")
            )
            launcher.start()
            self.launchers.append(launcher)

    def statuses(self) -> list[int]:
        """Wait for every launcher and return the exit statuses."""
        deadline = time.monotonic() + PATIENCE_S
        for each in self.launchers:
            each.join(max(deadline - time.monotonic(), 0.1))
        found = [each.exitcode for each in self.launchers if each.exitcode is not None]
        assert len(found) == len(self.launchers), f"launchers still run after {PATIENCE_S} s: {self.output()}"
        return found

    def until(self, done: Callable[[], bool]) -> None:
        """Wait until `done()` is true; fail if a launcher ends first."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, self.output()
            assert all(each.exitcode is None for each in self.launchers), self.output()
            time.sleep(0.02)

    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("out-*")))

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Return the ranks' notes of this kind, in order."""
        path = self.folder / "log"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["kind"] == kind]

    def placed(self, start: int, **only: str) -> list[tuple[int, str]]:
        """(rank, node) of a start's ranks, in order, that noted `only`."""
        asked = {name: value for name, value in only.items()}
        found = [note for note in self.log("started") if note["start"] == start]
        assert all(note[name] == value for note in found for name, value in asked.items()), found
        return sorted((note["rank"], note["node"]) for note in found)

    def end(self) -> None:
        for each in self.launchers:
            if each.exitcode is None:
                each.kill()
                each.join(20)


@contextlib.contextmanager
def step(folder: Path, nodes: int, body: str, *options: str, **more: Any) -> Iterator[Step]:
    """Start launchers, and kill the remaining processes at the end."""
    made = Step(folder, nodes, body, *options, **more)
    try:
        yield made
    finally:
        made.end()


STOPPED = -signal.SIGKILL
