"""Start, await and stop daemons that are child processes.

Each daemon has a session of its own and is stopped by its process id.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from .errors import DevClusterError


def program(name: str) -> str:
    """Return the path of a program.

    Raises:
        DevClusterError: the machine has no such program.
    """
    # Debian keeps the daemons in sbin, which is not in everybody's PATH.
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if found is None:
        raise DevClusterError(
            f"no {name} on this machine: contrib/devcluster/install.sh installs what is needed"
        )
    return found


MARK = "POLLUX_DEVCLUSTER"
"""Set for daemons alone: the cluster's slurm.conf. No client has it."""
_reserved: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """Return `count` distinct TCP ports that are free now.

    They are below the kernel's ephemeral range (32768 and up) and below the ports of `pollux run` (20000 and up), so
    that neither an outgoing connection nor a training takes one before its daemon binds it. No other process that asks
    here gets one of them until this process ends.
    """
    chosen: list[int] = []
    for port in random.SystemRandom().sample(range(10240, 20_000), 2000):
        # An abstract socket: it needs no file, and ends with the process.
        reservation = socket.socket(socket.AF_UNIX)
        try:
            reservation.bind(f"\0pollux-devcluster-port-{port}")
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))  # as slurmd does: a listener on any address stands in its way
        except OSError:
            reservation.close()
            continue
        _reserved.append(reservation)
        chosen.append(port)
        if len(chosen) == count:
            return chosen
    raise DevClusterError(f"no {count} free TCP ports")


def wait_until(ready: Callable[[], object], timeout_s: float, what: str, every_s: float = 0.05) -> None:
    """Poll `ready` until it is true.

    Raises:
        DevClusterError: it stayed false for `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise DevClusterError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(every_s)


class Daemon:
    """One foreground daemon process with its log file.

    Its own session keeps a Ctrl-C in the terminal from reaching it before we stop it in order. `env` may be changed
    before a start.
    """

    grace_s = 5.0
    """How long it may take to end before it is killed."""

    def __init__(
        self, name: str, argv: Sequence[str], log: Path, *, env: Mapping[str, str], user: str | None = None
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        self.env = dict(env)
        self.identity = {"user": user, "group": user, "extra_groups": []} if user else {}
        """Arguments with which subprocess runs a command by its account, with none of root's groups."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                self.argv,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
                cwd="/",
                **self.identity,  # type: ignore[call-overload]
            )

    def must_run(self) -> None:
        """Check that the daemon still runs.

        Raises:
            DevClusterError: the daemon has ended; the message carries the end of its log.
        """
        if not self.running:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])
            raise DevClusterError(f"{self.name} ended at once; {self.log} ends with:\n{tail}")

    def send(self, number: int) -> None:
        """Send a signal if the daemon runs (fault tests: STOP, CONT and KILL)."""
        if self.running and self._process is not None:
            self._process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM, grace_s: float | None = None) -> int:
        """End the daemon: send `number`, then KILL after `grace_s` seconds.

        Returns:
            its exit status; 0 where it does not run.
        """
        if self._process is None:
            return 0
        self.send(signal.SIGCONT)  # a stopped process takes no TERM
        self.send(number)
        try:
            self._process.wait(self.grace_s if grace_s is None else grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        status = self._process.wait()
        self._process = None
        return status


def pids_with_environment(*entries: str) -> list[int]:
    """List the processes whose initial environment holds all `entries`.

    An entry is "NAME=value", or "NAME=" for any value. This process and its ancestors are left out.
    """
    wanted = [b"\0" + entry.encode() + (b"" if entry.endswith("=") else b"\0") for entry in entries]
    spared = set(_ancestry(os.getpid()))
    found = []
    for pid in _all_pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it ended, or it is a kernel thread
            continue
        if all(each in b"\0" + environment for each in wanted) and pid not in spared:
            found.append(pid)
    return found


def pids_of_cluster(slurm_conf: Path) -> set[int]:
    """Return the daemons of a private cluster, and the processes of its jobs.

    `Daemon`s of a cluster, and so slurmd's steps, have MARK in their environment. Whoever else has its SLURM_CONF, such
    as a second terminal, is no part of it.
    """
    jobs = pids_with_environment(f"SLURM_CONF={slurm_conf}", "SLURM_JOB_ID=")
    return {*pids_with_environment(f"{MARK}={slurm_conf}"), *jobs}


def descendants(roots: Iterable[int]) -> set[int]:
    """Return all living descendants of the processes `roots`."""
    children: dict[int, list[int]] = {}
    for pid in _all_pids():
        children.setdefault(_parent(pid), []).append(pid)
    below: set[int] = set()
    queue = list(roots)
    while queue:
        for child in children.get(queue.pop(), []):
            if child not in below:
                below.add(child)
                queue.append(child)
    return below


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int:
    try:
        # The command may hold blanks and parentheses: the fields start after the last ")".
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _ancestry(pid: int) -> Iterable[int]:
    while pid > 0:
        yield pid
        pid = _parent(pid)
