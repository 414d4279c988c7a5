"""Show the most important events without any logging set-up.

They are restores, changes of GPUs or batch size, and the end of a training.
"""

from __future__ import annotations

import logging
import sys

from pollux.goodput import BatchChoice
from pollux.learning_rate.scaling import name_of
from pollux.training.training import Training
from pollux.tuning.knowledge import LastAttempt

logger = logging.getLogger("pollux")


def notice(text: str) -> None:
    """Log `text`, or print it to stderr if the script's logging hides it. Control characters are escaped."""
    text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
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


def announce(training: Training, last: LastAttempt | None) -> None:
    """Say what the training begins with: batch size, M0, learning rates."""
    choice, limits, gpus = training.choice, training.limits, training.world.size
    before = ""
    if last is not None and (last.batch_size, last.gpus) != (choice.size(gpus), gpus):
        before = f" (before the restart: {last.batch_size} on {last.gpus})"
    grows = training.adaptive and training.most > limits.initial
    later = f" from epoch {training.grow_after} on" if training.grow_after else ""
    bounds = f"M0 = {limits.initial}, {f'up to {training.most}{later}' if grows else 'fixed'}"
    model = training.models[0]
    rates = ", ".join(f"{rate:.4g}" for rate in model.rates.rates())
    notice(f"{in_words(choice, gpus)}{before}; {bounds}; learning rate {rates} by rule {name_of(model.rule)}")


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
