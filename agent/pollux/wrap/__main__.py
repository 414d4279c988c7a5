"""`pollux wrap [options] -- COMMAND`."""

from __future__ import annotations

import argparse
import logging
import re
import signal
import sys
from collections.abc import Sequence

from pollux.errors import PolluxAgentError
from pollux.wrap.sizes import UNKNOWN_BATCH
from pollux.wrap.wrapper import Contract, wrap

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
    found.add_argument(
        "--checkpoints",
        required=True,
        metavar="GLOB",
        help="files that change once a checkpoint is complete, and not before; ** stands for folders",
    )
    found.add_argument(
        "--step",
        type=_pattern,
        metavar="PATTERN",
        help="regular expression of the line that the trainer prints for a step; its first group is the step (default: "
        "the lines of known trainers)",
    )
    found.add_argument(
        "--signal",
        type=_signal,
        metavar="NAME",
        help="signal that makes the trainer save and end, such as TERM (default: it is asked nothing)",
    )
    found.add_argument(
        "--grace", type=_seconds, default=60.0, metavar="SECONDS", help="that it may take for it (default 60)"
    )
    found.add_argument(
        "--batch",
        type=_batches,
        default=((0.0, UNKNOWN_BATCH),),
        metavar="M",
        help="examples of a step, over all GPUs; or, where the trainer changes them, from which step on: '0:768 "
        "250000:1536'",
    )
    found.add_argument("--steps", type=_seconds, metavar="N", help="step at which the training ends")
    found.add_argument("command", nargs="+", metavar="COMMAND", help="what starts the trainer, after --")
    return found


def _pattern(text: str) -> re.Pattern[str]:
    try:
        found = re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {text!r}: {error}") from None
    if not found.groups:
        raise argparse.ArgumentTypeError(
            f"expected a group around the step, as in 'step ([0-9]+)', got {text!r}"
        )
    return found


def _signal(text: str) -> signal.Signals:
    try:
        return signal.Signals[f"SIG{text.upper().removeprefix('SIG')}"]
    except KeyError:
        raise argparse.ArgumentTypeError(
            f"expected the name of a signal, such as TERM, got {text!r}"
        ) from None


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def _batches(text: str) -> tuple[tuple[float, int], ...]:
    """Read one batch size, or step:size for each step from which on another one holds."""
    found = []
    for word in text.split():
        begin, _, size = word.rpartition(":")
        if not re.fullmatch(r"([0-9]{1,12}:)?[1-9][0-9]{0,8}", word):
            raise argparse.ArgumentTypeError(
                f"expected a whole number from 1, or step:number as in '0:768 250000:1536', got {word!r}"
            )
        found.append((float(begin or 0), int(size)))
    begins = [begin for begin, _ in found]
    if not found or begins[0] != 0 or begins != sorted(set(begins)) or len(found) > MOST_BATCHES:
        raise argparse.ArgumentTypeError(
            f"expected rising steps that begin with 0, {MOST_BATCHES} at most, got {text!r}"
        )
    return tuple(found)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    logging.basicConfig(format="pollux: %(message)s", level=logging.INFO)
    contract = Contract(
        options.command,
        options.checkpoints,
        options.step,
        options.signal,
        options.grace,
        options.batch,
        options.steps,
    )
    try:
        return wrap(contract)
    except PolluxAgentError as error:
        print(f"pollux: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
