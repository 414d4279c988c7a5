"""Measure the GPU-seconds that stay idle while a job could use them.

Every second `squeue` and `scontrol` say which GPUs are free and which jobs wait. polluxd is not asked.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from contrib.demo.measure import SlurmSilentError, slurm

_COMPANION = ".companion"
_GPUS = re.compile(r"gpu(?::[^,:=(]+)?[:=](\d+)")
_CLOSED = re.compile(r"DOWN|DRAIN|FAIL|INVAL|UNKNOWN|NOT_RESPONDING|\*")
"""Node states in which Slurm starts no job of any user."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a job of a case can use."""

    gpus: int
    """On each node."""
    nodes: int = 1
    on: frozenset[str] = frozenset()
    """The nodes that its options allow; empty: all."""
    at_once: int = 1
    """Tasks of an array that may run at one time."""
    barred: bool = False
    """A rule of the case forbids the job's start. The GPUs that it held before still count."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One record of squeue."""

    job_id: int
    """Of an array's task: the array's."""
    state: str
    gpus: int
    """Held now, or asked for while it waits."""


@dataclass(slots=True)
class Measured:
    """The measurement of one case."""

    wishes: dict[int, Wish] = field(default_factory=dict)
    gpu_s: float = 0.0
    longest_s: float = 0.0
    """The longest time without a break in which some GPU was idle."""
    idle_s: dict[int, float] = field(default_factory=dict)
    """By job: seconds in which it waited beside GPUs that it could use."""
    first_runs: dict[int, float] = field(default_factory=dict)
    """When each job was first seen to run, by a clock that does not step [s]."""
    _most: dict[int, int] = field(default_factory=dict)
    """The most GPUs that a job has held."""
    _idle_s: float = 0.0

    def note(self, seen: Iterable[Seen], free: Mapping[str, int], seconds: float) -> int:
        """Count a sample for the seconds since the one before.

        Returns the GPUs that idle.
        """
        seen = list(seen)
        for one in seen:
            if one.state not in ("PENDING", "CANCELLED"):
                self.first_runs.setdefault(one.job_id, time.monotonic())
        idle = self._idle(seen, Counter(free), seconds)
        self.gpu_s += idle * seconds
        self._idle_s = self._idle_s + seconds if idle else 0.0
        self.longest_s = max(self.longest_s, self._idle_s)
        return idle

    def _idle(self, seen: list[Seen], free: Counter[str], seconds: float) -> int:
        held: Counter[int] = Counter()
        for one in seen:
            if one.state == "RUNNING":
                held[one.job_id] += one.gpus
        waiting = Counter(one.job_id for one in seen if one.state == "PENDING")
        running = Counter(one.job_id for one in seen if one.state == "RUNNING")
        idle = 0
        for job_id, wish in self.wishes.items():
            for _ in range(min(waiting[job_id], max(wish.at_once - running[job_id], 0))):
                if not wish.barred and (taken := _taken(wish, free)):
                    idle += taken
                    self.idle_s[job_id] = self.idle_s.get(job_id, 0.0) + seconds
            if wish.at_once == 1:  # what an array holds falls with its last tasks
                lost = self._most.get(job_id, 0) - held[job_id]
                if lost > 0 and (running[job_id] or (waiting[job_id] and wish.barred)):
                    idle += _spread(lost, wish, free)
        for job_id, gpus in held.items():
            self._most[job_id] = max(self._most.get(job_id, 0), gpus)
        return idle


def _reach(wish: Wish, free: Mapping[str, int]) -> list[str]:
    return sorted((name for name in free if not wish.on or name in wish.on), key=lambda n: (-free[n], n))


def _taken(wish: Wish, free: Counter[str]) -> int:
    """GPUs that a start of the job would take; 0 if too few are free."""
    names = [name for name in _reach(wish, free) if free[name] >= wish.gpus][: wish.nodes]
    if len(names) < wish.nodes:
        return 0
    free.subtract(dict.fromkeys(names, wish.gpus))
    return wish.gpus * wish.nodes


def _spread(lost: int, wish: Wish, free: Counter[str]) -> int:
    """GPUs that a job held before, and that nobody else has now."""
    given = 0
    for name in _reach(wish, free):
        part = min(free[name], lost - given)
        free[name] -= part
        given += part
    return given


def read_jobs(text: str) -> list[Seen]:
    """Read `squeue -o "%F|%T|%D|%b|%j"`.

    A companion's GPUs count as its job's.
    """
    rows = [line.split("|", 4) for line in text.splitlines()]
    named = {name: int(ident) for ident, _, _, _, name in rows if not name.endswith(_COMPANION)}
    seen = []
    for ident, state, nodes, gres, name in rows:
        found = _GPUS.search(gres)
        one = Seen(int(ident), state, int(nodes) * int(found[1]) if found else 0)
        if not name.endswith(_COMPANION):
            seen.append(one)
        elif state == "RUNNING" and (parent := named.get(name.removesuffix(_COMPANION))) is not None:
            seen.append(replace(one, job_id=parent))
    return seen


def read_nodes(text: str) -> dict[str, int]:
    """Read free GPUs by node from `scontrol -o -d show node`."""
    free = {}
    for line in text.splitlines():
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        has, used = (sum(map(int, _GPUS.findall(words.get(key, "")))) for key in ("Gres", "GresUsed"))
        free[words["NodeName"]] = 0 if _CLOSED.search(words.get("State", "UNKNOWN")) else has - used
    return free


class Sampler:
    """Samples all the time; `measured` is the case's measurement."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.measured = Measured()
        self._env = env
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._lock = threading.Lock()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(60)

    def restart(self) -> None:
        """Begin the measurement of a case."""
        with self._lock:
            self.measured = Measured()

    def wish(self, job_id: int, wish: Wish) -> None:
        with self._lock:
            self.measured.wishes[job_id] = wish

    def admit(self, job_id: int) -> None:
        """The site allows a barred job's start from now on."""
        with self._lock:
            self.measured.wishes[job_id] = replace(self.measured.wishes[job_id], barred=False)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._end.wait(1.0):
            try:
                jobs = slurm(["squeue", "-h", "-a", "-r", "-t", "all", "-o", "%F|%T|%D|%b|%j"], self._env)
                nodes = slurm(["scontrol", "-o", "-d", "show", "node"], self._env)
            except SlurmSilentError:
                continue  # the next sample stands for the silence, too
            now = time.monotonic()
            with self._lock:
                self.measured.note(read_jobs(jobs), read_nodes(nodes), now - before)
            before = now
