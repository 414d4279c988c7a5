"""ResumeProgram and SuspendProgram of the private cluster, and the bill of its provider.

`programs` writes both programs. A node boots after `boot_s` seconds: its slurmd starts. One boot in `fails_every`
fails: no slurmd starts, Slurm's ResumeTimeout passes, and an administrator's script returns the node to service.
Each event is a line of the bill: the time, `resume`, `up`, `failed` or `suspend`, and the node.

    python power_saving.py resume|suspend SETTINGS.json NODES
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

RESET_S = 5.0
"""Between two looks at whether Slurm has given a node up that did not boot."""


@dataclass(frozen=True)
class PowerSaving:
    """How the nodes of a private cluster boot.

    Args:
        folder: takes the programs, the bill and process ids.
        fails_every: one boot in so many fails; 0: none.
    """

    folder: Path
    boot_s: float = 10.0
    fails_every: int = 10
    always_on: str = "n1"
    """Nodes that Slurm leaves on."""
    idle_s: int = 15
    """SuspendTime."""
    resume_timeout_s: int = 40

    @property
    def lines(self) -> tuple[str, ...]:
        """What slurm.conf needs."""
        return (
            f"ResumeProgram={self.folder}/resume",
            f"SuspendProgram={self.folder}/suspend",
            f"SuspendTime={self.idle_s}",
            f"ResumeTimeout={self.resume_timeout_s}",
            "SuspendTimeout=5",
            "ResumeRate=0",
            "SuspendRate=0",
            "PrivateData=cloud",
            f"SuspendExcNodes={self.always_on}",
            # Addresses are known beforehand. Without this line, Slurm 22.05 holds a job that it starts elsewhere after
            # a boot that failed.
            "SlurmctldParameters=cloud_dns",
        )

    def programs(self, slurm_conf: Path, slurmd: str) -> None:
        """Write the programs, for the cluster of `slurm_conf`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = self.folder / "settings.json"
        known = {"slurm_conf": str(slurm_conf), "slurmd": slurmd, "path": os.environ.get("PATH", os.defpath)}
        known |= {"boot_s": self.boot_s, "fails_every": self.fails_every, "timeout_s": self.resume_timeout_s}
        settings.write_text(json.dumps(known))
        for what in ("resume", "suspend"):
            path = self.folder / what
            # slurmctld waits for its programs: this one returns at once.
            path.write_text(
                f'#!/bin/sh\nsetsid {sys.executable} {Path(__file__).resolve()} {what} {settings} "$1" '
                f">>{self.folder}/{what}.log 2>&1 </dev/null &\n"
            )
            path.chmod(0o755)

    def bill(self) -> list[tuple[float, str, str]]:
        """Return the events in order: POSIX time, event and node."""
        try:
            lines = (self.folder / "bill").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(float(at), what, node) for at, what, node in map(str.split, lines)]


def rented_seconds(bill: Iterable[tuple[float, str, str]], until: float) -> float:
    """Return the seconds for which nodes were rented: from the order to boot to the order to stop, or its failure."""
    since: dict[str, float] = {}
    total = 0.0
    for at, what, node in bill:
        if what == "resume":
            since.setdefault(node, at)
        elif what in ("suspend", "failed") and node in since:
            total += at - since.pop(node)
    return total + sum(max(until - at, 0.0) for at in since.values())


class _Provider:
    def __init__(self, settings: Path) -> None:
        self.folder = settings.parent
        self.known = json.loads(settings.read_text())
        self.env = {"SLURM_CONF": self.known["slurm_conf"], "PATH": self.known["path"]}

    def note(self, what: str, node: str) -> None:
        with (self.folder / "bill").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(f"{time.time():.3f} {what} {node}\n")

    def number(self) -> int:
        """Return the number of this boot, from 1."""
        with (self.folder / "boots").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(".")
            return file.tell()

    def hosts(self, names: str) -> list[str]:
        return self.scontrol("show", "hostnames", names).split()

    def scontrol(self, *words: str) -> str:
        done = subprocess.run(["scontrol", *words], env=self.env, capture_output=True, text=True, check=False)
        return done.stdout

    def resume(self, node: str) -> None:
        number, every = self.number(), self.known["fails_every"]
        # The first boot that fails is an early one, so that short runs see it.
        fails = bool(every) and number % every == min(3, every - 1)
        self.note("resume", node)
        time.sleep(self.known["boot_s"])
        if fails:
            self.note("failed", node)
            # Slurm looks at its timeout now and then, and refuses to resume a node that it still waits for.
            deadline = time.monotonic() + 2 * self.known["timeout_s"]
            while "State=DOWN" not in self.scontrol("show", "node", node) and time.monotonic() < deadline:
                time.sleep(RESET_S)
            self.scontrol("update", f"NodeName={node}", "State=RESUME")
            return
        # -b: Slurm takes no registration of a node that has been up for longer than since the order to boot.
        argv = [self.known["slurmd"], "-b", "-D", "-N", node, "-f", self.known["slurm_conf"]]
        with (self.folder / f"slurmd-{node}.out").open("ab") as sink:
            process = subprocess.Popen(
                argv, env=self.env, stdout=sink, stderr=sink, start_new_session=True, cwd="/"
            )
        (self.folder / f"{node}.pid").write_text(str(process.pid))
        self.note("up", node)

    def suspend(self, node: str) -> None:
        self.note("suspend", node)
        record = self.folder / f"{node}.pid"
        if record.exists():
            # As when the power goes; slurmctld's children have TERM blocked.
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(record.read_text()), signal.SIGKILL)
            # Where nobody reaps the process, the next slurmd would wait for its end.
            (Path(self.known["slurm_conf"]).parents[1] / "state" / f"{node}.pid").unlink(missing_ok=True)
            record.unlink()


def main() -> None:
    what, settings, names = sys.argv[1:]
    provider = _Provider(Path(settings))
    for node in provider.hosts(names):
        if os.fork() == 0:
            (provider.resume if what == "resume" else provider.suspend)(node)
            os._exit(0)


if __name__ == "__main__":
    main()
