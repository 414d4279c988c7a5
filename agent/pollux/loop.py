"""The training loop's inner half: micro-batches, the optimizer steps that they make up, and the end of an epoch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from pollux.data import ElasticLoader
from pollux.profile import Configuration, StepProfile

if TYPE_CHECKING:
    from pollux.session import Job

WARM_PASSES = 3
"""Passes of a new configuration that the profile leaves out: first kernels, first connections, cold caches."""


@dataclass
class StepGroup:
    """The micro-batches of one optimizer step."""

    passes: int
    """s + 1; fewer where the pass through the data ends."""
    samples: int
    """Examples that they hold together, over all ranks."""
    local_batch: int
    whole: bool
    """As large as the batch size says."""
    done: int = 0
    """Passes begun."""

    @property
    def synchronises(self) -> bool:
        return self.done >= self.passes


class TrainingLoader:
    """What `job.loader` returns: iterate over it once per epoch. `data` is the loader beneath."""

    def __init__(self, job: Job, data: ElasticLoader) -> None:
        self._job = job
        self.data = data

    def __len__(self) -> int:
        """Micro-batches in a whole pass at the present batch size."""
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        return self._run()

    def _run(self) -> Iterator[Any]:
        job, data = self._job, self.data
        job.enter_loop()
        try:
            while not job.epoch_done():
                micro_batches = iter(data)
                while True:
                    if job.group is None or job.group.synchronises:
                        job.begin_group()
                    job.timer.fetch()
                    batch = next(micro_batches, None)
                    if batch is None:
                        break
                    job.begin_pass()
                    yield batch
                    job.end_pass()
                    if job.stepped:
                        ended = data.last_of_pass
                        job.end_step()
                        if ended or job.epoch_done():
                            break
        finally:
            job.leave_loop()


class MicroBatch:
    """The context of one forward and backward pass: without synchronisation except in a step's last one."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._unsynchronised: Any = None

    def __enter__(self) -> None:
        job = self._job
        job.accumulates = True
        model = job.model
        if isinstance(model, DistributedDataParallel) and not job.sync_gradients:
            self._unsynchronised = model.no_sync()
            self._unsynchronised.__enter__()
        job.meter.before_pass(job.sync_gradients)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        job = self._job
        if self._unsynchronised is not None:
            self._unsynchronised.__exit__(kind, error, trace)
        if kind is not None:
            job.meter.abandon_pass()
            return
        job.timer.passed()
        job.meter.after_pass(job.sync_gradients, job.share)


class PassTimer:
    """Times passes on the host's clock and files them under their configuration.

    The wait for other ranks is the time from the last local gradient (the hook on the last bucket) to the end of
    the pass; the rest of the step is this rank's own work. The queue of a device that is busy holds the host back, so
    that over many steps the host's clock is the device's.
    """

    def __init__(self, profile: StepProfile) -> None:
        self.profile = profile
        self._from: float | None = None
        self._ready: float | None = None
        self._wait: float | None = None
        self._key: Configuration | None = None
        self._warming = WARM_PASSES

    def pause(self) -> None:
        """Training did something else than training: what ran until now is no measurement."""
        self._from = None

    def cool(self) -> None:
        """A new configuration: leave its first passes out."""
        self._warming = WARM_PASSES
        self.pause()

    def fetch(self) -> None:
        """The next pass begins with the wait for its data."""
        if self._from is None:
            self._from = time.perf_counter()

    def ready(self) -> None:
        """The last local gradient of the synchronising pass is there (called by the communication hook)."""
        self._ready = time.perf_counter()

    def begin(self, key: Configuration) -> None:
        """The data is there."""
        self._key, self._ready, self._wait = key, None, None

    def passed(self) -> None:
        """The backward pass is over, synchronisation included."""
        if self._ready is not None:
            self._wait = time.perf_counter() - self._ready

    def end(self, *, synchronised: bool, counts: bool) -> None:
        """The loop's body is over; `counts`: a whole micro-batch like any other of its configuration."""
        now = time.perf_counter()
        started, self._from = self._from, now
        if started is None or self._key is None or not counts:
            return
        if self._warming > 0:
            self._warming -= 1
            return
        seconds = now - started
        if not synchronised:
            self.profile.add_local(self._key, seconds)
            return
        self.profile.add_final(self._key, seconds)
        if self._key.gpus == 1:
            self.profile.add_local(self._key, seconds)
        elif self._wait is not None:
            self.profile.add_local(self._key, seconds - self._wait)
