"""`pollux run [options] train.py ARGS`.

One launcher per node, one worker per GPU, torch imported once.
"""

# The first thing this process does: `sbatch --signal=USR1@120` reaches every process of a step, and would end this one.
import signal

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

import time  # noqa: E402

_LAUNCHED_AT = time.time()

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import os  # noqa: E402
import pkgutil  # noqa: E402
import secrets  # noqa: E402
import shlex  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import NoReturn  # noqa: E402

from pollux.errors import LaunchError, PolluxAgentError  # noqa: E402
from pollux.launcher.batch_step import begin_run, step_status  # noqa: E402
from pollux.launcher.companion_file import CompanionFile, read_companion_file  # noqa: E402
from pollux.launcher.log import say  # noqa: E402
from pollux.launcher.machine import Graces  # noqa: E402
from pollux.launcher.node import KEY_VARIABLE, PRELOAD, Task, run_node  # noqa: E402
from pollux.launcher.workers import end_at_once  # noqa: E402
from pollux.slurm_job.allocation import (  # noqa: E402
    STALE,
    StepAllocation,
    environment_of_srun,
    fewest_cpus,
    in_batch_script,
    machine_gpus,
    nodes_now,
    read_allocation,
    visible_gpus,
)
from pollux.slurm_job.environment import BATCH_PYTHON, CONTAINER  # noqa: E402
from pollux.slurm_job.trainings import RUN, checked  # noqa: E402
from pollux.version import __version__  # noqa: E402

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
  pollux run --container "apptainer exec --nv image.sif" train.py

