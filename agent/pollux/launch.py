"""`pollux run [options] train.py ARGS`: one launcher per node, one worker per GPU, torch imported once."""

# The first thing this process does: until USR1 is blocked, `scancel -s USR1` would end it (see wake).
import signal

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

import time  # noqa: E402

_LAUNCHED_AT = time.time()

import argparse  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import io  # noqa: E402
import os  # noqa: E402
import runpy  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

from pollux import wake  # noqa: E402
from pollux.allocation import (  # noqa: E402
    Allocation,
    fewest_cpus,
    in_batch_script,
    machine_gpus,
    node_address,
    read_allocation,
    visible_gpus,
    without_stale,
)
from pollux.errors import RETRY_STATUS, LaunchError, PolluxAgentError  # noqa: E402
from pollux.link import CANDIDATES, Link, free_port, gather, interface_of, join, listen  # noqa: E402
from pollux.supervise import WATCHED, Supervisor, Verdict, describe  # noqa: E402
from pollux.ticket import read_ticket  # noqa: E402
from pollux.workers import Notes, adopt_orphans, start_worker  # noqa: E402

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",
    "pollux.session",
)
"""What every worker needs, imported once before the fork. Making a torch optimizer or wrapping a model in
DistributedDataParallel imports torch._dynamo, which costs about as much CPU as torch itself."""

MAX_RETRIES = 3
"""Starts beside --max-restarts after a rank has asked for one (out of memory: once per type of GPU)."""

DESCRIPTION = """\
Run a PyTorch training script on every GPU that this job holds.

In a batch script, call it plainly: it starts itself on all nodes with srun, and takes the sizes that the
job has now, not those it was submitted with. Inside `srun --ntasks-per-node=1` it runs as it is. Outside of
Slurm it runs on this machine's GPUs, or as one process on CPU; `--nproc` says otherwise.

Each worker runs the script as __main__ with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT set as torchrun sets them, and with CUDA_VISIBLE_DEVICES naming its one GPU. When a worker fails,
the others are ended and its exit status becomes the launcher's.
"""
EPILOG = """\
examples:
  pollux run train.py --epochs 90          all GPUs of the job, or of this machine
  pollux run -m mypackage.train -- -v      a module instead of a file
  pollux run --nproc 4 train.py            four workers on this machine

environment: OMP_NUM_THREADS (1 unless set), POLLUX_TICKET_DIR (set by Slurm's job_submit hook; a Slurm job
without a ticket trains plainly, not scheduled by Pollux), POLLUX_ADAPTIVE (yes or no: whether the batch size may
change; outside of Slurm it may, up to the script's max_batch_size).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command `pollux`. Returns the exit status."""
    # A terminal's Ctrl-C while nothing runs yet ends the launcher without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = _parser().parse_args(argv)
    try:
        return run(options)
    except PolluxAgentError as error:
        _say(str(error))
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pollux", description="The job side of Pollux on Slurm.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run_parser = commands.add_parser(
        "run",
        help="run a training script on every GPU of the job",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run_parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is a module's name, as for python -m"
    )
    run_parser.add_argument(
        "--nproc", type=_positive, metavar="N", help="workers per node (default: one per GPU held, else 1)"
    )
    run_parser.add_argument(
        "--max-restarts",
        type=_count,
        default=0,
        metavar="N",
        help="after a failure, start all ranks again from the newest checkpoint, at most N times (default 0); "
        "a rank that ran out of memory, or exits with status 75, asks for a start beside these",
    )
    run_parser.add_argument("script", metavar="SCRIPT", help="the training script, or a module with -m")
    run_parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {value}")
    return value


def run(options: argparse.Namespace) -> int:
    """Start on all nodes when called from a batch script; otherwise run this node's workers."""
    if not options.module and not Path(options.script).is_file():
        raise LaunchError(f"no such script: {options.script} (in {Path.cwd()})")
    if in_batch_script(os.environ):
        _start_on_all_nodes(options)
    if "SLURM_STEP_ID" in os.environ:
        allocation = read_allocation(os.environ, workers=options.nproc)
    else:
        gpus = visible_gpus(os.environ)
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            gpus = gpus or machine_gpus()
        allocation = Allocation(workers=options.nproc or len(gpus) or 1, gpu_ids=gpus)
    return _run_workers(allocation, options)


