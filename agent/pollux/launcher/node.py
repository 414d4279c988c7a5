"""Run one node's part of `pollux run`.

Meet the other launchers, fork a worker per GPU, restart them where asked.
"""

from __future__ import annotations

import fcntl
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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pollux.errors import LaunchError
from pollux.launcher.batch_step import end_run
from pollux.launcher.companion_file import CompanionFile, reach_parent
from pollux.launcher.log import say
from pollux.launcher.machine import Graces, Outcome, Resized, StartTerms
from pollux.launcher.meeting import JobNode, Meeting, free_port
from pollux.launcher.messages import Channel, Over, Start
from pollux.launcher.rank_channel import VARIABLE
from pollux.launcher.supervisor import Follower, Supervisor
from pollux.launcher.workers import WATCHED, NodeWorkers, adopt_orphans
from pollux.ranks.links import Link
from pollux.ranks.node_memory import NO_COPIES, NodeMemory, hand_on
from pollux.slurm_job.access import read_access
from pollux.slurm_job.allocation import StepAllocation, node_address, node_name
from pollux.slurm_job.environment import CHOSEN_INTERFACE
from pollux.slurm_job.network import interface_of
from pollux.slurm_job.trainings import RUN

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

OWN_VARIABLES = ("POLLUX_RESIZED", "POLLUX_LEFT", "POLLUX_LOST", NO_COPIES, "POLLUX_COMPANION", VARIABLE)
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
    companion: CompanionFile | None = None
    """The file that invites this companion; None in an ordinary job."""
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
    """Run this node's workers to their end; on node 0, those of the whole job.

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
    hub = allocation.node_rank == 0
    parent = reach_parent(task.companion) if hub and task.companion is not None else None
    meeting = Meeting(allocation, launch_key(allocation, task.companion))
    _import_once(task.preload)
    nodes = meeting.nodes()
    channels = [node.channel for node in nodes if node.channel is not None]
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    adopt_orphans()
    held = channels if parent is None else [*channels, parent]
    for channel in held:
        signal_arrivals(channel)
    forker = Forker(allocation, task, held, channels[0].link.here if channels else "127.0.0.1")
    if hub:
        status = _lead(forker, nodes, parent)
        end_run(status)
        return status
    return Follower(channels[0], forker.start, task.graces, say).run()


class Forker:
    """Starts this node's workers."""

    def __init__(self, allocation: StepAllocation, task: Task, held: Sequence[Channel], here: str) -> None:
        """`held`: this launcher's connections, which workers close. `here`: its address."""
        self.allocation, self.task = allocation, task
        self.memory = NodeMemory(allocation.workers)
        hand_on(self.memory)
        self.rank_0: Channel | None = None
        """To the newest start's first worker, on node 0."""
        self._held = held
        self._own = {
            "LOCAL_WORLD_SIZE": str(allocation.workers),
            "MASTER_ADDR": node_address(allocation.first_node) if allocation.node_rank else here,
            "POLLUX_COMMAND": json.dumps({"cwd": os.getcwd(), "argv": list(task.command)}),
        }
        # gloo would look up the host's name, which may have an address that other nodes cannot reach.
        interface = interface_of(here)
        if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            self._own |= {"GLOO_SOCKET_IFNAME": interface, CHOSEN_INTERFACE: "yes"}
        if task.companion is not None:
            self._own["POLLUX_COMPANION"] = str(task.companion.path)

    def start(self, order: Start) -> NodeWorkers:
        allocation = self.allocation
        env = order.env | self._own | {"GROUP_RANK": str(order.node), "POLLUX_IMPORTED_AT": repr(time.time())}
        # A companion's ranks never lead the job's.
        ours, theirs = (
            socket.socketpair() if order.node == 0 and self.task.companion is None else (None, None)
        )

        def body() -> int:
            own = self.memory.local_rank = int(os.environ["LOCAL_RANK"])
            for channel in self._held:
                channel.close()
            if ours is not None and theirs is not None:
                ours.close()
                if own:
                    theirs.close()
                else:
                    os.environ[VARIABLE] = f"{theirs.fileno()}:{os.getpid()}"
            lightning = sys.modules.get("lightning_utilities.core.rank_zero")
            if lightning is not None:  # preloaded, where it took this node's launcher for rank 0
                lightning.rank_zero_only.rank = int(os.environ["RANK"])
            return self.task.run()

        workers = NodeWorkers(allocation.workers, node_name(), self.task.graces.term)
        for local_rank in range(allocation.workers):
            own = env | {"RANK": str(order.first_rank + local_rank), "LOCAL_RANK": str(local_rank)}
            if allocation.gpu_ids:
                own["CUDA_VISIBLE_DEVICES"] = allocation.gpu_ids[local_rank % len(allocation.gpu_ids)]
            workers.start(local_rank, own, body)
        if self.rank_0 is not None:
            self.rank_0.close()
        if ours is not None and theirs is not None:
            theirs.close()
            self.rank_0 = Channel(Link(ours))
            signal_arrivals(self.rank_0)
        return workers


