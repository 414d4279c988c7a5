"""The kinds of faults, how often they happen and how long they last."""

from __future__ import annotations

import heapq
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from contrib.devcluster import DevCluster, Polluxd

SCRIPTS = (b"counted.py", b"digits_search.py")
"""Trainings whose ranks meet faults."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault: how often it happens and how long it lasts.

    `mean_s` is the mean time between two such faults [s]; 0 means never.
    """

    mean_s: float
    lasts_s: tuple[float, float]
    what: str


KINDS: dict[str, Kind] = {
    "polluxd-kill": Kind(60, (0.0, 6.0), "kill -9 of one polluxd, started again"),
    "polluxd-stop": Kind(120, (6.0, 15.0), "SIGSTOP of one polluxd, past its lease"),
    "agent-kill": Kind(150, (0.0, 0.0), "kill -9 of one rank"),
    "agent-stop": Kind(90, (2.0, 8.0), "SIGSTOP of one rank"),
    "companion-kill": Kind(120, (0.0, 0.0), "kill -9 of one launcher of a companion job"),
    "companion-slurmd-kill": Kind(
        180, (1.0, 6.0), "kill -9 of the slurmd of a companion's node, started again"
    ),
    "slurmd-kill": Kind(180, (1.0, 6.0), "kill -9 of one slurmd, started again"),
    "slurmd-stop": Kind(150, (2.0, 8.0), "SIGSTOP of one slurmd"),
    "slurmctld-restart": Kind(240, (1.0, 4.0), "slurmctld stopped in order, started again"),
    "slurmctld-kill": Kind(600, (1.0, 4.0), "kill -9 of slurmctld: what changed in the last seconds is lost"),
    "slurmctld-stop": Kind(120, (2.0, 6.0), "SIGSTOP of slurmctld: every call times out"),
    "gateway-kill": Kind(90, (1.0, 15.0), "kill -9 of the gateway, started again"),
    "postgres-crash": Kind(180, (1.0, 6.0), "Postgres ended without a checkpoint, started again"),
}


