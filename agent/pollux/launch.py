"""`pollux run [options] train.py ARGS`: one launcher per node, one worker per GPU, torch imported once."""

# The first thing this process does: until USR1 is blocked, `scancel -s USR1` would end it (see wake).
import signal

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

import time  # noqa: E402

_LAUNCHED_AT = time.time()

import argparse  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import os  # noqa: E402
import runpy  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

from pollux.allocation import (  # noqa: E402
    Allocation,
    in_batch_script,
    node_address,
    read_allocation,
    visible_gpus,
    without_stale,
)
from pollux.errors import LaunchError, PolluxAgentError  # noqa: E402
from pollux.workers import WATCHED, Notes, Worker, start_worker, supervise  # noqa: E402

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

environment: OMP_NUM_THREADS (1 unless set), POLLUX_TICKET_DIR (set by Slurm's job_submit hook; without
a ticket the script trains plainly, not scheduled by Pollux).
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
        allocation = Allocation(workers=options.nproc or len(gpus) or 1, gpu_ids=gpus)
    return _run_workers(allocation, options)


def _start_on_all_nodes(options: argparse.Namespace) -> None:
    """Replace this process by srun, which starts one launcher on each node that the job has now."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    # The whole of the job's CPUs: one task with --cpus-per-task unset would be bound to one core.
    command += ["--cpu-bind=none", "--kill-on-bad-exit=1", "--unbuffered"]
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
    command += ["-m"] if options.module else []
    command += [options.script, *options.args]
    sys.stdout.flush()
    try:
        os.execvpe("srun", command, without_stale(os.environ))
    except OSError as error:
        raise LaunchError(f"inside a Slurm job, but srun cannot be started: {error}") from error


def _run_workers(allocation: Allocation, options: argparse.Namespace) -> int:
    os.environ["POLLUX_LAUNCHED_AT"] = repr(_LAUNCHED_AT)
    # Before torch is imported: several workers per node would otherwise start a thread per core each.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shared = _rendezvous(allocation)
    _import_once()
    shared["POLLUX_IMPORTED_AT"] = repr(time.time())
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    notes = Notes(allocation.workers)
    workers: list[Worker] = []
    for local_rank in range(allocation.workers):
        rank = allocation.node_rank * allocation.workers + local_rank
        env = shared | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        if allocation.gpu_ids:
            env["CUDA_VISIBLE_DEVICES"] = allocation.gpu_ids[local_rank % len(allocation.gpu_ids)]
        workers.append(start_worker(rank, local_rank, env, lambda: _run_script(options), notes))
    return supervise(workers, notes, say=_say)


def _rendezvous(allocation: Allocation) -> dict[str, str]:
    """The environment that all workers of the job share."""
    world_size = allocation.num_nodes * allocation.workers
    if allocation.num_nodes == 1:
        address, port = "127.0.0.1", _free_port(allocation.job_port)
    else:
        address, port = node_address(allocation.first_node), allocation.job_port
    env = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(allocation.workers),
        "GROUP_RANK": str(allocation.node_rank),
        "GROUP_WORLD_SIZE": str(allocation.num_nodes),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    if address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in os.environ:
        # gloo would look the host's name up, which need not lead to an address that the others can reach.
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


def _free_port(preferred: int) -> int:
    """A TCP port of this machine that nobody listens on: the preferred one, else the kernel's choice."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise LaunchError("no free TCP port on this machine")


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


def _say(message: str) -> None:
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    print(f"pollux run [{host}]: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