def _lead(forker: Forker, nodes: list[JobNode], parent: Channel | None) -> int:
    """On node 0: start the workers of all nodes until no start follows; return the exit status."""
    task, memory = forker.task, forker.memory
    launched, restarts, retries, failures = task.launched_at, 0, 0, 0
    resized, reached = Resized(), 0
    lessons: dict[str, str] = {}
    while True:
        channels = {number: node.channel for number, node in enumerate(nodes) if node.channel is not None}
        env = (
            resized.environment
            | lessons
            | {
                "WORLD_SIZE": str(sum(node.workers for node in nodes)),
                "GROUP_WORLD_SIZE": str(len(nodes)),
                "MASTER_PORT": str(free_port()),
                "POLLUX_LAUNCHED_AT": repr(launched),
                "POLLUX_RESTARTS": str(failures),
                RUN: os.environ.get(RUN, ""),
            }
        )
        for number, channel in channels.items():
            channel.send(Start(number, sum(node.workers for node in nodes[:number]), env))
        terms = StartTerms(
            tuple(node.workers for node in nodes),
            tuple(node.name for node in nodes),
            resized,
            may_restart=parent is None and restarts < task.max_restarts,
            may_retry=parent is None and retries < MAX_RETRIES,
            companion=parent is not None,
            graces=task.graces,
        )
        workers = forker.start(Start(0, 0, env))
        supervisor = Supervisor(
            terms, workers, channels, forker.rank_0, parent, restores=lambda: memory.shared.restores
        )
        outcome, machine = supervisor.wait(), supervisor.machine
        if machine.odd is not None and not outcome.ended_by:
            say(f"a rank was to end for a move; {machine.odd}, and nothing depends on it")
        if outcome.failure is not None:
            say(str(outcome.failure))
        if not outcome.next_nodes:
            if not outcome.ended_by:
                for channel in channels.values():
                    channel.send(Over(outcome.status))
            return outcome.status
        progress = max(memory.shared.copied, memory.shared.saved)
        retries = 0 if machine.move_id or progress != reached else retries
        reached = progress
        launched, resized = time.time(), machine.resized
        failures += 1
        if outcome.asked:
            retries += 1
            how = f"from their newest state, on {len(outcome.next_nodes)} node(s)"
        else:
            restarts += 1
            how = f"from the newest checkpoint: {restarts} of {task.max_restarts}"
        say(f"starting all ranks again, {how}")
        lessons |= _lessons(outcome, lessons)
        for number, channel in channels.items():
            if number not in outcome.next_nodes:
                channel.close()
        nodes = [nodes[number] for number in outcome.next_nodes]


def _lessons(outcome: Outcome, before: Mapping[str, str]) -> dict[str, str]:
    """Variables by which the next starts of the workers know what has happened in this one."""
    found = {"POLLUX_LOST": "1"} if outcome.lost else {}
    if outcome.failure is not None and outcome.failure.status == 128 + signal.SIGKILL:
        found[NO_COPIES] = "1"
        if NO_COPIES not in before:
            say(
                "a rank was killed, perhaps for want of memory: from here on no copies of the training's state are "
                "kept in memory. If Slurm counts an out-of-memory kill, ask for more by --mem"
            )
    return found


def signal_arrivals(channel: Channel) -> None:
    """Have the kernel send this process SIGIO when something comes. See fcntl(2): F_SETOWN, O_ASYNC."""
    fcntl.fcntl(channel.link, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(channel.link, fcntl.F_GETFL)
    fcntl.fcntl(channel.link, fcntl.F_SETFL, flags | os.O_ASYNC)


def launch_key(allocation: StepAllocation, companion: CompanionFile | None) -> bytes:
    """The key by which the launchers of this step know each other.

    Raises LaunchError where there is none.

    Only the job's user can know it. It derives from a companion's file, from a variable that `pollux run` in the batch
    script has put into srun's environment, or from the attempt's token. It differs between attempts and steps.
    """
    secret = os.environ.pop(KEY_VARIABLE, "")
    if companion is not None:
        secret = companion.secret
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


def _import_once(names: Sequence[str]) -> None:
    """Import what workers need, out of the garbage collector's sight. Raises LaunchError."""
    asked = [name for name in names if name not in PRELOAD]
    if asked:  # a module that only asks whether there is a GPU would open it otherwise
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    gc.disable()
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing == "torch":
                raise LaunchError(
                    "torch is not installed here; install it, or this package's extra `agent`"
                ) from error
            if name in asked:
                raise LaunchError(f"--preload: {name}: {error}; mend this, or leave {name} out") from error
            # torch._dynamo is not part of every build; a script that needs it says so itself.
            if missing is None:
                raise
    if asked and _gpu_is_open():
        raise LaunchError(
            f"--preload {','.join(asked)}: an import has opened the GPU, and ranks cannot inherit an open GPU; "
            "leave out the module that opens it"
        )
    # Pages of these objects stay shared with the workers: a collection there does not touch them.
    gc.freeze()
    gc.enable()


def _gpu_is_open() -> bool:
    """Return whether a process that is forked from here could not use a GPU: torch knows it in the child alone."""
    child = os.fork()
    if not child:
        os._exit(int(sys.modules["torch"].cuda._is_in_bad_fork()))
    return os.waitpid(child, 0)[1] != 0