class Chaos:
    """Begin and end faults on a running cluster, at times drawn from a seed.

    Args:
        rates: mean seconds between two faults of a kind, over those of `KINDS`.
        say: called with a line for each fault.
    """

    def __init__(
        self,
        cluster: DevCluster,
        daemons: list[Polluxd],
        *,
        seed: int,
        rates: Mapping[str, float],
        say: Callable[[str], None],
    ) -> None:
        self._cluster, self._daemons, self._say = cluster, daemons, say
        self._chance = random.Random(seed)
        self._rates = {name: rates.get(name, kind.mean_s) for name, kind in KINDS.items()}
        self._due: list[tuple[float, int, str]] = []
        self._ends: list[tuple[float, int, str, Callable[[], None]]] = []
        self._number = 0
        self._frozen: set[Polluxd] = set()
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        for name in self._rates:
            self._again(name)

    def turn(self) -> None:
        """Begin and end the faults that are due."""
        now = time.monotonic()
        while self._ends and self._ends[0][0] <= now:
            _, _, name, end = heapq.heappop(self._ends)
            end()
            self._again(name)
        while self._due and self._due[0][0] <= now:
            _, _, name = heapq.heappop(self._due)
            self._begin(name)

    def stop(self) -> None:
        """End all faults, so that every process runs again."""
        self._due.clear()
        while self._ends:
            heapq.heappop(self._ends)[3]()

    def _again(self, name: str) -> None:
        """Draw when the next fault of a kind is due, once the last one is over."""
        mean = self._rates[name]
        if mean > 0:
            self._number += 1
            at = time.monotonic() + self._chance.expovariate(1.0 / mean)
            heapq.heappush(self._due, (at, self._number, name))

    def _begin(self, name: str) -> None:
        lasts = self._chance.uniform(*KINDS[name].lasts_s)
        begun = getattr(self, "_" + name.replace("-", "_"))()
        if begun is None:  # no such process runs now, or another fault holds it
            self._again(name)
            return
        whom, end = begun
        self.counts[name] += 1
        self._say(f"{name} {whom} for {lasts:.1f} s")
        self._number += 1
        heapq.heappush(self._ends, (time.monotonic() + lasts, self._number, name, end))

    # Each: the job or node it met, and the call that ends it; None if it is not possible now.

    def _polluxd_kill(self) -> tuple[str, Callable[[], None]] | None:
        daemon = self._chance.choice(self._daemons)
        if not daemon.running or daemon in self._frozen:
            return None
        daemon.stop(signal.SIGKILL)
        return daemon.name, daemon.start

    def _polluxd_stop(self) -> tuple[str, Callable[[], None]] | None:
        daemon = self._chance.choice(self._daemons)
        if not daemon.running or daemon in self._frozen:
            return None
        daemon.send(signal.SIGSTOP)
        self._frozen.add(daemon)

        def go_on() -> None:
            self._frozen.discard(daemon)
            daemon.send(signal.SIGCONT)

        return daemon.name, go_on

    def _agent_kill(self) -> tuple[str, Callable[[], None]] | None:
        rank = self._rank()
        if rank is None:
            return None
        _signal(rank, signal.SIGKILL)
        return f"pid {rank}", lambda: None

    def _agent_stop(self) -> tuple[str, Callable[[], None]] | None:
        rank = self._rank()
        if rank is None:
            return None
        _signal(rank, signal.SIGSTOP)
        return f"pid {rank}", lambda: _signal(rank, signal.SIGCONT)

    def _rank(self) -> int | None:
        ranks = [process.pid for process in trainings_of(self._cluster) if not process.launcher]
        return self._chance.choice(ranks) if ranks else None

    def _companion_kill(self) -> tuple[str, Callable[[], None]] | None:
        launcher = self._companion()
        if launcher is None:
            return None
        _signal(launcher.pid, signal.SIGKILL)
        return f"pid {launcher.pid} on {launcher.node}", lambda: None

    def _companion_slurmd_kill(self) -> tuple[str, Callable[[], None]] | None:
        launcher = self._companion()
        return None if launcher is None or self._slurmd_busy() else self._kill_slurmd(launcher.node)

    def _companion(self) -> Process | None:
        launchers = [p for p in trainings_of(self._cluster) if p.launcher and p.companion]
        return self._chance.choice(launchers) if launchers else None

    def _slurmd_kill(self) -> tuple[str, Callable[[], None]] | None:
        name = self._free_node()
        return None if name is None else self._kill_slurmd(name)

    def _kill_slurmd(self, name: str) -> tuple[str, Callable[[], None]]:
        self._cluster.stop_slurmd(name, kill=True)
        return name, lambda: self._cluster.start_slurmd(name)

    def _slurmd_stop(self) -> tuple[str, Callable[[], None]] | None:
        name = self._free_node()
        if name is None:
            return None
        self._cluster.signal_slurmd(name, signal.SIGSTOP)
        return name, lambda: self._cluster.signal_slurmd(name, signal.SIGCONT)

    def _free_node(self) -> str | None:
        return None if self._slurmd_busy() else self._chance.choice(self._cluster.node_names)

    def _slurmd_busy(self) -> bool:
        return any("slurmd" in name for _, _, name, _ in self._ends)

    def _slurmctld_restart(self) -> tuple[str, Callable[[], None]] | None:
        return self._controller(kill=False)

    def _slurmctld_kill(self) -> tuple[str, Callable[[], None]] | None:
        return self._controller(kill=True)

    def _controller(self, *, kill: bool) -> tuple[str, Callable[[], None]] | None:
        if self._controller_busy():
            return None
        self._cluster.stop_slurmctld(kill=kill)
        return "", self._cluster.start_slurmctld

    def _slurmctld_stop(self) -> tuple[str, Callable[[], None]] | None:
        if self._controller_busy():
            return None
        self._cluster.signal_slurmctld(signal.SIGSTOP)
        return "", lambda: self._cluster.signal_slurmctld(signal.SIGCONT)

    def _controller_busy(self) -> bool:
        return any(name.startswith("slurmctld") for _, _, name, _ in self._ends)

    def _gateway_kill(self) -> tuple[str, Callable[[], None]] | None:
        self._cluster.gateways.stop(kill=True)
        return "", self._cluster.gateways.start

    def _postgres_crash(self) -> tuple[str, Callable[[], None]] | None:
        self._cluster.stop_postgres(immediate=True)
        return "", self._cluster.start_postgres


@dataclass(frozen=True)
class Process:
    """A process that trains for a job of the cluster.

    It is a rank, or the launcher that has forked ranks within a step.
    """

    pid: int
    node: str
    """Slurm's name of the node."""
    launcher: bool
    companion: bool
    """Whether its job is a companion, which lends its node to another job."""


def trainings_of(cluster: DevCluster) -> Iterator[Process]:
    """Yield the launchers and the ranks of this cluster's jobs.

    A launcher and its ranks have the same command line and the same environment, the step's. A process is a rank if its
    parent, a launcher, has the same command line.
    """
    conf = f"SLURM_CONF={cluster.slurm_conf}".encode()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                process = Path("/proc", entry)
                command = (process / "cmdline").read_bytes()
                companion = b"--companion" in command
                if not companion and not any(script in command for script in SCRIPTS):
                    continue
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                launcher = Path("/proc", parent, "cmdline").read_bytes() != command
                environment = (process / "environ").read_bytes().split(b"\0")
            except OSError:  # it ended
                continue
            told = dict(word.split(b"=", 1) for word in environment if b"=" in word)
            if conf in environment and b"SLURM_STEP_ID" in told:
                yield Process(int(entry), told.get(b"SLURMD_NODENAME", b"").decode(), launcher, companion)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # its job has ended
