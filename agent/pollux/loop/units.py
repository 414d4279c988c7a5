"""The units that a script may count in, and mistake for others: M0, passes, epochs.

M0 belongs to a training, whatever number of ranks its script makes it of. The loop over the loader counts passes, and
`len(loader)` those of a whole pass through the data; `job.progress` counts steps. A schedule counts steps of M0.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from pollux.learning_rate.schedule import ScaledSchedule
from pollux.loop.notices import notice, of_gpus
from pollux.training.training import Training
from pollux.tuning.knowledge import LastAttempt

logger = logging.getLogger("pollux")

M0_KEPT = (
    "M0 stays {before}, as in the checkpoint, which {before_on} wrote; the script's {now} on {on} follows the number "
    "of GPUs, and its schedule does not: give job.loader a number that does not depend on it"
)

M0_CHANGED = (
    "M0 was {before} on {before_on} before the restart, and is {now} on {on}: the schedule, which is restored, counts "
    "steps of {before} examples. If the script makes M0 of the number of GPUs, give job.loader a number that does not "
    "depend on it"
)

PASSES = (
    "an optimizer step now has %d passes, and the loop's body runs once in each: len(loader), enumerate(loader) and "
    "tqdm(loader) count passes. Count steps by job.progress.optimizer_steps, or in a step's last pass alone, under "
    "`if job.sync_gradients:`"
)
"""Said once, in the first step of several passes."""


LEFT_EARLY = (
    "the loop over the loader was left at sample %d of %d: the next epoch goes on there and ends with the pass, so it "
    "has other samples than this one, and fewer. For epochs of a part of the data write job.epochs(steps=N), or give "
    "the loader a sampler of as many samples"
)


BEGAN_AGAIN = (
    "the loop over the loader began again in an epoch that is over, and gives no batch: an epoch is one pass through "
    "the data. Write job.epochs(N) for the number of passes, with one loop over the loader in each. For other passes "
    "(update_bn, an evaluation) make a torch DataLoader of the dataset"
)

GOES_ON = (
    "goes on at sample %d of %d of this pass: there enumerate(loader) begins at 0, and the script's own counters and "
    "other loaders begin again. Count steps by job.progress.optimizer_steps, or keep counters in state="
)

AT_ONCE = (
    "the loop over this loader began within that of another training. Each has checkpoints of its own, and a restart "
    "goes on with each at another step: give both models to one job, job.add_model(...)"
)


class Units:
    """Says once where a script's counters cannot be what they are called."""

    running: ClassVar[Units | None] = None
    """Whose loop over a loader this process is in."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._told = self._told_of_rest = self._told_of_end = False

    def after_pass(self) -> None:
        """One of several passes of a step is over."""
        step = self._training.step
        if self._told or step.group is None or not step.accumulates:
            return
        self._told = True
        if self._training.world.rank == 0:
            notice(PASSES % step.group.passes)

    def begin_loop(self, *, over: bool) -> None:
        """A loop over the loader begins. `over`: the epoch is."""
        data, first = self._training.data, not (self._training.step.looped or self._training.world.rank)
        if first and data.position:
            notice(GOES_ON % (data.position, data.length))
        if first and Units.running not in (None, self):
            logger.warning(AT_ONCE)
        Units.running = self
        if over and self._training.step.managed and not self._told_of_end:
            self._told_of_end = True
            if self._training.world.rank == 0:
                logger.warning(BEGAN_AGAIN)

    def after_epoch(self) -> None:
        """An epoch of one pass is over, and another one follows: the script may have left it early."""
        data = self._training.data
        if data.position and not self._told_of_rest and self._training.world.rank == 0:
            self._told_of_rest = True
            logger.warning(LEFT_EARLY, data.position, data.length)

    def after_step(self, schedule: ScaledSchedule) -> None:
        """A step is over: its schedule may be one of epochs."""
        training, progress = self._training, self._training.progress
        length = training.data.length
        total = progress.target_steps(length, training.data.pass_index, training.data.position, 1.0)
        doubt = schedule.doubt(progress.steps, total, length / progress.initial)
        if doubt and training.world.rank == 0:
            logger.warning(doubt)


def initial_batch(training: Training, batch_size: int, last: LastAttempt | None) -> int:
    """M0 of a training that may go on from a checkpoint. `batch_size`: the script's.

    A script that makes M0 of the number of ranks has another one after each restart on other ranks, and its schedule
    would not end with the training: the checkpoint's stays. Any other change is the user's, who is told of it.
    """
    before, ranks = training.progress.initial, training.world.size
    if last is None or not last.gpus or batch_size == before:
        return batch_size
    follows = last.gpus != ranks and before * ranks == batch_size * last.gpus
    if training.world.rank == 0 and (follows or training.models[0].scheduler is not None):
        text = M0_KEPT if follows else M0_CHANGED
        notice(text.format(before=before, before_on=of_gpus(last.gpus), now=batch_size, on=of_gpus(ranks)))
    return before if follows else batch_size
