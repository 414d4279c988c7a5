"""Show the most important events without any logging set-up.

They are restores, changes of GPUs or batch size, and the end of a training.
"""

from __future__ import annotations

import logging
import sys

from pollux.goodput import BatchChoice
from pollux.tuning.knowledge import LastAttempt

logger = logging.getLogger("pollux")


def notice(text: str) -> None:
    """Log `text`, or print it to stderr if the script's logging hides it."""
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(text)
    else:
        print(f"pollux: {text}", file=sys.stderr, flush=True)


def of_gpus(number: int) -> str:
    """Return so many GPUs in words."""
    return "1 GPU" if number == 1 else f"{number} GPUs"


def in_words(choice: BatchChoice, gpus: int) -> str:
    """Return a batch size in the words of its user."""
    passes = f" in each of {choice.accumulation + 1} passes" if choice.accumulation else ""
    return f"batch size {choice.size(gpus)} on {of_gpus(gpus)}: {choice.local_batch} per GPU{passes}"


def tell_of_restart(last: LastAttempt | None, choice: BatchChoice, gpus: int) -> None:
    """Tell where a restart has other GPUs or another batch size."""
    if last is not None and (last.batch_size, last.gpus) != (choice.size(gpus), gpus):
        notice(f"{in_words(choice, gpus)} (before the restart: {last.batch_size} on {last.gpus})")
