"""Run one node's part of `pollux run`.

Meet the other launchers, fork a worker per GPU, restart them where asked.
"""

from __future__ import annotations

import gc
import hmac
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pollux.errors import LaunchError, PolluxAgentError
from pollux.launcher.channel import signal_arrivals
from pollux.launcher.companion_file import CompanionFile, Parent
from pollux.launcher.launcher_channel import LauncherChannels, candidate_ports, gather, join, listen
from pollux.launcher.outcome import Outcome, Resized, describe
from pollux.launcher.rank_channel import VARIABLE, open_line
from pollux.launcher.state import Graces
from pollux.launcher.supervisor import WATCHED, LaunchContext, Supervisor
from pollux.launcher.workers import Notes, adopt_orphans, start_worker
from pollux.ranks.node_memory import NodeMemory, hand_on
from pollux.slurm_job.access import read_access
from pollux.slurm_job.allocation import StepAllocation, node_address
from pollux.slurm_job.network import interface_of

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",
    "pollux.loop.session",
)
"""Modules that every worker needs, imported once before the fork. torch._dynamo is one of them: making a torch
optimizer or wrapping a model in DistributedDataParallel imports it, and this costs about as much CPU time as torch
itself."""

KEY_VARIABLE = "POLLUX_LAUNCH_KEY"
"""The secret by which the launchers of a step know each other, from `pollux run` in the batch script."""

MAX_RETRIES = 3
"""Starts beside --max-restarts after a rank was lost, or has asked for one (out of memory: once per type of GPU). The
count begins at 0 with each move that rank 0 announces, and where the ranks have made steps since the start before."""

WORKERS_OWN = WATCHED | {signal.SIGUSR1}
"""Signals that the launcher blocks, and its workers receive."""

OWN_VARIABLES = ("POLLUX_RESIZED", "POLLUX_LEFT", "POLLUX_LOST", "POLLUX_COMPANION", VARIABLE)
"""Variables that only this launcher sets for its workers. An outer launcher may have set them for this one."""


@dataclass(frozen=True, slots=True)
class Task:
    """What the workers run, and how often."""

    script: str
    """A file, or with `module` a module's name."""
    args: Sequence[str]
    command: Sequence[str]
    """Arguments of `pollux run`, by which a companion runs the same."""
    module: bool = False
    max_restarts: int = 0
    launched_at: float = 0.0
    companion: Path | None = None
    """The file that invites this companion; None in an ordinary job."""
    companion_file: CompanionFile | None = None
    """What that file says."""
    graces: Graces = field(default_factory=Graces)
    preload: Sequence[str] = PRELOAD
    """Modules to import before workers are forked."""

    def run(self) -> int:
        """Run the script in a worker, as `python SCRIPT ARGS` would."""
        sys.argv = [self.script, *self.args]
        if self.module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(self.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(self.script).resolve().parent))
            runpy.run_path(self.script, run_name="__main__")
        return 0


def run_node(allocation: StepAllocation, task: Task) -> int:
    """Run this node's workers to their end.

    Returns the exit status. Raises RankLost and LaunchError.
    """
    # Before torch is imported: otherwise each of several workers per node would start a thread per core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in OWN_VARIABLES:
        os.environ.pop(name, None)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Write whole lines at once: ranks share the output, and a rank that is killed must not lose any line.
            stream.reconfigure(line_buffering=True, write_through=False)
    parent = Parent(task.companion_file) if task.companion_file is not None else None
    rendezvous = LauncherRendezvous(allocation, launch_key(allocation, task.companion_file))
    _import_once(task.preload)
    channels = rendezvous.outcome()
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    adopt_orphans()
    channels.signal_arrivals()
    if parent is not None:
        parent.signal_end()
    return _start_until_done(allocation, task, channels, parent)


