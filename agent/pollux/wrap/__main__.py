"""`pollux wrap [options] -- COMMAND`."""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Sequence

from pollux.errors import LaunchError, PolluxAgentError
from pollux.slurm_job.access import in_pollux_job
from pollux.slurm_job.attempt import Attempt
from pollux.wrap.process import alone
from pollux.wrap.sizes import UNKNOWN_BATCH
from pollux.wrap.wrapper import Contract, Wrapper

MOST_BATCHES = 32

DESCRIPTION = """\
Let polluxd start, grow, shrink and park a trainer whose own loop stays as it is.

Put it before the launch command in the batch script. polluxd's order to stop is answered at the trainer's next
checkpoint. COMMAND has to go on from its newest checkpoint by itself, at any number of GPUs that the job allows, and to
keep its total batch size. Outside a Pollux job, COMMAND runs alone.

COMMAND finds its size in POLLUX_NODES, POLLUX_GPUS_PER_NODE and POLLUX_GPUS.
"""
EPILOG = """\
examples:
  #POLLUX max-gpus=8 adaptive=no gpu-counts=1,2,4,8
  pollux wrap --checkpoints 'out/step-*.pt' --batch 48 -- srun torchrun train.py
  pollux wrap --checkpoints 'out/checkpoint-*/trainer_state.json' -- bash launch.sh hf.py
"""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="pollux wrap",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    told = "files that change once a checkpoint is complete, and not before; ** stands for folders"
    add("--checkpoints", required=True, metavar="GLOB", help=told)
    told = "regular expression of the line that the trainer prints for a step; its first group is the step (default:"
    add("--step", type=_pattern, metavar="PATTERN", help=f"{told} the lines of known trainers)")
    told = "signal that makes the trainer save and end, such as TERM (default: it is asked nothing)"
    add("--signal", type=_signal, metavar="NAME", help=told)
    told = "that it may take for it (default 60)"
    add("--grace", type=_number, default=60.0, metavar="SECONDS", help=told)
    told = (
        "examples of a step, over all GPUs; or, where the trainer changes them, from which step or sample on:"
    )
    add(
        "--batch",
        type=_batches,
        default=((0.0, UNKNOWN_BATCH),),
        metavar="M",
        dest="batches",
        help=f"{told} '0:768 250000:1536', '0:768 192000000s:1536'",
    )
    add("--steps", type=_number, metavar="N", help="step at which the training ends")
    told = "age from which a checkpoint is too old to go back to without a newer one (default: none)"
    add("--oldest", type=_number, default=math.inf, metavar="SECONDS", help=told)
    add("command", nargs="+", metavar="COMMAND", help="what starts the trainer, after --")
    return found


def _pattern(text: str) -> re.Pattern[str]:
    try:
        found = re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {text!r}: {error}") from None
    if not found.groups:
        why = f"expected a group around the step, as in 'step ([0-9]+)', got {text!r}"
        raise argparse.ArgumentTypeError(why)
    return found


def _signal(text: str) -> signal.Signals:
    found = {each.name: each for each in signal.Signals}.get(f"SIG{text.upper().removeprefix('SIG')}")
    if found is None or found in (signal.SIGKILL, signal.SIGSTOP):
        why = f"expected the name of a signal that a trainer can catch, such as TERM, got {text!r}"
        raise argparse.ArgumentTypeError(why)
    return found


def _number(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def _batches(text: str) -> tuple[tuple[float, int], ...]:
    """Read one batch size, or each step:size or SAMPLEs:size from which on another one holds; return them by step."""
    found = list[tuple[float, int]]()
    samples = 0.0  # before the newest entry's step
    for word in text.split():
        begin, _, size = word.rpartition(":")
        if not re.fullmatch(r"([0-9]{1,15}s?:)?[1-9][0-9]{0,8}", word):
            why = f"expected a whole number from 1, or step:number as in '0:768 250000:1536', got {word!r}"
            raise argparse.ArgumentTypeError(why)
        last, each = found[-1] if found else (0.0, 1)
        by_samples = last + math.ceil((float(begin.removesuffix("s") or 0) - samples) / each)
        step = float(by_samples if begin.endswith("s") else begin or 0)
        samples += (step - last) * each
        found.append((step, int(size)))
    begins = [begin for begin, _ in found]
    if not found or begins[0] != 0 or begins != sorted(set(begins)) or len(found) > MOST_BATCHES:
        why = f"expected rising steps that begin with 0, {MOST_BATCHES} at most, got {text!r}"
        raise argparse.ArgumentTypeError(why)
    return tuple(found)


def wrap(contract: Contract) -> int:
    """Run the trainer to its end; return the status to exit with. Outside a Pollux job it takes this process's place.

    Raises LaunchError.
    """
    environ = dict(os.environ)
    if not in_pollux_job(environ):
        try:
            os.execvp(contract.command[0], list(contract.command))
        except OSError as error:
            raise LaunchError(f"cannot start {contract.command[0]}: {error}") from error
    attempt = Attempt.begin(None, seed=0, environ=environ)
    if attempt.access is None or attempt.directory is None or environ.get("SLURM_PROCID", "0") != "0":
        raise LaunchError(
            "this job's number or attempt makes no sense, or srun has started several of this command; call `pollux "
            "wrap` in the batch script itself"
        )
    with alone(attempt.directory, attempt.access.attempt):
        return Wrapper(contract, attempt, attempt.access, attempt.directory, environ).run()


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(format="pollux: %(message)s", level=logging.INFO)
    try:
        return wrap(Contract(**vars(parser().parse_args(argv))))
    except PolluxAgentError as error:
        print(f"pollux: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