def _start_on_all_nodes(options: argparse.Namespace) -> None:
    """Replace this process by srun, which starts one launcher on each node that the job has now."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    cpus = fewest_cpus(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    if cpus:
        # Said outright: a task of unsaid size may be bound to a single core.
        command.append(f"--cpus-per-task={cpus}")
    command.append("--kill-on-bad-exit=1")
    # A shell ignores USR1 within its first instant, where Python takes milliseconds; exec keeps it ignored.
    command += [
        "/bin/sh",
        "-c",
        'trap "" USR1; exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "pollux.launch",
        "run",
    ]
    if options.nproc:
        command += ["--nproc", str(options.nproc)]
    command += ["--max-restarts", str(options.max_restarts)]
    command += ["-m"] if options.module else []
    command += [options.script, *options.args]
    sys.stdout.flush()
    try:
        os.execvpe("srun", command, without_stale(os.environ))
    except OSError as error:
        raise LaunchError(f"inside a Slurm job, but srun cannot be started: {error}") from error


def _run_workers(allocation: Allocation, options: argparse.Namespace) -> int:
    # Before torch is imported: several workers per node would otherwise start a thread per core each.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Whole lines, each at once: ranks share the output, and a rank that is ended must lose none of its own.
            stream.reconfigure(line_buffering=True, write_through=False)
    meeting = _Meeting(allocation)
    _import_once()
    link = meeting.outcome()
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    adopt_orphans()
    if link is not None:
        link.signal_arrivals()
    launched, restarts, port = _LAUNCHED_AT, 0, link.port if link is not None else free_port()
    retries = 0
    while True:
        env = _shared_environment(allocation, link, port)
        env |= {"POLLUX_LAUNCHED_AT": repr(launched), "POLLUX_IMPORTED_AT": repr(time.time())}
        env["POLLUX_RESTARTS"] = str(restarts + retries)
        verdict = _start_once(
            allocation,
            options,
            link,
            env,
            may_restart=restarts < options.max_restarts,
            may_retry=retries < MAX_RETRIES,
        )
        if verdict.failure is not None and (link is None or link.is_hub):
            _say(describe(verdict.failure))
        if verdict.restart_port is None:
            return verdict.status
        launched, port = time.time(), verdict.restart_port
        if verdict.failure is not None and verdict.failure.status == RETRY_STATUS and retries < MAX_RETRIES:
            retries, count = retries + 1, "as the rank has asked"
        else:
            restarts += 1
            count = f"{restarts} of {options.max_restarts}"
        if link is None or link.is_hub:
            _say(f"starting all ranks again, from the newest checkpoint: {count}")


def _start_once(
    allocation: Allocation,
    options: argparse.Namespace,
    link: Link | None,
    env: dict[str, str],
    *,
    may_restart: bool,
    may_retry: bool,
) -> Verdict:
    def body() -> int:
        if link is not None:
            link.close()
        return _run_script(options)

    first = int(env.pop("FIRST_RANK"))
    notes = Notes(allocation.workers)
    workers = []
    for local_rank in range(allocation.workers):
        own = env | {"RANK": str(first + local_rank), "LOCAL_RANK": str(local_rank)}
        if allocation.gpu_ids:
            own["CUDA_VISIBLE_DEVICES"] = allocation.gpu_ids[local_rank % len(allocation.gpu_ids)]
        unblock = WATCHED - {wake.WAKE_SIGNAL}
        workers.append(start_worker(first + local_rank, local_rank, own, body, notes, unblock=unblock))
    return Supervisor(
        workers, notes, where=_host(), link=link, may_restart=may_restart, may_retry=may_retry
    ).wait()


class _Meeting:
    """Meeting the other nodes' launchers, in a thread while torch is imported. It ends before any fork."""

    def __init__(self, allocation: Allocation) -> None:
        self._link: Link | None = None
        self._error: PolluxAgentError | None = None
        self._thread: threading.Thread | None = None
        if allocation.num_nodes > 1:
            self._thread = threading.Thread(target=self._meet, args=(allocation,), daemon=True)
            self._thread.start()

    def outcome(self) -> Link | None:
        """The link, None with one node. Raises RankLost and LaunchError."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._link

    def _meet(self, allocation: Allocation) -> None:
        ports = allocation.link_ports(CANDIDATES)
        ticket = read_ticket()
        # Without a ticket the key keeps attempts and jobs apart, and no more.
        key = (ticket.token if ticket is not None else "no ticket").encode() + allocation.identity.encode()
        try:
            if allocation.node_rank == 0:
                self._link = gather(listen(ports), key, allocation.workers, allocation.num_nodes)
            else:
                address = node_address(allocation.first_node)
                self._link = join(address, ports, key, allocation.node_rank, allocation.workers)
        except PolluxAgentError as error:
            self._error = error
        except Exception as error:
            # Whatever it is: without the others this node would train alone, as if it were the whole job.
            self._error = LaunchError(f"the launchers could not meet: {type(error).__name__}: {error}")


def _shared_environment(allocation: Allocation, link: Link | None, port: int) -> dict[str, str]:
    """What this node's workers find in their environment, by torchrun's names; and FIRST_RANK, for the launcher."""
    workers = link.workers if link is not None else [allocation.workers]
    address = link.address if link is not None else "127.0.0.1"
    env = {
        "WORLD_SIZE": str(sum(workers)),
        "LOCAL_WORLD_SIZE": str(allocation.workers),
        "GROUP_RANK": str(allocation.node_rank),
        "GROUP_WORLD_SIZE": str(len(workers)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "FIRST_RANK": str(sum(workers[: allocation.node_rank])),
    }
    # gloo would look the host's name up, and that need not lead to an address which the others can reach.
    mine = link.channels[0].socket.getsockname()[0] if link is not None else address
    interface = interface_of(mine)
    if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        env["GLOO_SOCKET_IFNAME"] = interface
    return env


def _import_once() -> None:
    """Import what workers need, without the garbage collector's passes over it, then or in a worker."""
    gc.disable()
    for name in PRELOAD:
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


def _run_script(options: argparse.Namespace) -> int:
    """Run the script in a worker, as `python SCRIPT ARGS` would."""
    args = options.args[1:] if options.args[:1] == ["--"] else options.args
    sys.argv = [options.script, *args]
    if options.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(options.script).resolve().parent))
        runpy.run_path(options.script, run_name="__main__")
    return 0


def _host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _say(message: str) -> None:
    print(f"pollux run [{_host()}]: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