def _start_until_done(
    allocation: StepAllocation, task: Task, channels: LauncherChannels, parent: Parent | None
) -> int:
    launched, restarts, retries, failures = task.launched_at, 0, 0, 0
    resized, lost, reached = Resized(), False, 0
    memory = NodeMemory(allocation.workers)
    hand_on(memory)
    while True:
        env = _shared_environment(allocation, channels) | resized.environment
        env |= {"POLLUX_LAUNCHED_AT": repr(launched), "POLLUX_IMPORTED_AT": repr(time.time())}
        env |= {
            "POLLUX_RESTARTS": str(failures),
            "POLLUX_COMMAND": json.dumps({"cwd": os.getcwd(), "argv": list(task.command)}),
        }
        if lost:
            env["POLLUX_LOST"] = "1"
        if task.companion is not None:
            env["POLLUX_COMPANION"] = str(task.companion)
        context = LaunchContext(
            host(),
            may_restart=parent is None and restarts < task.max_restarts,
            may_retry=parent is None and retries < MAX_RETRIES,
            resized=resized,
            parent=parent,
            graces=task.graces,
        )
        outcome, moved = _start_once(allocation, task, channels, env, context, memory)
        if outcome.failure is not None and channels.is_hub:
            say(describe(outcome.failure))
        if outcome.again is None:
            return outcome.status
        progress = max(memory.copied, memory.saved)
        retries = 0 if moved or progress > reached else retries
        reached, lost = progress, lost or outcome.again.lost
        launched, resized = time.time(), outcome.again.resized
        if outcome.failure is None:
            what = f"for move {resized.move_id}, on {len(outcome.again.nodes)} node(s)"
        elif outcome.again.asked:
            retries, failures = retries + 1, failures + 1
            what = f"from their newest state, on {len(outcome.again.nodes)} node(s)"
        else:
            restarts, failures = restarts + 1, failures + 1
            what = f"from the newest checkpoint: {restarts} of {task.max_restarts}"
        if channels.is_hub:
            say(f"starting all ranks again, {what}")
        channels.keep(outcome.again.nodes, outcome.again.port)


def _start_once(
    allocation: StepAllocation,
    task: Task,
    channels: LauncherChannels,
    env: dict[str, str],
    context: LaunchContext,
    memory: NodeMemory,
) -> tuple[Outcome, bool]:
    """Start this node's workers, and supervise them to their end.

    Returns how they ended, and whether rank 0 announced a move.
    """
    # A companion's ranks never lead the job's: they need no line.
    lines = [open_line() for _ in range(allocation.workers)] if context.parent is None else []

    def close(keep: int | None = None) -> None:
        channels.close()
        if context.parent is not None:
            context.parent.close()
        for local_rank, (ours, theirs) in enumerate(lines):
            ours.close()
            if local_rank != keep:
                theirs.close()

    def body() -> int:
        own = memory.local_rank = int(os.environ["LOCAL_RANK"])
        close(keep=own)
        if lines:
            os.environ[VARIABLE] = f"{lines[own][1].fileno()}:{os.getpid()}"
        return task.run()

    notes = Notes(allocation.workers)
    workers = []
    for local_rank in range(allocation.workers):
        rank = channels.first_rank + local_rank
        own = env | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        if allocation.gpu_ids:
            own["CUDA_VISIBLE_DEVICES"] = allocation.gpu_ids[local_rank % len(allocation.gpu_ids)]
        workers.append(start_worker(rank, local_rank, own, body, notes, unblock=WORKERS_OWN))
    for ours, theirs in lines:
        theirs.close()
        signal_arrivals(ours.link)
    supervisor = Supervisor(workers, notes, channels, context, [ours for ours, _ in lines], memory)
    outcome = supervisor.wait()
    for ours, _ in lines:
        ours.close()
    odd = supervisor.oddly_ended
    if odd is not None and outcome.ended_by is None:
        say(f"ranks of this node were to end for a move; {describe(odd)}, and nothing depends on it")
    return outcome, supervisor.moved


