"""Show the most important events without any logging set-up.

They are restores, changes of GPUs or batch size, and the end of a training.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

from pollux.goodput import BatchChoice
from pollux.learning_rate.progress import Progress
from pollux.learning_rate.scaling import name_of
from pollux.slurm_job.trainings import RUN
from pollux.training.training import Training
from pollux.tuning.knowledge import LastAttempt

logger = logging.getLogger("pollux")


def notice(text: str, **facts: Any) -> None:
    """Log `text`, or print it to stderr if the script's logging hides it. Control characters are escaped.

    In a Slurm job the `facts` follow as a line for programs; `event` says what has happened:
    `POLLUX {"event": "restored", "step": 400, ...}`.
    """
    text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(text)
    else:
        print(f"pollux: {text}", file=sys.stderr, flush=True)
    if facts and "SLURM_JOB_ID" in os.environ:
        run = {"run": os.environ[RUN]} if os.environ.get(RUN) else {}
        line = json.dumps({**facts, **run, "at": round(time.time(), 3)})
        print(f"POLLUX {line}", file=sys.stderr, flush=True)


def restored(where: str, progress: Progress) -> None:
    """Say from where a training goes on."""
    steps = progress.optimizer_steps
    text = f"restored the {where}: epoch {progress.epoch}, optimizer step {steps}"
    notice(text, event="restored", step=steps)


def moves(step: int) -> None:
    """Say that the job goes through the queue now."""
    notice(
        f"saved optimizer step {step}: polluxd moves this job through Slurm's queue, and it goes on there. "
        "Slurm now calls its processes cancelled",
        event="moves",
        step=step,
    )


def already_finished(progress: Progress, count: float) -> None:
    """Say that an attempt has nothing left to train."""
    notice(
        f"already finished: {progress.optimizer_steps} optimizer steps, {progress.epoch} of {count:g} epochs. "
        "Epochs count from the beginning of the training",
        event="already-finished",
        step=progress.optimizer_steps,
    )


def of_gpus(number: int) -> str:
    """Return so many GPUs in words."""
    return "1 GPU" if number == 1 else f"{number} GPUs"


def in_words(choice: BatchChoice, gpus: int) -> str:
    """Return a batch size in the words of its user."""
    passes = f" in each of {choice.accumulation + 1} passes" if choice.accumulation else ""
    return f"batch size {choice.size(gpus)} on {of_gpus(gpus)}: {choice.local_batch} per GPU{passes}"


def announce(training: Training, last: LastAttempt | None) -> None:
    """Say what the training begins with: batch size, M0, learning rates."""
    choice, limits, gpus = training.choice, training.limits, training.world.size
    before = ""
    if last is not None and (last.batch_size, last.gpus) != (choice.size(gpus), gpus):
        before = f" (before the restart: {last.batch_size} on {last.gpus})"
    grows = training.adaptive and training.most > limits.initial
    # Early growth can cost accuracy: whoever did not decide on it reads its name.
    later = f" from epoch {training.grow_after} on" if training.grow_after else " (at once: no grow_after)"
    bounds = f"M0 = {limits.initial}, {f'up to {training.most}{later}' if grows else 'fixed'}"
    model = training.models[0]
    rates = ", ".join(f"{rate:.4g}" for rate in model.rates.rates())
    notice(
        f"{in_words(choice, gpus)}{before}; {bounds}; learning rate {rates} by rule {name_of(model.rule)}",
        event="begun",
        gpus=gpus,
        batch_size=choice.size(gpus),
        step=training.progress.optimizer_steps,
    )


def summary(training: Training) -> str:
    """Return what a finished training took, in one line."""
    progress, noise = training.progress, training.noise_scale
    hours = progress.gpu_seconds / 3600
    parts = [f"finished: {progress.optimizer_steps} optimizer steps, {progress.samples} examples"]
    if progress.optimizer_steps:
        parts.append(
            f"{progress.samples / progress.optimizer_steps:.4g} in a batch on average (M0 = {progress.initial})"
        )
    if progress.gpu_seconds:
        parts.append(
            f"{hours:.3g} GPU hours, goodput {_short(progress.examples / progress.gpu_seconds)} examples/s per GPU"
        )
    if noise is not None and noise.sqr > 0:
        parts.append(f"noise scale {_short(progress.initial * noise.var / noise.sqr)} examples")
    return "; ".join(parts)


def _short(value: float) -> str:
    """Return a number with four digits, and without an exponent below a million."""
    return f"{float(f'{value:.4g}'):g}"