environment: OMP_NUM_THREADS (1 unless set), POLLUX_GATEWAY (set by Slurm's job_submit hook in Pollux jobs),
POLLUX_TOKEN (set by `pollux env`), POLLUX_ADAPTIVE (yes or no: whether the batch size may change; outside of Slurm it
may, up to the script's max_batch_size), POLLUX_CONTAINER (as --container).
"""


def main(
    argv: Sequence[str] | None = None, *, graces: Graces | None = None, preload: Sequence[str] = PRELOAD
) -> NoReturn:
    """Entry point of the command `pollux`; tests shorten `graces`, and leave out `preload`."""
    # Ctrl-C before any worker runs ends the launcher without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] in (
        ["selftest"],
        ["wrap"],
    ):  # they import what no launcher needs, and every further word is theirs
        os.execv(sys.executable, [sys.executable, "-m", f"pollux.{words[0]}", *words[1:]])
    options = argument_parser().parse_args(words)
    if options.command == "skill":
        sys.stdout.buffer.write(pkgutil.get_data("pollux", "SKILL.md") or b"")
        sys.exit(0)
    try:
        status = (
            _print_environment() if options.command == "env" else run(options, graces=graces, preload=preload)
        )
    except PolluxAgentError as error:
        say(str(error))
        status = 2
    # A requeue, or a node's release, waits for this process.
    end_at_once(status)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pollux", description="The job side of Pollux on Slurm.")
    parser.add_argument(
        "--version",
        action="version",
        version=f"pollux {__version__}",
        help="print the version and exit",
    )
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
    run_parser.add_argument(
        "--preload",
        type=lambda text: text.replace(",", " ").split(),
        default=(),
        metavar="MODULE,...",
        help="import these once per node and let all ranks inherit them, as torch is: a start after a lost rank then "
        "imports nothing; for example transformers.trainer or lightning.pytorch",
    )
    run_parser.add_argument(
        "--container",
        metavar="COMMAND",
        help="in a batch script: start `python3` of every node inside COMMAND, for example 'apptainer exec --nv "
        "image.sif'; that Python has to have torch and the agent",
    )
    run_parser.add_argument(
        "--name",
        type=_name,
        metavar="NAME",
        help="the training's name among those of this job, where a batch script holds several: by it, a restart finds "
        "the training's checkpoints whatever the command line is (default: by command line and count)",
    )
    run_parser.add_argument(
        "--companion",
        type=Path,
        metavar="FILE",
        help="lend this job's GPUs to the job whose agent wrote FILE, and run what that one runs; for the batch "
        "scripts that the agent submits",
    )
    run_parser.add_argument(
        "script", nargs="?", metavar="SCRIPT", help="the training script, or a module with -m"
    )
    run_parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments"
    )
    commands.add_parser("selftest", add_help=False, help="test trainings on this machine")
    commands.add_parser(
        "wrap", add_help=False, help="let polluxd schedule a trainer of its own loop, which stays as it is"
    )
    commands.add_parser(
        "skill", help="print how to port a training script, for a coding agent (or a person in a hurry)"
    )
    commands.add_parser(
        "env",
        help="print the environment that srun needs in a batch script",
        description="Print shell commands that correct the sizes in a batch script's environment and add the job's "
        "token. `pollux run` in the batch script needs none of them. Before an srun of your own: "
        'eval "$(pollux env)"',
    )
    return parser


def _positive(text: str, least: int = 1) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
    return value


def _name(text: str) -> str:
    try:
        return checked(text)
    except PolluxAgentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    return _positive(text, 0)


def run(
    options: argparse.Namespace, *, graces: Graces | None = None, preload: Sequence[str] = PRELOAD
) -> int:
    """Start on all nodes when called from a batch script. Otherwise run this node's workers. Raises LaunchError."""
    task, nproc = _task(options)
    task = dataclasses.replace(task, graces=graces or Graces(), preload=(*preload, *task.preload))
    batch = in_batch_script(os.environ)
    if options.container is not None and not batch:
        raise LaunchError(
            "--container is for `pollux run` in a batch script; elsewhere, call `pollux run` inside of the container"
        )
    container = (options.container or os.environ.get(CONTAINER, "")) if batch else ""
    hosts = task.companion is None and not task.module and not container
    if hosts and not Path(task.script).is_file():
        raise LaunchError(f"no such script: {task.script} (in {Path.cwd()})")
    if batch:
        return _on_all_nodes(task, container, options.name)
    if "SLURM_STEP_ID" in os.environ:
        allocation = read_allocation(os.environ, workers=nproc)
        if not allocation.node_rank and RUN not in os.environ and task.companion is None:
            os.environ.update(begin_run([task.script, *task.args], options.name))
    else:
        os.environ.update(begin_run([task.script, *task.args], options.name))
        gpus = visible_gpus(os.environ)
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            gpus = gpus or machine_gpus()
        allocation = StepAllocation(workers=nproc or len(gpus) or 1, gpu_ids=gpus)
    return run_node(allocation, task)


def _task(options: argparse.Namespace) -> tuple[Task, int | None]:
    """Return what to run, and --nproc. For a companion, its file says both, and the working directory."""
    if options.companion is not None:
        # Before the working directory changes.
        return _task_of_companion(read_companion_file(options.companion.absolute()))
    if options.script is None:
        raise LaunchError("expected a SCRIPT to run: pollux run [options] SCRIPT [ARGS...]")
    args = options.args[1:] if options.args[:1] == ["--"] else options.args
    command = ["--nproc", str(options.nproc)] if options.nproc else []
    command += ["--name", options.name] if options.name else []
    command += ["--max-restarts", str(options.max_restarts)]
    command += ["--preload", ",".join(options.preload)] if options.preload else []
    command += ["-m"] if options.module else []
    command += [options.script, *options.args]
    task = Task(
        options.script,
        args,
        command,
        module=options.module,
        max_restarts=options.max_restarts,
        launched_at=_LAUNCHED_AT,
        preload=options.preload,
    )
    return task, options.nproc


def _task_of_companion(file: CompanionFile) -> tuple[Task, int | None]:
    try:
        options = argument_parser().parse_args(["run", *file.argv])
        os.chdir(file.cwd)
    except SystemExit:
        raise LaunchError(f"{file.path} invites nobody: its argv is none of `pollux run`") from None
    except OSError as error:
        raise LaunchError(f"expected the directory of the other job's `pollux run` here: {error}") from error
    if options.companion is not None:
        raise LaunchError(f"{file.path} invites nobody: it is of a companion itself")
    task, nproc = _task(options)
    return dataclasses.replace(task, max_restarts=0, companion=file), nproc


def _on_all_nodes(task: Task, container: str, name: str | None) -> int:
    """Have srun start one launcher on each node that the job has now, inside `container`: a command, or nothing.

    Returns the exit status of the training.
    """
    try:
        inside = shlex.split(container)
    except ValueError as error:
        raise LaunchError(f"expected a command as container, got {container!r}: {error}") from None
    nodes = nodes_now(os.environ)
    # Without --wait, a site's WaitTime ends all launchers some time after that of a removed node. The ranks get all
    # that the batch script has exported. They are no MPI processes: what MPI offers to the launcher would mislead them.
    command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--quiet", "--wait=0"]
    command += ["--export=ALL", "--mpi=none"]
    cpus = fewest_cpus(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    if cpus:
        # Give the size explicitly: Slurm may bind a task without a size to a single core.
        command.append(f"--cpus-per-task={cpus}")
    command.append("--kill-on-bad-exit=1")
    command += [
        *([*inside, "python3"] if inside else [sys.executable]),
        "-m",
        "pollux.launcher.launch",
        "run",
    ]
    command += ["--companion", str(task.companion.path)] if task.companion is not None else task.command
    sys.stdout.flush()
    added = {KEY_VARIABLE: secrets.token_hex(32)}
    if task.companion is None:
        added |= begin_run([task.script, *task.args], name) | _token(in_container=bool(inside))
    if inside:  # for the companion jobs that rank 0 submits from inside
        added |= {CONTAINER: container, BATCH_PYTHON: sys.executable}
    return step_status(command, environment_of_srun(os.environ) | added)


def _token(*, in_container: bool) -> dict[str, str]:
    """Return the variable by which ranks inherit a token of this attempt. Outside a Pollux job there is none."""
    from pollux.scheduler.credentials import CONTAINER_PATIENCE_S, environment_of_ranks  # noqa: PLC0415 - loads ssl

    added, trouble = environment_of_ranks(
        os.environ, patience_s=CONTAINER_PATIENCE_S if in_container else 0.0
    )
    if trouble:
        later = "nobody inside the container can ask later" if in_container else "rank 0 asks again"
        say(f"no token from Pollux' gateway ({trouble}); {later}, and the training goes on")
    return added


def _print_environment() -> int:
    """Print what an srun of the batch script needs.

    sbatch stores the sizes of the submission in the job, and srun takes them for options: after a move to other nodes
    they are wrong.
    """
    nodes, cpus = nodes_now(os.environ), fewest_cpus(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    names = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_NPROCS")
    added = dict.fromkeys(names, str(nodes)) | {"SLURM_NTASKS_PER_NODE": "1"}
    if cpus:
        # From Slurm 22.05 on, srun takes the size of a task from the second one only.
        added |= dict.fromkeys(("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK"), str(cpus))
    added |= _token(in_container=True)
    print("unset", *sorted(STALE - added.keys()))
    for name, value in added.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    main()