class LauncherRendezvous:
    """Meet the other nodes' launchers, in a thread while torch is imported.

    The thread ends before any fork.
    """

    def __init__(self, allocation: StepAllocation, key: bytes) -> None:
        self._channels: LauncherChannels | None = None
        self._error: PolluxAgentError | None = None
        self._thread: threading.Thread | None = None
        if allocation.num_nodes > 1:
            self._thread = threading.Thread(target=self._meet, args=(allocation, key), daemon=True)
            self._thread.start()
        else:
            self._channels = LauncherChannels.alone(allocation.workers, host())

    def outcome(self) -> LauncherChannels:
        """The channels to the others. Raises RankLost and LaunchError."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._channels is not None
        return self._channels

    def _meet(self, allocation: StepAllocation, key: bytes) -> None:
        # This thread may outlive its end, as Python sees it, by a moment, and must not be the one that takes a signal
        # which the main thread has blocked by then: SIGIO of the channels would end the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        ports, workers, num_nodes = (
            candidate_ports(key),
            allocation.workers,
            allocation.num_nodes,
        )
        try:
            if allocation.node_rank == 0:
                self._channels = gather(listen(ports), key, workers, num_nodes, name=host())
            else:
                address = node_address(allocation.first_node)
                self._channels = join(address, ports, key, allocation.node_rank, workers, name=host())
        except PolluxAgentError as error:
            self._error = error
        except Exception as error:
            # Any error ends this node: without the other launchers it would train alone, as if it were the whole job.
            self._error = LaunchError(f"the launchers could not meet: {type(error).__name__}: {error}")


def launch_key(allocation: StepAllocation, companion_file: CompanionFile | None) -> bytes:
    """The key by which the launchers of this step know each other.

    Raises LaunchError where there is none.

    Only the job's user can know it. It derives from a companion's file, from a variable that `pollux run` in the batch
    script has put into srun's environment, or from the attempt's token. It differs between attempts and steps.
    """
    secret = os.environ.pop(KEY_VARIABLE, "")
    if companion_file is not None:
        secret = companion_file.secret
    elif not secret and allocation.num_nodes > 1:
        access = read_access(os.environ)
        secret = "" if access is None or access.grant is None else access.grant.token
    if not secret and allocation.num_nodes > 1:
        raise LaunchError(
            "the launchers of several nodes need a secret to know each other by, and there is none: "
            f"call `pollux run` in the batch script without srun, or export {KEY_VARIABLE}=$(openssl rand -hex 32) "
            "before srun"
        )
    return hmac.digest(secret.encode(), f"pollux launchers {allocation.identity}".encode(), "sha256")


def _shared_environment(allocation: StepAllocation, channels: LauncherChannels) -> dict[str, str]:
    """What this node's workers find in their environment, by torchrun's names."""
    env = {
        "WORLD_SIZE": str(sum(channels.workers)),
        "LOCAL_WORLD_SIZE": str(allocation.workers),
        "GROUP_RANK": str(channels.node_rank),
        "GROUP_WORLD_SIZE": str(len(channels.workers)),
        "MASTER_ADDR": channels.address,
        "MASTER_PORT": str(channels.port),
    }
    # gloo would look up the host's name, which may have an address that other nodes cannot reach.
    interface = interface_of(channels.here)
    if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        env["GLOO_SOCKET_IFNAME"] = interface
    return env


def _import_once(names: Sequence[str]) -> None:
    """Import what workers need, out of the garbage collector's sight."""
    gc.disable()
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # torch._dynamo is not part of every build; a script that needs it says so itself.
            if error.name == "torch":
                raise LaunchError(
                    "torch is not installed here; install it, or this package's extra `agent`"
                ) from error
    # Pages of these objects stay shared with the workers: a collection there does not touch them.
    gc.freeze()
    gc.enable()


def host() -> str:
    """Return Slurm's name of this node; outside of Slurm, the machine's name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def say(message: str) -> None:
    """A line in the job's output."""
    print(f"pollux run [{host()}]: {message}", file=sys.stderr, flush=True)
